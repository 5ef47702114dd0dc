"""Caps on cgroups that do not train: what need leaves over times a trim that feedback moves.

The trim is cut while somebody starves and raised while everybody is well, quickly up to where somebody last starved
and slowly beyond, so that the device is used but not probed to death. What is left over is counted from what the device
was seen to do while somebody starved: under a mix of seeks that is far below its stated capacity. A cap appears with
the first victim; it goes when the cgroup stops pressing against it, when the jobs it was made for are gone, when so
much is left that it is none, or when it did not help who starves.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import inf
from typing import NamedTuple, Protocol

from agent.policies.base import Moment, PolicySettings
from agent.policies.caps import Cap, follow
from agent.pool import fill
from agent.smoothing import clip, gain
from agent.types import JobId

PRESSING_RATIO = 0.5
"""A cgroup that uses less than this part of its cap does not press against it."""

SLOW_RAISE = 0.02
"""Raise of the trim per second beyond the level at which somebody last starved."""

QUICK_RAISE = 0.3
"""Raise of the trim per second below that level."""

SAFE_RATIO = 0.9
"""The level believed to be safe after a victim, of the trim at which it appeared."""

EPISODE_SECONDS = 1.0
"""Victims closer than this belong to one episode: it lowers the safe level once."""

REACH_SECONDS = (0.5, 60.0)
"""Time constants at which the reach follows a device that does less, and forgets that it did."""

FUTILE_SECONDS = (8.0, 60.0)
"""Caps that after the first time have not helped are given up for the second."""

WELL_SECONDS = 3.0
"""Nobody starved for this long: the caps have helped, and who starves afterwards is another matter."""

HELPED_RATIO = 1.1
"""Caps helped when who starved uses at least this many times what it did before."""

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
    def used(self) -> float:
        """Share of the device it uses."""

    @property
    def score(self) -> float:
        """Its health."""

    @property
    def helpable(self) -> bool:
        """Whether its score counts."""


class Trial(NamedTuple):
    """When the caps appeared, or who was well under them starved again, and what who starved used of the device then.

    `others` is what best effort used before the caps.
    """

    began: float
    starved: float
    others: float


_NO_CAPS: Mapping[JobId, Cap] = {}
_NO_TIMES: Mapping[JobId, float] = {}


class BestEffort(NamedTuple):
    """What is remembered: the share all of them get together (None: free), trim and its safe level, caps.

    `protects` are the jobs that starved since the caps appeared, `steady` what training consumed then; `pressed_at` is
    when somebody last starved, `reach` what the device does under the present mix (share of its stated capacity);
    `idle_since` is when each cgroup stopped pressing. `trial` remembers how it all began.
    """

    total: float | None = None
    trim: float = 1.0
    safe: float = 1.0
    caps: Mapping[JobId, Cap] = _NO_CAPS
    protects: frozenset[JobId] = frozenset()
    steady: float = 0.0
    pressed_at: float = -inf
    reach: float = 1.0
    idle_since: Mapping[JobId, float] = _NO_TIMES
    trial: Trial | None = None
    futile_until: float = -inf


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
    if not (neighbours and switches.best_effort and switches.cap_others):
        return _free(before)
    protects = (before.protects | victims) & {m.job for m in members}
    if (switches.gate and not protects) or (before.total is None and not is_open):
        return _free(before)
    found = _trial(moment.now, protects, members, neighbours)
    trial = before.trial or found
    if victims and moment.now - before.pressed_at > WELL_SECONDS:
        trial = found._replace(others=trial.others)
    if moment.now < before.futile_until:
        return _free(before)
    if victims and _futile(trial, found):
        return BestEffort(futile_until=moment.now + FUTILE_SECONDS[1])
    steady = sum(m.want if m.steady is None else m.steady for m in members)
    reach = _reach(before.reach, members, neighbours, pressed=bool(victims), moment=moment)
    trim, safe = before.trim, before.safe
    if steady < RELIEF_RATIO * before.steady:
        safe = settings.neighbour_trim_ceiling
    if victims:
        trim, safe = _cut(trim, safe, moment.now - before.pressed_at, moment.dt, settings)
    elif min((m.score for m in members if m.helpable), default=100.0) > settings.healthy_score:
        trim, safe = _raise(trim, safe, moment.dt, settings)
    left = max(0.0, settings.usable * min(reach, moment.available) - sum(m.want for m in members)) * trim
    target = clip(left, settings.floor, settings.ceiling) if switches.bounds else left
    total = target if before.total is None else min(target, before.total + settings.neighbour_raise * reach * moment.dt)
    caps, idle = _share(before, neighbours, total, moment.now, settings)
    if not is_open and (not caps or total >= settings.ceiling):
        return _free(before)
    pressed_at = moment.now if victims else before.pressed_at
    steady = steady if victims else before.steady
    return BestEffort(total, trim, safe, caps, protects, steady, pressed_at, reach, idle, trial)


def _free(before: BestEffort) -> BestEffort:
    """No caps; only that they were of no use is remembered."""
    return BestEffort(futile_until=before.futile_until)


def _trial(
    now: float, protects: frozenset[JobId], members: Sequence[Trainee], neighbours: Sequence[Neighbour]
) -> Trial:
    return Trial(now, sum(m.used for m in members if m.job in protects), sum(n.used for n in neighbours))


def _futile(began: Trial, now: Trial) -> bool:
    """Whether best effort was cut to half and more for a while, and who starves gained nothing from it."""
    return (
        now.began - began.began >= FUTILE_SECONDS[0]
        and now.others < 0.5 * began.others
        and now.starved < HELPED_RATIO * began.starved
    )


def _reach(
    before: float, members: Sequence[Trainee], neighbours: Sequence[Neighbour], *, pressed: bool, moment: Moment
) -> float:
    """What the device can do: what it is seen to do while somebody starves, at least what it does at any time."""
    total = sum(m.used for m in members) + sum(n.used for n in neighbours) + 1.0 - moment.available
    if total >= before:
        return min(1.0, total)
    down, up = REACH_SECONDS
    if pressed:
        return before + gain(moment.dt, down) * (total - before)
    return before + gain(moment.dt, up) * (1.0 - before)


def _cut(trim: float, safe: float, since: float, dt: float, settings: PolicySettings) -> tuple[float, float]:
    """(trim, safe level) while somebody starves; `since` the last victim tells whether this is a new episode."""
    low = settings.neighbour_trim_floor
    if since > EPISODE_SECONDS:
        safe = max(low, SAFE_RATIO * min(trim, safe))
    return max(low, trim * settings.neighbour_cut**dt), safe


def _raise(trim: float, safe: float, dt: float, settings: PolicySettings) -> tuple[float, float]:
    """(trim, safe level) while everybody is well."""
    trim = min(settings.neighbour_trim_ceiling, trim + (QUICK_RAISE if trim < safe else SLOW_RAISE) * dt)
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
