"""The network namespaces that processes of cgroups are in, and a thread's visit to one.

Nothing is kept open between two visits: a socket or a descriptor would keep the network of a pod that is gone.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import NamedTuple

_CLONE_NEWNET = 0x40000000
"""include/uapi/linux/sched.h. With 0 in its place a service manager's filter of namespaces refuses setns()."""

_OWN = Path("/proc/thread-self/ns/net")
_LIBC = ctypes.CDLL(None, use_errno=True)


class StrandedError(Exception):
    """This thread is in a foreign namespace and cannot return; it must end."""


class Found(NamedTuple):
    """Process ids by namespace (its inode number), and why those of some processes are not known, where so."""

    processes: dict[int, list[int]]
    why: str


def own_namespace() -> int:
    """Inode number of this thread's network namespace. OSError where /proc does not tell."""
    return _OWN.stat().st_ino


def find_namespaces(root: Path, cgroup_ids: Collection[int], proc_root: Path = Path("/proc")) -> Found:
    """Those of all processes of these cgroups and of what is below them. `root`: where cgroup v2 is mounted."""
    found, why = Found({}, ""), ""
    for process in _processes(root, frozenset(cgroup_ids)):
        if not process:
            why = "the agent is not in the node's PID namespace (hostPID)"  # cgroup.procs says 0 for the others
            continue
        try:
            namespace = (proc_root / str(process) / "ns/net").stat().st_ino
        except (FileNotFoundError, ProcessLookupError):
            continue  # it has ended
        except OSError as error:
            why = f"{error.filename}: {error.strerror}"
            continue
        found.processes.setdefault(namespace, []).append(process)
    return found._replace(why=why)


def _processes(root: Path, cgroup_ids: frozenset[int]) -> Iterator[int]:
    pending = [(str(root), False)]
    while pending:
        folder, is_managed = pending.pop()
        # Removed meanwhile, or its processes are told by the cgroup above (threaded).
        with contextlib.suppress(OSError):
            with os.scandir(folder) as entries:
                below = [one for one in entries if one.is_dir(follow_symlinks=False)]
            pending += [(one.path, is_managed or one.inode() in cgroup_ids) for one in below]
            if is_managed:
                yield from map(int, Path(folder, "cgroup.procs").read_text(encoding="ascii").split())


@contextlib.contextmanager
def visited(processes: Collection[int], proc_root: Path = Path("/proc")) -> Iterator[bool]:
    """Be in the namespace of the first of these processes that lives, then return; False (and no visit) if all ended.

    Only this thread moves. OSError where the kernel refuses (CAP_SYS_ADMIN and CAP_SYS_PTRACE are needed),
    StrandedError where there is no way back.
    """
    home = os.open(_OWN, os.O_RDONLY | os.O_CLOEXEC)
    try:
        namespace = _open_first(processes, proc_root)
        if namespace is None:
            yield False
            return
        try:
            _enter(namespace)
        finally:
            os.close(namespace)
        try:
            yield True
        finally:
            _return(home)
    finally:
        os.close(home)


def _open_first(processes: Collection[int], proc_root: Path) -> int | None:
    for process in processes:
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            return os.open(proc_root / str(process) / "ns/net", os.O_RDONLY | os.O_CLOEXEC)
    return None


def _enter(namespace: int) -> None:
    if _LIBC.setns(namespace, _CLONE_NEWNET):
        code = ctypes.get_errno()
        raise OSError(code, f"setns: {errno.errorcode.get(code, code)}: {os.strerror(code)}")


def _return(home: int) -> None:
    try:
        _enter(home)
    except OSError as error:
        raise StrandedError(f"the way back to the agent's network namespace is barred: {error.strerror}") from error
