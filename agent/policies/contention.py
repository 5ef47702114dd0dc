"""One device under the adaptive policy: who starves for lack of it, who may use how much, and whom to cap.

Learned on a real kernel (policy prototype, 82 runs): io.max only caps, so a job that waits because others use the
device is helped by capping the others; caps on jobs that keep within their share only make stalls of their own; the
neighbour's cap is what need leaves over, times a trim that is cut at once and raised slowly.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import inf
from typing import NamedTuple

from agent import pool as elastic
from agent.policies.base import Moment, PolicySettings
from agent.policies.best_effort import BestEffort, Neighbour, guard
from agent.policies.caps import Cap, bounded, follow
from agent.pool import Claim, Pool, fill
from agent.types import DeviceInfo, DeviceView, Entitlement, JobId, PoolState, Quota, make

VICTIM_RATIO = 0.95
"""A job is short when it receives less than this part of its fair need (policy prototype)."""

OVER_RATIO = 1.1
"""A job is over its share when it uses more than this many times its fair part (policy prototype)."""

OTHERS_SHARE = 0.05
"""Where others use less of the device than this there is nothing to win by capping them."""

FIRST_CUT = 0.5
"""The first cap on a job that takes too much while others starve, as a part of what it uses."""

REOPEN_SECONDS = 5.0
"""A gate that opens again within this time after closing is held twice as long."""


class Member(NamedTuple):
    """One training job on this device; shares of the device.

    `want` is its need with trim and refill, `steady` the need without refill (None: unknown), `used` what it achieves.
    `actionable`: more local bandwidth can help it. `confident`: its score is known well enough to act on. `full`: its
    queue is. `lasts`: seconds until its queue is empty at what it receives now.
    """

    job: JobId
    want: float
    steady: float | None
    used: float
    score: float
    iteration: int
    weight: float
    actionable: bool = True
    confident: bool = True
    full: bool = False
    lasts: float = inf

    @property
    def helpable(self) -> bool:
        """Whether it may be a victim, and its score moves the caps of others."""
        return self.actionable and self.confident


_NO_CAPS: Mapping[JobId, Cap] = {}
_NO_TIMES: Mapping[JobId, float] = {}


class Bounds(NamedTuple):
    """What caps on training go by, by job: entitlement, fair part by weight, the larger of the two, some first caps."""

    entitled: Mapping[JobId, float]
    fair: Mapping[JobId, float]
    due: Mapping[JobId, float]
    first: Mapping[JobId, float]


class DeviceState(NamedTuple):
    """What is remembered of one device. Times in monotonic seconds; `starved_at` is when each job was last a victim."""

    open_until: float = -inf
    hold: float = 0.0
    pool: Pool = Pool()
    caps: Mapping[JobId, Cap] = _NO_CAPS
    best_effort: BestEffort = BestEffort()
    starved_at: Mapping[JobId, float] = _NO_TIMES


class Outcome(NamedTuple):
    """What was decided for one device."""

    state: DeviceState
    quotas: Mapping[JobId, Quota]
    entitlements: Mapping[JobId, Entitlement]
    pool: PoolState
    open: bool
    victims: frozenset[JobId]


def decide(
    before: DeviceState,
    device: DeviceView,
    members: Sequence[Member],
    neighbours: Sequence[Neighbour],
    *,
    moment: Moment,
    settings: PolicySettings,
) -> Outcome:
    """Victims, then gate, entitlements, caps on training, caps on best effort."""
    victims = find_victims(members, neighbours, moment.available, settings)
    until, hold = _gate(before, bool(victims), moment.now, settings)
    is_open = moment.now < until or not settings.switches.gate
    pool, entitlements, lent = _entitle(
        before.pool, device.info, members, is_open=is_open, moment=moment, settings=settings
    )
    caps: dict[JobId, Cap] = {}
    starved_at = _starved_at(before.starved_at, victims, moment.now, settings)
    best_effort = guard(
        before.best_effort, members, neighbours, victims=victims, is_open=is_open, moment=moment, settings=settings
    )
    if is_open and settings.switches.cap_others and _may_cap(device, settings):
        fair = _fair_parts(members, moment.available, settings)
        due = {m.job: max(fair[m.job], entitlements[m.job].share) for m in members}
        first = _first_caps(members, neighbours, due, settings.usable * moment.available) if victims else {}
        spared = _spared(before.caps, members, victims, starved_at, due)
        spared |= _sheltered(before.caps, best_effort, neighbours, members, due)
        entitled = {job: one.share for job, one in entitlements.items()}
        bounds = Bounds(entitled, fair, due, first)
        caps = _training_caps(before.caps, members, spared, bounds, now=moment.now, settings=settings)
    quotas = {job: _quota(cap, before.caps.get(job), "over its share or healthy") for job, cap in caps.items()}
    for job, cap in best_effort.caps.items():
        quotas[job] = _quota(cap, before.best_effort.caps.get(job), "what need leaves over")
    shares = entitlements | _left_over(entitlements, best_effort.caps, lent, settings)
    state = DeviceState(until, hold, pool, caps, best_effort, starved_at)
    return Outcome(state, quotas, shares, lent, is_open, victims)


def find_victims(
    members: Sequence[Member], neighbours: Sequence[Neighbour], available: float, settings: PolicySettings
) -> frozenset[JobId]:
    """Jobs that starve, or are about to, and receive less than their fair need, while others use the device.

    The fair need is the job's part in a max-min division of the whole device by need.
    """
    sick = [m for m in members if m.score < settings.healthy_score and m.helpable and _starves(m, settings)]
    if not sick:
        return frozenset()
    fair = _needed(members, settings.usable * available)
    total = sum([m.used for m in members]) + sum([n.used for n in neighbours])
    return frozenset([m.job for m in sick if m.used < VICTIM_RATIO * fair[m.job] and total - m.used > OTHERS_SHARE])


def _needed(members: Sequence[Member], usable: float) -> dict[JobId, float]:
    """Each job's part in a max-min division of the device by need."""
    return fill({m.job: m.want for m in members}, usable, {m.job: m.weight for m in members})


def _starves(m: Member, settings: PolicySettings) -> bool:
    """Whether a job that is not healthy is tight or about to be: the score follows a draining queue with a delay."""
    return m.score < settings.tight_score or m.lasts < settings.foresight_seconds


def _gate(before: DeviceState, victims: bool, now: float, settings: PolicySettings) -> tuple[float, float]:
    """(open until, hold time): each victim holds the gate open; one that opens again soon is held longer."""
    hold = before.hold or settings.hold_seconds
    if not victims:
        return before.open_until, hold
    if now >= before.open_until:
        again = now - before.open_until < REOPEN_SECONDS
        hold = min(2.0 * hold, settings.longest_hold_seconds) if again else settings.hold_seconds
    return now + hold, hold


def _starved_at(
    before: Mapping[JobId, float], victims: frozenset[JobId], now: float, settings: PolicySettings
) -> dict[JobId, float]:
    """When each job was last a victim, of those that were lately: they refill their queues and stay uncapped."""
    recent = {job: at for job, at in before.items() if now - at < settings.longest_hold_seconds} if before else {}
    return recent | dict.fromkeys(victims, now) if victims else recent


def _may_cap(device: DeviceView, settings: PolicySettings) -> bool:
    """Whether training jobs may be capped on this medium: on HDD own caps only harm (policy prototype)."""
    return settings.training_caps[device.info.medium] or not settings.switches.media


def _entitle(
    pool: Pool,
    info: DeviceInfo,
    members: Sequence[Member],
    *,
    is_open: bool,
    moment: Moment,
    settings: PolicySettings,
) -> tuple[Pool, dict[JobId, Entitlement], PoolState]:
    """Regular shares and loans; behind a closed gate nobody is entitled to anything, and loans only run out."""
    if not settings.switches.allocation:
        equal = settings.pool.regular / max(1, len(members))
        shares = {m.job: Entitlement(equal) for m in members if is_open}
        return Pool(), shares, PoolState(settings.pool.elastic, 0.0, equal * len(members))
    if not is_open:
        iterations = {m.job: m.iteration for m in members} if pool.loans else {}
        new, lent = elastic.run_out(pool, iterations, moment.now, settings.pool)
        return new, {}, lent
    claims = [make(Claim, (m.job, m.want, m.score, m.iteration, m.weight, m.helpable)) for m in members]
    return elastic.allocate(
        claims,
        pool,
        moment.now,
        device=info.device,
        medium=info.medium,
        settings=settings.pool,
        available=moment.available,
    )


def _fair_parts(members: Sequence[Member], available: float, settings: PolicySettings) -> dict[JobId, float]:
    """Each job's part of what is handed out, by weight alone."""
    weights = sum(m.weight for m in members)
    return {m.job: settings.usable * available * m.weight / weights for m in members}


def _first_caps(
    members: Sequence[Member], neighbours: Sequence[Neighbour], due: Mapping[JobId, float], usable: float
) -> dict[JobId, float]:
    """The first caps on jobs that take too much while others starve, by job: half of what they use.

    A job that restarts with many workers has most of the device for a second or two, and a first cap that does not bite
    leaves it that: in the lab the jobs of ssd-flood waited 2.2 ms with one, 1.7 with this one (seed 1).
    Never below its fair need, and not where best effort takes more than the job would lose.
    """
    over = [m for m in members if m.used > OVER_RATIO * due[m.job]]
    if not over:
        return {}
    theirs = sum(n.used for n in neighbours)
    needed = _needed(members, usable)
    kept = {m.job: max(due[m.job], needed[m.job]) for m in over}
    return {m.job: max(kept[m.job], FIRST_CUT * m.used) for m in over if m.used - kept[m.job] >= theirs}


def _spared(
    before: Mapping[JobId, Cap],
    members: Sequence[Member],
    victims: frozenset[JobId],
    starved_at: Mapping[JobId, float],
    due: Mapping[JobId, float],
) -> frozenset[JobId]:
    """Who is not capped: victims, and recent ones but for those that took more than their share while others starve.

    Such a one keeps its cap until nobody starves: under the cap it no longer takes too much, and would at once again.
    """
    spared = set(victims)
    for m in members:
        over = m.used > OVER_RATIO * due[m.job]
        if m.job in starved_at and not (victims and (over or m.job in before)):
            spared.add(m.job)
    return frozenset(spared)


def _sheltered(
    before: Mapping[JobId, Cap],
    best_effort: BestEffort,
    neighbours: Sequence[Neighbour],
    members: Sequence[Member],
    due: Mapping[JobId, float],
) -> frozenset[JobId]:
    """Who starved since best effort is capped, and takes less beyond its due than best effort takes in all.

    Such a job needs what it takes. Once it is well again, a cap on it helps those that still starve less than a lower
    one on best effort does, and makes a stall of its own with its next burst. One that was capped for taking too much
    (`before`) stays so.
    """
    theirs = sum(n.used for n in neighbours)
    if theirs <= OTHERS_SHARE:
        return frozenset()
    starved = best_effort.protects - before.keys()
    return frozenset(m.job for m in members if m.job in starved and m.used - due[m.job] < theirs)


def _training_caps(
    before: Mapping[JobId, Cap],
    members: Sequence[Member],
    spared: frozenset[JobId],
    bounds: Bounds,
    *,
    now: float,
    settings: PolicySettings,
) -> dict[JobId, Cap]:
    """Caps on who is over its share and on healthy jobs; never on recent victims nor where the controller is frozen."""
    caps: dict[JobId, Cap] = {}
    for m in members:
        if m.job in spared or not m.actionable:
            continue
        cap = _cap(m, before.get(m.job), bounds, now=now, settings=settings)
        if cap is not None:
            caps[m.job] = cap
    return caps


def _cap(m: Member, old: Cap | None, bounds: Bounds, *, now: float, settings: PolicySettings) -> Cap | None:
    """The cap of one job, or None.

    It never goes below what the job uses healthily within its fair part. A full queue is slack even where the latency
    of the crowded device lowers the score. A job that falls sick under its cap without wanting more than its fair part
    is released; one that wants more keeps to its entitlement, without the headroom that a well job has.
    """
    fair = bounds.fair[m.job]
    over = m.used > OVER_RATIO * bounds.due[m.job]
    slack = m.score > settings.healthy_score or (m.full and m.score >= settings.tight_score)
    healthy = slack and m.confident and m.used > settings.floor
    kept = old is not None and (m.score >= settings.tight_score or m.want > fair)
    if not (over or healthy or kept):
        return None
    enough = min(fair, m.used if m.steady is None else m.steady)
    gentle = settings.switches.gentle_writes and m.score >= settings.tight_score
    headroom = settings.headroom if gentle else 0.0
    target = bounded(max(bounds.entitled[m.job], enough) * (1.0 + headroom), settings)
    if target is None:
        return None
    first = bounds.first.get(m.job) if old is None else None
    return follow(old, target, m.used, now, settings) if first is None else Cap(max(first, target), now)


def _quota(cap: Cap, before: Cap | None, why: str) -> Quota:
    return Quota(cap.share, why, before is None or cap.share < before.share)


def _left_over(
    training: Mapping[JobId, Entitlement], caps: Mapping[JobId, Cap], lent: PoolState, settings: PolicySettings
) -> dict[JobId, Entitlement]:
    """Best effort is entitled to what is left of the regular part, and to the pool as far as nobody borrows it."""
    if not caps:
        return {}
    regular = max(0.0, settings.pool.regular - sum(one.regular for one in training.values()))
    spare = max(0.0, settings.pool.elastic - lent.lent)
    shares: dict[JobId, Entitlement] = {}
    for job, cap in caps.items():
        part = min(cap.share, regular)
        rest = min(cap.share - part, spare)
        shares[job] = Entitlement(part, rest)
        regular -= part
        spare -= rest
    return shares
