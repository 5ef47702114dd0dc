"""What every block device did since boot, from /proc/diskstats."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

SECTOR_BYTES = 512
"""Unit of /proc/diskstats whatever the device's own block size (Documentation/admin-guide/iostats)."""


@dataclass(frozen=True, slots=True)
class DiskCounters:
    """Cumulative completions of one device: requests, bytes, and milliseconds during which it had work."""

    name: str
    reads: int
    read_bytes: int
    writes: int
    write_bytes: int
    in_flight: int
    busy_ms: int


def parse_diskstats(text: str) -> Mapping[str, DiskCounters]:
    """Device `maj:min` -> counters; lines that are too short or not numeric are passed over."""
    found: dict[str, DiskCounters] = {}
    for line in text.splitlines():
        words = line.split()
        if len(words) < 13 or not all(word.isdecimal() for word in (*words[:2], *words[3:13])):
            continue
        numbers = [int(word) for word in words[3:13]]
        found[f"{words[0]}:{words[1]}"] = DiskCounters(
            name=words[2],
            reads=numbers[0],
            read_bytes=numbers[2] * SECTOR_BYTES,
            writes=numbers[4],
            write_bytes=numbers[6] * SECTOR_BYTES,
            in_flight=numbers[8],
            busy_ms=numbers[9],
        )
    return found
