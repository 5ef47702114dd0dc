"""The elastic pool of one device (paper, section 3): 85 % regular shares, 15 % lent for a while to who is short.

Shares are fractions of the device's capacity. What always holds, for every input: regular shares sum to at most
`regular`, loans to at most `elastic`, nothing is negative, a running loan is never taken away early, no loan outlives
its time, and nobody is served before somebody with a lower score who waits.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from agent.types import Entitlement, JobId, Loan, Medium, PoolState, Slot, make

TIGHT_SCORE = 60.0
"""Only a job below this score may borrow (paper, section 3)."""


@dataclass(frozen=True, slots=True)
class PoolSettings:
    """Sizes as shares, times in seconds.

    A loan lasts `loan_iterations` of the borrower and at least `loan_seconds`; when the borrower's iterations stop it
    ends after `limit_seconds` all the same. Shortfalls and rests below `smallest` are not lent.
    """

    regular: float = 0.85
    elastic: float = 0.15
    loan_iterations: Mapping[Medium, int] = field(
        default_factory=lambda: {Medium.SSD: 3, Medium.HDD: 3, Medium.REMOTE: 3}
    )
    loan_seconds: float = 1.5
    limit_seconds: float = 15.0
    smallest: float = 0.002

    def __post_init__(self) -> None:
        """Raise ValueError unless both parts are positive and sum to at most 1."""
        if self.regular <= 0.0 or self.elastic < 0.0 or self.regular + self.elastic > 1.0 + 1e-9:
            raise ValueError(
                f"regular part {self.regular:g} and elastic part {self.elastic:g} do not fit into 1; "
                "use for example 0.85 and 0.15"
            )


class Claim(NamedTuple):
    """One job's wish on one device: total share wanted, score 0..100, cumulative iterations; who may borrow."""

    job: JobId
    want: float
    score: float
    iteration: int
    weight: float = 1.0
    may_borrow: bool = True


_NOBODY: Mapping[JobId, float] = {}


class Pool(NamedTuple):
    """The loans that run, oldest first, and since when each job below the tight level has been waiting (seconds)."""

    loans: tuple[Loan, ...] = ()
    waiting: Mapping[JobId, float] = _NOBODY


def fill(
    wants: Mapping[JobId, float], capacity: float, weights: Mapping[JobId, float] | None = None
) -> dict[JobId, float]:
    """Weighted max-min shares, summing to at most `capacity`: what one does not want goes to the others."""
    rest = max(0.0, capacity)
    weigh = weights or {}
    order = []
    for job, want in wants.items():
        wanted, weight = max(0.0, want), weigh.get(job, 1.0)
        order.append((wanted / weight, job, wanted, weight))
    order.sort()
    left = sum([weight for _, _, _, weight in order])
    shares: dict[JobId, float] = {}
    for _, job, wanted, weight in order:
        share = min(wanted, rest * weight / left) if left > 0.0 else 0.0
        shares[job] = share
        rest = max(0.0, rest - share)
        left -= weight
    return shares


def lent_by_job(loans: Iterable[Loan]) -> dict[JobId, float]:
    """What each borrower holds in all, as shares."""
    lent: dict[JobId, float] = {}
    for loan in loans:
        lent[loan.job] = lent.get(loan.job, 0.0) + loan.share
    return lent


def borrowed(pools: Mapping[str, PoolState]) -> dict[Slot, float]:
    """What each job holds of each device's pool: the parts of `PoolState.lent`, while control is active or not.

    An entitlement's second part is not always that: best effort may use what nobody borrows, until somebody does.
    """
    return {(job, device): share for device, pool in pools.items() for job, share in lent_by_job(pool.loans).items()}


def run_out(pool: Pool, iterations: Mapping[JobId, int], now: float, settings: PoolSettings) -> tuple[Pool, PoolState]:
    """(pool, its state) while nobody wants anything: no regular shares, no waiting, and loans that only run out."""
    loans = tuple(running(pool.loans, iterations, now, settings)) if pool.loans else ()
    return Pool(loans), PoolState(settings.elastic, sum(lent_by_job(loans).values()), 0.0, loans)


def running(loans: Sequence[Loan], iterations: Mapping[JobId, int], now: float, settings: PoolSettings) -> list[Loan]:
    """The loans that have not run out at `now`; those of jobs without an entry in `iterations` are gone with them."""
    return [
        loan
        for loan in loans
        if loan.job in iterations
        and now < loan.granted_at + settings.limit_seconds
        and (now < loan.expires_at or iterations[loan.job] < loan.expires_iteration)
    ]


def lend(
    claims: Sequence[Claim],
    shortfalls: Mapping[JobId, float],
    pool: Pool,
    now: float,
    *,
    device: str,
    medium: Medium,
    settings: PoolSettings,
    available: float = 1.0,
) -> Pool:
    """Expire what has run out, then serve who is short: lowest score first, first come first served among equals.

    A loan that ran out this moment competes like any other request, which is its renewal: the borrower gets it back
    only while it is still tight and what sicker ones leave. `shortfalls` is what each wants beyond its regular share
    and its running loans; `available` < 1 shrinks the pool by what unmanaged traffic takes of the device.
    """
    loans: list[Loan] = []
    if pool.loans:
        loans = running(pool.loans, {claim.job: claim.iteration for claim in claims}, now, settings)
    held = lent_by_job(loans)
    asking: dict[JobId, Claim] = {}
    short: dict[JobId, float] = {}
    for claim in claims:
        if claim.score >= TIGHT_SCORE or not claim.may_borrow:
            continue
        missing = shortfalls.get(claim.job, 0.0) - held.get(claim.job, 0.0)
        if missing > settings.smallest:
            asking[claim.job], short[claim.job] = claim, missing
    if not asking:
        return Pool(tuple(loans))
    free = settings.elastic * max(0.0, min(1.0, available)) - sum(loan.share for loan in loans)
    waiting = {job: pool.waiting.get(job, now) for job in asking}
    for job in sorted(asking, key=lambda job: (asking[job].score, waiting[job], job)):
        share = min(short[job], free)
        if share <= settings.smallest:
            break
        until = asking[job].iteration + settings.loan_iterations[medium]
        loans.append(Loan(job, device, share, now, now + settings.loan_seconds, until))
        free -= share
        if share >= short[job] - settings.smallest:
            del waiting[job]
    return Pool(tuple(loans), waiting)


def allocate(
    claims: Sequence[Claim],
    pool: Pool,
    now: float,
    *,
    device: str,
    medium: Medium,
    settings: PoolSettings,
    available: float = 1.0,
) -> tuple[Pool, dict[JobId, Entitlement], PoolState]:
    """Max-min fill of the regular part by want, then loans for those still short: (pool, entitlements, its state)."""
    room = max(0.0, min(1.0, available))
    wants = {claim.job: claim.want for claim in claims}
    regular = fill(wants, settings.regular * room, {claim.job: claim.weight for claim in claims})
    shortfalls = {job: wants[job] - share for job, share in regular.items()}
    new = lend(claims, shortfalls, pool, now, device=device, medium=medium, settings=settings, available=available)
    lent = lent_by_job(new.loans)
    entitlements = {job: make(Entitlement, (share, lent.get(job, 0.0))) for job, share in regular.items()}
    state = PoolState(settings.elastic, sum(lent.values()), sum(regular.values()), new.loans)
    return new, entitlements, state
