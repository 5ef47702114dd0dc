"""The NFS probe: READ and WRITE calls of the managed cgroups per mount, with the program of nfs.c.

Tracepoints of the modules sunrpc and nfs only. They exist once the modules are loaded, so the probe attaches late: a
read looks for them every few seconds while they are missing, and the one that finds them compiles (under a second).
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterable
from pathlib import Path

from bpf.decode import OPS, decode_nfs, device_name
from bpf.loader import HISTOGRAM_HEADER, Loader, ProbeError, Program
from bpf.owners import OWNER_HEADER, Owners
from bpf.samples import NfsCounters, NfsKey, ProbeState, ProbeStatus, Sample

SOURCE = Path(__file__).with_name("nfs.c")
MOUNTINFO = Path("/proc/self/mountinfo")

_ATTACH = {
    "sunrpc:rpc_stats_latency": "task_ended",
    "nfs:nfs_readpage_done": "read_done",
    "nfs:nfs_writeback_done": "write_done",
    "sunrpc:rpc_task_begin": "task_begun",
    "nfs:nfs_initiate_read": "read_initiated",
    "nfs:nfs_initiate_write": "write_initiated",
}
_LOOK_EVERY_NS = 5_000_000_000
_SLOTS = 4096
_RUNNING = 16384


class NfsProbe:
    """NFS counters per (cgroup, mount, read or write).

    Writes that the kernel sends in the background have no owner that it could tell (NFS has no cgroup writeback) and
    are not counted; those of O_DIRECT, fsync and O_SYNC are.
    """

    name = "nfs"

    def __init__(self, loader: Loader) -> None:
        self._loader = loader
        self._program: Program | None = None
        self._owners: Owners | None = None
        self._wanted: frozenset[int] = frozenset()
        self._why = ""
        self._broken = self._closed = False
        self._next_look_ns = 0
        self._mounts: dict[str, str] = {}
        self._try()

    def _try(self) -> None:
        """Attach if the modules are there; what fails although they are will not get better."""
        try:
            missing = [name for name in _ATTACH if not self._loader.tracepoint_exists(name)]
        except ProbeError as error:
            self._why, self._broken = str(error), True
            return
        if missing:
            modules = sorted({name.partition(":")[0] for name in missing})
            self._why = f"tracepoints of {' and '.join(modules)} are missing: the module is not loaded"
            return
        try:
            self._attach()
        except ProbeError as error:
            self._why, self._broken = str(error), True
            self._drop()

    def _attach(self) -> None:
        macros = {"MAX_SLOTS": _SLOTS, "MAX_RUNNING": _RUNNING}
        program = self._loader.load(SOURCE, macros, shared=[HISTOGRAM_HEADER, OWNER_HEADER])
        self._program = program
        self._owners = Owners(program)
        self._owners.replace(self._wanted)
        for tracepoint, function in _ATTACH.items():
            program.attach_tracepoint(tracepoint, function)
        self._why = ""

    def status(self) -> ProbeStatus:
        """Attached or unavailable: there is one tier."""
        if self._program is None:
            return ProbeStatus(self.name, ProbeState.UNAVAILABLE, self._why)
        lost = int(self._program.map("nfs_lost")[0].value)
        fill = len(self._program.map("nfs_calls")) / _SLOTS
        return ProbeStatus(self.name, ProbeState.ATTACHED, "", "tracepoint", lost, fill)

    def manage(self, cgroup_ids: Collection[int]) -> None:
        """Count these cgroups and what is below them, and no others."""
        self._wanted = frozenset(cgroup_ids)
        if self._owners is None or self._program is None:
            return
        dropped = self._owners.replace(self._wanted)
        if dropped:
            calls = self._program.map("nfs_calls")
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
        found: dict[NfsKey, NfsCounters] = {}
        for key, value in self._program.map("nfs_calls").items():
            mount = self._mount_of(device_name(key.device))
            found[NfsKey(key.cgroup, mount, OPS[key.op])] = decode_nfs(bytes(value))
        return Sample(now_ns, nfs=found)

    def _mount_of(self, device: str) -> str:
        """`server:/export` of an NFS super block; its device number where it is no longer mounted."""
        if device not in self._mounts:
            self._mounts |= nfs_mounts(MOUNTINFO.read_text().splitlines())
        return self._mounts.setdefault(device, device)

    def _drop(self) -> None:
        if self._program is not None:
            self._program.close()
        self._program = self._owners = None

    def close(self) -> None:
        """Detach and free."""
        self._closed, self._why = True, self._why or "closed"
        self._drop()


def nfs_mounts(lines: Iterable[str]) -> dict[str, str]:
    """`maj:min` -> source of the NFS mounts of a mountinfo file (proc(5)); octal escapes stay as they are."""
    found = {}
    for line in lines:
        before, dash, after = line.partition(" - ")
        fields, kinds = before.split(), after.split()
        if dash and len(fields) > 2 and len(kinds) > 1 and kinds[0] in {"nfs", "nfs4"}:
            found[fields[2]] = kinds[1]
    return found
