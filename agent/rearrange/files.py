"""What the helper asks the kernel: files that processes have open, where files lie, what is cached, what pipes hold.

Nothing here changes a file, its times or a process. Calls may block for as long as the disk takes.
"""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
import stat
import struct
from contextlib import suppress
from typing import NamedTuple

from agent.rearrange.window import Extent, FileId, Skip

_FS_IOC_FIEMAP = 0xC020660B  # include/uapi/linux/fs.h
_FS_IOC_GETFLAGS = 0x80086601
_FS_ENCRYPT_FL = 0x00000800
_FIEMAP = struct.Struct("=QQIIII")  # include/uapi/linux/fiemap.h: start, length, flags, mapped, room, reserved
_EXTENT = struct.Struct("=QQQ16xI12x")  # logical, physical, length, flags
_EXTENTS_A_CALL = 512
MOST_EXTENTS = 65536
"""Of one file; what is more fragmented than that is read ahead only up to there."""

_LAST = 0x1
_UNPLACED = 0x2 | 0x4 | 0x200 | 0x400  # unknown, delayed allocation, inline, tail
_ENCODED = 0x8 | 0x80  # encoded, encrypted
_UNWRITTEN = 0x800
_SHARED = 0x2000

MOST_PROCESSES, MOST_FILES = 256, 512
"""Of one job that are looked at, and of one process."""
READ_FLAGS = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY
"""For files whose name somebody else chose: a pipe or a device must not block or do anything."""

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, *[ctypes.c_size_t] * 1, *[ctypes.c_int] * 3, ctypes.c_long]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_libc.mincore.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_char_p]
_libc.tee.restype = ctypes.c_ssize_t
_libc.tee.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_size_t, ctypes.c_uint]


class OpenFile(NamedTuple):
    """A regular file that a process has open: where its reader stands, its size (bytes), the flags of open(2)."""

    pid: int
    descriptor: int
    file: FileId
    position: int
    size: int
    flags: int

    @property
    def link(self) -> str:
        """A path that opens this very file again, whatever its name and mount namespace are."""
        return f"/proc/{self.pid}/fd/{self.descriptor}"


def is_link(path: str) -> bool:
    """Whether this is a path to a descriptor (`OpenFile.link`)."""
    return path.startswith("/proc/") and path.rpartition("/")[0].endswith("/fd")


class Processes(NamedTuple):
    """Processes of a cgroup, whether there were more."""

    pids: tuple[int, ...]
    too_many: bool


class Looked(NamedTuple):
    """What one look at a process found: its files, its pipes' inodes with a path to each, whether there were more."""

    files: tuple[OpenFile, ...]
    pipes: dict[int, str]
    too_many: bool


def processes_of(folder: str) -> Processes:
    """The processes of a cgroup and of those below it, at most `MOST_PROCESSES`. One that is gone has none."""
    found: list[int] = []
    pending = [folder]
    while pending and len(found) <= MOST_PROCESSES:
        here = pending.pop()
        with suppress(OSError, ValueError):
            with open(f"{here}/cgroup.procs", encoding="ascii") as file:  # noqa: PTH123 - the helper is kept small
                found.extend(int(line) for line in file)
            pending.extend(entry.path for entry in os.scandir(here) if entry.is_dir(follow_symlinks=False))
    return Processes(tuple(found[:MOST_PROCESSES]), len(found) > MOST_PROCESSES)


def command_of(pid: int) -> str:
    """The name of a process's main thread, "" where it is gone."""
    try:
        with open(f"/proc/{pid}/comm", encoding="utf-8", errors="replace") as file:  # noqa: PTH123
            return file.read().rstrip("\n")
    except OSError:
        return ""


def look_at(pid: int) -> Looked:
    """The regular files and pipes that a process has open; what is closed meanwhile is left out."""
    files: list[OpenFile] = []
    pipes: dict[int, str] = {}
    folder = f"/proc/{pid}/fd"
    try:
        names = os.listdir(folder)  # noqa: PTH208
    except OSError:
        return Looked((), {}, too_many=False)
    for name in names[:MOST_FILES]:
        with suppress(OSError, ValueError, KeyError):
            status = os.stat(f"{folder}/{name}")  # noqa: PTH116
            if stat.S_ISFIFO(status.st_mode):
                pipes[status.st_ino] = f"{folder}/{name}"
            elif stat.S_ISREG(status.st_mode):
                position, flags = _position(pid, name)
                file = (status.st_dev, status.st_ino)
                files.append(OpenFile(pid, int(name), file, position, status.st_size, flags))
    return Looked(tuple(files), pipes, len(names) > MOST_FILES)


def name_of(one: OpenFile) -> str:
    """The path by which its process has it open; "" where the descriptor is closed, or another file's by now."""
    try:
        path = os.readlink(one.link)  # noqa: PTH115
        status = os.stat(one.link)  # noqa: PTH116
    except OSError:
        return ""
    return path if (status.st_dev, status.st_ino) == one.file else ""


def _position(pid: int, name: str) -> tuple[int, int]:
    """(position, flags) of a descriptor, from fdinfo (Documentation/filesystems/proc.rst)."""
    with open(f"/proc/{pid}/fdinfo/{name}", encoding="ascii", errors="replace") as file:  # noqa: PTH123
        fields = dict(line.split(":", 1) for line in file if ":" in line)
    return int(fields["pos"]), int(fields["flags"], 8)


def refusal(flags: int) -> Skip | None:
    """Why a file that is open with these flags is not read ahead."""
    if flags & os.O_DIRECT:
        return Skip.DIRECT
    return None if flags & os.O_ACCMODE == os.O_RDONLY else Skip.WRITABLE


def extents_of(descriptor: int, size: int, *, every: bool = False) -> tuple[tuple[Extent, ...], set[Skip]]:
    """Where the written parts of a file lie, and why others were left out, unless `every` one is wanted.

    Blocks on a cold fragmented file.

    Raises OSError where the file system cannot say. Nothing is flushed (no FIEMAP_FLAG_SYNC): what has no place yet is
    left out.
    """
    skips: set[Skip] = set()
    if _is_encrypted(descriptor) and not every:
        return (), {Skip.ENCRYPTED}
    found: list[Extent] = []
    at, covered = 0, 0
    while at < size and len(found) < MOST_EXTENTS:
        batch = _ask_extents(descriptor, at, size - at)
        for logical, physical, length, flags in batch:
            why = _unusable(flags)
            if why is None or every:
                found.append(Extent(logical, physical, length))
            if why is not None:
                skips.add(why)
            if logical > covered:
                skips.add(Skip.SPARSE)
            at = covered = logical + length
        if not batch or batch[-1][3] & _LAST:
            break
    if covered < size and len(found) < MOST_EXTENTS:
        skips.add(Skip.SPARSE)
    return tuple(found), skips


def _unusable(flags: int) -> Skip | None:
    """Shared extents would be read once per file that shares them, unwritten ones hold nothing to read."""
    for mask, why in (
        (_ENCODED, Skip.ENCRYPTED),
        (_UNWRITTEN, Skip.UNWRITTEN),
        (_SHARED, Skip.SHARED),
        (_UNPLACED, Skip.UNMAPPED),
    ):
        if flags & mask:
            return why
    return None


def _ask_extents(descriptor: int, start: int, length: int) -> list[tuple[int, int, int, int]]:
    buffer = bytearray(_FIEMAP.size + _EXTENTS_A_CALL * _EXTENT.size)
    _FIEMAP.pack_into(buffer, 0, start, length, 0, 0, _EXTENTS_A_CALL, 0)
    fcntl.ioctl(descriptor, _FS_IOC_FIEMAP, buffer)
    mapped = _FIEMAP.unpack_from(buffer)[3]
    return [_EXTENT.unpack_from(buffer, _FIEMAP.size + i * _EXTENT.size) for i in range(mapped)]


def _is_encrypted(descriptor: int) -> bool:
    flags = bytearray(8)
    try:
        fcntl.ioctl(descriptor, _FS_IOC_GETFLAGS, flags)
    except OSError:
        return False  # a file system without such flags
    return bool(int.from_bytes(flags[:4], "little") & _FS_ENCRYPT_FL)


def missing_bytes(descriptor: int, offset: int, length: int) -> int:
    """How much of a part of a file is not in the page cache; all of it where that cannot be told."""
    pages = cached_pages(descriptor, offset, length)
    return length if pages is None else min(length, pages.count(False) * mmap.PAGESIZE)


def cached_pages(descriptor: int, offset: int, length: int) -> tuple[bool, ...] | None:
    """Which pages of a part of a file are in the page cache (mincore(2)); None where that cannot be told."""
    start = offset // mmap.PAGESIZE * mmap.PAGESIZE
    span = offset + length - start
    address = _libc.mmap(None, span, mmap.PROT_READ, mmap.MAP_SHARED, descriptor, start)
    if address in (None, ctypes.c_void_p(-1).value):
        return None
    try:
        seen = ctypes.create_string_buffer(-(-span // mmap.PAGESIZE))
        if _libc.mincore(address, span, seen):
            return None
    finally:
        _libc.munmap(address, span)
    return tuple(page & 1 == 1 for page in seen.raw[: -(-span // mmap.PAGESIZE)])


def ask_for(descriptor: int, offset: int, length: int) -> None:
    """Have the kernel read a part of a file into the page cache; returns before it is there."""
    os.posix_fadvise(descriptor, offset, length, os.POSIX_FADV_WILLNEED)


class PipeReader:
    """Sees what pipes hold, without taking anything out: tee(2) only adds references to the pages."""

    def __init__(self) -> None:
        self._out, self._in = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        with suppress(OSError):
            fcntl.fcntl(self._in, fcntl.F_SETPIPE_SZ, 1 << 20)

    def peek(self, path: str) -> bytes:
        """The bytes in the pipe that `path` (/proc/PID/fd/N) leads to; none where it is gone or empty.

        The pipe is open here only for that moment: a reader too many would hide from the job that its own has died.
        """
        try:
            pipe = os.open(path, READ_FLAGS)
        except OSError:
            return b""
        try:
            count = _libc.tee(pipe, self._in, 1 << 20, os.SPLICE_F_NONBLOCK if hasattr(os, "SPLICE_F_NONBLOCK") else 2)
        finally:
            os.close(pipe)
        return os.read(self._out, count) if count > 0 else b""

    def close(self) -> None:
        """Give the pipe back."""
        os.close(self._out)
        os.close(self._in)


def in_flight(device: str) -> int:
    """Requests that the disk (maj:min) has in hand, reads and writes; 0 where it is not told."""
    try:
        with open(f"/sys/dev/block/{device}/inflight", encoding="ascii") as file:  # noqa: PTH123
            return sum(map(int, file.read().split()))
    except (OSError, ValueError):
        return 0


def files_below(root: str, most: int, *, below: bool) -> list[str]:
    """Paths of at most `most` files in a folder, with all folders below it where `below`; links are left out."""
    found: list[str] = []
    pending = [root]
    while pending and len(found) < most:
        with suppress(OSError):
            for entry in os.scandir(pending.pop()):
                if entry.is_file(follow_symlinks=False):
                    found.append(entry.path)
                elif below and entry.is_dir(follow_symlinks=False):
                    pending.append(entry.path)
    return found[:most]
