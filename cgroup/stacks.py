"""Where to write a limit for a device that stands on others, and how a share is split over its members. Pure.

blk-throttle works on every bio that is submitted to a device, so also on device-mapper and md devices themselves;
there one limit covers all of a job's IO and each IO counts once. Splitting over members is for kernels on which that
does not hold, and for actuators that need a request queue (io.weight, io.bfq.weight).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from cgroup.devices import BlockDevice
from cgroup.errors import DeviceRefused


@dataclass(frozen=True, slots=True)
class EnforcementTarget:
    """A device to write at, and the part of the stack's bytes that it serves: 0.5 means half of every limit there.

    A mirror has each member serve its part of the reads but all of the writes.
    """

    device: str
    read_factor: float
    write_factor: float


def enforcement_targets(
    device: BlockDevice, known: Mapping[str, BlockDevice] | None = None, *, on_members: bool = False
) -> tuple[EnforcementTarget, ...]:
    """Return where to write for this device: on itself, or (`on_members`) on the disks at the bottom of its stack.

    `known` holds the members by maj:min, needed for `on_members`. Raises DeviceRefused where the split is not known.
    """
    if not on_members or not device.members:
        return (EnforcementTarget(device.device, 1.0, 1.0),)
    read, write = _factors(device)
    totals: dict[str, tuple[float, float]] = {}
    for member in device.members:
        below = (known or {}).get(member)
        if below is None:
            raise DeviceRefused(f"{device.name} has a member {member} of which nothing is known.")
        for target in enforcement_targets(below, known, on_members=True):
            old = totals.get(target.device, (0.0, 0.0))
            totals[target.device] = (old[0] + read * target.read_factor, old[1] + write * target.write_factor)
    return tuple(EnforcementTarget(number, *factors) for number, factors in totals.items())


def _factors(device: BlockDevice) -> tuple[float, float]:
    """Return the part of the reads and of the writes that each member serves."""
    count = len(device.members)
    if count == 1:
        return 1.0, 1.0
    # RAID 10 keeps two copies. Parity levels write (data + parity) / data times as much; reads are spread evenly.
    writes = {
        "raid0": 1 / count,
        "raid1": 1.0,
        "raid10": 2 / count,
        "raid4": 1 / (count - 1),
        "raid5": 1 / (count - 1),
        "raid6": 1 / (count - 2) if count > 2 else 1.0,
    }.get(device.layout if device.kind == "md" else "")
    if writes is None:
        how = f"{device.kind} {device.layout or 'of unknown make'}"
        raise DeviceRefused(
            f"{device.name} ({how}) joins {count} devices in a way that sysfs does not tell: "
            "limit the mapped device itself."
        )
    return 1 / count, writes
