"""From a share of a device to what is written: io.max, io.weight or io.bfq.weight, behind one interface.

Nothing here switches a scheduler or io.cost on: an actuator is usable where the host is already set up for it.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

from cgroup.errors import DeviceRefused
from cgroup.io_files import parse_controllers, parse_cost_qos, parse_scheduler
from cgroup.lines import IO_MAX, Limit, Line, Setting, Weight, format_line
from cgroup.tree import CGROUP_ROOT

ActuatorName = Literal["io.max", "io.weight", "io.bfq.weight"]

WEIGHT_SCALE = 1000
"""Weight of the whole device: a share of 0.1 is then the 100 that a cgroup has by default."""


@dataclass(frozen=True, slots=True)
class DeviceCapacity:
    """What a device can do: bytes/s and requests/s. None is unknown: that dimension is not limited."""

    rbps: float | None = None
    wbps: float | None = None
    riops: float | None = None
    wiops: float | None = None


class Actuator(Protocol):
    """Turns shares into settings."""

    @property
    def file(self) -> str:
        """The cgroup file it writes."""

    def desired(self, share: float | None, capacity: DeviceCapacity) -> Setting:
        """Return the setting for a share (0..1) of the capacity; None gives back what was there before us."""


@dataclass(frozen=True, slots=True)
class IoMax:
    """Absolute caps, kept by blk-throttle on any device."""

    file: str = IO_MAX

    def desired(self, share: float | None, capacity: DeviceCapacity) -> Limit:
        """See Actuator. A share of an unknown capacity is no limit, and no limit is ever below 1."""

        def part(whole: float | None) -> int | None:
            return None if share is None or whole is None else max(1, int(share * whole))

        return Limit(part(capacity.rbps), part(capacity.wbps), part(capacity.riops), part(capacity.wiops))


@dataclass(frozen=True, slots=True)
class IoWeight:
    """Proportions among siblings, kept by io.cost (weights 1..10000, block/blk-iocost.c)."""

    file: Literal["io.weight"] = "io.weight"
    greatest: int = 10_000

    def desired(self, share: float | None, capacity: DeviceCapacity) -> Weight:
        """See Actuator. The capacity plays no part in a proportion."""
        del capacity
        return Weight(_weight(share, self.greatest), self.file)


@dataclass(frozen=True, slots=True)
class BfqWeight:
    """Proportions among siblings, kept by the bfq scheduler (weights 1..1000, block/bfq-iosched.h)."""

    file: Literal["io.bfq.weight"] = "io.bfq.weight"
    greatest: int = 1_000

    def desired(self, share: float | None, capacity: DeviceCapacity) -> Weight:
        """See Actuator. The capacity plays no part in a proportion."""
        del capacity
        return Weight(_weight(share, self.greatest), self.file)


def _weight(share: float | None, greatest: int) -> int | None:
    return None if share is None else min(greatest, max(1, round(share * WEIGHT_SCALE)))


ACTUATORS: dict[ActuatorName, Actuator] = {
    "io.max": IoMax(),
    "io.weight": IoWeight(),
    "io.bfq.weight": BfqWeight(),
}


def detect(device: str, root: str = CGROUP_ROOT, sys_root: str = "/sys") -> frozenset[ActuatorName]:
    """Return the actuators that work on a device (maj:min) as the host is set up now."""
    found: set[ActuatorName] = set()
    if "io" in parse_controllers(_text(Path(root, "cgroup.controllers"))):
        found.add("io.max")
    if device in parse_cost_qos(_text(Path(root, "io.cost.qos"))):
        found.add("io.weight")
    if parse_scheduler(_text(Path(sys_root, "dev/block", device, "queue/scheduler"))) == "bfq":
        found.add("io.bfq.weight")
    return frozenset(found)


def pick(wanted: ActuatorName | Literal["auto"], device: str, available: frozenset[ActuatorName]) -> Actuator:
    """Return the actuator for a device: the wanted one, or io.max for `auto`. Raises DeviceRefused with the fix."""
    name: ActuatorName = "io.max" if wanted == "auto" else wanted
    if name in available:
        return ACTUATORS[name]
    fixes = {
        "io.max": "the io controller is not available in this cgroup tree",
        "io.weight": f"io.cost is off: write '{device} enable=1' to io.cost.qos of the root cgroup",
        "io.bfq.weight": "the scheduler is not bfq: write 'bfq' to the disk's queue/scheduler",
    }
    raise DeviceRefused(f"{name} cannot be used on {device}: {fixes[name]}.")


def preview(device: str, setting: Setting) -> str:
    """Return the text that a setting would write, for dry runs.

    >>> preview("8:0", Limit(rbps=1048576))
    '8:0 rbps=1048576 wbps=max riops=max wiops=max'
    """
    return format_line(Line(0, "", device, setting.file), setting.values())


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii", errors="replace")
    except OSError:
        return ""
