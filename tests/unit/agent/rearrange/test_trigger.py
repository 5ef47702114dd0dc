"""Where `adaptive` asks for reading ahead: the paper's score, and jobs that lose their time at an empty queue."""

import pytest

from agent.policies.base import PolicySettings, make_policy
from agent.types import Medium
from tests.unit.agent.builders import HDD, job_view, node_view

LOSING = {"score": 38.0, "queue": 0.0, "wait_seconds": 0.06, "compute_seconds": 0.1, "used": 0.5, "device": HDD}


def ask(*views, policy="adaptive"):
    """The policy's answer after each of these views of one job, 0.1 s apart."""
    made = make_policy(policy, PolicySettings())
    state, found = made.initial(), []
    for step, view in enumerate(views):
        state, decision = made.step(state, node_view(step / 10, [view], media={HDD: Medium.HDD}))
        found.append(bool(decision.rearrange))
    return found


def test_a_job_that_loses_its_time_at_an_empty_queue_is_helped_after_three_iterations():
    assert ask(*[job_view(1, **LOSING)] * 5) == [False, False, False, True, True]


def test_the_paper_goes_by_the_score_alone():
    assert ask(*[job_view(1, **LOSING)] * 5, policy="paper") == [False] * 5


@pytest.mark.parametrize(
    "change",
    [
        {"queue": 60.0},
        {"queue": None},
        {"wait_seconds": 0.009},
        {"wait_seconds": None},
        {"compute_seconds": None},
        {"actionable": False},
    ],
)
def test_others_are_not(change):
    assert ask(*[job_view(1, **LOSING | change)] * 30) == [False] * 30


LOST, WELL = job_view(1, **LOSING), job_view(1, **LOSING | {"queue": 90.0, "score": 85.0, "wait_seconds": 0.0})


def test_one_iteration_that_was_well_takes_back_one():
    assert ask(LOST, LOST, LOST, WELL, LOST, LOST, LOST) == [*[False] * 5, True, True]
    assert not any(ask(*[LOST, WELL] * 20))


def test_it_is_asked_for_until_the_loss_is_over():
    assert ask(*[LOST] * 50, *[WELL] * 6)[-6:] == [True] * 4 + [False] * 2


def test_passes_without_a_new_iteration_do_not_count():
    assert ask(*[job_view(1, **LOSING, new_iteration=False)] * 10) == [False] * 10
