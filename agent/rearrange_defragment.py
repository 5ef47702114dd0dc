"""Which files are made contiguous, and which are left as they are and why. Pure.

On a disk that seeks a file in many pieces costs a seek for each, in whatever order it is read: only another place
cures that. The file system's own tool does it (e4defrag, xfs_fsr): it allocates a contiguous place, copies, and
exchanges the two by transactions of the file system, so that whatever ends it leaves a file whole.
`agent.rearrange_mover` runs it, one file at a time; `agent.rearrange_pay` says whether it pays.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import pairwise
from typing import NamedTuple

from agent.rearrange import MIB, Extent

FEWEST_PIECES = 8
PIECE_BYTES = MIB
"""A file whose pieces are smaller than this in the mean is badly fragmented: a drive that moves 150 MB/s spends more
than half of its time on positioning then."""
STILL_SECONDS = 60.0
"""A file that was written less long ago may still be in the making."""
MEMORY_FILES = 3
"""The tool has a file in the page cache twice (the old place and the new one); a third of the memory is for it."""
SPARE_RATIO = 0.05
"""Of the file system, what must stay free beside the second place of the file."""

SECOND_SUFFIX = ".defrag"
"""e4defrag makes its second file beside the first, under the name of that with this after it."""
LONGEST_NAME_BYTES = 255

_TOOLS = {"ext4": ("e4defrag",), "xfs": ("xfs_fsr",)}

COMPRESSED, IMMUTABLE, APPEND_ONLY = 0x4, 0x10, 0x20  # FS_…_FL in include/uapi/linux/fs.h
ENCRYPTED, JOURNALLED, VERITY = 0x800, 0x4000, 0x100000
NO_DEFRAGMENTATION = 0x2000  # FS_XFLAG_NODEFRAG, among the flags of FS_IOC_FSGETXATTR
_QUOTAS = frozenset({"usrquota", "grpquota", "prjquota", "uquota", "gquota", "pquota", "quota"})


class Leave(StrEnum):
    """Why a fragmented file is left where it is. Those of `LATER` are looked at again."""

    OPEN = "open"
    WRITABLE = "writable"
    RECENT = "recent"
    NO_SPACE = "no_space"
    QUOTA = "quota"
    SPARSE = "sparse"
    UNWRITTEN = "unwritten"
    SHARED = "shared"
    ENCRYPTED = "encrypted"
    COMPRESSED = "compressed"
    IMMUTABLE = "immutable"
    UNMAPPED = "unmapped"
    TOO_LARGE = "too_large"
    READ_ONLY = "read_only"
    LONG_NAME = "long_name"
    FILE_SYSTEM = "file_system"
    NO_TOOL = "no_tool"
    VANISHED = "vanished"
    NOT_BETTER = "not_better"
    FAILED = "failed"


LATER = frozenset({Leave.OPEN, Leave.WRITABLE, Leave.RECENT, Leave.NO_SPACE})


@dataclass(frozen=True, slots=True)
class Facts:
    """What was found out about a file: sizes and the length of its name in bytes, age since its last change in seconds.

    `flags` are those of FS_IOC_GETFLAGS, `extended` those of FS_IOC_FSGETXATTR; `odd` why parts of it have no extent
    that can be used. `is_open` and `is_written`: some process has it open, or open for writing.
    """

    name_bytes: int
    size: int
    allocated: int
    links: int
    age_seconds: float
    extents: Sequence[Extent]
    odd: frozenset[str]
    flags: int
    extended: int
    is_open: bool
    is_written: bool
    file_system: str
    options: frozenset[str]
    free: int
    total: int


class Mend(NamedTuple):
    """What moving files did for one job since the mover started: files, their bytes, and what is known to be left.

    `is_moving`: one of its files is under way.
    """

    files: int = 0
    bytes: int = 0
    left_files: int = 0
    left_bytes: int = 0
    is_moving: bool = False


def pieces(extents: Sequence[Extent]) -> int:
    """In how many places of the disk a file lies."""
    return len(extents) - sum(one.physical + one.length == after.physical for one, after in pairwise(extents))


def is_fragmented(extents: Sequence[Extent]) -> bool:
    """Whether positioning costs more than reading it."""
    count = pieces(extents)
    return count >= FEWEST_PIECES and sum(one.length for one in extents) < count * PIECE_BYTES


def tool_of(file_system: str) -> str:
    """The name of the program that makes a file of this file system contiguous, "" where none is known."""
    return _TOOLS.get(file_system, ("",))[0]


def largest_file_bytes(memory_bytes: int) -> int:
    """What the mover may take on within its memory limit."""
    return memory_bytes // MEMORY_FILES


def why_leave(facts: Facts, largest_bytes: int) -> Leave | None:
    """The first reason to leave a fragmented file where it is; what never changes comes first.

    A file with several names is moved like any other: all of them lead to the one file, which stays what it is.
    """
    return _for_good(facts, largest_bytes) or _for_now(facts)


def _for_good(facts: Facts, largest_bytes: int) -> Leave | None:
    rules = (
        (not tool_of(facts.file_system), Leave.FILE_SYSTEM),
        (facts.links == 0, Leave.VANISHED),
        ("ro" in facts.options, Leave.READ_ONLY),
        (bool(facts.flags & (IMMUTABLE | APPEND_ONLY | VERITY)), Leave.IMMUTABLE),
        (bool(facts.extended & NO_DEFRAGMENTATION), Leave.IMMUTABLE),
        (bool(facts.flags & ENCRYPTED) or "encrypted" in facts.odd, Leave.ENCRYPTED),
        (bool(facts.flags & COMPRESSED), Leave.COMPRESSED),
        ("shared" in facts.odd, Leave.SHARED),
        ("unwritten" in facts.odd, Leave.UNWRITTEN),
        ("sparse" in facts.odd or facts.allocated < facts.size, Leave.SPARSE),
        (bool(facts.odd) or bool(facts.flags & JOURNALLED), Leave.UNMAPPED),
        (bool(facts.options & _QUOTAS), Leave.QUOTA),
        (facts.size > largest_bytes, Leave.TOO_LARGE),
        (facts.name_bytes > _longest_name(facts.file_system), Leave.LONG_NAME),
    )
    return next((why for applies, why in rules if applies), None)


def _longest_name(file_system: str) -> int:
    """Of the names whose second file can have one too; xfs_fsr names its own otherwise."""
    return LONGEST_NAME_BYTES - (len(SECOND_SUFFIX) if file_system == "ext4" else 0)


def _for_now(facts: Facts) -> Leave | None:
    if facts.is_written:
        return Leave.WRITABLE
    if facts.is_open:
        return Leave.OPEN
    if facts.age_seconds < STILL_SECONDS:
        return Leave.RECENT
    return Leave.NO_SPACE if facts.free - facts.size < SPARE_RATIO * facts.total else None
