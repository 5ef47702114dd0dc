"""The policy `adaptive`: each of its nine lines has a check that holds, and that fails once its switch is off."""

import itertools
from dataclasses import fields

import pytest

from agent.policies.base import PolicySettings, Switches, make_policy
from agent.types import Cause, Medium, Need
from tests.unit.agent.builders import CAPACITY, HDD, SSD, device_signals, job_view, neighbour_view, node_view


def barely_used(view):
    return {name: device._replace(access_share=0.001) for name, device in view.signals.devices.items()}


class Run:
    """Steps of the policy, 0.1 s apart."""

    def __init__(self, **off):
        self.policy = make_policy("adaptive", PolicySettings(switches=Switches(**off)))
        self.state, self.now, self.iteration = self.policy.initial(), 0.0, 100

    def step(self, *jobs, neighbours=(), media=None, seconds=0.1, unmanaged=0.0):
        self.now += seconds
        self.iteration += 1
        views = [one._replace(signals=one.signals._replace(iterations=self.iteration)) for one in jobs]
        view = node_view(self.now, views, neighbours, unmanaged, media)
        self.state, decision = self.policy.step(self.state, view)
        return decision

    def steps(self, count, *jobs, **options):
        return [self.step(*jobs, **options) for _ in range(count)]


VICTIM = {"score": 20.0, "used": 0.1, "need": 0.4}
DONOR = {"score": 90.0, "used": 0.15, "need": 0.15}


def contention(**off):
    """A victim, a healthy donor and a greedy neighbour on one SSD, for a second."""
    run = Run(**off)
    return run, run.steps(10, job_view(1, **VICTIM), job_view(2, **DONOR), neighbours=(neighbour_view(9, 0.75),))


def check_cap_others(**off):
    """1: what helps a job that waits because others use the device is capping the others, never the victim."""
    _, decisions = contention(**off)
    assert set(decisions[-1].quotas) == {(2, SSD), (9, SSD)}


def check_gate(**off):
    """2: nobody is capped while nobody is a victim: not even beside a greedy neighbour."""
    run = Run(**off)
    fed = (job_view(1, score=90.0, used=0.4, need=0.4), job_view(2, **DONOR))
    for decision in run.steps(10, *fed, neighbours=(neighbour_view(9, 0.4),)):
        assert decision.quotas == {}
        assert decision.entitlements == {}
        assert decision.gate_open == {SSD: False}


def check_feed_forward(**off):
    """3: a cold start that needs 0.7 of the device has it at the first step, not after minutes of 20 % steps."""
    run = Run(**off)
    cold = job_view(1, score=10.0, used=0.1, need=0.7)
    first, second = run.steps(2, cold, job_view(2, **DONOR), neighbours=(neighbour_view(9, 0.7),))
    assert second.entitlements[1, SSD].share == pytest.approx(0.7, abs=0.02)
    assert first.quotas[9, SSD].share <= 0.13


def check_allocation(**off):
    """4: 85 % is divided by need, and the pool goes to who is still short."""
    run = Run(**off)
    sick = job_view(1, score=20.0, used=0.3, need=0.9)
    decision = run.step(sick, job_view(2, **DONOR), neighbours=(neighbour_view(9, 0.5),))
    assert decision.entitlements[2, SSD].regular == pytest.approx(0.15, abs=0.01)
    assert decision.entitlements[1, SSD].regular == pytest.approx(0.70, abs=0.01)
    assert decision.entitlements[1, SSD].loan == pytest.approx(0.15, abs=0.01)


def check_best_effort(**off):
    """5: the neighbour gets what need leaves over: at once, and less while the victim stays sick."""
    _, decisions = contention(**off)
    assert decisions[0].quotas[9, SSD].share <= 0.97 - 0.55 + 0.01
    assert decisions[-1].quotas[9, SSD].share < decisions[0].quotas[9, SSD].share


def check_actionable(**off):
    """6: a job whose workers are busy on a CPU gets no local bandwidth, and the decision says so."""
    run = Run(**off)
    busy = job_view(1, **VICTIM, cause=Cause.CPU_BOUND, actionable=False)
    for decision in run.steps(10, busy, job_view(2, **DONOR), neighbours=(neighbour_view(9, 0.75),)):
        assert decision.quotas == {}
        assert not decision.gate_open[SSD]
        assert any("cpu_bound" in note for note in decision.notes)


def check_gentle_writes(**off):
    """7: needs that jitter by a few percent make few writes, and a cap leaves room above the need."""
    run = Run(**off)
    caps = []
    for n in range(40):
        need = 0.15 + 0.004 * (n % 3)
        donor = job_view(2, score=90.0, used=0.15, need=need)
        decision = run.step(job_view(1, **VICTIM), donor, neighbours=(neighbour_view(9, 0.75),))
        caps.append(decision.quotas[2, SSD].share)
    assert sum(a != b for a, b in itertools.pairwise(caps)) <= 5
    assert caps[-1] >= 1.05 * 0.158


def check_media(**off):
    """8: on HDD the lever is the neighbour alone: own caps only harm what the scheduler does by itself."""
    run = Run(**off)
    victim, donor = job_view(1, **VICTIM, device=HDD), job_view(2, **DONOR, device=HDD)
    neighbours = (neighbour_view(9, 0.75, HDD),)
    decision = run.steps(10, victim, donor, neighbours=neighbours, media={HDD: Medium.HDD})[-1]
    assert set(decision.quotas) == {(9, HDD)}


def check_bounds(**off):
    """9: a flood of one job is cut to half and then by 20 % a step, and no cap goes below the floor."""
    run = Run(**off)
    flood, starving = job_view(2, score=70.0, used=0.9, need=0.9), (job_view(1, **VICTIM), job_view(4, **VICTIM))
    small = job_view(3, score=90.0, used=0.025, need=0.0001)
    caps = [one.quotas for one in run.steps(20, *starving, flood, small)]
    flooding = [quotas[2, SSD].share for quotas in caps]
    assert flooding[0] == pytest.approx(0.45)
    assert all(b >= 0.8 * a - 1e-9 for a, b in itertools.pairwise(flooding))
    assert flooding[-1] < 0.33
    assert min(quotas[3, SSD].share for quotas in caps) >= 0.02


CHECKS = {
    "cap_others": check_cap_others,
    "gate": check_gate,
    "feed_forward": check_feed_forward,
    "allocation": check_allocation,
    "best_effort": check_best_effort,
    "actionable": check_actionable,
    "gentle_writes": check_gentle_writes,
    "media": check_media,
    "bounds": check_bounds,
}


def test_a_queue_that_drains_opens_the_gate_before_the_score_is_low():
    """Well at 70, but at half of what it consumes its four batches of 0.1 s last for 0.8 s; at 0.9 of it for 4 s."""
    for used, starving in ((0.1, True), (0.18, False)):
        run = Run()
        draining = job_view(1, score=70.0, used=used, need=0.2, queue_takeable=3.9)
        decision = run.step(draining, job_view(2, **DONOR), neighbours=(neighbour_view(9, 0.6),))
        assert decision.gate_open[SSD] is starving
        assert ((9, SSD) in decision.quotas) is starving


def test_a_healthy_job_is_not_about_to_starve_however_short_its_queue():
    run = Run()
    short = job_view(1, score=85.0, used=0.1, need=0.2, queue_takeable=1.0)
    assert not run.step(short, job_view(2, **DONOR), neighbours=(neighbour_view(9, 0.6),)).gate_open[SSD]


@pytest.mark.parametrize("line", CHECKS)
def test_line_holds(line):
    CHECKS[line]()


@pytest.mark.parametrize("line", CHECKS)
def test_line_fails_without_its_switch(line):
    with pytest.raises((AssertionError, KeyError)):
        CHECKS[line](**{line: False})


def test_every_switch_has_its_check():
    assert {field.name for field in fields(Switches)} == set(CHECKS)


class TestGate:
    def test_it_holds_for_a_while_and_then_lets_go(self):
        run, decisions = contention()
        assert decisions[-1].gate_open[SSD]
        fed = (job_view(1, score=90.0, used=0.4, need=0.4), job_view(2, **DONOR))
        after = run.steps(10, *fed, neighbours=(neighbour_view(9, 0.2),))
        assert after[3].gate_open[SSD]
        assert (2, SSD) in after[3].quotas
        assert not after[8].gate_open[SSD]
        assert (2, SSD) not in after[8].quotas

    def test_one_that_opens_again_soon_is_held_longer(self):
        run, _ = contention()
        fed = (job_view(1, score=90.0, used=0.4, need=0.4), job_view(2, **DONOR))
        run.steps(15, *fed)
        run.step(job_view(1, **VICTIM), job_view(2, **DONOR))
        after = run.steps(15, *fed)
        assert after[8].gate_open[SSD]
        assert not after[13].gate_open[SSD]

    def test_a_sick_job_that_gets_its_fair_need_is_no_victim(self):
        run = Run()
        decision = run.step(job_view(1, score=20.0, used=0.4, need=0.4), job_view(2, **DONOR))
        assert not decision.gate_open[SSD]

    def test_alone_on_the_device_nobody_is_a_victim(self):
        assert not Run().step(job_view(1, **VICTIM)).gate_open[SSD]

    def test_a_score_of_little_confidence_opens_nothing(self):
        run = Run()
        decision = run.step(job_view(1, **VICTIM, confidence=0.3), job_view(2, **DONOR))
        assert not decision.gate_open[SSD]

    def test_a_first_iteration_without_known_need_counts_as_wanting_its_fair_part(self):
        run = Run()
        decision = run.step(job_view(1, score=10.0, used=0.05, need=None), neighbours=(neighbour_view(9, 0.9),))
        assert decision.gate_open[SSD]
        assert decision.entitlements[1, SSD].share == pytest.approx(0.97)

    def test_each_device_has_its_own(self):
        run = Run()
        media = {SSD: Medium.SSD, HDD: Medium.HDD}
        jobs = (job_view(1, **VICTIM), job_view(2, **DONOR), job_view(3, **DONOR, device=HDD))
        assert run.step(*jobs, media=media).gate_open == {SSD: True, HDD: False}


class TestCaps:
    def test_a_hog_whose_loader_cannot_be_seen_is_held_to_its_share(self):
        hog = job_view(2, score=75.0, confidence=0.3, used=0.8, need=None, iteration_source="timer")
        decision = Run().steps(10, job_view(1, **VICTIM), hog)[-1]
        assert decision.quotas[2, SSD].share < 0.8

    def test_a_job_that_hardly_uses_the_device_takes_no_part_of_it(self):
        """Thirty jobs that once read a byte here do not make the fair part of two others small."""
        crowd = [job_view(n, used=0.0, need=0.001) for n in range(10, 40)]
        crowd = [one._replace(signals=one.signals._replace(devices=barely_used(one))) for one in crowd]
        decision = Run().step(job_view(1, **VICTIM), job_view(2, **DONOR), *crowd)
        assert decision.entitlements[1, SSD].share == pytest.approx(0.4, abs=0.01)
        assert (10, SSD) not in decision.entitlements

    def test_victims_stay_uncapped_and_donors_are_not_squeezed(self):
        _, decisions = contention()
        for decision in decisions:
            assert (1, SSD) not in decision.quotas
            assert decision.quotas[2, SSD].share >= 0.15

    def test_a_full_queue_is_slack_even_on_a_crowded_device(self):
        """The latency of the device lowers every score: 70 with a full queue is a donor, 70 with half of it is not."""
        full = job_view(2, score=70.0, queue=95.0, used=0.15, need=0.15)
        half = job_view(3, score=70.0, queue=50.0, used=0.15, need=0.15)
        quotas = Run().step(job_view(1, **VICTIM), full, half).quotas
        assert (2, SSD) in quotas
        assert (3, SSD) not in quotas

    def test_a_recent_victim_refills_its_queue_uncapped(self):
        run, _ = contention()
        well = (job_view(1, score=95.0, used=0.5, need=0.4), job_view(2, **DONOR))
        assert all((1, SSD) not in one.quotas for one in run.steps(25, *well, neighbours=(neighbour_view(9, 0.3),)))

    def test_who_starved_stays_uncapped_while_there_is_best_effort_to_cut(self):
        """It is well for longer than a recent victim is spared, and another still starves."""
        run, _ = contention()
        well = job_view(1, score=95.0, used=0.45, need=0.4)
        starving = job_view(3, score=20.0, used=0.1, need=0.4)
        scan, none = (neighbour_view(9, 0.3),), (neighbour_view(9, 0.01),)
        assert all((1, SSD) not in one.quotas for one in run.steps(60, well, starving, neighbours=scan))
        assert (1, SSD) in run.steps(60, well, starving, neighbours=none)[-1].quotas

    def test_a_recent_victim_that_takes_more_than_its_share_is_not_spared_while_others_starve(self):
        run, _ = contention()
        flood = job_view(1, score=50.0, used=0.85, need=0.9)
        starving = job_view(2, score=20.0, used=0.1, need=0.5)
        assert all(
            (1, SSD) in one.quotas for one in run.steps(5, flood, starving, neighbours=(neighbour_view(9, 0.1),))
        )

    def test_and_it_keeps_its_cap_when_that_has_brought_it_down_to_its_share(self):
        run, _ = contention()
        flood = job_view(1, score=50.0, used=0.85, need=0.9)
        starving = job_view(2, score=20.0, used=0.1, need=0.5)
        run.steps(5, flood, starving, neighbours=(neighbour_view(9, 0.1),))
        tamed = job_view(1, score=50.0, used=0.5, need=0.9)
        assert all(
            (1, SSD) in one.quotas for one in run.steps(5, tamed, starving, neighbours=(neighbour_view(9, 0.1),))
        )

    def test_a_flood_is_held_to_its_entitlement_although_it_is_sick_itself(self):
        run = Run()
        flood = job_view(2, score=20.0, used=0.8, need=0.9)
        decision = run.steps(30, job_view(1, **VICTIM), flood)[-1]
        assert decision.quotas[2, SSD].share < 0.8
        assert decision.quotas[2, SSD].share >= decision.entitlements[2, SSD].share

    def test_a_job_that_falls_sick_under_its_cap_within_its_share_is_released(self):
        run, _ = contention()
        sick = job_view(2, score=40.0, used=0.15, need=0.15)
        decision = run.step(job_view(1, **VICTIM), sick, neighbours=(neighbour_view(9, 0.4),))
        assert (2, SSD) not in decision.quotas

    def test_caps_rise_at_most_twice_a_second(self):
        run, _ = contention()
        more = job_view(2, score=90.0, used=0.3, need=0.3)
        decisions = run.steps(20, job_view(1, **VICTIM), more, neighbours=(neighbour_view(9, 0.4),))
        caps = [decision.quotas[2, SSD].share for decision in decisions]
        assert caps[-1] > 0.3
        assert sum(b > a for a, b in itertools.pairwise(caps)) <= 5

    def test_the_first_cap_is_what_is_used(self):
        """Of a job that takes too much as well, where best effort has more to give."""
        hog, scan = job_view(2, score=90.0, used=0.6, need=0.6), neighbour_view(9, 0.2)
        quotas = Run().step(job_view(1, **VICTIM), hog, neighbours=(scan,)).quotas
        assert quotas[2, SSD].share == pytest.approx(0.6)

    def test_that_of_a_flood_is_half_of_it(self):
        """Three need as much as they can get: each may have a third."""
        starving = [job_view(number, score=20.0, used=0.05, need=0.9) for number in (1, 3)]
        flood = job_view(2, score=70.0, used=0.8, need=0.9)
        assert Run().step(*starving, flood).quotas[2, SSD].share == pytest.approx(0.4)

    def test_that_of_a_flood_is_never_below_its_fair_need(self):
        """The victim needs 0.4 of 0.97."""
        flood = job_view(2, score=70.0, used=0.9, need=0.9)
        assert Run().step(job_view(1, **VICTIM), flood).quotas[2, SSD].share == pytest.approx(0.57)

    def test_a_cap_says_whether_it_is_a_cut(self):
        _, decisions = contention()
        assert decisions[0].quotas[9, SSD].cut
        assert all(quota.why for quota in decisions[0].quotas.values())


class TestBestEffort:
    def test_it_rises_slowly_once_everybody_is_well(self):
        run, decisions = contention()
        fed = (job_view(1, score=90.0, used=0.4, need=0.4), job_view(2, **DONOR))
        low = decisions[-1].quotas[9, SSD].share
        after = run.steps(30, *fed, neighbours=(neighbour_view(9, low),))
        shares = [one.quotas[9, SSD].share for one in after]
        assert shares[-1] > low
        assert max(b - a for a, b in itertools.pairwise(shares)) <= 0.3 * 0.6 + 1e-9

    def test_it_is_released_when_it_stops_pressing(self):
        run, _ = contention()
        fed = (job_view(1, score=90.0, used=0.4, need=0.4), job_view(2, **DONOR))
        after = run.steps(20, *fed, neighbours=(neighbour_view(9, 0.0),))
        assert after[-1].quotas == {}

    def test_it_is_released_when_the_jobs_it_was_capped_for_are_gone(self):
        run, _ = contention()
        assert run.step(job_view(2, **DONOR), neighbours=(neighbour_view(9, 0.3),), seconds=2.0).quotas == {}
        assert run.step(neighbours=(neighbour_view(9, 0.3),)).quotas == {}

    def test_it_is_entitled_to_what_nobody_else_is(self):
        _, decisions = contention()
        for decision in decisions:
            shares = decision.entitlements
            assert sum(one.regular for one in shares.values()) <= 0.85 + 1e-9
            assert sum(one.loan for one in shares.values()) <= 0.15 + 1e-9
            assert shares[9, SSD].share > 0.0

    def test_several_share_what_is_left(self):
        run = Run()
        pair = (neighbour_view(8, 0.6), neighbour_view(9, 0.1))
        decision = run.step(job_view(1, **VICTIM), job_view(2, **DONOR), neighbours=pair)
        assert decision.quotas[8, SSD].share + decision.quotas[9, SSD].share <= 0.97 - 0.55 + 0.01
        assert decision.quotas[9, SSD].share >= 0.1

    def test_unmanaged_traffic_is_taken_off(self):
        run = Run()
        pair = (job_view(1, **VICTIM), job_view(2, **DONOR))
        decision = run.step(*pair, neighbours=(neighbour_view(9, 0.5),), unmanaged=0.2)
        assert decision.quotas[9, SSD].share <= 0.97 * 0.8 - 0.55 + 0.01


class TestTrim:
    def test_a_victim_whose_error_persists_is_given_more_than_its_need(self):
        run = Run()
        jobs = (job_view(1, score=20.0, used=0.1, need=0.3), job_view(2, **DONOR))
        decisions = run.steps(30, *jobs, neighbours=(neighbour_view(9, 0.5),))
        assert decisions[-1].entitlements[1, SSD].share > 1.1 * decisions[0].entitlements[1, SSD].share
        assert decisions[-1].entitlements[1, SSD].share <= 1.5 * 0.3 + 1e-6

    def test_and_no_more_once_it_is_well(self):
        run = Run()
        jobs = (job_view(1, score=20.0, used=0.1, need=0.3), job_view(2, **DONOR))
        run.steps(30, *jobs, neighbours=(neighbour_view(9, 0.5),))
        run.steps(100, job_view(1, score=90.0, used=0.3, need=0.3), job_view(2, **DONOR))
        trims = {slot: one.trim for slot, one in run.state.slots.items()}
        assert trims[1, SSD] < 0.01

    def test_frozen_while_bandwidth_cannot_help(self):
        run = Run()
        busy = job_view(1, **VICTIM, cause=Cause.CPU_BOUND, actionable=False)
        decision = run.steps(10, busy, job_view(2, **DONOR))[-1]
        assert (1, SSD) not in decision.pid
        assert (2, SSD) in decision.pid


def on_both(number, score, used, needed):
    """A job on both media: what it uses and needs of each, as shares, split by what it uses."""
    total = sum(used.values())
    devices = {name: device_signals(name, share, access_share=share / total) for name, share in used.items()}
    rate = sum(needed.values()) * CAPACITY.rbps
    view = job_view(number, score=score, devices=devices, next_batch_bytes=0.1 * rate)
    return view._replace(need={name: Need(share * CAPACITY.rbps, 0.0) for name, share in needed.items()})


def test_a_job_that_moves_from_hdd_to_ssd_ends_with_its_quota_there_within_the_step_limits():
    """A healthy job beside one that starves on both media. On the HDD training is not capped; on the SSD its cap begins
    where it is and from then on moves by at most 20 % a step, up to 15 % above what it needs."""
    run, last, seen = Run(), None, []
    for n in range(160):
        there = min(1.0, max(0.0, (n - 10) / 30))
        split = {HDD: 0.3 * (1.0 - there), SSD: 0.3 * there}
        mover, victim = on_both(1, 90.0, split, split), on_both(2, 20.0, {HDD: 0.2, SSD: 0.2}, {HDD: 0.6, SSD: 0.6})
        decision = run.step(mover, victim, media={HDD: Medium.HDD, SSD: Medium.SSD})
        assert (1, HDD) not in decision.quotas
        quota = decision.quotas.get((1, SSD))
        if last is not None and quota is not None:
            assert 0.8 * last - 1e-9 <= quota.share <= 1.2 * last + 1e-9
        last = None if quota is None else quota.share
        seen.append(last)
        assert (2, SSD) not in decision.quotas
    assert seen[5] is None
    assert seen[-1] == pytest.approx(0.3 * 1.15, rel=0.1)


def test_the_pace_of_the_loop_does_not_change_the_law():
    """The same two seconds of contention at 20 and at 100 ms a step end at about the same caps."""

    def end(seconds):
        run = Run()
        jobs = (job_view(1, **VICTIM), job_view(2, score=90.0, used=0.6, need=0.3))
        decisions = run.steps(round(2.0 / seconds), *jobs, neighbours=(neighbour_view(9, 0.3),), seconds=seconds)
        return {slot: quota.share for slot, quota in decisions[-1].quotas.items()}

    slow, fast = end(0.1), end(0.02)
    assert fast == pytest.approx(slow, rel=0.12)


def test_rearrangement_needs_a_busy_disk():
    run = Run()
    media = {HDD: Medium.HDD}
    busy = run.steps(5, job_view(1, score=20.0, used=0.5, need=0.9, device=HDD), media=media)
    assert busy[-1].rearrange == {(1, HDD)}
    idle = Run().steps(5, job_view(1, score=20.0, used=0.01, need=0.9, device=HDD), media=media)
    assert idle[-1].rearrange == frozenset()


def test_a_job_that_vanishes_leaves_nothing_behind():
    run, _ = contention()
    decision = run.step()
    assert decision.quotas == {}
    assert decision.entitlements == {}
    assert decision.pools[SSD].lent == 0.0
    assert run.state.slots == {}


def test_time_that_runs_backwards_is_refused():
    run = Run()
    run.step(job_view(1))
    with pytest.raises(ValueError, match="clock that only grows"):
        run.step(job_view(1), seconds=-1.0)


def test_policies_by_name():
    assert make_policy("paper", PolicySettings()).name == "paper"
    assert make_policy("adaptive", PolicySettings()).name == "adaptive"
    with pytest.raises(ValueError, match="'best' is unknown; use adaptive or paper"):
        make_policy("best", PolicySettings())


@pytest.mark.parametrize(("iteration_seconds", "wanted"), [(1.0, 0.0), (4.0, 0.4)])
def test_a_loop_that_stands_still_wants_nothing_unless_its_iterations_take_that_long(iteration_seconds, wanted):
    run = Run()
    still = {"used": 0.0, "need": 0.4, "new_iteration": False, "iteration_seconds": iteration_seconds}
    decision = run.steps(150, job_view(1, **VICTIM), job_view(2, **still), neighbours=(neighbour_view(9, 0.75),))[-1]
    assert decision.entitlements[2, SSD].regular == pytest.approx(wanted, abs=0.03)
    going_on = still | {"used": 0.1, "new_iteration": True}
    decision = run.step(job_view(1, **VICTIM), job_view(2, **going_on), neighbours=(neighbour_view(9, 0.75),))
    assert decision.entitlements[2, SSD].regular == pytest.approx(0.4, abs=0.03)


def test_a_job_that_also_writes_is_not_capped_below_what_it_writes():
    """One cap holds in every dimension: what is enough for its reads throttled its writes to a third."""
    run = Run()
    donor = job_view(2, score=90.0, used=0.1, need=0.1)
    writing = donor.signals.devices[SSD]._replace(write_bytes_per_second=0.3 * CAPACITY.wbps)
    donor = donor._replace(signals=donor.signals._replace(devices={SSD: writing}))
    caps = [decision.quotas.get((2, SSD)) for decision in run.steps(50, job_view(1, **VICTIM), donor)]
    assert [cap.share for cap in caps if cap is not None and cap.share < 0.3] == []
    assert any(cap is not None for cap in caps), "it is healthy, so it is capped"
