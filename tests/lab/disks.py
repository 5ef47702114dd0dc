"""The guest's disks from inside: found by serial number, and given a file system where a scenario wants one."""

from __future__ import annotations

import contextlib
import os
import subprocess
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from agent.simulate.scenario import Access, Device, Scenario
from tests.lab import nfs
from tests.lab.errors import LabBroken
from tests.lab.trainer import Extent
from tests.lab.undo import undo

_MOUNTS = Path("/run/lab-disks")
_BLOCK = 1 << 20
_APPEAR_SECONDS = 10.0


@dataclass(frozen=True)
class Disk:
    """A disk of the guest: node in /dev, `maj:min`, kernel name, whether the kernel calls it rotational."""

    node: Path
    number: str
    name: str
    rotational: bool

    @property
    def scheduler(self) -> Path:
        return Path(f"/sys/block/{self.name}/queue/scheduler")


def find_disk(serial: str) -> Disk:
    """Return the disk that the lab gave this serial number; raises `LabBroken` where the guest has none such.

    SCSI disks are found one after the other while the first commands run already, so it is waited for a moment.
    """
    deadline = time.monotonic() + _APPEAR_SECONDS
    while True:
        for folder in sorted(Path("/sys/block").iterdir()):
            if _serial(folder) == serial:
                rotational = (folder / "queue" / "rotational").read_text().strip() == "1"
                number = (folder / "dev").read_text().strip()
                return Disk(Path("/dev") / folder.name, number, folder.name, rotational)
        if time.monotonic() > deadline:
            break
        time.sleep(0.1)
    raise LabBroken(f"The guest has no disk with the serial number {serial!r}; boot it with the scenario's devices.")


def _serial(folder: Path) -> str:
    with contextlib.suppress(OSError):
        return (folder / "device" / "serial").read_text().strip()
    with contextlib.suppress(OSError):  # SCSI page 0x80: four bytes of header, then the number
        return (folder / "device" / "vpd_pg80").read_bytes()[4:].decode().strip("\0 ")
    return ""


@contextlib.contextmanager
def data_of(scenario: Scenario) -> Iterator[Mapping[str, Mapping[str, Extent]]]:
    """Lay out every user's data on the scenario's devices: give extents by user name, then device name.

    A device that only direct users read is divided among them. One that somebody reads through a file system gets an
    ext4, mounted while the body runs, and a written file per user; an NFS mount has the files in its server's memory.
    """
    extents: dict[str, dict[str, Extent]] = {}
    with contextlib.ExitStack() as stack:
        for device in scenario.devices:
            for user, extent in _lay_out(stack, scenario, device).items():
                extents.setdefault(user, {})[device.name] = extent
        os.sync()
        Path("/proc/sys/vm/drop_caches").write_text("3")
        yield extents


def _lay_out(stack: contextlib.ExitStack, scenario: Scenario, device: Device) -> dict[str, Extent]:
    users = scenario.users_of(device.name)
    if device.kind == "nfs":
        mount = stack.enter_context(nfs.served(device.bytes_per_second, device.round_trip_ms))
        files = {user: write_file(nfs.EXPORT / user, _data_bytes(scenario, user)) for user in users}
        return {user: Extent(mount / user, 0, file.length) for user, file in files.items()}
    disk = find_disk(device.name)
    if "filesystem" not in _accesses(scenario, device.name):
        return divide(disk.node, device.size, users)
    folder = stack.enter_context(mounted(disk))
    return {user: write_file(folder / user, _data_bytes(scenario, user)) for user in users}


def divide(node: Path, size: int, users: tuple[str, ...]) -> dict[str, Extent]:
    """Give every user an equal part of a device, aligned to 1 MiB."""
    part = size // max(1, len(users)) // _BLOCK * _BLOCK
    return {user: Extent(node, part * index, part) for index, user in enumerate(users)}


_MAKE = {
    "ext4": ["mkfs.ext4", "-q", "-F", "-N", "8192", "-O", "^has_journal", "-E", "lazy_itable_init=0,nodiscard"],
    "xfs": ["mkfs.xfs", "-q", "-f", "-K"],
}


@contextlib.contextmanager
def mounted(disk: Disk, file_system: str = "ext4") -> Iterator[Path]:
    """Make an xfs, or an ext4 without a journal, on the whole disk and mount it while the body runs."""
    subprocess.run([*_MAKE[file_system], str(disk.node)], check=True, capture_output=True)
    with mounted_again(disk) as folder:
        yield folder


@contextlib.contextmanager
def mounted_again(disk: Disk) -> Iterator[Path]:
    """Mount the file system that is on the disk while the body runs."""
    folder = _MOUNTS / disk.name
    folder.mkdir(parents=True, exist_ok=True)
    subprocess.run(["mount", "-o", "noatime", str(disk.node), str(folder)], check=True)
    try:
        yield folder
    finally:
        undo("umount", folder)


def write_file(path: Path, size: int) -> Extent:
    """Write a file with real data, so that reading it reads the disk: an unwritten extent would not."""
    block = os.urandom(_BLOCK)
    with path.open("wb") as file:
        for _ in range(max(1, size // _BLOCK)):
            file.write(block)
        file.flush()
        os.fsync(file.fileno())
    return Extent(path, 0, path.stat().st_size)


def _accesses(scenario: Scenario, device: str) -> set[Access]:
    return {job.access for job in scenario.jobs if device in (job.device, job.slow_device)}


def _data_bytes(scenario: Scenario, user: str) -> int:
    sizes = {job.name: int(job.data) for job in scenario.jobs}
    return sizes.get(user, 128 << 20)
