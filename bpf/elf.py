"""Names of exported symbols of a shared library, found by their beginning. Pure: works on bytes or a memory map.

C++ names carry their parameter types, which change from version to version of a library; uprobes need the whole name.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Iterable

_HEADER = struct.Struct("<16sHHIQQQIHHHHHH")
_SECTION = struct.Struct("<IIQQQQIIQQ")
_MAGIC_64_LITTLE = b"\x7fELF\x02\x01"
_SHT_DYNSYM = 11


class ElfError(ValueError):
    """Not a 64-bit little-endian ELF file with dynamic symbols."""


def find_symbols(image: bytes | mmap.mmap, prefixes: Iterable[str]) -> dict[str, str]:
    """The first dynamic symbol name that starts with each prefix; prefixes that none starts with are left out."""
    start, end = _dynamic_strings(image)
    found = {}
    for prefix in prefixes:
        at = image.find(b"\0" + prefix.encode(), start, end)
        if at >= 0:
            found[prefix] = bytes(image[at + 1 : image.find(b"\0", at + 1, end)]).decode()
    return found


def _dynamic_strings(image: bytes | mmap.mmap) -> tuple[int, int]:
    """Where the string table of the dynamic symbols starts and ends, in bytes."""
    try:
        header = _HEADER.unpack_from(image)
        if header[0][:6] != _MAGIC_64_LITTLE:
            raise ElfError("not a 64-bit little-endian ELF file")
        offset, size, count = header[6], header[11], header[12]
        sections = [_SECTION.unpack_from(image, offset + n * size) for n in range(count)]
        link = next(section[6] for section in sections if section[1] == _SHT_DYNSYM)
        strings = sections[link]
    except (struct.error, StopIteration, IndexError) as error:
        raise ElfError("cut short, or without dynamic symbols") from error
    return int(strings[4]), int(strings[4] + strings[5])
