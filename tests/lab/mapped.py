"""Device-mapper devices of the guest: any table, and a cache of the SSD before the disk with moving parts."""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.lab.disks import Disk

MIB = 1 << 20
SECTOR_BYTES = 512
SECTORS = MIB // SECTOR_BYTES
METADATA_BYTES = 8 * MIB
CACHE_BLOCK_BYTES = 64 << 10


@contextlib.contextmanager
def mapped(name: str, table: str) -> Iterator[str]:
    """Make a mapped device while the body runs; gives its kernel name (`dm-0`)."""
    subprocess.run(["modprobe", "dm_mod"], check=True)
    subprocess.run(["dmsetup", "create", name, "--noudevsync"], input=table, text=True, check=True)
    try:
        subprocess.run(["dmsetup", "mknodes", name], check=True)
        info = ["dmsetup", "info", "-c", "--noheadings", "-o", "blkdevname", name]
        yield subprocess.run(info, capture_output=True, text=True, check=True).stdout.strip()
    finally:
        subprocess.run(["dmsetup", "remove", "--noudevsync", "--retry", name], check=True)


def disk_of(name: str) -> Disk:
    """A whole device of the guest by its kernel name."""
    folder = Path("/sys/block", name)
    rotational = (folder / "queue/rotational").read_text().strip() == "1"
    return Disk(Path("/dev", name), (folder / "dev").read_text().strip(), name, rotational)


def has_cache() -> bool:
    """Whether this kernel has dm-cache and its policy."""
    return subprocess.run(["modprobe", "--all", "dm-cache", "dm-cache-smq"], check=False).returncode == 0


@contextlib.contextmanager
def cached(origin: Disk, fast: Disk, cache_bytes: int) -> Iterator[Disk]:
    """A dm-cache of an origin, with an empty cache on a fast disk; built as LVM does, of linear devices."""
    parts = {"cmeta": METADATA_BYTES, "cdata": cache_bytes}
    sectors = int(Path(f"/sys/block/{origin.name}/size").read_text())
    with contextlib.ExitStack() as stack:
        at, names = 0, {}
        for name, size in parts.items():
            table = f"0 {size // SECTOR_BYTES} linear {fast.number} {at // SECTOR_BYTES}\n"
            names[name] = stack.enter_context(mapped(f"lab-{name}", table))
            at += size
        names["corig"] = stack.enter_context(mapped("lab-corig", f"0 {sectors} linear {origin.number} 0\n"))
        with Path("/dev", names["cmeta"]).open("r+b") as metadata:
            metadata.write(bytes(MIB))
        below = " ".join(f"/dev/{names[name]}" for name in ("cmeta", "cdata", "corig"))
        table = f"0 {sectors} cache {below} {CACHE_BLOCK_BYTES // SECTOR_BYTES} 1 writethrough smq 0\n"
        yield disk_of(stack.enter_context(mapped("lab-cache", table)))


@dataclass(frozen=True)
class CacheReads:
    """How many reads a dm-cache has sent to its fast device and to the origin, and blocks moved to the fast one."""

    hits: int
    misses: int
    promotions: int


def cache_reads(name: str = "lab-cache") -> CacheReads:
    """As `dmsetup status` tells (Documentation/admin-guide/device-mapper/cache.rst)."""
    words = subprocess.run(["dmsetup", "status", name], capture_output=True, text=True, check=True).stdout.split()
    hits, misses, _, _, _, promotions = map(int, words[7:13])
    return CacheReads(hits, misses, promotions)
