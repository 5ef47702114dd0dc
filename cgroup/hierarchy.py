"""Which cgroup version a host runs, and whether limits on IO can work there at all."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from cgroup.io_files import parse_controllers
from cgroup.mountinfo import Mount, parse_mountinfo

_BOOT_V2 = (
    "boot with `systemd.unified_cgroup_hierarchy=1` (without systemd: `cgroup_no_v1=all`) on the kernel command line,"
    " then check that `stat -fc %T /sys/fs/cgroup` prints cgroup2fs."
)


@dataclass(frozen=True, slots=True)
class Hierarchy:
    """What was found. `problem` is None where enforcement can work, else what is wrong and `fix` how to mend it."""

    kind: Literal["v2", "hybrid", "v1", "none"]
    root: str | None
    problem: str | None = None
    fix: str | None = None


def detect_hierarchy(mountinfo_path: str = "/proc/self/mountinfo", prefix: str = "") -> Hierarchy:
    """Look at the mounts and at the root's controllers. `prefix` goes before the mount points, for trees in tests."""
    mounts = parse_mountinfo(Path(mountinfo_path).read_text(encoding="utf-8", errors="surrogateescape"))
    unified = [mount for mount in mounts if mount.fstype == "cgroup2"]
    legacy = [mount for mount in mounts if mount.fstype == "cgroup" and _controllers_of(mount)]
    if legacy:
        return _legacy(unified, legacy)
    if not unified:
        return Hierarchy(
            "none", None, "no cgroup file system is mounted", f"Mount cgroup2 on /sys/fs/cgroup: {_BOOT_V2}"
        )
    return _unified(_best(unified), prefix)


def _controllers_of(mount: Mount) -> frozenset[str]:
    """A named hierarchy (`name=systemd`) has none."""
    general = {"rw", "ro", "xattr", "noprefix", "clone_children", "cpuset_v2_mode"}
    return frozenset(o for o in mount.super_options if o not in general and "=" not in o)


def _legacy(unified: list[Mount], legacy: list[Mount]) -> Hierarchy:
    blkio = next((m.point for m in legacy if "blkio" in _controllers_of(m)), None)
    where = f"the blkio controller is bound to cgroup v1 at {blkio}" if blkio else "controllers are bound to cgroup v1"
    if unified:
        problem = f"the host runs the hybrid hierarchy: {where}, so the v2 tree at {unified[0].point} cannot limit IO"
        return Hierarchy("hybrid", unified[0].point, problem, f"Use cgroup v2 alone: {_BOOT_V2}")
    return Hierarchy("v1", None, f"the host runs cgroup v1 only: {where}", f"Use cgroup v2: {_BOOT_V2}")


def _best(unified: list[Mount]) -> Mount:
    """Prefer a mount of the whole tree at the usual place, then any of the whole tree."""
    return min(unified, key=lambda mount: (mount.root != "/", mount.point != "/sys/fs/cgroup", len(mount.point)))


def _unified(mount: Mount, prefix: str) -> Hierarchy:
    if mount.root != "/":
        problem = f"{mount.point} shows only the part {mount.root} of the cgroup tree"
        return Hierarchy("v2", mount.point, problem, "Mount the host's /sys/fs/cgroup into the container, read-write.")
    controllers = Path(prefix + mount.point, "cgroup.controllers")
    try:
        names = parse_controllers(controllers.read_text(encoding="utf-8", errors="replace"))
    except OSError as error:
        return Hierarchy("v2", mount.point, f"{controllers} cannot be read ({error.strerror})", "Run as root.")
    if "io" not in names:
        problem = f"{controllers} does not list `io` but {', '.join(sorted(names)) or 'nothing'}"
        fix = "Use a kernel with CONFIG_BLK_CGROUP and CONFIG_BLK_DEV_THROTTLING, without `cgroup_disable=io`."
        return Hierarchy("v2", mount.point, problem, fix)
    return Hierarchy("v2", mount.point)
