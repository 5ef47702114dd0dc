"""Training files on a disk with moving parts, laid out on purpose: contiguous, interleaved, fragmented, small."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable
from pathlib import Path

from agent.rearrange.files import extents_of

MIB = 1 << 20
CHUNK = 256 << 10
SHARD_BYTES = 64 * MIB
SHARDS = 8
MANY_SHARDS = 16
MANY_BYTES = 16 * MIB
SMALL_FILES = 2048
FRAGMENTED = 16
FRAGMENTED_BYTES = 8 * MIB
FRAGMENT = 64 << 10
GAP = MIB
"""Between small files lies what belongs to others: a training set does not fill its disk alone."""


def lay_out(root: Path, name: str) -> Path:
    """Make a set of files and return its folder; `name` is a key of `LAYOUTS`."""
    folder = root / name
    folder.mkdir()
    LAYOUTS[name](folder)
    os.sync()
    return folder


def _contiguous(folder: Path, shards: int = SHARDS, size: int = SHARD_BYTES) -> None:
    for number in range(shards):
        _fill(_allocated(folder / f"shard{number:02d}", size), size)


def _interleaved(folder: Path) -> None:
    """Room is taken in turns of `CHUNK`, each turn in another order, as by shards that are written at the same time."""
    chance = random.Random(7)
    files = [os.open(folder / f"shard{number}", os.O_RDWR | os.O_CREAT, 0o644) for number in range(SHARDS)]
    for start in range(0, SHARD_BYTES, CHUNK):
        for descriptor in chance.sample(files, len(files)):
            os.posix_fallocate(descriptor, start, CHUNK)
    for descriptor in files:
        _fill(descriptor, SHARD_BYTES)


def _small(folder: Path) -> None:
    others = os.open(folder.with_name("others"), os.O_RDWR | os.O_CREAT, 0o644)
    for number in range(SMALL_FILES):
        part = folder / f"class{number * 16 // SMALL_FILES:02d}"
        part.mkdir(exist_ok=True)
        _fill(_allocated(part / f"img{number:05d}", CHUNK), CHUNK)
        os.posix_fallocate(others, number * GAP, GAP)
    os.close(others)


def _fragmented(folder: Path) -> None:
    """Extents of 64 KiB anywhere: every chunk of every file lies where chance has put it among all of them.

    Room is taken chunk by chunk, in an order in which neighbours in a file are never neighbours on the disk. Its time
    of change lies back: what was written a moment ago is not yet taken for training data.
    """
    chance = random.Random(11)
    count = FRAGMENTED_BYTES // FRAGMENT
    room = [(file, chunk) for file in range(FRAGMENTED) for chunk in range(count)]
    chance.shuffle(room)
    files = [os.open(folder / f"shard{number:02d}", os.O_RDWR | os.O_CREAT, 0o644) for number in range(FRAGMENTED)]
    for file, chunk in room:
        os.posix_fallocate(files[file], chunk * FRAGMENT, FRAGMENT)
    for number, descriptor in enumerate(files):
        _fill(descriptor, FRAGMENTED_BYTES)
        os.utime(folder / f"shard{number:02d}", (time.time() - 3600,) * 2)


def _allocated(path: Path, size: int) -> int:
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    os.posix_fallocate(descriptor, 0, size)
    return descriptor


def _fill(descriptor: int, size: int) -> None:
    """Write every byte, so that no extent stays unwritten, and close."""
    block = os.urandom(4096) * (MIB // 4096)
    for start in range(0, size, MIB):
        os.pwrite(descriptor, block[: min(MIB, size - start)], start)
    os.close(descriptor)


def pieces(path: Path) -> int:
    """In how many places of the disk a file lies (FIEMAP)."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        found, _ = extents_of(descriptor, path.stat().st_size)
    finally:
        os.close(descriptor)
    ends = [one.physical + one.length for one in found]
    return 1 + sum(one.physical != end for one, end in zip(found[1:], ends, strict=False)) if found else 0


LAYOUTS: dict[str, Callable[[Path], None]] = {
    "contiguous": _contiguous,
    "interleaved": _interleaved,
    "many": lambda folder: _contiguous(folder, MANY_SHARDS, MANY_BYTES),
    "small": _small,
    "fragmented": _fragmented,
    "mended": lambda folder: _contiguous(folder, FRAGMENTED, FRAGMENTED_BYTES),
}
