"""From a path in the file system to the block device that serves it, or the reason why there is no single one."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from cgroup.devices import BlockDevice, Devices, Medium
from cgroup.errors import DeviceRefused
from cgroup.mountinfo import Mount, parse_mountinfo

_REMOTE = re.compile(r"nfs4?|cifs|smb3?|ceph|lustre|gpfs|beegfs|9p|virtiofs|afs|glusterfs|orangefs|pvfs2|fuse(\..*)?")
_MEMORY = frozenset(
    ("tmpfs", "ramfs", "proc", "sysfs", "devtmpfs", "cgroup2", "cgroup", "devpts", "hugetlbfs", "rootfs")
)
_DEPTH = 8  # of overlays on overlays


class Mounts:
    """Resolves paths on one host. `prefix` goes before every path that is looked up, for trees in tests."""

    def __init__(self, devices: Devices, mountinfo: str = "/proc/self/mountinfo", sys_root: str = "/sys") -> None:
        self._devices = devices
        self._mountinfo = Path(mountinfo)
        self._sys = Path(sys_root)

    def resolve(self, spec: str, medium: Medium | None = None) -> BlockDevice:
        """Return the device for anything an operator may name: maj:min, /dev path, mount point, file or folder.

        Raises DeviceRefused with the reason: remote, in memory, ambiguous, unknown.
        """
        if not spec.startswith("/") or spec.startswith("/dev/"):
            return self._devices.resolve(spec, medium)
        return self._of_path(spec, self._mounts(), medium, _DEPTH)

    def _mounts(self) -> tuple[Mount, ...]:
        return parse_mountinfo(self._mountinfo.read_text(encoding="utf-8", errors="surrogateescape"))

    def _of_path(self, path: str, mounts: Sequence[Mount], medium: Medium | None, depth: int) -> BlockDevice:
        mount = mount_of(_real(path), mounts)
        if mount is None or depth == 0:
            raise DeviceRefused(f"{path!r} lies on no mount that this process can see; name the device instead.")
        if mount.fstype == "overlay":
            return self._of_overlay(path, mount, mounts, medium, depth)
        refuse_file_system(path, mount)
        if mount.fstype == "btrfs":
            self._refuse_btrfs_on_many(path, mount)
        number = mount.source if mount.device.startswith("0:") else mount.device
        return self._devices.resolve(number, medium)

    def _of_overlay(
        self, path: str, mount: Mount, mounts: Sequence[Mount], medium: Medium | None, depth: int
    ) -> BlockDevice:
        """Resolve every layer: reads come from the lower ones, writes go to the upper one."""
        layers = [layer for name in ("upperdir", "lowerdir") for layer in _layers(mount.option(name) or "")]
        found = {self._of_path(layer, mounts, medium, depth - 1) for layer in layers}
        if len(found) == 1:
            return found.pop()
        names = ", ".join(sorted(device.name for device in found)) or "none that is visible here"
        raise DeviceRefused(f"{path!r} is an overlay whose layers lie on several devices ({names}); name one of them.")

    def _refuse_btrfs_on_many(self, path: str, mount: Mount) -> None:
        name = Path(mount.source).resolve().name if mount.source.startswith("/dev/") else mount.source
        for folder in sorted((self._sys / "fs/btrfs").glob("*/devices")):
            names = sorted(entry.name for entry in folder.iterdir())
            if name in names and len(names) > 1:
                raise DeviceRefused(
                    f"{path!r} is a btrfs on several devices ({', '.join(names)}), where no share of them is known; "
                    "name one of them."
                )


def mount_of(path: str, mounts: Sequence[Mount]) -> Mount | None:
    """Return the mount on which an absolute path lies: the deepest, and of several on one point the last."""
    best: Mount | None = None
    for mount in mounts:
        inside = path == mount.point or path.startswith(mount.point.rstrip("/") + "/")
        if inside and (best is None or len(mount.point) >= len(best.point)):
            best = mount
    return best


def refuse_file_system(path: str, mount: Mount) -> None:
    """Raise DeviceRefused where the file system has no block device on which a job's own IO could be limited."""
    if _REMOTE.fullmatch(mount.fstype):
        raise DeviceRefused(f"{path!r} is on {mount.fstype}, a remote file system: io.max cannot limit it.")
    if mount.fstype in _MEMORY:
        raise DeviceRefused(f"{path!r} is on {mount.fstype}, which lives in memory.")
    if mount.fstype == "zfs":
        raise DeviceRefused(f"{path!r} is on ZFS, whose IO is done by threads that belong to no job's cgroup.")
    realtime = mount.option("rtdev")
    if realtime:
        raise DeviceRefused(f"{path!r} is an XFS with a second, real-time device {realtime}; name one of the two.")
    if mount.fstype == "bcachefs" and ":" in mount.source:
        raise DeviceRefused(f"{path!r} is a bcachefs on several devices ({mount.source}); name one of them.")


def _layers(option: str) -> list[str]:
    """`lowerdir` is a list with `:` between; an escaped colon belongs to the name, `::` starts data-only layers."""
    return [part.replace("\\:", ":").replace("\\,", ",") for part in re.split(r"(?<!\\):", option) if part]


def _real(path: str) -> str:
    try:
        return str(Path(path).resolve())
    except (OSError, RuntimeError, ValueError):
        return path
