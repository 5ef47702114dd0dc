"""Where to measure: the file to make on a device, or the raw device where that was asked for outright."""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import stat
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from agent.errors import CannotEnforceError, UsageError
from cgroup.devices import BlockDevice, Devices
from cgroup.diskstats import DiskCounters, parse_diskstats
from cgroup.errors import DeviceRefused
from cgroup.mountinfo import Mount, parse_mountinfo
from cgroup.mounts import Mounts

MIB = 1 << 20
FILE_BYTES = 4096 * MIB
FREE_PART = 0.25
"""The file takes at most this part of the free space."""
SMALLEST_BYTES = 64 * MIB
BUSY_RATIO = 0.05
"""A device that has work for more than this part of the time is busy."""


@dataclass(frozen=True, slots=True)
class Place:
    """What is measured: the device, and the folder for the file (None: the raw device is read)."""

    device: BlockDevice
    folder: Path | None

    @property
    def node(self) -> str:
        """The device's file."""
        return f"/dev/{self.device.name}"


def find_place(target: str, *, raw: bool) -> Place:
    """The place for what the operator named; raises UsageError or CannotEnforceError with one sentence."""
    devices = Devices()
    path = Path(target)
    try:
        if raw:
            return Place(devices.resolve(target), None)
        if _is_file_or_folder(path):
            folder = path if path.is_dir() else path.parent
            return Place(Mounts(devices).resolve(str(folder.resolve())), folder)
        device = devices.resolve(target)
        return Place(device, _folder_on(device, devices))
    except DeviceRefused as error:
        if "/" in target and not path.exists() and not path.is_relative_to("/dev"):
            raise UsageError(
                f"Path {target!r} does not exist; name a device, or a folder or file that exists."
            ) from None
        hint = "; name a folder on a local disk" if _is_file_or_folder(path) else ""
        raise CannotEnforceError(f"{str(error).rstrip('.')}{hint}.") from None


def _is_file_or_folder(path: Path) -> bool:
    return path.exists() and not stat.S_ISBLK(path.stat().st_mode)


def _folder_on(device: BlockDevice, devices: Devices) -> Path:
    """The writable mount on the device that has the most room."""
    mounts = parse_mountinfo(Path("/proc/self/mountinfo").read_text(encoding="utf-8", errors="surrogateescape"))
    folders = [Path(mount.point) for mount in mounts if _holds(mount, device, devices)]
    usable = [folder for folder in folders if folder.is_dir() and os.access(folder, os.W_OK)]
    if not usable:
        raise UsageError(
            f"No writable file system of device {device.name!r} is mounted; mount one, or give --raw to measure reads."
        )
    return max(usable, key=free_bytes)


def _holds(mount: Mount, device: BlockDevice, devices: Devices) -> bool:
    if "ro" in mount.options:
        return False
    number = mount.source if mount.device.startswith("0:") else mount.device
    if not number.startswith("/dev/") and number.startswith("0:"):
        return False
    with contextlib.suppress(DeviceRefused, OSError):
        return devices.resolve(number).device == device.device
    return False


def free_bytes(folder: Path) -> int:
    """Bytes that may be written there."""
    status = os.statvfs(folder)
    return status.f_bavail * status.f_frsize


def file_size(folder: Path, wanted: int | None) -> int:
    """How large the file is to be, whole MiB; raises UsageError where there is no room."""
    free = free_bytes(folder)
    size = min(FILE_BYTES, int(free * FREE_PART)) if wanted is None else wanted
    size -= size % MIB
    if size < SMALLEST_BYTES or size > free:
        raise UsageError(
            f"{folder} has {free >> 20} MiB free, the file would take {max(size, SMALLEST_BYTES) >> 20} MiB; free "
            f"some, or choose another --size (at least {SMALLEST_BYTES >> 20} MiB)."
        )
    return size


def _open_nameless(folder: Path) -> int:
    """A file that never had a name; on the few file systems without such files one that loses it at once."""
    flags = os.O_RDWR | os.O_DIRECT | os.O_CLOEXEC
    try:
        return os.open(folder, flags | os.O_TMPFILE, 0o600)
    except OSError as error:
        if error.errno not in (errno.EOPNOTSUPP, errno.EISDIR):
            raise
    path = folder / f".prefetchd-calibrate-{secrets.token_hex(8)}"
    try:
        return os.open(path, flags | os.O_CREAT | os.O_EXCL, 0o600)
    finally:
        path.unlink(missing_ok=True)


@contextlib.contextmanager
def nameless_file(folder: Path) -> Iterator[int]:
    """A file without a name, open for direct IO: it is gone with this process, however that ends.

    Raises CannotEnforceError where the file system has no direct IO.
    """
    try:
        descriptor = _open_nameless(folder)
    except OSError as error:
        if error.errno == errno.EINVAL:
            raise CannotEnforceError(f"The file system at {folder} has no direct IO, so its disk cannot be measured; "
                                     "choose a folder on another one.") from None  # fmt: skip
        raise UsageError(f"No file can be made in {folder} ({error.strerror}); choose another folder.") from None
    try:
        yield descriptor
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def raw_device(place: Place) -> Iterator[int]:
    """The device itself, open for reading only."""
    try:
        descriptor = os.open(place.node, os.O_RDONLY | os.O_DIRECT | os.O_CLOEXEC)
    except OSError as error:
        raise UsageError(
            f"Device {place.node!r} cannot be read ({error.strerror}); run as root, outside of a container."
        ) from None
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def counters(device: BlockDevice) -> DiskCounters | None:
    """What the device did since boot."""
    return parse_diskstats(Path("/proc/diskstats").read_text(encoding="ascii", errors="replace")).get(device.device)


def busy_ratio(device: BlockDevice, seconds: float) -> float:
    """Watch the device for some seconds: the part of the time in which it had work."""
    before = counters(device)
    time.sleep(seconds)
    after = counters(device)
    if before is None or after is None:
        return 0.0
    return (after.busy_ms - before.busy_ms) / 1000 / seconds
