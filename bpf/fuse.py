"""The FUSE probe: requests of the managed cgroups to user-space file systems per mount, with the program of fuse.c.

Ladder: kprobes see a request from the moment its caller makes it; the tracepoints of Linux 6.11 only once it is queued
for the server, so that background requests beyond the mount's limit have waited before. Where the file system is a
module the probe attaches once it is loaded: a read looks for it every few seconds.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterable
from pathlib import Path

from bpf.btf import BtfError
from bpf.decode import decode_fuse, device_name
from bpf.loader import HISTOGRAM_HEADER, MEMORY_HEADER, Loader, ProbeError, Program
from bpf.owners import OWNER_HEADER, Owners
from bpf.samples import FUSE_OPS, FuseCounters, FuseKey, ProbeState, ProbeStatus, Sample

SOURCE = Path(__file__).with_name("fuse.c")
FILESYSTEMS = Path("/proc/filesystems")
MOUNTINFO = Path("/proc/self/mountinfo")
TIERS = ("kprobe", "tracepoint")

_FIELDS = {
    "OFF_MOUNT_SB": "fuse_mount.sb",
    "OFF_SB_DEV": "super_block.s_dev",
    "OFF_REQ_ARGS": "fuse_req.args",
    "OFF_REQ_MOUNT": "fuse_req.fm",
    "OFF_REQ_OPCODE": "fuse_req.in.h.opcode",
    "OFF_REQ_PID": "fuse_req.in.h.pid",
    "OFF_REQ_IN_LENGTH": "fuse_req.in.h.len",
    "OFF_REQ_OUT_LENGTH": "fuse_req.out.h.len",
    "OFF_REQ_ERROR": "fuse_req.out.h.error",
}
_LOOK_EVERY_NS = 5_000_000_000
_SLOTS = 4096
_RUNNING = 16384
_SERVERS = 1024


class FuseProbe:
    """FUSE counters per (cgroup, mount, op). `tiers` narrows the ladder (tests, benchmarks).

    What the page cache writes back later is the kernel's own request and not counted; writes that wait are.
    """

    name = "fuse"

    def __init__(self, loader: Loader, *, tiers: Collection[str] = TIERS) -> None:
        self._loader = loader
        self._tiers = tiers
        self._program: Program | None = None
        self._owners: Owners | None = None
        self._wanted: frozenset[int] = frozenset()
        self._tier = self._why = ""
        self._broken = self._closed = False
        self._next_look_ns = 0
        self._mounts: dict[str, str] = {}
        self._try()

    def _try(self) -> None:
        """Attach if the file system is there; what fails although it is will not get better."""
        if not is_loaded(FILESYSTEMS):
            self._why = "the module fuse is not loaded"
            return
        refusals: list[str] = []
        try:
            self._attach(refusals)
        except (ProbeError, BtfError) as error:
            self._why, self._broken = "; ".join([*refusals, str(error)]), True
            self._drop()

    def _attach(self, refusals: list[str]) -> None:
        macros = {"MAX_SLOTS": _SLOTS, "MAX_RUNNING": _RUNNING, "MAX_SERVERS": _SERVERS}
        btf = self._loader.btf
        if not btf.has("fuse_req.args"):
            btf = btf.of_module("fuse")
        macros |= btf.offsets(_FIELDS)
        program = self._loader.load(SOURCE, macros, shared=[MEMORY_HEADER, HISTOGRAM_HEADER, OWNER_HEADER])
        self._program, self._owners = program, Owners(program)
        self._owners.replace(self._wanted)
        ladder: dict[str, Callable[[Program], None]] = {"kprobe": _attach_kprobe, "tracepoint": _attach_tracepoints}
        for tier in (name for name in TIERS if name in self._tiers):
            try:
                ladder[tier](program)
            except ProbeError as error:
                refusals.append(str(error))
                program.detach_all()
            else:
                self._tier, self._why = tier, "; ".join(refusals)
                return
        raise ProbeError(f"no tier of {', '.join(self._tiers) or 'none'} works here")

    def status(self) -> ProbeStatus:
        """Attached where requests are seen from their start, degraded where only from the queue on."""
        if self._program is None:
            return ProbeStatus(self.name, ProbeState.UNAVAILABLE, self._why)
        state, why = ProbeState.ATTACHED, ""
        if self._tier == "tracepoint":
            state = ProbeState.DEGRADED
            why = f"the wait of background requests for their turn is unknown: {self._why or 'asked for'}"
        lost = int(self._program.map("fuse_lost")[0].value)
        return ProbeStatus(self.name, state, why, self._tier, lost, len(self._program.map("fuse_calls")) / _SLOTS)

    def manage(self, cgroup_ids: Collection[int]) -> None:
        """Count these cgroups and what is below them, and no others."""
        self._wanted = frozenset(cgroup_ids)
        if self._owners is None or self._program is None:
            return
        dropped = self._owners.replace(self._wanted)
        if dropped:
            calls = self._program.map("fuse_calls")
            for key in [key for key in calls if key.cgroup in dropped]:
                with contextlib.suppress(KeyError):
                    del calls[key]

    def read(self, now_ns: int) -> Sample:
        """The counters as they stand."""
        if self._program is None and not self._broken and not self._closed and now_ns >= self._next_look_ns:
            self._next_look_ns = now_ns + _LOOK_EVERY_NS
            self._try()
        if self._program is None:
            return Sample(now_ns)
        found: dict[FuseKey, FuseCounters] = {}
        for key, value in self._program.map("fuse_calls").items():
            mount = self._mount_of(device_name(key.device))
            found[FuseKey(key.cgroup, mount, FUSE_OPS[key.op])] = decode_fuse(bytes(value))
        return Sample(now_ns, fuse=found)

    def _mount_of(self, device: str) -> str:
        """Where a FUSE super block is mounted; its device number where this mount namespace does not know it."""
        if device not in self._mounts:
            self._mounts |= fuse_mounts(MOUNTINFO.read_text().splitlines())
        return self._mounts.setdefault(device, device)

    def _drop(self) -> None:
        if self._program is not None:
            self._program.close()
        self._program = self._owners = None

    def close(self) -> None:
        """Detach and free."""
        self._closed, self._why = True, self._why or "closed"
        self._drop()


def is_loaded(filesystems: Path) -> bool:
    """Whether the kernel has FUSE now (proc(5), /proc/filesystems)."""
    try:
        return "fuse" in filesystems.read_text().split()
    except OSError:
        return False


def fuse_mounts(lines: Iterable[str]) -> dict[str, str]:
    """`maj:min` -> mount point of the FUSE mounts of a mountinfo file (proc(5)); the first where there are several.

    The source is no name: every mount of one program has the same. Octal escapes stay as they are.
    """
    found: dict[str, str] = {}
    for line in lines:
        before, dash, after = line.partition(" - ")
        fields, kinds = before.split(), after.split()
        if dash and len(fields) > 4 and kinds and kinds[0].partition(".")[0] in {"fuse", "fuseblk"}:
            found.setdefault(fields[2], fields[4])
    return found


def _attach_kprobe(program: Program) -> None:
    program.attach_kprobe("fuse_request_end", "kprobe_end")
    program.attach_kprobe("fuse_simple_background", "kprobe_call")
    try:
        program.attach_kprobe("fuse_simple_request", "kprobe_call")
    except ProbeError:  # since Linux 6.12 an inline function around this one
        program.attach_kprobe("__fuse_simple_request", "kprobe_mapped_call")


def _attach_tracepoints(program: Program) -> None:
    program.attach_raw_tracepoint("fuse_request_end", "raw_ended")
    program.attach_raw_tracepoint("fuse_request_send", "raw_sent")
