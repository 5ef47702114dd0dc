"""What the feedback on best-effort cgroups does, step by step, and how a single cap moves."""

import itertools
from dataclasses import dataclass

import pytest

from agent.policies.base import Moment, PolicySettings, Switches
from agent.policies.best_effort import BestEffort, Neighbour, guard
from agent.policies.caps import Cap, bounded, follow

SETTINGS = PolicySettings()


@dataclass
class Job:
    """A training job as the feedback sees it."""

    job: int = 1
    want: float = 0.5
    steady: float = 0.5
    used: float = 0.5
    score: float = 90.0
    helpable: bool = True


SICK = {"score": 20.0, "used": 0.2}


class Loop:
    """Steps of 0.1 s."""

    def __init__(self):
        self.state, self.now = BestEffort(), 0.0

    def step(self, *jobs, neighbours=(), is_open=None, available=1.0):
        self.now += 0.1
        victims = frozenset(one.job for one in jobs if one.score < 60.0)
        self.state = guard(
            self.state,
            jobs,
            [Neighbour(job, used) for job, used in neighbours],
            victims=victims,
            is_open=bool(victims) if is_open is None else is_open,
            moment=Moment(self.now, 0.1, available),
            settings=SETTINGS,
        )
        return self.state

    def steps(self, count, *jobs, **options):
        for _ in range(count):
            self.step(*jobs, **options)
        return self.state


def test_feed_forward_first():
    """0.97 - 0.5 = 0.47 is left; the trim falls from 1 by 0.65 a second."""
    state = Loop().step(Job(**SICK), neighbours=[(9, 0.8)])
    assert state.total == pytest.approx(0.47 * 0.65**0.1)
    assert state.caps[9].share == pytest.approx(state.total)


def test_while_somebody_starves_the_trim_falls_to_its_floor():
    loop = Loop()
    state = loop.steps(60, Job(**SICK), neighbours=[(9, 0.8)])
    assert state.trim == pytest.approx(0.3)
    assert state.total == pytest.approx(0.47 * 0.3, rel=0.01)


def test_it_rises_quickly_to_the_safe_level_and_slowly_beyond():
    loop = Loop()
    loop.step(Job(**SICK), neighbours=[(9, 0.8)])
    assert loop.state.safe == pytest.approx(0.9)
    loop.steps(20, Job(), neighbours=[(9, 0.4)])
    assert loop.state.trim > 0.9
    before = loop.state.trim
    loop.steps(10, Job(), neighbours=[(9, 0.4)])
    assert loop.state.trim == pytest.approx(before + 0.02, abs=0.001)


def test_neither_well_nor_starving_it_stays():
    loop = Loop()
    loop.step(Job(**SICK), neighbours=[(9, 0.8)])
    trim = loop.state.trim
    assert loop.steps(10, Job(score=70.0), neighbours=[(9, 0.4)]).trim == trim


def test_each_episode_lowers_the_safe_level_once():
    loop, levels = Loop(), []
    for _ in range(4):
        loop.steps(5, Job(**SICK), neighbours=[(9, 0.8)])
        levels.append(loop.state.safe)
        loop.steps(12, Job(), neighbours=[(9, 0.4)])
    assert levels[0] == pytest.approx(0.9)
    assert all(0.85 * a < b < 0.95 * a for a, b in itertools.pairwise(levels))


def test_a_disk_that_seeks_does_less_than_its_stated_capacity():
    """All together get 0.25 of the stated rate while somebody starves: that, not 1.0, is what there is to divide."""
    loop = Loop()
    sick = Job(want=0.1, steady=0.1, used=0.02, score=20.0)
    state = loop.steps(20, sick, neighbours=[(9, 0.23)])
    assert state.reach == pytest.approx(0.25, abs=0.05)
    assert state.total < 0.1


def test_the_reach_is_at_least_what_is_seen():
    loop = Loop()
    loop.steps(20, Job(want=0.1, used=0.02, score=20.0), neighbours=[(9, 0.23)])
    assert loop.step(Job(used=0.1), neighbours=[(9, 0.6)]).reach == pytest.approx(0.7)


def test_caps_that_do_not_help_are_given_up_for_a_while():
    loop = Loop()
    loop.steps(5, Job(**SICK), neighbours=[(9, 0.8)])
    assert loop.state.caps
    state = loop.steps(90, Job(**SICK), neighbours=[(9, 0.1)])
    assert state.caps == {}
    assert loop.steps(300, Job(**SICK), neighbours=[(9, 0.8)]).caps == {}
    assert loop.steps(320, Job(**SICK), neighbours=[(9, 0.8)]).caps


def test_caps_that_help_stay():
    loop = Loop()
    loop.steps(5, Job(**SICK), neighbours=[(9, 0.8)])
    assert loop.steps(90, Job(used=0.3, score=50.0), neighbours=[(9, 0.1)]).caps


def test_who_starves_again_after_being_well_is_judged_afresh():
    """A job that restarts under caps that worked reads next to nothing in its first moments: no proof against them."""
    loop = Loop()
    loop.steps(5, Job(**SICK), neighbours=[(9, 0.8)])
    loop.steps(120, Job(), neighbours=[(9, 0.3)])
    assert loop.steps(5, Job(used=0.01, score=20.0), neighbours=[(9, 0.1)]).caps
    assert loop.steps(50, Job(used=0.3, score=50.0), neighbours=[(9, 0.1)]).caps


def test_caps_that_stop_helping_are_given_up_all_the_same():
    loop = Loop()
    loop.steps(5, Job(**SICK), neighbours=[(9, 0.8)])
    loop.steps(120, Job(), neighbours=[(9, 0.3)])
    assert loop.steps(90, Job(**SICK), neighbours=[(9, 0.1)]).caps == {}


def test_a_need_that_fell_frees_best_effort():
    loop = Loop()
    loop.steps(60, Job(**SICK), neighbours=[(9, 0.8)])
    loop.steps(60, Job(want=0.05, steady=0.05, used=0.05), neighbours=[(9, 0.8)], is_open=False)
    assert loop.state.total is None


def test_what_rests_is_not_capped_and_the_other_gets_its_part():
    loop = Loop()
    state = loop.steps(20, Job(**SICK), neighbours=[(8, 0.0), (9, 0.7)])
    assert set(state.caps) == {9}


class TestFollow:
    def test_the_first_cap_does_not_bite(self):
        assert follow(None, 0.2, 0.5, 0.0, SETTINGS) == Cap(0.5, 0.0)
        assert follow(None, 0.6, 0.5, 0.0, SETTINGS) == Cap(0.6, 0.0)

    def test_best_effort_is_cut_at_once(self):
        assert follow(None, 0.2, 0.5, 0.0, SETTINGS, at_once=True) == Cap(0.2, 0.0)
        assert follow(Cap(0.5, 0.0), 0.1, 0.5, 0.01, SETTINGS, at_once=True) == Cap(0.1, 0.01)

    def test_twenty_percent_in_a_tenth_of_a_second(self):
        assert follow(Cap(0.5, 0.0), 0.1, 0.5, 0.1, SETTINGS).share == pytest.approx(0.4)
        assert follow(Cap(0.5, 0.0), 0.1, 0.5, 9.0, SETTINGS).share == pytest.approx(0.4)
        assert follow(Cap(0.5, 0.0), 0.45, 0.5, 9.0, SETTINGS).share == pytest.approx(0.45)

    def test_a_fast_loop_does_not_cut_faster(self):
        cap = Cap(0.5, 0.0)
        for n in range(1, 101):
            cap = follow(cap, 0.01, 0.5, n / 1000, SETTINGS)
        assert cap.share == pytest.approx(0.4, rel=0.08)

    def test_raises_wait_half_a_second(self):
        assert follow(Cap(0.2, 0.0), 0.5, 0.2, 0.49, SETTINGS).share == 0.2
        assert follow(Cap(0.2, 0.0), 0.5, 0.2, 0.5, SETTINGS).share == pytest.approx(0.24)

    def test_small_changes_are_not_worth_a_write(self):
        old = Cap(0.2, 0.0)
        assert follow(old, 0.21, 0.2, 9.0, SETTINGS) is old
        assert follow(old, 0.19, 0.2, 9.0, SETTINGS) is old

    def test_bounds(self):
        assert bounded(0.001, SETTINGS) == SETTINGS.floor
        assert bounded(0.95, SETTINGS) is None
        assert bounded(0.001, PolicySettings(switches=Switches(bounds=False))) == 0.001
