"""The benchmark's short form: the default policy must not fall back against doing nothing, nor against the best peer.

One scenario, three runs of 16 s. A pair of runs is off now and then, so a fall counts when it shows twice.
"""

import tomllib

import pytest

from tests.lab.bench_guest import measure
from tests.lab.bench_plan import SHIPPED, load_subject
from tests.lab.bench_results import regressed

pytestmark = [pytest.mark.guest, pytest.mark.timeout(600)]

REFERENCE = tomllib.loads(SHIPPED.with_name("bench_reference.toml").read_text())
NAME = "ssd-greedy"


@pytest.fixture(scope="module")
def runs():
    """Make a run of a policy when it is first asked for, and keep it: policy, seed -> summary."""
    made = {}
    scenario = load_subject(NAME, REFERENCE[NAME]["seconds"]).scenario

    def get(policy, seed):
        if (policy, seed) not in made:
            made[policy, seed] = measure(scenario, policy, seed)
        return made[policy, seed]

    return get


@pytest.mark.parametrize("other", ["none", "bfqw"])
def test_no_regression(runs, other):
    reference = REFERENCE[NAME][other]
    for seed in (1, 2):
        ours, theirs = runs("adaptive", seed), runs(other, seed)
        waits = ours["wait_ms"]["mean"], theirs["wait_ms"]["mean"]
        text = f"waits {waits[0]:.2f} ms, {other} {waits[1]:.2f} ms; reference ratio {reference}"
        print(f"seed {seed}: {text}; neighbour {ours['neighbour_bytes_per_second']:.3g} B/s")
        assert ours["stuck"] == theirs["stuck"] == {}, "the guest spoiled the run"
        if not regressed(*waits, reference):
            return
    pytest.fail(f"more than 25 % worse, twice: {text}")


def test_the_agent_counts_what_it_did_and_cost(runs):
    summary = runs("adaptive", 1)
    assert summary["agent"]["status"] == 0
    assert summary["control_writes"] > 0
    assert 0 < summary["bpf_seconds"] < summary["agent"]["cpu_seconds"] + REFERENCE[NAME]["seconds"]
    assert len(summary["wait_ms_by_second"]) == REFERENCE[NAME]["seconds"]
