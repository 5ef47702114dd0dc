"""The guest's disks as data: what QEMU is told, and the servers behind them."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from agent.simulate.scenario import Scenario
from tests.lab.cache import cache_folder

MIB = 1 << 20
_BLOCK = 4096


class Device(Protocol):
    """A disk of the guest, known there by its serial number `name`."""

    @property
    def name(self) -> str: ...

    def servers(self, work: Path) -> Sequence[Sequence[str]]:
        """Return the programs that must run beside QEMU; each listens on a socket named below `work`."""
        ...

    def qemu_options(self, work: Path) -> Sequence[str]:
        """Return QEMU's arguments for this disk; creates image files as needed."""
        ...


@dataclass(frozen=True)
class Ssd:
    """An NVMe drive that QEMU throttles: reads and writes together pass `bytes_per_second` and `iops`."""

    name: str = "ssd0"
    size_bytes: int = 1024 * MIB
    bytes_per_second: int = 120 * MIB
    iops: int = 4000

    def servers(self, work: Path) -> Sequence[Sequence[str]]:
        return ()

    def qemu_options(self, work: Path) -> Sequence[str]:
        limits = f"throttling.bps-total={self.bytes_per_second},throttling.iops-total={self.iops}"
        # snapshot=on: writes go to a temporary file that ends with QEMU, so every boot sees the same drive.
        drive = f"file={filled_image(self.size_bytes)},if=none,id={self.name},format=raw,snapshot=on,{limits}"
        return ("-drive", drive, "-device", f"nvme,drive={self.name},serial={self.name}")


@dataclass(frozen=True)
class Hdd:
    """A rotational SCSI disk over the seek-time model of `hdd_model`; `queueing` lets it choose among 32 requests."""

    name: str = "hdd0"
    size_bytes: int = 4096 * MIB
    bytes_per_second: int = 150_000_000
    queueing: bool = True

    def servers(self, work: Path) -> Sequence[Sequence[str]]:
        image = work / f"{self.name}.img"
        with image.open("wb") as file:
            file.truncate(self.size_bytes)
        model = [str(Path(__file__).with_name("hdd_model.py")), f"image={image}"]
        model += [f"bytes_per_second={self.bytes_per_second}", f"queue={32 if self.queueing else 1}"]
        return (("nbdkit", "-f", "-t", "32", "-U", str(self._socket(work)), "python", *model),)

    def qemu_options(self, work: Path) -> Sequence[str]:
        drive = f"file=nbd:unix:{self._socket(work)},if=none,id={self.name},format=raw,cache=none"
        disk = f"scsi-hd,bus=scsi-{self.name}.0,drive={self.name},serial={self.name},rotation_rate=7200"
        return ("-device", f"virtio-scsi-pci,id=scsi-{self.name},num_queues=1", "-drive", drive, "-device", disk)

    def _socket(self, work: Path) -> Path:
        return work / f"{self.name}.sock"


TEST_DISKS: tuple[Device, ...] = (Ssd(), Hdd(), Hdd("hdd1", queueing=False), Hdd("hdd2"))
"""What guest tests find: the usual two, a drive without command queueing, and one more for another file system."""


def devices_of(scenario: Scenario) -> tuple[Device, ...]:
    """Return the disks that a scenario needs; two scenarios with equal disks can share a guest."""
    disks: list[Device] = []
    for device in scenario.devices:
        rate = int(device.bytes_per_second)
        if device.kind == "ssd":
            disks.append(Ssd(device.name, int(device.size), rate, device.iops))
        elif device.kind == "hdd":
            disks.append(Hdd(device.name, int(device.size), rate, device.queueing))
    return tuple(disks)


def filled_image(size_bytes: int) -> Path:
    """Return an image of the cache that holds real data: no hole, every 4 KiB block starts with its own number."""
    path = cache_folder("images") / f"filled-{size_bytes}.img"
    if not path.exists():
        part = path.with_suffix(f".{os.getpid()}")
        with part.open("wb") as file:
            for start in range(0, size_bytes // _BLOCK, 256):
                file.write(b"".join(block_content(start + i) for i in range(256)))
        part.replace(path)
    return path


def block_content(number: int) -> bytes:
    """Return what block `number` (of 4 KiB) of a filled image holds: its number, little endian, 512 times."""
    return number.to_bytes(8, "little") * (_BLOCK // 8)
