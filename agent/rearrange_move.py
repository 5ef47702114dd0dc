"""One file, moved by the file system's own tool: looked at, warmed in the disk's order, moved, looked at again."""

from __future__ import annotations

import ctypes
import os
import signal
import stat
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress

from agent import rearrange_files as files
from agent.rearrange import FileId, Range, pieces_of
from agent.rearrange_defragment import SECOND_SUFFIX, Facts, Leave, is_fragmented, pieces, tool_of, why_leave
from agent.rearrange_facts import facts_of, mounts_of, open_here, path_here
from cgroup.mountinfo import Mount

FOLDERS = ("/usr/sbin", "/sbin", "/usr/local/sbin", "/usr/bin")
WARMED = frozenset({"ext4"})
"""e4defrag copies through the page cache and holds the journal while it reads, so all that it reads is there before.
xfs_fsr reads around the cache: warming would read everything twice."""
BETTER = 0.5
"""Of the pieces before, what may be left for a file to count as moved."""
LONGEST_SECONDS = 600.0
STEP_SECONDS = 0.05
CLOCK_SECONDS = 0.02
"""The kernel stamps files by a clock that lags behind the one that is read here, by a timer tick."""

_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None, use_errno=True)


class Stopped(Exception):  # noqa: N818 - no error: somebody asked for it
    """The file was given up since nothing may be moved now."""


class Move:
    """Moves one file at a time, at no more than the rates that are set; `stop` ends what is under way."""

    def __init__(self, largest_bytes: int, folders: Sequence[str] = FOLDERS) -> None:
        self.bytes_per_second = self.requests_per_second = 1.0
        self._largest_bytes = largest_bytes
        self._folders = folders
        self._closed = False
        self._stopping = threading.Event()
        self._idle = threading.Event()
        self._idle.set()

    def stop(self) -> None:
        """End what is under way, if anything is."""
        if not self._idle.is_set():
            self._stopping.set()

    def close(self) -> None:
        """End what is under way and begin nothing any more."""
        self._closed = True
        self._stopping.set()

    def wait(self, seconds: float) -> None:
        """Return once nothing is under way, or after that time."""
        self._idle.wait(seconds)

    def size_if_fragmented(self, path: str, file: FileId, theirs: Sequence[Mount]) -> int | Leave:
        """Bytes of a file that is badly fragmented, 0 where it is not, or why nobody can tell."""
        return self._reach(path, file, theirs, lambda _, facts, __: facts.size)

    def carry_out(self, path: str, file: FileId, theirs: Sequence[Mount]) -> int | Leave:
        """Bytes that were moved, 0 where the file is not fragmented, or why it was left. Raises `Stopped`."""
        self._idle.clear()
        self._stopping.clear()
        try:
            if self._closed:
                raise Stopped
            return self._reach(path, file, theirs, self._move)
        finally:
            self._idle.set()

    def _reach(
        self,
        path: str,
        file: FileId,
        theirs: Sequence[Mount],
        then: Callable[[str, Facts, int], int | Leave],
    ) -> int | Leave:
        """Open the file and look at it; where it is fragmented `then` gets its path here, its facts, a descriptor."""
        device = f"{os.major(file[0])}:{os.minor(file[0])}"
        here = path_here(path, device, theirs, mounts_of("self"))
        if isinstance(here, Leave):
            return here
        descriptor = open_here(here.path, file)
        if isinstance(descriptor, Leave):
            return descriptor
        try:
            facts = facts_of(descriptor, here)
            return then(here.path, facts, descriptor) if is_fragmented(facts.extents) else 0
        except OSError:
            return Leave.UNMAPPED
        finally:
            os.close(descriptor)

    def _move(self, path: str, facts: Facts, descriptor: int) -> int | Leave:
        why = why_leave(facts, self._largest_bytes)
        if why is not None:
            return why
        tool = find_tool(facts.file_system, self._folders)
        if not tool:
            return Leave.NO_TOOL
        if facts.file_system in WARMED:
            self._warm(descriptor, facts)
        return self._run(tool, path, descriptor, facts)

    def _warm(self, descriptor: int, facts: Facts) -> None:
        """Read it in the order in which it lies, no faster than allowed; what is cached already is left out."""
        whole = Range((0, 0), 0, facts.size)
        next_at = time.monotonic()
        for piece in sorted(pieces_of(whole, facts.extents)):
            missing = files.missing_bytes(descriptor, piece.offset, piece.length)
            if missing:
                self._sleep_until(next_at)
                next_at = max(next_at, time.monotonic() - STEP_SECONDS) + self._cost_seconds(missing)
                files.ask_for(descriptor, piece.offset, piece.length)
        while files.missing_bytes(descriptor, 0, facts.size) and time.monotonic() - next_at < 1.0:
            self._sleep_until(time.monotonic() + STEP_SECONDS)

    def _cost_seconds(self, size: int) -> float:
        """What one request of that size takes at the rates that are allowed now."""
        return max(size / max(self.bytes_per_second, 1.0), 1.0 / max(self.requests_per_second, 0.1))

    def _sleep_until(self, moment: float) -> None:
        while (left := moment - time.monotonic()) > 0:
            if self._stopping.wait(min(left, 1.0)):
                raise Stopped
        if self._stopping.is_set():
            raise Stopped

    def _run(self, tool: str, path: str, descriptor: int, facts: Facts) -> int | Leave:
        folder, _, name = path.rpartition("/")
        pinned = os.open(folder or "/", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            if not _is_same(pinned, name, descriptor):
                return Leave.VANISHED
            status = self._tool(tool, pinned, name)
        finally:
            os.close(pinned)
        if status:
            return Leave.FAILED
        after, _ = files.extents_of(descriptor, facts.size)
        return facts.size if pieces(after) <= BETTER * pieces(facts.extents) else Leave.NOT_BETTER

    def _tool(self, tool: str, folder: int, name: str) -> int:
        """Run it in the file's folder, whatever becomes of the path meanwhile; returns its exit status."""
        null, mover, second = subprocess.DEVNULL, os.getpid(), f"{name}{SECOND_SUFFIX}"
        theirs, began = _is_there(folder, second), time.time() - CLOCK_SECONDS
        process = subprocess.Popen(
            [tool, "-v", f"./{name}"], cwd=f"/proc/self/fd/{folder}", stdin=null, stdout=null, stderr=null, umask=0o077,
            env={"PATH": ":".join(self._folders), "LC_ALL": "C"}, preexec_fn=lambda: _die_with(mover),  # noqa: PLW1509
        )  # fmt: skip
        try:
            return self._watch(process)
        finally:
            if not theirs:
                _remove_leftover(folder, second, began)
            _remove_leftover(folder, f".fsr{process.pid}", began)

    def _watch(self, process: subprocess.Popen[bytes]) -> int:
        """The tool's exit status; it is ended where it takes too long or nothing may be moved any more."""
        deadline = time.monotonic() + LONGEST_SECONDS
        while process.poll() is None:
            if self._stopping.wait(STEP_SECONDS) or time.monotonic() > deadline:
                process.kill()
                process.wait()
                raise Stopped
        return process.returncode


def find_tool(file_system: str, folders: Sequence[str] = FOLDERS) -> str:
    """The path of the file system's own tool, "" where it is not installed."""
    name = tool_of(file_system)
    return next((f"{one}/{name}" for one in folders if name and os.access(f"{one}/{name}", os.X_OK)), "")


def _is_same(folder: int, name: str, descriptor: int) -> bool:
    try:
        there = os.stat(name, dir_fd=folder, follow_symlinks=False)
    except OSError:
        return False
    return os.path.samestat(there, os.fstat(descriptor))


def _is_there(folder: int, name: str) -> bool:
    try:
        os.stat(name, dir_fd=folder, follow_symlinks=False)
    except OSError:
        return False
    return True


def _remove_leftover(folder: int, name: str, began: float) -> None:
    """e4defrag makes NAME.defrag, xfs_fsr .fsrPID, and each removes the name at once.

    Ended just between the two (while the first waits for the disk, behind its cap), it leaves an empty file: root's,
    which nobody but its owner may write, and no older than the tool.
    """
    with suppress(OSError):
        status = os.stat(name, dir_fd=folder, follow_symlinks=False)
        is_empty = stat.S_ISREG(status.st_mode) and status.st_size == 0 and status.st_nlink == 1
        if is_empty and status.st_uid == 0 and not status.st_mode & 0o7133 and status.st_ctime >= began:
            os.unlink(name, dir_fd=folder)


def _die_with(mover: int) -> None:
    """However the mover ends, the tool ends with it; or does not begin, where the mover ended before this."""
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != mover:
        os._exit(1)
