"""Names of exported symbols of a shared library, found by their beginning. Pure: works on what a function reads.

C++ names carry their parameter types, which change from version to version of a library; uprobes need the whole name.
The file is whatever its owner makes of it, also while it is read: nothing in it is believed before it is checked, and
it is read rather than mapped, since memory of a file that is cut meanwhile ends the process that looks at it.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Iterator

_HEADER = struct.Struct("<16sHHIQQQIHHHHHH")
_SECTION = struct.Struct("<IIQQQQIIQQ")
_MAGIC_64_LITTLE = b"\x7fELF\x02\x01"
_SHT_DYNSYM = 11
_MOST_STRINGS = 1 << 28
_PIECE = 1 << 20
_LONGEST_NAME = 1 << 13

Read = Callable[[int, int], bytes]
"""How many bytes from an offset on; fewer where the file ends."""


class ElfError(ValueError):
    """Not a 64-bit little-endian ELF file with dynamic symbols."""


def find_symbols(read: Read, prefixes: Iterable[str]) -> dict[str, str]:
    """The first dynamic symbol name that starts with each prefix; prefixes that none starts with are left out."""
    needles = {prefix: b"\0" + prefix.encode() for prefix in prefixes}
    found: dict[str, str] = {}
    for piece in _pieces(read, *_dynamic_strings(read)):
        for prefix in needles.keys() - found.keys():
            at = piece.find(needles[prefix])
            end = piece.find(b"\0", at + 1) if at >= 0 else -1
            if end >= 0:
                found[prefix] = piece[at + 1 : end].decode(errors="replace")
    return found


def _pieces(read: Read, start: int, size: int) -> Iterator[bytes]:
    """The string table in parts that overlap by more than a name."""
    for at in range(0, size, _PIECE):
        yield read(start + at, min(_PIECE + _LONGEST_NAME, size - at))


def _dynamic_strings(read: Read) -> tuple[int, int]:
    """Where the string table of the dynamic symbols starts, and its length, in bytes."""
    try:
        header = _HEADER.unpack(read(0, _HEADER.size))
        if header[0][:6] != _MAGIC_64_LITTLE:
            raise ElfError("not a 64-bit little-endian ELF file")
        offset, size, count = header[6], header[11], header[12]
        table = read(offset, size * count)
        sections = [_SECTION.unpack_from(table, n * size) for n in range(count)]
        link = next(section[6] for section in sections if section[1] == _SHT_DYNSYM)
        start, length = int(sections[link][4]), int(sections[link][5])
    except (struct.error, StopIteration, IndexError, OverflowError) as error:
        raise ElfError("cut short, or without dynamic symbols") from error
    if length > _MOST_STRINGS or start + length > 1 << 62:
        raise ElfError(f"its symbols' names take {length} bytes at {start}, which no library's do")
    return start, length
