"""The NFS probe: READ and WRITE calls of the managed cgroups per mount, with the program of nfs.c.

Tracepoints of the modules sunrpc and nfs only, so it attaches once these are loaded.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from bpf.decode import OPS, decode_nfs
from bpf.loader import HISTOGRAM_HEADER
from bpf.mount_probe import MountProbe, parse_mounts
from bpf.owners import OWNER_HEADER
from bpf.samples import NOT_LOADED, NfsKey, Sample

SOURCE = Path(__file__).with_name("nfs.c")

_ATTACH = {
    "sunrpc:rpc_stats_latency": "task_ended",
    "nfs:nfs_readpage_done": "read_done",
    "nfs:nfs_writeback_done": "write_done",
    "sunrpc:rpc_task_begin": "task_begun",
    "nfs:nfs_initiate_read": "read_initiated",
    "nfs:nfs_initiate_write": "write_initiated",
}


class NfsProbe(MountProbe):
    """NFS counters per (cgroup, mount, read or write); a mount is called `server:/export`.

    Writes that the kernel sends in the background have no owner that it could tell (NFS has no cgroup writeback) and
    are not counted; those of O_DIRECT, fsync and O_SYNC are.
    """

    name = "nfs"

    def _missing(self) -> str:
        missing = [name for name in _ATTACH if not self._loader.tracepoint_exists(name)]
        modules = sorted({name.partition(":")[0] for name in missing})
        return f"tracepoints of {' and '.join(modules)} are missing: {NOT_LOADED}" if modules else ""

    def _attach(self) -> None:
        program = self._load(SOURCE, {}, [HISTOGRAM_HEADER, OWNER_HEADER])
        for tracepoint, function in _ATTACH.items():
            program.attach_tracepoint(tracepoint, function)
        self._tier = "tracepoint"

    def read(self, now_ns: int) -> Sample:
        """The counters as they stand."""
        calls = self._calls(now_ns)
        found = {NfsKey(call.cgroup_id, call.mount, OPS[call.op]): decode_nfs(call.value) for call in calls}
        return Sample(now_ns, nfs=found)

    def _names(self, lines: Iterable[str]) -> dict[str, str]:
        return nfs_mounts(lines)


def nfs_mounts(lines: Iterable[str]) -> dict[str, str]:
    """`maj:min` -> source of the NFS mounts of a mountinfo file."""
    return {mount.device: mount.source for mount in parse_mounts(lines) if mount.kind in {"nfs", "nfs4"}}
