"""A decision's shares -> the limits to stand on each cgroup and device. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from math import isfinite

from agent.types import Capacity, Decision, DeviceView, Job, JobId, Slot
from cgroup.actuators import WEIGHT_SCALE, BfqWeight, DeviceCapacity, IoWeight
from cgroup.lines import DEFAULT_WEIGHT, Limit, Setting, Target

SMALLEST_BYTES_PER_SECOND = 65536
"""No cap below this: blk-throttle passes whole bios, and a smaller cap would stop a job for seconds at a time."""
SMALLEST_REQUESTS_PER_SECOND = 2

WEIGHTS: Mapping[str, IoWeight | BfqWeight] = {"io.weight": IoWeight(), "io.bfq.weight": BfqWeight()}
"""Actuators that write a proportion; what is uncapped keeps the weight it had."""

STEP = 0.20
"""A cap on a training job moves by at most this much of what stands there, write by write (paper, section 3)."""

Desired = dict[Target, tuple[Setting, str]]
Applied = Mapping[Slot, tuple[int | None, int | None, int | None, int | None]]


def desired_limits(
    decision: Decision,
    jobs: Mapping[JobId, Job],
    devices: Mapping[str, DeviceView],
    applied: Applied,
    *,
    floor: float,
    ceiling: float,
) -> Desired:
    """What shall stand where; slots without a quota are left out, which means uncapped.

    `floor` and `ceiling` (shares) bound every cap. A dimension whose capacity is unknown (infinite) is not limited.
    `applied` holds the caps in force (rbps, wbps, riops, wiops): since raises are rationed, several steps of a policy
    may pass between two writes, and the step limit must hold for what is written. Best-effort caps move freely.
    """
    desired: Desired = {}
    for (job, device), quota in decision.quotas.items():
        view = devices.get(device)
        if job not in jobs or view is None or view.info.capacity is None:
            continue
        share = min(max(quota.share, floor), ceiling)
        target = Target(cgroup_id=job, path=jobs[job].path, device=device)
        if view.info.actuator in WEIGHTS:
            weighed = _beside_others(share, device, decision)
            desired[target] = (WEIGHTS[view.info.actuator].desired(weighed, DeviceCapacity()), quota.why)
            continue
        limit = _limit(view.info.capacity, share)
        standing = applied.get((job, device))
        if standing is not None and jobs[job].training:
            limit = _within_step(limit, standing)
        desired[target] = (limit, quota.why)
    return desired


def _beside_others(share: float, device: str, decision: Decision) -> float:
    """The share as a weight has to say it: a weight counts only beside those of others.

    Who has no quota keeps the default weight, whatever it is entitled to, and a cap never makes anybody outweigh those:
    at 0.2 of the device a flood would have twice the weight of who starves beside it. Where everybody has a quota (the
    paper's law) shares are weights.
    """
    free = [
        one.share
        for (job, name), one in decision.entitlements.items()
        if name == device and (job, name) not in decision.quotas
    ]
    if not free and decision.gate_open.get(device, True):
        return share
    usual = DEFAULT_WEIGHT / WEIGHT_SCALE
    entitled = sum(free)
    return min(usual, share * usual * len(free) / entitled if entitled > 0.0 else share)


def _within_step(limit: Limit, standing: tuple[int | None, ...]) -> Limit:
    wanted = (limit.rbps, limit.wbps, limit.riops, limit.wiops)
    return Limit(*(_step(new, old) for new, old in zip(wanted, standing, strict=True)))


def _step(new: int | None, old: int | None) -> int | None:
    """A first cap and the release are no steps; a step of a small number is at least 1."""
    if new is None or old is None:
        return new
    span = max(1.0, old * STEP)
    return round(min(max(new, old - span), old + span))


def _limit(capacity: Capacity, share: float) -> Limit:
    return Limit(
        rbps=_scaled(capacity.rbps, share, SMALLEST_BYTES_PER_SECOND),
        wbps=_scaled(capacity.wbps, share, SMALLEST_BYTES_PER_SECOND),
        riops=_scaled(capacity.riops, share, SMALLEST_REQUESTS_PER_SECOND),
        wiops=_scaled(capacity.wiops, share, SMALLEST_REQUESTS_PER_SECOND),
    )


def _scaled(capacity: float, share: float, smallest: int) -> int | None:
    return max(smallest, round(capacity * share)) if isfinite(capacity) else None
