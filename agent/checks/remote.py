"""Remote storage: NFS mounts and what the kernel can tell about their requests; FUSE mounts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from agent.checks.finding import Finding, failed, note, ok, unknown, warning
from agent.checks.host import Host
from agent.checks.kernel import TRACE_FOLDERS
from cgroup.errors import IoFileError
from cgroup.mountinfo import parse_mountinfo

NFS_EVENTS = ("sunrpc/rpc_task_begin", "sunrpc/rpc_stats_latency")


@dataclass(frozen=True, slots=True)
class RemoteFacts:
    """`events` are the NFS tracepoints that exist, None where tracefs cannot be read."""

    nfs_mounts: tuple[str, ...]
    fuse_mounts: tuple[str, ...]
    nfs_known: bool
    events: frozenset[str] | None


def gather(host: Host) -> RemoteFacts:
    """Read mounts, file systems and tracefs."""
    try:
        mounts = parse_mountinfo(host.read("/proc/self/mountinfo") or "")
    except IoFileError:
        mounts = ()
    folder = next((folder for folder in TRACE_FOLDERS if host.names(f"{folder}/events")), None)
    file_systems = (host.read("/proc/filesystems") or "").split()
    return RemoteFacts(
        nfs_mounts=tuple(mount.point for mount in mounts if mount.fstype in ("nfs", "nfs4")),
        fuse_mounts=tuple(mount.point for mount in mounts if mount.fstype.startswith("fuse.")),
        nfs_known="nfs" in file_systems or "nfs4" in file_systems,
        events=None if folder is None else frozenset(e for e in NFS_EVENTS if host.exists(f"{folder}/events/{e}")),
    )


def check(facts: RemoteFacts) -> Iterator[Finding]:
    """Judge the facts."""
    yield _nfs(facts)
    if facts.fuse_mounts:
        yield note("remote.fuse", f"FUSE mounts ({', '.join(facts.fuse_mounts[:3])}) are seen at the FUSE request")


def _nfs(facts: RemoteFacts) -> Finding:
    if not facts.nfs_known and not facts.nfs_mounts:
        return note("remote.nfs", "the NFS client is not loaded and nothing is mounted; the probe attaches when it is")
    if facts.events is None:
        return unknown("remote.nfs", "tracepoints of NFS can be listed only where tracefs is mounted and readable",
                       "mount -t tracefs none /sys/kernel/tracing, then run the doctor again as root")  # fmt: skip
    mounts = f"{len(facts.nfs_mounts)} NFS mount(s)"
    missing = [event for event in NFS_EVENTS if event not in facts.events]
    if missing:
        fix = (
            "Boot a kernel with CONFIG_SUNRPC and tracepoints (CONFIG_EVENT_TRACING=y), or load sunrpc: modprobe sunrpc"
        )
        evidence = f"{mounts}, but {', '.join(missing)} is missing: requests are not seen"
        return (
            failed("remote.nfs", evidence, fix, "measuring")
            if facts.nfs_mounts
            else warning("remote.nfs", evidence, fix)
        )
    return ok("remote.nfs", f"{mounts}, both tracepoints exist")
