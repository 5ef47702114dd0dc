"""Frames of a recording: bytes to payloads and back. Pure but for the file given."""

from __future__ import annotations

import os
import struct
import zlib
from collections.abc import Callable, Iterator
from typing import BinaryIO

HEAD, PASSES = 1, 2
MAX_PAYLOAD = 16 * 2**20
"""A longer frame is not one of ours."""

_PREFIX = struct.Struct("<II")
_HEAD_MARK = bytes((HEAD,)) + b"\x87\xa6format\xa9prefetchd"
"""How the payload of a head begins: its kind, a MessagePack map of seven, the first of them."""
_PIECE = 2**20

Found = tuple[int, bytes, int]


def frame(kind: int, contents: bytes) -> bytes:
    """The bytes of one frame."""
    payload = bytes((kind,)) + contents
    return _PREFIX.pack(len(payload), zlib.crc32(payload)) + payload


def frames(file: BinaryIO, lost: Callable[[int, int], object] = lambda _, __: None) -> Iterator[Found]:
    """(kind, contents, offset behind the frame) of every good frame from where the file stands.

    Behind a bad one nothing can be made sense of up to the next head. `lost` is told from where to where.
    """
    at = file.tell()
    while True:
        found = _frame(file)
        if found is not None:
            yield found
            at = found[2]
            continue
        size = file.seek(0, os.SEEK_END)
        if at == size:
            return
        head = _next_head(file, at + 1)
        lost(at, size if head is None else head)
        if head is None:
            return
        at = file.seek(head)


def _frame(file: BinaryIO) -> Found | None:
    """The frame where the file stands; None for one that is cut short or that does not fit its CRC."""
    prefix = file.read(_PREFIX.size)
    if len(prefix) < _PREFIX.size:
        return None
    length, crc = _PREFIX.unpack(prefix)
    if not 1 <= length <= MAX_PAYLOAD:
        return None
    payload = file.read(length)
    if len(payload) < length or zlib.crc32(payload) != crc:
        return None
    return payload[0], payload[1:], file.tell()


def _next_head(file: BinaryIO, start: int) -> int | None:
    """Where the next good head begins."""
    at = file.seek(start)
    seen = b""
    while piece := file.read(_PIECE):
        seen += piece
        place = -1
        while (place := seen.find(_HEAD_MARK, place + 1)) >= 0:
            file.seek(at + place - _PREFIX.size)
            if at + place - _PREFIX.size >= start and _frame(file) is not None:
                return at + place - _PREFIX.size
        kept = seen[-(len(_HEAD_MARK) - 1) :]
        at, seen = at + len(seen) - len(kept), kept
        file.seek(at + len(kept))
    return None


def is_framed(file: BinaryIO) -> bool:
    """Whether there is any whole frame in the file; a sound one is not read beyond its first."""
    file.seek(0)
    return next(frames(file), None) is not None
