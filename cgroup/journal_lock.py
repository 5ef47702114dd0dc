"""The lock that keeps a second enforcing process away from a host, and what its errors mean."""
# ruff: noqa: PTH103, PTH120  # the guardian imports this, and pathlib would cost it a megabyte

from __future__ import annotations

import errno
import fcntl
import os
import struct
import time
from collections.abc import Callable

from cgroup.errors import JournalBusy, JournalError, JournalFull

_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def translated(error: OSError, path: str) -> JournalError:
    """Return the error of the journal's own that an OSError amounts to."""
    if error.errno in _NO_ROOM:
        return JournalFull(f"no room for the journal {path} ({error.strerror}): nothing is enforced until there is.")
    return JournalError(f"the journal {path} cannot be written ({error.strerror}): nothing is enforced.")


def lock_holder(path: str) -> int:
    """Return the process that holds the journal's lock, 0 where none does or it is of another process namespace.

    Not for the holder itself: closing any descriptor of the file gives a POSIX lock up.
    """
    try:
        file = os.open(path + ".lock", os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return 0
    try:
        # struct flock of fcntl(2): l_type, l_whence, l_start, l_len, l_pid
        ask = struct.pack("hhqqi4x", fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
        kind, _, _, _, pid = struct.unpack("hhqqi4x", fcntl.fcntl(file, fcntl.F_GETLK, ask))
        return 0 if kind == fcntl.F_UNLCK else max(int(pid), 0)
    finally:
        os.close(file)


def take_lock(path: str, wait_seconds: float) -> int:
    """Take the lock file, waiting so long for whoever holds it. Raises JournalBusy or JournalError.

    POSIX locks belong to a process: a forked child does not keep one alive, and SIGKILL gives it back.
    """
    try:
        os.makedirs(os.path.dirname(path) or ".", mode=0o700, exist_ok=True)
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    except OSError as error:
        raise translated(error, path) from error
    deadline = time.monotonic() + wait_seconds
    while True:
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if time.monotonic() < deadline:
                time.sleep(0.01)
                continue
            holder = os.read(file, 20).decode("ascii", "replace").strip()
            os.close(file)
            raise JournalBusy(
                f"another prefetchd (pid {holder or 'unknown'}) enforces on this host and holds {path}; stop it first."
            ) from error
        ignore_errors(lambda: os.ftruncate(file, 0))
        ignore_errors(lambda: os.pwrite(file, b"%d\n" % os.getpid(), 0))
        return file


def take_tree(root: str) -> int:
    """Take the cgroup tree itself, whatever journal is used. Raises JournalBusy where somebody else enforces below it.

    Two agents with journals of their own would each take the other's limits for an administrator's, and put them back
    as such. The lock is on the folder's inode, so it holds across containers; a process's end gives it back.
    """
    folder = os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        os.close(folder)
        raise JournalBusy(f"another prefetchd enforces below {root}, with a state directory of its own.") from error
    except OSError:  # no such locks here: the journal's alone must do
        pass
    return folder


def ignore_errors(action: Callable[[], object]) -> None:
    """For what is nice to have but must not stop a restore, on a full disk above all."""
    try:
        action()
    except OSError:
        return
