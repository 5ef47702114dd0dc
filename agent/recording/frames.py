"""Frames of a recording: bytes to payloads and back. Pure but for the file given."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator
from typing import BinaryIO

HEAD, PASSES = 1, 2
MAX_PAYLOAD = 16 * 2**20
"""A longer frame is not one of ours."""

_PREFIX = struct.Struct("<II")


def frame(kind: int, contents: bytes) -> bytes:
    """The bytes of one frame."""
    payload = bytes((kind,)) + contents
    return _PREFIX.pack(len(payload), zlib.crc32(payload)) + payload


def frames(file: BinaryIO) -> Iterator[tuple[int, bytes, int]]:
    """(kind, contents, offset behind the frame) of every good frame from where the file stands, up to the first bad."""
    while True:
        prefix = file.read(_PREFIX.size)
        if len(prefix) < _PREFIX.size:
            return
        length, crc = _PREFIX.unpack(prefix)
        if not 1 <= length <= MAX_PAYLOAD:
            return
        payload = file.read(length)
        if len(payload) < length or zlib.crc32(payload) != crc:
            return
        yield payload[0], payload[1:], file.tell()


def good_length(file: BinaryIO) -> int:
    """How many bytes from the start of the file are whole frames."""
    file.seek(0)
    end = 0
    for _, _, end in frames(file):  # noqa: B007 - the last one counts
        pass
    return end
