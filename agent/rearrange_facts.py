"""What the mover asks the kernel about a file before it has it moved, and where the file is in its own mounts."""
# ruff: noqa: PTH123  # pathlib would cost a megabyte

from __future__ import annotations

import array
import fcntl
import os
import struct
import time
from collections.abc import Sequence
from typing import NamedTuple

from agent import rearrange_files as files
from agent.rearrange import FileId
from agent.rearrange_defragment import Facts, Leave
from bpf.regular_file import open_regular
from cgroup.mountinfo import Mount, parse_mountinfo

_FS_IOC_GETFLAGS = 0x80086601  # include/uapi/linux/fs.h
_FS_IOC_FSGETXATTR = 0x801C581F
_FSXATTR = struct.Struct("=IIIII8x")


def mounts_of(pid: int | str) -> Sequence[Mount]:
    """The mounts as a process sees them; none where it is gone."""
    try:
        with open(f"/proc/{pid}/mountinfo", encoding="utf-8", errors="surrogateescape") as file:
            return parse_mountinfo(file.read())
    except OSError:
        return ()


class Here(NamedTuple):
    """Where we reach a file: the path, and the mount on which it is."""

    path: str
    mount: Mount


def path_here(path: str, device: str, theirs: Sequence[Mount], ours: Sequence[Mount]) -> Here | Leave:
    """How we reach a file that a process with the mounts `theirs` knows as `path`, or why we do not.

    `device` is the file system's maj:min. The path inside the file system is looked for under every mount of it here.
    """
    there = [mount for mount in theirs if mount.device == device and _below(path, mount.point) is not None]
    if not there:
        return Leave.VANISHED
    deepest = max(there, key=lambda mount: len(mount.point))
    inside = deepest.root.rstrip("/") + (_below(path, deepest.point) or "")
    found = [Here(mount.point.rstrip("/") + rest, mount) for mount in ours
             if mount.device == device and (rest := _below(inside, mount.root)) is not None]  # fmt: skip
    writable = [here for here in found if "ro" not in here.mount.options]
    if found and not writable:
        return Leave.READ_ONLY
    return writable[0] if writable else Leave.VANISHED


def _below(path: str, folder: str) -> str | None:
    """What follows the folder in the path, beginning with "/"; None where it is not below it."""
    bare = folder.rstrip("/")
    return path[len(bare) :] if path.startswith(bare + "/") else None


def open_here(path: str, file: FileId) -> int | Leave:
    """A descriptor of that very file for reading, or why there is none. Links are not followed in its name."""
    try:
        descriptor = open_regular(path, os.O_NOFOLLOW)
    except OSError:
        return Leave.VANISHED
    status = os.fstat(descriptor)
    if (status.st_dev, status.st_ino) == file:
        return descriptor
    os.close(descriptor)
    return Leave.VANISHED


def facts_of(descriptor: int, here: Here) -> Facts:
    """All that `why_leave` asks. Raises OSError, and where the file system cannot say where the file lies."""
    status = os.fstat(descriptor)
    extents, odd = files.extents_of(descriptor, status.st_size, every=True)
    space = os.fstatvfs(descriptor)
    mount = here.mount
    return Facts(
        name_bytes=len(os.fsencode(os.path.basename(here.path))),  # noqa: PTH119 - pathlib would cost a megabyte
        size=status.st_size,
        allocated=status.st_blocks * 512,
        links=status.st_nlink,
        age_seconds=time.time() - max(status.st_mtime, 0.0),
        extents=extents,
        odd=frozenset(str(why) for why in odd),
        flags=_flags(descriptor),
        extended=_extended(descriptor),
        is_open=_has_others(descriptor, fcntl.F_WRLCK),
        is_written=_has_others(descriptor, fcntl.F_RDLCK),
        file_system=mount.fstype,
        options=frozenset(option.partition("=")[0] for option in (*mount.options, *mount.super_options)),
        free=space.f_bavail * space.f_frsize,
        total=space.f_blocks * space.f_frsize,
    )


def _has_others(descriptor: int, kind: int) -> bool:
    """Whether somebody else has the file open (F_WRLCK), or open for writing (F_RDLCK).

    The kernel grants a lease only where nobody has (check_conflicting_open in fs/locks.c); it is given back at once.
    Where it grants none at all nobody can tell, so the file counts as open.
    """
    try:
        fcntl.fcntl(descriptor, fcntl.F_SETLEASE, kind)
    except OSError:
        return True
    fcntl.fcntl(descriptor, fcntl.F_SETLEASE, fcntl.F_UNLCK)
    return False


def _flags(descriptor: int) -> int:
    """FS_…_FL, 0 on a file system without them."""
    found = array.array("i", [0, 0])
    try:
        fcntl.ioctl(descriptor, _FS_IOC_GETFLAGS, found)
    except OSError:
        return 0
    return found[0]


def _extended(descriptor: int) -> int:
    """FS_XFLAG_…, 0 on a file system without them."""
    found = bytearray(_FSXATTR.size)
    try:
        fcntl.ioctl(descriptor, _FS_IOC_FSGETXATTR, found)
    except OSError:
        return 0
    return int(_FSXATTR.unpack_from(found)[0])
