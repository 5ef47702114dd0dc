"""The simulator is held to the lab: recorded results of real runs, the same scenarios, lengths and seeds.

`recorded/*.json` hold of benchmark results (`python -m tests.lab bench … --json FILE`) what is compared:
`{"seconds": 24.0, "revision": "…", "scenarios": {NAME: {POLICY: {"seeds": [1], "wait_ms": 1.2}}}}`, the median over the
seeds of the mean wait. `recorded/index.toml` lists what the models are known not to reproduce, each with its reason.
"""

import functools
import itertools
import json
import tomllib
from pathlib import Path
from statistics import median

import msgspec
import pytest

from agent.simulate.control import POLICIES
from agent.simulate.run import simulate, summarise
from agent.simulate.scenario import load_scenario

RECORDED = Path(__file__).with_name("recorded")
SCENARIOS = Path(__file__).parents[4] / "tests" / "lab" / "scenarios"
WITHIN = 0.30
WITHIN_MS = 0.5
"""Waits that differ by less differ by what waking up costs, which is the guest's matter."""
CLEAR = 1.5
"""Only policies whose waits differ by more than this factor (and WITHIN_MS) have an order in the lab itself."""


@functools.cache
def index():
    listed = tomllib.loads((RECORDED / "index.toml").read_text()).get("not_reproduced", [])
    assert all(entry["why"] for entry in listed)
    return {(entry["scenario"], entry["policy"]) for entry in listed}


@functools.cache
def recordings():
    """(scenario, seconds, {policy: (seeds, wait in ms)}) of every file."""
    found = []
    for path in sorted(RECORDED.glob("*.json")):
        document = json.loads(path.read_text())
        for name, policies in document["scenarios"].items():
            waits = {one: (tuple(it["seeds"]), it["wait_ms"]) for one, it in policies.items() if one in POLICIES}
            found.append((name, document["seconds"], waits))
    return found


@functools.cache
def simulated(name, seconds, policy, seeds):
    scenario = load_scenario(SCENARIOS / f"{name}.toml")
    if seconds is not None:
        scenario = msgspec.structs.replace(scenario, duration_seconds=min(seconds, scenario.duration_seconds))
    return median(float(summarise(simulate(scenario, policy, seed))["wait_ms"]) for seed in seeds)


def each_wait():
    for name, seconds, waits in recordings():
        for policy, (seeds, wait_ms) in waits.items():
            yield pytest.param(name, seconds, policy, seeds, wait_ms, id=f"{name}-{policy}")


def each_scenario():
    return [pytest.param(*one, id=one[0]) for one in recordings()]


def test_there_are_recordings_and_the_index_names_none_besides():
    known = {(name, policy) for name, _, waits in recordings() for policy in waits}
    assert known
    assert index() <= known


@pytest.mark.parametrize(("name", "seconds", "policy", "seeds", "wait_ms"), list(each_wait()))
def test_waits_are_within_30_percent(name, seconds, policy, seeds, wait_ms):
    ours = simulated(name, seconds, policy, seeds)
    reproduced = abs(ours - wait_ms) <= max(WITHIN * wait_ms, WITHIN_MS)
    assert reproduced != ((name, policy) in index()), f"lab {wait_ms:.2f} ms, simulator {ours:.2f} ms"


@pytest.mark.parametrize(("name", "seconds", "waits"), each_scenario())
def test_policies_come_in_the_same_order(name, seconds, waits):
    wrong = []
    for better, worse in itertools.permutations(waits, 2):
        low, high = waits[better][1], waits[worse][1]
        if high < max(CLEAR * low, low + WITHIN_MS) or {(name, better), (name, worse)} & index():
            continue
        if simulated(name, seconds, better, waits[better][0]) > simulated(name, seconds, worse, waits[worse][0]):
            wrong.append(f"{better} ({low:.2f} ms in the lab) before {worse} ({high:.2f} ms)")
    assert not wrong, f"the simulator does not put {'; '.join(wrong)}"
