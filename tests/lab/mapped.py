"""Devices made of others: partitions, software RAID, device-mapper tables, a cache of the SSD before the slow disk."""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.lab.disks import Disk
from tests.lab.undo import undo

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


@contextlib.contextmanager
def partition(disk: Disk, number: int, first_byte: int, size: int) -> Iterator[Disk]:
    """A partition in the kernel alone, not on the disk, while the body runs."""
    where = [str(number), str(first_byte // SECTOR_BYTES), str(size // SECTOR_BYTES)]
    made = subprocess.run(["addpart", disk.node, *where], check=False, capture_output=True, text=True)
    there = [entry.name for entry in Path("/sys/block", disk.name).glob(f"{disk.name}*")]
    assert made.returncode == 0, f"addpart {disk.node} {where}: {made.stderr.strip()}; partitions: {there}"
    try:
        name = f"{disk.name}p{number}" if disk.name[-1].isdigit() else f"{disk.name}{number}"
        device = Path("/sys/block", disk.name, name, "dev").read_text().strip()
        yield Disk(Path("/dev", name), device, name, disk.rotational)
    finally:
        undo("delpart", disk.node, str(number))


@contextlib.contextmanager
def raid(disk: Disk, level: int) -> Iterator[Disk]:
    """A software RAID of two partitions of a disk while the body runs; level 0 or 1."""
    subprocess.run(["modprobe", f"raid{level}"], check=True)
    create = ["mdadm", "--create", "/dev/md9", "--run", f"--level={level}", "--raid-devices=2", "--metadata=1.2"]
    create += ["--chunk=64"] if level == 0 else ["--assume-clean", "--bitmap=none"]
    with contextlib.ExitStack() as stack:
        parts = [stack.enter_context(partition(disk, at, MIB + (at - 1) * 100 * MIB, 96 * MIB)) for at in (1, 2)]
        nodes = [part.node for part in parts]
        subprocess.run([*create, *nodes], check=True, capture_output=True, stdin=subprocess.DEVNULL)
        stack.callback(undo, "mdadm", "--zero-superblock", *nodes)
        stack.callback(undo, "mdadm", "--stop", "/dev/md9")
        yield disk_of("md9")


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
