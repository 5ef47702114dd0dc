import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from agent.pool import Claim, Pool, PoolSettings, allocate, fill, lend
from agent.types import Medium
from tests.unit.agent.builders import SSD

SETTINGS = PoolSettings()


def one_step(claims, pool=None, now=0.0, pool_settings=SETTINGS, **changes):
    return allocate(
        claims, pool or Pool(), now, **({"device": SSD, "medium": Medium.SSD, "settings": pool_settings} | changes)
    )


def loans_of(pool):
    return {loan.job: round(loan.share, 6) for loan in pool.loans}


class TestFill:
    def test_max_min_by_hand(self):
        """0.85 among 0.1, 0.3, 0.9: the first two get what they want, the third the rest."""
        assert fill({1: 0.1, 2: 0.3, 3: 0.9}, 0.85) == pytest.approx({1: 0.1, 2: 0.3, 3: 0.45})

    def test_equals_share_equally(self):
        assert fill({1: 1.0, 2: 1.0}, 0.85) == pytest.approx({1: 0.425, 2: 0.425})

    def test_weights(self):
        assert fill({1: 1.0, 2: 1.0}, 0.9, {1: 200.0, 2: 100.0}) == pytest.approx({1: 0.6, 2: 0.3})

    def test_nothing_to_divide(self):
        assert fill({}, 0.85) == {}
        assert fill({1: -1.0, 2: 0.5}, -0.1) == {1: 0.0, 2: 0.0}

    @given(st.dictionaries(st.integers(0, 50), st.floats(0, 2)), st.floats(0, 1))
    def test_nobody_is_short_while_another_has_more(self, wants, capacity):
        shares = fill(wants, capacity)
        assert sum(shares.values()) <= capacity + 1e-9
        for job, share in shares.items():
            assert 0.0 <= share <= wants[job] + 1e-12
            if share < wants[job] - 1e-9:
                assert all(other <= share + 1e-9 for other in shares.values())


class TestLoans:
    def test_the_short_and_tight_borrow(self):
        claims = [Claim(1, 0.6, 30.0, 10), Claim(2, 0.35, 90.0, 10)]
        pool, entitlements, state = one_step(claims)
        assert entitlements[1].regular == pytest.approx(0.5)
        assert entitlements[1].loan == pytest.approx(0.1)
        assert entitlements[2].loan == 0.0
        assert state.regular == pytest.approx(0.85)
        assert state.lent == pytest.approx(0.1)
        assert pool.waiting == {}

    def test_lowest_score_first(self):
        claims = [Claim(1, 0.55, 50.0, 0), Claim(2, 0.55, 20.0, 0)]
        pool, _, _ = one_step(claims)
        assert loans_of(pool) == {2: 0.125, 1: 0.025}
        assert set(pool.waiting) == {1}

    def test_first_come_first_served_among_equals(self):
        """7 has waited longer than 3, whose id is lower."""
        pool = Pool((), {7: 1.0, 3: 2.0})
        claims = [Claim(3, 0.6, 40.0, 0), Claim(7, 0.6, 40.0, 0)]
        pool, _, _ = one_step(claims, pool, now=5.0)
        assert loans_of(pool) == {7: 0.15}
        assert pool.waiting == {3: 2.0, 7: 1.0}

    def test_ties_are_deterministic(self):
        claims = [Claim(7, 0.6, 40.0, 0), Claim(3, 0.6, 40.0, 0)]
        assert loans_of(one_step(claims)[0]) == loans_of(one_step(claims[::-1])[0]) == {3: 0.15}

    def test_a_running_loan_is_not_taken_for_a_sicker_job(self):
        pool, _, _ = one_step([Claim(1, 1.0, 50.0, 0)])
        pool, _, _ = one_step([Claim(1, 1.0, 50.0, 1), Claim(2, 1.0, 5.0, 0)], pool, now=0.5)
        assert loans_of(pool) == {1: 0.15}
        assert 2 in pool.waiting

    def test_cooldown_is_three_iterations_and_at_least_the_time(self):
        pool, _, _ = one_step([Claim(1, 1.0, 50.0, 100)])
        assert pool.loans[0].expires_iteration == 103
        assert loans_of(one_step([Claim(1, 0.0, 90.0, 103)], pool, now=1.0)[0]) == {1: 0.15}
        assert loans_of(one_step([Claim(1, 0.0, 90.0, 102)], pool, now=2.0)[0]) == {1: 0.15}
        assert loans_of(one_step([Claim(1, 0.0, 90.0, 103)], pool, now=2.0)[0]) == {}

    def test_the_cooldown_is_configurable_by_medium(self):
        slow = PoolSettings(loan_iterations={Medium.SSD: 3, Medium.HDD: 6})
        pool, _, _ = one_step([Claim(1, 1.0, 50.0, 0)], pool_settings=slow, medium=Medium.HDD)
        assert pool.loans[0].expires_iteration == 6

    def test_when_iterations_stop_the_clock_ends_the_loan(self):
        pool, _, _ = one_step([Claim(1, 1.0, 50.0, 0)])
        assert loans_of(one_step([Claim(1, 0.0, 50.0, 0)], pool, now=14.9)[0]) == {1: 0.15}
        assert loans_of(one_step([Claim(1, 0.0, 50.0, 0)], pool, now=15.0)[0]) == {}

    def test_renewed_while_tight_and_nobody_sicker_waits(self):
        pool, _, _ = one_step([Claim(1, 1.0, 50.0, 0)])
        renewed, _, _ = one_step([Claim(1, 1.0, 50.0, 3)], pool, now=2.0)
        assert renewed.loans[0].granted_at == 2.0
        recovered, _, _ = one_step([Claim(1, 1.0, 60.0, 3)], pool, now=2.0)
        assert loans_of(recovered) == {}
        sicker, _, _ = one_step([Claim(1, 1.0, 50.0, 3), Claim(2, 1.0, 10.0, 0)], pool, now=2.0)
        assert loans_of(sicker) == {2: 0.15}

    def test_a_job_that_vanished_frees_its_share_at_once(self):
        pool, _, _ = one_step([Claim(1, 1.0, 50.0, 0)])
        pool, _, _ = one_step([Claim(2, 1.0, 50.0, 0)], pool, now=0.1)
        assert loans_of(pool) == {2: 0.15}

    def test_who_may_not_borrow_does_not(self):
        assert loans_of(one_step([Claim(1, 1.0, 10.0, 0, may_borrow=False)])[0]) == {}

    def test_unmanaged_traffic_is_taken_off(self):
        pool, entitlements, _ = one_step([Claim(1, 1.0, 10.0, 0)], available=0.5)
        assert entitlements[1].regular == pytest.approx(0.425)
        assert loans_of(pool) == {1: 0.075}

    def test_the_rest_of_a_partial_loan_is_served_when_the_pool_fills(self):
        first = Claim(1, 0.56, 20.0, 0)
        second = Claim(2, 0.56, 40.0, 0)
        pool, _, _ = one_step([first, second])
        assert loans_of(pool)[2] == pytest.approx(0.015)
        pool, _, _ = one_step([Claim(1, 0.1, 80.0, 9), Claim(2, 0.85, 40.0, 1)], pool, now=2.0)
        assert sum(loan.share for loan in pool.loans if loan.job == 2) == pytest.approx(0.1)

    def test_parts_must_fit(self):
        with pytest.raises(ValueError, match="do not fit"):
            PoolSettings(regular=0.9, elastic=0.15)


def order_holds(claims, before, after):
    """Nobody was served this step while somebody sicker, who asked for more, was left waiting."""
    new = [loan for loan in after.loans if loan not in before.loans]
    scores = {claim.job: claim.score for claim in claims}
    waiting = [scores[job] for job in after.waiting]
    return all(scores[loan.job] <= score for loan in new for score in waiting)


class Walk:
    """A random life of one pool: jobs come, go, iterate, fall sick and recover; checked after each step."""

    def __init__(self, seed):
        self.random = random.Random(seed)
        self.now = 0.0
        self.pool = Pool()
        self.jobs = {}
        self.serial = 0

    def step(self):
        draw = self.random
        self.now += draw.choice((0.0, 0.02, 0.1, 0.1, 1.0, 20.0)) if draw.random() < 0.9 else draw.random()
        if len(self.jobs) < 8 and draw.random() < 0.1:
            self.serial += 1
            self.jobs[self.serial] = 0
        if self.jobs and draw.random() < 0.05:
            del self.jobs[draw.choice(list(self.jobs))]
        claims = []
        for job in self.jobs:
            self.jobs[job] += draw.choice((0, 0, 1, 2))
            score = draw.choice((5.0, 30.0, 30.0, 59.9, 60.0, 90.0))
            claims.append(
                Claim(
                    job,
                    draw.random() ** 2 * 1.5,
                    score,
                    self.jobs[job],
                    draw.choice((50.0, 100.0)),
                    draw.random() < 0.9,
                )
            )
        available = 1.0 if draw.random() < 0.8 else draw.random()
        before = self.pool
        self.pool, entitlements, state = one_step(claims, before, self.now, available=available)
        self.check(claims, before, entitlements, state)

    def check(self, claims, before, entitlements, state):
        assert sum(one.regular for one in entitlements.values()) <= 0.85 + 1e-9
        assert sum(loan.share for loan in self.pool.loans) <= 0.15 + 1e-9
        assert state.lent <= 0.15 + 1e-9
        assert all(one.regular >= 0.0 and one.loan >= 0.0 for one in entitlements.values())
        iterations = {claim.job: claim.iteration for claim in claims}
        for loan in self.pool.loans:
            assert loan.share > 0.0
            assert loan.job in iterations
            assert self.now < loan.granted_at + SETTINGS.limit_seconds
            assert self.now < loan.expires_at or iterations[loan.job] < loan.expires_iteration
        for loan in before.loans:
            over = (
                loan.job not in iterations
                or self.now >= loan.granted_at + SETTINGS.limit_seconds
                or (self.now >= loan.expires_at and iterations[loan.job] >= loan.expires_iteration)
            )
            assert over or loan in self.pool.loans
        assert order_holds(claims, before, self.pool)


def test_fifty_thousand_random_steps():
    walk = Walk(seed=20240607)
    for _ in range(50_000):
        walk.step()


@pytest.mark.nightly
@pytest.mark.parametrize("seed", range(10))
def test_a_million_random_steps(seed):
    walk = Walk(seed)
    for _ in range(100_000):
        walk.step()


class PoolMachine(RuleBasedStateMachine):
    """The same invariants, with hypothesis looking for the shortest life that breaks one."""

    steps = 0

    def __init__(self):
        super().__init__()
        self.walk = Walk(0)
        self.claims = {}

    @rule(job=st.integers(0, 5), want=st.floats(0, 2), score=st.floats(0, 100), borrow=st.booleans())
    def claim(self, job, want, score, borrow):
        before = self.claims.get(job)
        self.claims[job] = Claim(job, want, score, before.iteration if before else 0, may_borrow=borrow)

    @rule(job=st.integers(0, 5), count=st.integers(1, 4))
    def iterate(self, job, count):
        if job in self.claims:
            old = self.claims[job]
            self.claims[job] = Claim(job, old.want, old.score, old.iteration + count, may_borrow=old.may_borrow)

    @rule(job=st.integers(0, 5))
    def vanish(self, job):
        self.claims.pop(job, None)

    @rule(dt=st.floats(0, 20), available=st.floats(0, 1))
    def step(self, dt, available):
        self.walk.now += dt
        before = self.walk.pool
        claims = list(self.claims.values())
        self.walk.pool, entitlements, state = one_step(claims, before, self.walk.now, available=available)
        self.walk.check(claims, before, entitlements, state)

    @invariant()
    def never_overlent(self):
        PoolMachine.steps += 1
        assert sum(loan.share for loan in self.walk.pool.loans) <= 0.15 + 1e-9


@pytest.mark.parametrize("part", [1, *[pytest.param(part, marks=pytest.mark.nightly) for part in range(2, 21)]])
def test_no_life_that_hypothesis_finds_breaks_a_rule(part):
    """Fifty thousand steps of the machine, whatever rule they take; by night twenty times as many."""
    del part
    PoolMachine.steps = 0
    some = settings(max_examples=500, stateful_step_count=100, deadline=None, database=None)
    while PoolMachine.steps < 50_000:
        run_state_machine_as_test(PoolMachine, settings=some)


def test_lend_alone_counts_running_loans_as_served():
    claims = [Claim(1, 0.0, 10.0, 0)]
    options = {"device": SSD, "medium": Medium.SSD, "settings": SETTINGS}
    pool = lend(claims, {1: 0.1}, Pool(), 0.0, **options)
    again = lend(claims, {1: 0.1}, pool, 0.1, **options)
    assert again.loans == pool.loans
