"""What to read ahead next, and in which order, for a job that starves on a disk with moving parts. Pure.

Most of the gain is the disk's queue: a helper that asks for many pieces at once lets the disk choose among them. Pieces
are sorted by where they lie on the disk and hold at most 1 MB, since one POSIX_FADV_WILLNEED reads no more than
about that (force_page_cache_ra in mm/readahead.c stops at the larger of read_ahead_kb and the device's optimal size).
`agent.rearrange.helper` finds the files and carries this out; `agent.rearrange.stop` says whether it pays.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

MIB = 1 << 20
PIECE_BYTES = MIB
JOB_WINDOW_BYTES = 32 * MIB
SHUFFLED_WINDOW_BYTES = 16 * MIB
"""Of samples that lie all over the disk: in a larger window what is needed now waits behind what is needed later."""
WORKER_WINDOW_BYTES = 8 * MIB
MEMORY_WINDOWS = 3
"""Pages that were read ahead stay in the helper's memory until they are used: a limit below three windows would drop
them before that, which is worse than not to read ahead at all."""

IN_FLIGHT_BESIDE = 8
"""Requests in hand of a disk that other jobs read from, up to which more is read ahead: enough for the drive to choose
the nearest among, few enough that what somebody waits for is not behind a whole window of small pieces."""

LEAST_RATE = MIB
"""Bytes/s: nobody is read ahead for at less, since one piece would take longer than a second."""

FileId = tuple[int, int]
"""(st_dev, st_ino)."""


class Skip(StrEnum):
    """Why a file, or a part of one, is not read ahead."""

    DIRECT = "direct"
    WRITABLE = "writable"
    VANISHED = "vanished"
    SPARSE = "sparse"
    UNWRITTEN = "unwritten"
    SHARED = "shared"
    ENCRYPTED = "encrypted"
    UNMAPPED = "unmapped"
    OTHER_DEVICE = "other_device"
    OVER_BUDGET = "over_budget"
    TOO_MANY_FILES = "too_many_files"
    TOO_MANY_PROCESSES = "too_many_processes"
    UNPREDICTABLE = "unpredictable"
    UNUSED = "unused"


class Extent(NamedTuple):
    """Where a part of a file lies on its device: first byte in the file, first byte on the device, length (bytes)."""

    logical: int
    physical: int
    length: int

    @property
    def end(self) -> int:
        """The first byte in the file behind it."""
        return self.logical + self.length


class Range(NamedTuple):
    """Bytes [start, end) of a file that the job is expected to read next."""

    file: FileId
    start: int
    end: int


class Piece(NamedTuple):
    """One request of the helper, at most `PIECE_BYTES` long, in one extent; sorts by place on the device."""

    physical: int
    file: FileId
    offset: int
    length: int


@dataclass(frozen=True, slots=True)
class Window:
    """What is asked for at once: pieces in physical order, and how much of each wanted range was taken (bytes).

    `taken` follows the order of the ranges that were wanted and may be shorter; `over_budget` counts the ranges that
    found no room.
    """

    pieces: tuple[Piece, ...]
    taken: tuple[Range, ...]
    over_budget: int

    @property
    def size(self) -> int:
        """All its pieces, bytes."""
        return sum(piece.length for piece in self.pieces)


def job_window_bytes(workers: int, budget_bytes: int, jobs: int) -> int:
    """How much may be read ahead and unused for one of `jobs` jobs, whose files are read by `workers` processes.

    Larger windows block the head of the line: what a job needs now waits behind what it needs later.
    """
    return min(JOB_WINDOW_BYTES, WORKER_WINDOW_BYTES * max(1, workers), budget_bytes // max(1, jobs))


def memory_budget_bytes(memory_bytes: int) -> int:
    """What may be in flight or unused at a time, for all jobs together, within the helper's memory limit."""
    return memory_bytes // MEMORY_WINDOWS


def rest_of_file(file: FileId, position: int, size: int, asked_to: int, ahead_bytes: int) -> Range | None:
    """What to ask for of a file that is read from its beginning to its end, or None while enough is under way.

    `position` is where the reader stands, `asked_to` the end of what was asked for so far. It is asked for again once
    half of the `ahead_bytes` are used, so that requests stay long runs.
    """
    start = max(position, asked_to)
    end = min(size, position + ahead_bytes)
    if start >= end or (end < size and end - start < ahead_bytes // 2):
        return None
    return Range(file, start, end)


def pieces_of(wanted: Range, extents: Sequence[Extent]) -> Iterator[Piece]:
    """The range cut where extents end and every `PIECE_BYTES`; holes have no pieces."""
    for extent in extents:
        start = max(wanted.start, extent.logical)
        end = min(wanted.end, extent.end)
        while start < end:
            length = min(PIECE_BYTES, end - start)
            yield Piece(extent.physical + start - extent.logical, wanted.file, start, length)
            start += length


def plan_window(wanted: Sequence[Range], extents: Mapping[FileId, Sequence[Extent]], room_bytes: int) -> Window:
    """The next window: ranges in the order in which they are needed until the room is used up, then sorted.

    A range that does not fit is cut at the room and ends the window. Of each range some part lies on the disk
    (`Place.holds` in `agent.rearrange.follow`); the holes in it take room as well.
    """
    pieces: list[Piece] = []
    taken: list[Range] = []
    left = room_bytes
    over = 0
    for one in wanted:
        size = min(one.end - one.start, left)
        if size <= 0 and one.end > one.start:
            over += 1
            continue
        part = Range(one.file, one.start, one.start + size)
        pieces.extend(pieces_of(part, extents[one.file]))
        taken.append(part)
        left -= size
    return Window(tuple(sorted(pieces)), tuple(taken), over)


def helper_share(elastic_free: float, own: float, others: float, *, others_tight: bool, usable: float = 0.97) -> float:
    """The share of a device that reading ahead for one job may use.

    The free elastic part, and what the job itself used (`own`), in whose stead the helper reads; where no other job on
    the device is tight, also all that `others` leave over. Shares of the device's sequential rate, 0..1.
    """
    share = elastic_free + own
    if not others_tight:
        share = max(share, usable - others)
    return min(max(share, 0.0), usable)
