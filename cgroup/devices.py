"""Block devices: from whatever an operator names to the whole device on which `io.max` works.

io.max takes whole disks only (blkcg_conf_open_bdev in block/blk-cgroup.c answers ENODEV for a partition). sysfs
layout: Documentation/ABI/stable/sysfs-block. Everything is read below `sys_root` and `dev_root`.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from cgroup.errors import DeviceRefused
from cgroup.io_files import is_device

Medium = Literal["ssd", "hdd"]
Kind = Literal["disk", "dm", "md", "nvme-multipath"]

SECTOR_BYTES = 512
"""Unit of `size` in sysfs, whatever the disk's own sector size is."""

ATTRIBUTES = ("dev", "size", "hidden", "queue/rotational", "dm/uuid", "dm/name", "md/level", "md/raid_disks")

_MEMORY_BACKED = re.compile(r"(?P<kind>loop|zram|ram)\d+")
_REMOVABLE = re.compile(r"(sr|fd|scd)\d+")
_NVME_PATH = re.compile(r"nvme(?P<subsystem>\d+)c\d+n(?P<head>\d+)")
_REASONS = {
    "loop": "a loop device passes its IO on to a file, where it is counted: name the disk under that file",
    "zram": "zram keeps compressed memory, not storage",
    "ram": "a RAM disk does no IO",
}
_DEPTH = 16  # of a stack of devices; a longer one is a loop of links


@dataclass(frozen=True, slots=True)
class BlockDevice:
    """A whole device that io.max accepts.

    `device` is its maj:min; `rotational` what its own queue says; `medium` what its disks say, or the override;
    `members` the whole devices right below a dm or md device, as maj:min; `layout` the RAID level of md and the
    device-mapper's own prefix (LVM, CRYPT, mpath) of dm, else "".
    """

    device: str
    name: str
    medium: Medium
    rotational: bool
    size_bytes: int
    kind: Kind
    members: tuple[str, ...] = ()
    layout: str = ""


class Devices:
    """Resolves names on one host."""

    def __init__(self, sys_root: str = "/sys", dev_root: str = "/dev") -> None:
        self._sys = Path(sys_root)
        self._dev = Path(dev_root)

    def resolve(self, spec: str, medium: Medium | None = None) -> BlockDevice:
        """Return the whole device behind a `maj:min`, a name or a path below /dev, links of udev included.

        A partition stands for its disk, a path of NVMe multipath for the head. `medium` overrides what the kernel
        says (virtio disks claim to rotate). Raises DeviceRefused with the reason.
        """
        folder = self._whole(self._folder(spec), spec)
        _refuse_kind(folder.name)
        return self._describe(folder, medium)

    def name_of(self, number: str) -> str:
        """Return what the kernel calls a device, refused or not; its number where it is gone."""
        try:
            return self._folder(number).name
        except DeviceRefused:
            return number

    def all(self) -> tuple[BlockDevice, ...]:
        """Return every whole device that could be enforced on, by number."""
        found = {}
        for name in _names(self._sys / "class/block"):
            try:
                device = self.resolve(name)
            except DeviceRefused:
                continue
            found[device.device] = device
        return tuple(found[number] for number in sorted(found, key=_numeric))

    def _folder(self, spec: str) -> Path:
        """Return the sysfs folder of the device that the text names."""
        if "\0" in spec:
            raise _unknown(spec)
        if is_device(spec):
            return self._existing(self._sys / "dev/block" / spec, spec)
        relative = spec.removeprefix("/dev/")
        node = self._dev / relative
        try:
            status = node.stat()
        except OSError:
            status = None
        if status is not None and stat.S_ISBLK(status.st_mode):
            number = f"{os.major(status.st_rdev)}:{os.minor(status.st_rdev)}"
            return self._existing(self._sys / "dev/block" / number, spec)
        name = str(node.resolve().relative_to(self._dev.resolve())) if _inside(node, self._dev) else relative
        return self._existing(self._sys / "class/block" / name.replace("/", "!"), spec)

    def _existing(self, path: Path, spec: str) -> Path:
        folder = path.resolve()
        if not (folder / "size").exists():  # hidden paths of NVMe multipath need not have a `dev`
            raise _unknown(spec)
        return folder

    def _whole(self, folder: Path, spec: str) -> Path:
        """Step from a partition to its disk and from a hidden NVMe path to the head."""
        if (folder / "partition").exists():
            folder = folder.parent
        match = _NVME_PATH.fullmatch(folder.name)
        if match and _text(folder / "hidden").strip() == "1":
            head = self._sys / "class/block" / f"nvme{match['subsystem']}n{match['head']}"
            return self._existing(head, spec)
        return folder

    def _describe(self, folder: Path, medium: Medium | None, depth: int = _DEPTH) -> BlockDevice:
        attributes = {name: _text(folder / name) for name in ATTRIBUTES if (folder / name).exists()}
        members = self._members(folder, depth)
        subsystem = "/nvme-subsystem/" in str(folder)
        return describe(folder.name, attributes, members, medium=medium, multipath=subsystem)

    def _members(self, folder: Path, depth: int) -> tuple[BlockDevice, ...]:
        """Return the devices right below. Two partitions of one disk give it twice; a loop device may be a member."""
        if depth == 0:
            raise DeviceRefused(f"{folder.name} stands on more than {_DEPTH} layers of devices.")
        below = []
        for name in _names(folder / "slaves"):
            whole = self._whole(self._existing(self._sys / "class/block" / name, name), name)
            below.append(self._describe(whole, None, depth - 1))
        return tuple(below)


def describe(
    name: str,
    attributes: Mapping[str, str],
    members: tuple[BlockDevice, ...] = (),
    *,
    medium: Medium | None = None,
    multipath: bool = False,
) -> BlockDevice:
    """Return what the texts of a device's sysfs files say (`ATTRIBUTES`). Pure; the only error is DeviceRefused."""
    device = attributes.get("dev", "").strip()
    if not is_device(device):
        raise DeviceRefused(f"{name} has no device number but {device[:40]!r}.")
    size_bytes = _size_bytes(name, attributes.get("size", ""))
    rotational = attributes.get("queue/rotational", "0").strip() == "1"
    rotates = any(member.medium == "hdd" for member in members) if members else rotational
    return BlockDevice(
        device=device,
        name=name,
        medium=medium or ("hdd" if rotates else "ssd"),
        rotational=rotational,
        size_bytes=size_bytes,
        kind=_kind(attributes, multipath=multipath),
        members=tuple(member.device for member in members),
        layout=_layout(attributes),
    )


def _unknown(spec: str) -> DeviceRefused:
    return DeviceRefused(f"{spec!r} is no block device of this host; `lsblk -o NAME,MAJ:MIN` lists them.")


def _refuse_kind(name: str) -> None:
    match = _MEMORY_BACKED.fullmatch(name)
    if match:
        raise DeviceRefused(f"{name} is refused: {_REASONS[match['kind']]}.")
    if _REMOVABLE.fullmatch(name):
        raise DeviceRefused(f"{name} is refused: it holds removable media, no training data.")


def _size_bytes(name: str, text: str) -> int:
    text = text.strip()
    if not (text.isascii() and text.isdigit() and len(text) <= 20):
        raise DeviceRefused(f"{name} has no size but {text[:40]!r}.")
    if int(text) == 0:
        raise DeviceRefused(f"{name} has size 0: there is no medium in it, or it is being removed.")
    return int(text) * SECTOR_BYTES


def _kind(attributes: Mapping[str, str], *, multipath: bool) -> Kind:
    if "dm/uuid" in attributes or "dm/name" in attributes:
        return "dm"
    if "md/level" in attributes:
        return "md"
    return "nvme-multipath" if multipath else "disk"


def _layout(attributes: Mapping[str, str]) -> str:
    """`LVM-…`, `CRYPT-LUKS2-…`, `part1-mpath-…` tell who made a dm device; md names its level."""
    if "md/level" in attributes:
        return attributes["md/level"].strip()
    return re.sub(r"^part\d+-", "", attributes.get("dm/uuid", "").strip()).partition("-")[0]


def _inside(node: Path, root: Path) -> bool:
    try:
        return node.resolve().is_relative_to(root.resolve())
    except (OSError, ValueError, RuntimeError):
        return False


def _names(folder: Path) -> list[str]:
    try:
        return sorted(entry.name for entry in folder.iterdir())
    except OSError:
        return []


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def _numeric(device: str) -> tuple[int, ...]:
    return tuple(map(int, device.split(":")))
