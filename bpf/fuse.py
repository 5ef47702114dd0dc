"""The FUSE probe: requests of the managed cgroups to user-space file systems per mount, with the program of fuse.c.

Ladder: kprobes see a request from the moment its caller makes it; the tracepoints of Linux 6.11 only once it is queued
for the server, so that background requests beyond the mount's limit have waited before.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from pathlib import Path

from bpf.decode import decode_fuse
from bpf.loader import HISTOGRAM_HEADER, MEMORY_HEADER, Loader, ProbeError, Program
from bpf.mount_probe import MountProbe, parse_mounts
from bpf.owners import OWNER_HEADER
from bpf.reasons import Reason, partly
from bpf.samples import FUSE_OPS, NOT_LOADED, FuseKey, Sample

SOURCE = Path(__file__).with_name("fuse.c")
FILESYSTEMS = Path("/proc/filesystems")
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
_SERVERS = 1024


class FuseProbe(MountProbe):
    """FUSE counters per (cgroup, mount, op); a mount is called by its place. `tiers` narrows the ladder (tests).

    What the page cache writes back later is the kernel's own request and not counted; writes that wait are.
    """

    name = "fuse"

    def __init__(self, loader: Loader, *, tiers: Collection[str] = TIERS) -> None:
        self._tiers = tiers
        super().__init__(loader)

    def _missing(self) -> str:
        return "" if is_loaded(FILESYSTEMS) else f"the file system fuse is missing: {NOT_LOADED}"

    def _attach(self) -> None:
        btf = self._loader.btf
        if not btf.has("fuse_req.args"):
            btf = btf.of_module("fuse")
        macros = {"MAX_SERVERS": _SERVERS, **btf.offsets(_FIELDS)}
        program = self._load(SOURCE, macros, [MEMORY_HEADER, HISTOGRAM_HEADER, OWNER_HEADER])
        ladder: dict[str, Callable[[Program], None]] = {"kprobe": _attach_kprobe, "tracepoint": _attach_tracepoints}
        for tier in (name for name in TIERS if name in self._tiers):
            try:
                ladder[tier](program)
            except ProbeError as error:
                self._refusals.append(str(error))
                program.detach_all()
            else:
                self._tier = tier
                return
        raise ProbeError(f"no tier of {', '.join(self._tiers) or 'none'} works here")

    def _unseen(self) -> Reason:
        """From the queue on is not from the start."""
        if self._tier != "tracepoint":
            return Reason()
        return partly("the wait of background requests for their turn is unknown", self._refusals)

    def read(self, now_ns: int) -> Sample:
        """The counters as they stand."""
        calls = self._calls(now_ns)
        found = {FuseKey(call.cgroup_id, call.mount, FUSE_OPS[call.op]): decode_fuse(call.value) for call in calls}
        return Sample(now_ns, fuse=found)

    def _names(self, lines: Iterable[str]) -> dict[str, str]:
        return fuse_mounts(lines)


def is_loaded(filesystems: Path) -> bool:
    """Whether the kernel has FUSE now (proc(5), /proc/filesystems)."""
    try:
        return "fuse" in filesystems.read_text().split()
    except OSError:
        return False


def fuse_mounts(lines: Iterable[str]) -> dict[str, str]:
    """`maj:min` -> mount point of the FUSE mounts of a mountinfo file; the first where there are several.

    The source is no name: every mount of one program has the same.
    """
    found: dict[str, str] = {}
    for mount in parse_mounts(lines):
        if mount.kind.partition(".")[0] in {"fuse", "fuseblk"}:
            found.setdefault(mount.device, mount.where)
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
