"""A decision's shares -> the limits to stand on each cgroup and device. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from math import isfinite

from agent.types import Capacity, Decision, DeviceView, Job, JobId
from cgroup.lines import Limit, Target

SMALLEST_BYTES_PER_SECOND = 65536
"""No cap below this: blk-throttle passes whole bios, and a smaller cap would stop a job for seconds at a time."""
SMALLEST_REQUESTS_PER_SECOND = 2

Desired = dict[Target, tuple[Limit, str]]


def desired_limits(
    decision: Decision, jobs: Mapping[JobId, Job], devices: Mapping[str, DeviceView], floor: float, ceiling: float
) -> Desired:
    """What shall stand where; slots without a quota are left out, which means uncapped.

    `floor` and `ceiling` (shares) bound every cap. A dimension whose capacity is unknown (infinite) is not limited.
    """
    desired: Desired = {}
    for (job, device), quota in decision.quotas.items():
        view = devices.get(device)
        if job not in jobs or view is None or view.info.capacity is None:
            continue
        share = min(max(quota.share, floor), ceiling)
        target = Target(cgroup_id=job, path=jobs[job].path, device=device)
        desired[target] = (_limit(view.info.capacity, share), quota.why)
    return desired


def _limit(capacity: Capacity, share: float) -> Limit:
    return Limit(
        rbps=_scaled(capacity.rbps, share, SMALLEST_BYTES_PER_SECOND),
        wbps=_scaled(capacity.wbps, share, SMALLEST_BYTES_PER_SECOND),
        riops=_scaled(capacity.riops, share, SMALLEST_REQUESTS_PER_SECOND),
        wiops=_scaled(capacity.wiops, share, SMALLEST_REQUESTS_PER_SECOND),
    )


def _scaled(capacity: float, share: float, smallest: int) -> int | None:
    return max(smallest, round(capacity * share)) if isfinite(capacity) else None
