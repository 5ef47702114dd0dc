"""The short form of the confusion matrix: one run each of three causes, under the eyes of the shipped agent."""

import pytest

from tests.lab.causes import TUNING_SEED
from tests.lab.causes_guest import make, observing
from tests.lab.causes_runs import labelled

pytestmark = [pytest.mark.guest, pytest.mark.nightly, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def agent():
    with observing(labelled("remote_congestion", 0, TUNING_SEED).scenario):
        yield


@pytest.mark.parametrize("label", ["device_contention", "self_throttled", "cpu_bound"])
@pytest.mark.usefixtures("agent")
def test_the_agent_says_why(label):
    result = make(labelled(label, 0, TUNING_SEED), TUNING_SEED)
    assert not result["stuck"]
    assert result["starving_looks"] >= 10
    assert result["verdict"] == label, result
