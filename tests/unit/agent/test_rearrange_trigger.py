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
    "change", [{"queue": 20.0}, {"wait_seconds": 0.02}, {"wait_seconds": None}, {"compute_seconds": None}]
)
def test_others_are_not(change):
    assert ask(*[job_view(1, **LOSING | change)] * 6) == [False] * 6


def test_one_iteration_that_was_well_begins_the_count_anew():
    lost, well = job_view(1, **LOSING), job_view(1, **LOSING | {"queue": 90.0, "score": 85.0})
    assert ask(lost, lost, lost, well, lost, lost, lost, lost) == [*[False] * 7, True]


def test_passes_without_a_new_iteration_do_not_count():
    assert ask(*[job_view(1, **LOSING, new_iteration=False)] * 10) == [False] * 10
