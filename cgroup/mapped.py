"""Mapped devices that join disks of both media (dm-cache and the like): what their IO passes through. Linux dm ioctls.

Such a device has no medium of its own, so no capacity and no limit of its own either: what matters is the disk that a
request ends up on. Layouts: include/uapi/linux/dm-ioctl.h.
"""

from __future__ import annotations

import errno
import fcntl
import os
import struct
from collections.abc import Callable, Collection

from cgroup.devices import BlockDevice, Devices
from cgroup.errors import DeviceRefused

CONTROL = "/dev/mapper/control"

REMAPPING = frozenset({"cache", "writecache", "linear", "striped", "thin", "thin-pool"})
"""Targets that send the bio on where it is to go, told by block_bio_remap in the caller's context.

Not `raid` and `mirror`, which make bios of their own, nor `crypt`, whose threads send on untold before Linux 5.18. That
also holds for what dm-cache holds back until a block is moved: such kernels do not show those few requests.
"""

_HEADER = struct.Struct("=3I I I I i I I I Q 128s 129s 7x")
"""struct dm_ioctl: version, data_size, data_start, target_count, open_count, flags, event_nr, padding, dev, name, uuid.

`data_start` counts from the beginning."""
_SPEC = struct.Struct("=Q Q i I 16s")
"""struct dm_target_spec: sector_start, length, status, next (from the first one), target_type."""
_VERSION = (4, 0, 0)
_NO_FLUSH = 1 << 11
_BUFFER_FULL = 1 << 8
_ROOM_BYTES = (16 << 10, 256 << 10, 4 << 20)
"""Tried one after the other; a target takes about 60, so volumes of hundreds of segments need more than the first."""
_TABLE_STATUS = 3 << 30 | _HEADER.size << 16 | 0xFD << 8 | 12

Targets = Callable[[str], frozenset[str]]


def targets_of(device: str, control: str = CONTROL) -> frozenset[str]:
    """Return the kinds of target that the table of a mapped device `maj:min` is made of.

    Raises OSError with the control node's path, also for a table that is too long to be read.
    """
    for room in _ROOM_BYTES:
        answer = _ask_status(device, control, room)
        if not _HEADER.unpack_from(answer)[7] & _BUFFER_FULL:
            return parse_targets(answer)
    raise OSError(errno.ENOBUFS, f"the table of {device} has more than {_ROOM_BYTES[-1]} bytes", control)


def _ask_status(device: str, control: str, room: int) -> bytes:
    """Ask for the state, which tells no key of dm-crypt, without a flush."""
    major, minor = map(int, device.split(":"))
    huge = (minor & 0xFF) | major << 8 | (minor & ~0xFF) << 12  # huge_encode_dev in include/linux/kdev_t.h
    asked = _HEADER.pack(*_VERSION, room, _HEADER.size, 0, 0, _NO_FLUSH, 0, 0, huge, b"", b"")
    buffer = bytearray(asked.ljust(room, b"\0"))
    try:
        descriptor = os.open(control, os.O_RDONLY | os.O_CLOEXEC)
        try:
            fcntl.ioctl(descriptor, _TABLE_STATUS, buffer)
        finally:
            os.close(descriptor)
    except OSError as error:
        raise OSError(error.errno, f"asking for the table of {device}: {error.strerror}", control) from error
    return bytes(buffer)


def parse_targets(answer: bytes) -> frozenset[str]:
    """Return the kinds of target in the answer to DM_TABLE_STATUS; one that was cut off or spoilt ends early. Pure."""
    start, count = _HEADER.unpack_from(answer)[4:6]
    found, at = set(), start
    while count and at + _SPEC.size <= len(answer):
        *_, following, kind = _SPEC.unpack_from(answer, at)
        found.add(kind.partition(b"\0")[0].decode("ascii", "replace"))
        at, count = max(start + following, at + _SPEC.size), count - 1  # never backwards
    return frozenset(found)


def passed_through(
    device: str, devices: Devices, named: Collection[str] = (), targets: Targets = targets_of
) -> frozenset[str]:
    """Return the mapped devices (`maj:min`) from this one down that IO passes to reach disks of both media, else none.

    A device of `named` is where an operator wants IO counted, so the way ends there, as at anything that is not a
    mapped device or that joins its disks in another way (`REMAPPING`). Raises OSError of `targets`.
    """
    if not _joins_media(_way(device, devices, lambda here: here.kind == "dm")):
        return frozenset()  # without asking for a table
    way = _way(device, devices, lambda here: here.device not in named and here.kind == "dm" and _remaps(here, targets))
    return frozenset(one.device for one, passed in way if passed) if _joins_media(way) else frozenset()


_Way = list[tuple[BlockDevice, bool]]
"""Devices of a stack, and whether IO passes them: False of those where the way ends."""


def _way(top: str, devices: Devices, passes: Callable[[BlockDevice], bool]) -> _Way:
    """Everything from a device down to where its IO no longer passes on; what is refused (loop devices) is left out."""
    found: dict[str, tuple[BlockDevice, bool]] = {}
    pending = [top]
    while pending:
        number = pending.pop()
        if number in found:
            continue
        try:
            here = devices.resolve(number)
        except DeviceRefused:
            continue
        found[number] = here, bool(here.members) and passes(here)
        if found[number][1]:
            pending.extend(here.members)
    return list(found.values())


def _joins_media(way: _Way) -> bool:
    return len({one.medium for one, passed in way if not passed}) > 1


def _remaps(device: BlockDevice, targets: Targets) -> bool:
    kinds = targets(device.device)
    return bool(kinds) and kinds <= REMAPPING
