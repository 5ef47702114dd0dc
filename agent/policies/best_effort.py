"""Caps on cgroups that do not train: what need leaves over times a trim that feedback moves.

The trim is cut while somebody starves and raised while everybody is well, quickly up to where somebody last starved
and slowly beyond, so that the device is used but not probed to death. A cap appears with the first victim; it goes when
the cgroup stops pressing against it, when the jobs it was made for are gone, or when so much is left that it is none.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from agent.policies.base import Moment, PolicySettings
from agent.policies.caps import Cap, follow
from agent.pool import fill
from agent.smoothing import clip
from agent.types import JobId

PRESSING_RATIO = 0.5
"""A cgroup that uses less than this part of its cap does not press against it."""

SLOW_RAISE = 0.02
"""Raise of the trim per second beyond the level at which somebody last starved."""

QUICK_RAISE = 0.3
"""Raise of the trim per second below that level."""

SAFE_RATIO = 0.9
"""The level believed to be safe after a victim, of the trim at which it appeared."""

RELIEF_RATIO = 0.7
"""When consumption falls below this part of what it was with the last victim, what was learned then is void."""


@dataclass(frozen=True, slots=True)
class Neighbour:
    """One best-effort cgroup on the device: the share it uses."""

    job: JobId
    used: float
    weight: float = 100.0


class Trainee(Protocol):
    """What is asked of a training job here (see `agent.policies.contention.Member`)."""

    @property
    def job(self) -> JobId:
        """Its id."""

    @property
    def want(self) -> float:
        """Share of the device it needs."""

    @property
    def steady(self) -> float | None:
        """The part of it that is consumption, not refill; None: unknown."""

    @property
    def score(self) -> float:
        """Its health."""

    @property
    def helpable(self) -> bool:
        """Whether its score counts."""


@dataclass(frozen=True, slots=True)
class BestEffort:
    """What is remembered: the share all of them get together (None: free), trim and its safe level, caps.

    `protects` are the jobs that starved since the caps appeared, `steady` what training consumed then; `idle_since` is
    when each cgroup stopped pressing.
    """

    total: float | None = None
    trim: float = 1.0
    safe: float = 1.0
    caps: Mapping[JobId, Cap] = field(default_factory=dict)
    protects: frozenset[JobId] = frozenset()
    steady: float = 0.0
    idle_since: Mapping[JobId, float] = field(default_factory=dict)


def guard(
    before: BestEffort,
    members: Sequence[Trainee],
    neighbours: Sequence[Neighbour],
    *,
    victims: frozenset[JobId],
    is_open: bool,
    moment: Moment,
    settings: PolicySettings,
) -> BestEffort:
    """The caps of all best-effort cgroups of one device after this step."""
    switches = settings.switches
    protects = (before.protects | victims) & {m.job for m in members}
    off = not (switches.best_effort and switches.cap_others)
    wanted = sum(m.want for m in members)
    steady = sum(m.want if m.steady is None else m.steady for m in members)
    if off or not neighbours or (switches.gate and not protects) or (before.total is None and not is_open):
        return BestEffort()
    relieved = steady < RELIEF_RATIO * before.steady
    trim, safe = _trim(before, members, bool(victims), moment.dt, relieved=relieved, settings=settings)
    left = max(0.0, settings.usable * moment.available - wanted) * trim
    target = clip(left, settings.floor, settings.ceiling) if switches.bounds else left
    total = target if before.total is None else min(target, before.total + settings.neighbour_raise * moment.dt)
    if total >= settings.ceiling and not is_open:
        return BestEffort()
    caps, idle = _share(before, neighbours, total, moment.now, settings)
    if not caps and not is_open:
        return BestEffort()
    return BestEffort(total, trim, safe, caps, protects, steady if victims else before.steady, idle)


def _trim(
    before: BestEffort,
    members: Sequence[Trainee],
    victims: bool,
    dt: float,
    *,
    relieved: bool,
    settings: PolicySettings,
) -> tuple[float, float]:
    """(trim, safe level) after `dt`: both lie between the trim's floor and ceiling."""
    trim, safe = before.trim, before.safe
    low, high = settings.neighbour_trim_floor, settings.neighbour_trim_ceiling
    if relieved:
        safe = high
    if victims:
        if trim > safe or before.total is None:
            safe = clip(SAFE_RATIO * trim, low, high)
        return clip(trim * settings.neighbour_cut**dt, low, high), safe
    worst = min((m.score for m in members if m.helpable), default=100.0)
    if worst <= settings.healthy_score:
        return trim, safe
    pace = QUICK_RAISE if trim < safe else SLOW_RAISE
    trim = min(high, trim + pace * dt)
    return trim, max(safe, trim)


def _share(
    before: BestEffort, neighbours: Sequence[Neighbour], total: float, now: float, settings: PolicySettings
) -> tuple[dict[JobId, Cap], dict[JobId, float]]:
    """Divide `total`: max-min by what each uses and a margin to grow, the rest evenly; (caps, idle since)."""
    weights = {n.job: n.weight for n in neighbours}
    shares = fill({n.job: 1.5 * n.used + settings.floor for n in neighbours}, total, weights)
    rest = (total - sum(shares.values())) / sum(weights.values())
    caps: dict[JobId, Cap] = {}
    idle: dict[JobId, float] = {}
    for n in neighbours:
        share = shares[n.job] + rest * n.weight
        share = max(share, settings.floor) if settings.switches.bounds else share
        old = before.caps.get(n.job)
        if n.used < PRESSING_RATIO * (share if old is None else old.share):
            idle[n.job] = before.idle_since.get(n.job, now)
        resting = n.job in idle and now - idle[n.job] >= settings.neighbour_idle_seconds
        if resting or (old is None and n.used < settings.floor):
            continue
        caps[n.job] = follow(old, share, n.used, now, settings, at_once=True)
    return caps, idle
