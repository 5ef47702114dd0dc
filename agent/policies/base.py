"""What every policy has in common: the interface, the settings, and how use of a device is counted in shares."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from agent.pid import GAINS_BY_MEDIUM, PidGains
from agent.pool import PoolSettings
from agent.types import (
    Capacity,
    Decision,
    DeviceSignals,
    DeviceView,
    JobId,
    JobView,
    Medium,
    Need,
    NodeView,
    Slot,
)


class Policy(Protocol):
    """A control law: explicit state in and out (of a type of its own), no clock but `view.now`, no IO.

    `step` may be called at any pace, and besides whenever a job finished an iteration.
    """

    name: str

    def initial(self) -> Any:
        """The state before the first step."""

    def step(self, state: Any, view: NodeView) -> tuple[Any, Decision]:
        """What to cap and who may use what, from everything known at `view.now`.

        Raises ValueError when `view.now` lies before the last step.
        """


@dataclass(frozen=True, slots=True)
class Switches:
    """The nine lines of `adaptive` (design, section 3), each of which a test can turn off to prove that it matters."""

    cap_others: bool = True
    gate: bool = True
    feed_forward: bool = True
    allocation: bool = True
    best_effort: bool = True
    actionable: bool = True
    gentle_writes: bool = True
    media: bool = True
    bounds: bool = True


@dataclass(frozen=True, slots=True)
class PolicySettings:
    """Numbers of both policies: shares of a device, times in seconds, scores in points.

    `headroom`: a cap lies this much above what it is meant to let through (blk-throttle makes gaps otherwise).
    `usable`: what of a device is handed out. `floor` and `ceiling` bound every cap; a cap at the ceiling is none.
    `rearrange_score`, `rearrange_iterations`: where reading ahead on an HDD is asked for (paper, section 4);
    `rearrange_queue`, `rearrange_wait_ratio`: a queue part below, with a wait of this part of the computation, counts.
    `foresight_seconds`: a job whose queue will be empty sooner than this at what it receives now is about to starve and
    counts as a victim. `training_caps`: media on which training jobs may be capped. `raise_seconds`: a cap is raised at
    most this often; `suppress`: smaller relative changes are not worth a write. `switches` belongs to the tests.
    """

    pool: PoolSettings = field(default_factory=PoolSettings)
    gains: Mapping[Medium, PidGains] = field(default_factory=lambda: dict(GAINS_BY_MEDIUM))
    target_score: float = 75.0
    tight_score: float = 60.0
    healthy_score: float = 80.0
    full_queue: float = 90.0
    step_limit: float = 0.20
    step_seconds: float = 0.1
    usable: float = 0.97
    floor: float = 0.02
    ceiling: float = 0.95
    headroom: float = 0.15
    hold_seconds: float = 0.6
    longest_hold_seconds: float = 3.0
    victim_confidence: float = 0.4
    foresight_seconds: float = 0.8
    consumption_seconds: float = 1.0
    trim_limit: float = 0.5
    trim_release_seconds: float = 2.0
    neighbour_cut: float = 0.65
    neighbour_raise: float = 0.3
    neighbour_trim_floor: float = 0.3
    neighbour_trim_ceiling: float = 1.6
    neighbour_idle_seconds: float = 1.0
    raise_seconds: float = 0.5
    suppress: float = 0.08
    training_caps: Mapping[Medium, bool] = field(
        default_factory=lambda: {Medium.SSD: True, Medium.HDD: False, Medium.REMOTE: False}
    )
    timer_seconds: float = 1.0
    rearrange_score: float = 30.0
    rearrange_iterations: int = 3
    rearrange_queue: float = 50.0
    rearrange_wait_ratio: float = 0.1
    switches: Switches = field(default_factory=Switches)


class Moment(NamedTuple):
    """When a device is looked at (monotonic seconds), seconds since last time, and what part of it is ours (0..1)."""

    now: float
    dt: float
    available: float


def used_share(device: DeviceSignals, capacity: Capacity) -> float:
    """What a cgroup uses of a device, in its busiest dimension: the share at which a cap would begin to bind."""
    share, requests = device.read_bytes_per_second / capacity.rbps, device.read_requests_per_second / capacity.riops
    return max(share, requests, written_share(device, capacity))


def written_share(device: DeviceSignals, capacity: Capacity) -> float:
    """What a cgroup writes to a device, as a share in the busier dimension; rare in training but for checkpoints."""
    if device.write_requests_per_second > 0.0 or device.write_bytes_per_second > 0.0:
        return max(device.write_bytes_per_second / capacity.wbps, device.write_requests_per_second / capacity.wiops)
    return 0.0


def need_share(need: Need, capacity: Capacity) -> float:
    """A need as a share of the device, in its busiest dimension."""
    return max(need.bytes_per_second / capacity.rbps, need.requests_per_second / capacity.riops)


def low_iterations(old: Mapping[JobId, int], jobs: tuple[JobView, ...], settings: PolicySettings) -> dict[JobId, int]:
    """Iterations in a row that each job ended below the rearrangement score (paper, section 4), of those that live."""
    counts = {}
    for view in jobs:
        seen = old.get(view.job.id, 0)
        if view.health.score >= settings.rearrange_score:
            seen = 0
        elif view.new_iteration:
            seen += max(1, view.signals.new_iterations)
        counts[view.job.id] = seen
    return counts


def stuck_iterations(old: Mapping[JobId, int], jobs: tuple[JobView, ...], settings: PolicySettings) -> dict[JobId, int]:
    """The same, and besides iterations of a job that loses a good part of its time to a queue that runs empty.

    The latency part of the score compares a job with its own normal. On a disk that seeks for every request that is
    slow from the start, so a job that loses half of its time there still scores 35 to 40. Workers that read files of
    their own deliver at the same time, so every other iteration may wait for nothing: one that is well takes back one.
    """
    low = low_iterations(old, jobs, settings)
    for view in jobs:
        if low[view.job.id]:
            continue
        fresh = max(1, view.signals.new_iterations) if view.new_iteration else 0
        seen = old.get(view.job.id, 0) + (fresh if _loses_time(view, settings) else -fresh)
        low[view.job.id] = min(max(0, seen), 2 * (settings.rearrange_iterations + 1))
    return low


def _loses_time(view: JobView, settings: PolicySettings) -> bool:
    queue, wait, compute = view.health.parts.get("queue"), view.signals.wait_seconds, view.signals.compute_seconds
    if queue is None or queue >= settings.rearrange_queue or wait is None or not compute:
        return False
    return view.diagnosis.actionable and wait >= settings.rearrange_wait_ratio * compute


def rearrangements(
    low: Mapping[JobId, int], jobs: tuple[JobView, ...], devices: Mapping[str, DeviceView], settings: PolicySettings
) -> frozenset[Slot]:
    """Where reading ahead in physical order should start: HDDs of jobs that stayed low for more than 3 iterations."""
    return frozenset(
        (view.job.id, name)
        for view in jobs
        if low.get(view.job.id, 0) > settings.rearrange_iterations
        for name, signals in view.signals.devices.items()
        if name in devices and devices[name].info.medium is Medium.HDD and signals.access_share > 0.0
    )


def elapsed(now: float, before: float | None) -> float:
    """Seconds since the last step, 0 at the first. Raises ValueError when time runs backwards."""
    dt = 0.0 if before is None else now - before
    if dt < 0.0:
        raise ValueError(f"step at {now} s after one at {before} s; pass a clock that only grows")
    return dt


def make_policy(name: str, settings: PolicySettings) -> Policy:
    """The policy of that name: `adaptive` or `paper`. Raises ValueError for any other."""
    from agent.policies.adaptive import Adaptive  # noqa: PLC0415 - both modules import this one
    from agent.policies.paper import Paper  # noqa: PLC0415

    if name == "adaptive":
        return Adaptive(settings)
    if name == "paper":
        return Paper(settings)
    raise ValueError(f"policy {name!r} is unknown; use adaptive or paper")
