"""The policy `paper` against traces worked out by hand from the paper's text (section 3 and 4).

Gains are kp = 1 % per point and nothing else, so a score of 55 asks for +20 % and one of 90 for -15 %.
"""

import itertools
import random

import pytest

from agent.pid import PidGains
from agent.policies.base import PolicySettings, make_policy
from agent.types import JobView, Medium, NeighbourView
from tests.unit.agent.builders import HDD, SSD, device_signals, job_view, neighbour_view, node_view

PROPORTIONAL = PidGains(kp=0.01, ki=0.0, kd=0.0, filter_seconds=0.0)
SETTINGS = PolicySettings(gains=dict.fromkeys(Medium, PROPORTIONAL))


class Trace:
    """Steps of the policy one second apart; `iterations` counts for all jobs that are passed in."""

    def __init__(self, settings=SETTINGS):
        self.policy = make_policy("paper", settings)
        self.state = self.policy.initial()
        self.now, self.iteration = 0.0, 0

    def step(self, *jobs, neighbours=(), media=None, seconds=1.0, unmanaged=0.0):
        self.now += seconds
        self.iteration += 1
        views = [one._replace(signals=one.signals._replace(iterations=self.iteration)) for one in jobs]
        view = node_view(self.now, views, neighbours, unmanaged, media)
        self.state, decision = self.policy.step(self.state, view)
        return decision

    def quota(self, decision, number, device=SSD):
        return decision.quotas[number, device].share


def test_everybody_is_capped_from_the_start_with_equal_parts():
    """Three cgroups share 85 %: 0.28333 each; in the dead zone nothing moves."""
    trace = Trace()
    for _ in range(5):
        decision = trace.step(
            job_view(1, score=75.0), job_view(2, score=78.0), neighbours=(neighbour_view(9, used=0.2),)
        )
    assert {slot[0]: quota.share for slot, quota in decision.quotas.items()} == pytest.approx(
        {1: 0.85 / 3, 2: 0.85 / 3, 9: 0.85 / 3}
    )
    assert decision.gate_open == {SSD: True}


def test_trace_of_a_donor_and_a_borrower():
    """Job 1 scores 55 (error 20, +20 %), job 2 scores 90 (error -15, -15 %); both begin with 0.425.

    Step 1: job 2 falls to 0.425 * 0.85 = 0.36125, which frees 0.06375. Job 1 wants 0.425 * 1.2 = 0.51; the regular
    part gives 0.425 + 0.06375 = 0.48875, the pool lends the rest, 0.02125.
    Step 2: job 2 falls to 0.3070625, frees 0.0541875. Job 1 wants 0.51 * 1.2 = 0.612: regular 0.5429375, and of the
    0.0690625 beyond it holds 0.02125 and borrows 0.0478125 more.
    Step 3: job 2 falls to 0.26100313 and frees 0.04605938. Job 1 wants 0.7344: regular 0.58899688; of 0.14540313
    beyond it borrows what it does not hold yet.
    Step 4: job 2 falls to 0.22185266; job 1 wants 0.88128: regular 0.62814734. Its first loan (iteration 1 + 3) ran
    out and it asks for 0.25313266, more than there is: the pool lends all of its 0.15, so the total is 0.77814734.
    """
    trace = Trace()
    expected = [
        (0.48875, 0.02125, 0.36125, 0.51),
        (0.5429375, 0.0690625, 0.3070625, 0.612),
        (0.588996875, 0.145403125, 0.261003125, 0.7344),
        (0.62814734375, 0.15, 0.22185265625, 0.77814734375),
    ]
    for regular, loan, other, quota in expected:
        decision = trace.step(job_view(1, score=55.0), job_view(2, score=90.0))
        assert decision.entitlements[1, SSD].regular == pytest.approx(regular)
        assert decision.entitlements[1, SSD].loan == pytest.approx(loan)
        assert decision.entitlements[2, SSD].regular == pytest.approx(other)
        assert decision.entitlements[2, SSD].loan == 0.0
        assert trace.quota(decision, 1) == pytest.approx(quota)
        assert trace.quota(decision, 2) == pytest.approx(other)
    assert decision.pools[SSD].lent == pytest.approx(0.15)


def test_trace_of_a_loan_that_returns_by_itself():
    """Alone with 0.85 regular, job 1 can only borrow: at score 55 it wants 1.02 and gets all of the pool.

    Recovered (score 75, no output) it keeps the loan until 3 iterations after the grant, then falls back to 0.85.
    """
    trace = Trace()
    assert trace.quota(trace.step(job_view(1, score=55.0)), 1) == pytest.approx(1.0)
    assert trace.quota(trace.step(job_view(1, score=75.0)), 1) == pytest.approx(1.0)
    assert trace.quota(trace.step(job_view(1, score=75.0)), 1) == pytest.approx(1.0)
    decision = trace.step(job_view(1, score=75.0))
    assert trace.quota(decision, 1) == pytest.approx(0.85)
    assert decision.pools[SSD].lent == 0.0


def test_trace_of_the_lending_order():
    """Two jobs want 20 % more of 0.425, 0.085 each: the sicker gets all of it, the other the remaining 0.065."""
    trace = Trace()
    decision = trace.step(job_view(1, score=50.0), job_view(2, score=30.0))
    assert decision.entitlements[2, SSD].loan == pytest.approx(0.085)
    assert decision.entitlements[1, SSD].loan == pytest.approx(0.065)


def test_between_60_and_70_a_job_asks_but_may_not_borrow():
    """Score 65 asks for +10 % but is not tight: with no regular share free nothing changes."""
    trace = Trace()
    decision = trace.step(job_view(1, score=65.0), job_view(2, score=75.0))
    assert decision.entitlements[1, SSD].share == pytest.approx(0.425)
    assert decision.pid[1, SSD].output == pytest.approx(0.1)


def test_a_job_acts_only_at_the_end_of_its_iteration():
    trace = Trace()
    trace.step(job_view(1, score=75.0), job_view(2, score=75.0))
    for _ in range(5):
        decision = trace.step(job_view(1, score=20.0, new_iteration=False), job_view(2, score=75.0))
    assert trace.quota(decision, 1) == pytest.approx(0.425)
    assert trace.quota(trace.step(job_view(1, score=20.0), job_view(2, score=75.0)), 1) > 0.425


def test_a_blocked_job_acts_by_the_timer():
    trace = Trace()
    blocked = job_view(1, score=20.0, new_iteration=False, blocked_seconds=3.0)
    trace.step(blocked, job_view(2, score=75.0))
    first = trace.quota(trace.step(blocked, job_view(2, score=75.0), seconds=0.5), 1)
    assert first == pytest.approx(0.425 * 1.2)
    assert trace.quota(trace.step(blocked, job_view(2, score=75.0), seconds=0.5), 1) > first


def test_the_first_cap_does_not_bite_and_steps_bind_later():
    """Found at 0.8 of the device, healthy: 0.8 at first, then 20 % steps at most, down to its quota."""
    trace = Trace()
    trace.step(job_view(2, score=75.0, used=0.1))
    views = [trace.step(job_view(1, score=79.0, used=0.8), job_view(2, score=75.0, used=0.1)) for _ in range(25)]
    quotas = [trace.quota(decision, 1) for decision in views]
    assert quotas[0] == pytest.approx(0.8, rel=0.21)
    assert all(later >= 0.8 * before - 1e-9 for before, later in itertools.pairwise(quotas))
    assert quotas[-1] == pytest.approx(views[-1].entitlements[1, SSD].share, rel=0.1)


def test_a_sick_job_keeps_what_its_first_cap_left():
    trace = Trace()
    quotas = [
        trace.quota(trace.step(job_view(1, score=40.0, used=0.6), job_view(2, score=75.0, used=0.4)), 1)
        for _ in range(10)
    ]
    assert quotas == sorted(quotas)
    assert quotas[-1] > quotas[0]


def test_a_newcomer_makes_room_in_one_step_of_twenty_percent():
    """One job holds 0.85; a second deserves 0.425 but at first gets what one step frees: 0.17."""
    trace = Trace()
    trace.step(job_view(1, score=75.0))
    decision = trace.step(job_view(1, score=75.0), job_view(2, score=75.0))
    assert decision.entitlements[1, SSD].regular == pytest.approx(0.68)
    assert decision.entitlements[2, SSD].regular == pytest.approx(0.17)


def test_a_job_that_vanishes_frees_its_share_at_once():
    trace = Trace()
    trace.step(job_view(1, score=20.0), job_view(2, score=75.0))
    decision = trace.step(job_view(1, score=20.0))
    assert set(decision.quotas) == {(1, SSD)}
    assert decision.entitlements[1, SSD].regular > 0.45


def test_best_effort_keeps_its_part_and_is_cut_at_once():
    trace = Trace()
    trace.step(job_view(1, score=75.0))
    decision = trace.step(job_view(1, score=30.0), neighbours=(neighbour_view(9, used=0.9),))
    assert decision.quotas[9, SSD].share == pytest.approx(decision.entitlements[9, SSD].regular)
    assert decision.quotas[9, SSD].share <= 0.85 / 2 + 1e-9


def test_two_media_are_merged_by_access_share():
    """SSD and HDD with gains of 1 % and 0.5 % per point, score 65: 0.75 * 10 % + 0.25 * 5 % = 8.75 % on both."""
    half = PidGains(kp=0.005, ki=0.0, kd=0.0)
    settings = PolicySettings(gains={Medium.SSD: PROPORTIONAL, Medium.HDD: half})
    trace = Trace(settings)
    media = {SSD: Medium.SSD, HDD: Medium.HDD}
    devices = {SSD: device_signals(access_share=0.75), HDD: device_signals(HDD, access_share=0.25)}
    other = {SSD: device_signals(access_share=0.5), HDD: device_signals(HDD, access_share=0.5)}
    trace.step(job_view(1, score=75.0, devices=devices), job_view(2, score=75.0, devices=other), media=media)
    gone = trace.step(job_view(1, score=75.0, devices=devices), media=media)
    assert trace.quota(gone, 1) == pytest.approx(0.425)
    decision = trace.step(job_view(1, score=65.0, devices=devices), media=media)
    assert trace.quota(decision, 1, SSD) == pytest.approx(0.425 * 1.0875)
    assert trace.quota(decision, 1, HDD) == pytest.approx(0.425 * 1.0875)


def test_a_job_that_moves_from_hdd_to_ssd_gets_its_quota_there_within_the_step_limits():
    trace = Trace()
    media = {SSD: Medium.SSD, HDD: Medium.HDD}
    last, moved = None, []
    for n in range(60):
        there = min(1.0, max(0.0, (n - 10) / 20))
        devices = {HDD: device_signals(HDD, access_share=1.0 - there)}
        if there > 0.0:
            devices[SSD] = device_signals(SSD, 0.1, access_share=there)
        decision = trace.step(job_view(1, score=50.0, devices=devices), job_view(2, score=90.0, used=0.3), media=media)
        quotas = {slot: quota.share for slot, quota in decision.quotas.items()}
        for slot in set(quotas) & set(last or {}):
            assert 0.8 * last[slot] - 1e-9 <= quotas[slot] <= 1.2 * last[slot] + 1e-9
        last = quotas
        moved.append(quotas.get((1, SSD), 0.0))
    assert moved[5] == 0.0
    assert moved[-1] > 0.5


def test_rearrangement_on_hdd_below_30_for_more_than_three_iterations():
    trace = Trace()
    media = {SSD: Medium.SSD, HDD: Medium.HDD}
    sick = {"device": HDD, "score": 29.0}
    decisions = [trace.step(job_view(1, **sick), job_view(2, score=10.0), media=media) for _ in range(5)]
    assert [sorted(one.rearrange) for one in decisions] == [[], [], [], [(1, HDD)], [(1, HDD)]]
    assert trace.step(job_view(1, device=HDD, score=30.0), media=media).rearrange == frozenset()


def test_unmanaged_traffic_leaves_less_to_rise_into():
    trace = Trace()
    trace.step(job_view(1, score=75.0), job_view(2, score=75.0))
    trace.step(job_view(1, score=75.0))
    decision = trace.step(job_view(1, score=55.0), unmanaged=0.6)
    assert decision.entitlements[1, SSD].regular == pytest.approx(0.425)
    assert decision.entitlements[1, SSD].loan == pytest.approx(0.06)


def test_time_that_runs_backwards_is_refused():
    trace = Trace()
    trace.step(job_view(1))
    with pytest.raises(ValueError, match="clock that only grows"):
        trace.step(job_view(1), seconds=-2.0)


def random_jobs(draw, jobs):
    """Views of a random node: scores, iterations, devices and bytes of each job move at random."""
    views = []
    for number, state in jobs.items():
        state["score"] = min(100.0, max(0.0, state["score"] + draw.gauss(0, 12)))
        state["iterations"] += draw.choice((0, 1, 1, 2))
        devices = {SSD: device_signals(SSD, draw.random(), access_share=state["ssd"])}
        if state["ssd"] < 1.0:
            devices[HDD] = device_signals(HDD, draw.random() / 4, access_share=1.0 - state["ssd"])
        view = job_view(
            number,
            score=state["score"],
            devices=devices,
            iterations=state["iterations"],
            new_iteration=draw.random() < 0.7,
            blocked_seconds=draw.choice((0.0, 0.0, 2.0)),
            need=draw.random(),
            actionable=draw.random() < 0.9,
        )
        views.append(view)
    return views


@pytest.mark.parametrize("name", ["paper", "adaptive"])
@pytest.mark.parametrize("seed", range(4))
def test_invariants_hold_whatever_happens(name, seed):
    """Sums, signs, and for the paper's training jobs the step limit, over 1,500 random steps of a changing node."""
    draw = random.Random(seed)
    policy = make_policy(name, PolicySettings())
    state, now, jobs, serial, last = policy.initial(), 0.0, {}, 0, {}
    for _ in range(1500):
        now += draw.choice((0.0, 0.01, 0.1, 0.1, 0.1, 2.0))
        if len(jobs) < 6 and draw.random() < 0.1:
            serial += 1
            jobs[serial] = {"score": 50.0, "iterations": 0, "ssd": draw.choice((1.0, 1.0, 0.5))}
        if jobs and draw.random() < 0.02:
            del jobs[draw.choice(list(jobs))]
        neighbours = [neighbour_view(1000, used=draw.random())] if draw.random() < 0.7 else []
        media = {SSD: Medium.SSD, HDD: Medium.HDD}
        views = random_jobs(draw, jobs)
        unmanaged = draw.choice((0.0, 0.0, 0.3))
        state, decision = policy.step(state, node_view(now, views, neighbours, unmanaged, media))
        check(decision, views, neighbours)
        quotas = {slot: quota.share for slot, quota in decision.quotas.items()}
        if name == "paper":
            for slot in set(quotas) & set(last):
                if slot[0] != 1000:
                    assert 0.8 * last[slot] - 1e-9 <= quotas[slot] <= 1.2 * last[slot] + 1e-9
        last = quotas


def check(decision, views: list[JobView], neighbours: list[NeighbourView]):
    alive = {one.job.id for one in (*views, *neighbours)}
    for device in (SSD, HDD):
        shares = [share for (_, where), share in decision.entitlements.items() if where == device]
        assert sum(share.regular for share in shares) <= 0.85 + 1e-9
        assert sum(share.loan for share in shares) <= 0.15 + 1e-9
        assert all(share.regular >= 0.0 and share.loan >= 0.0 for share in shares)
        assert decision.pools[device].lent <= 0.15 + 1e-9
        assert decision.pools[device].regular <= 0.85 + 1e-9
    for (number, _), quota in decision.quotas.items():
        assert number in alive
        assert 0.0 < quota.share <= 1.2
