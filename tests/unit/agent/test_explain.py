"""A job in words: every state of a node can be told, with the numbers that were there; the command finds the job."""

import json
import subprocess
import sys
from dataclasses import replace

import pytest
from prometheus_client import CollectorRegistry

from agent.commands.explain import find
from agent.config import MetricsSection
from agent.diagnosis import ADVICE
from agent.errors import UsageError
from agent.explanation import CAUSES, EVIDENCE, explain, headline
from agent.history import History
from agent.server import Endpoint
from agent.snapshot import snapshot
from agent.types import Cause
from tests.unit.agent.made_reports import story


@pytest.fixture(scope="module")
def states():
    history = History()
    found = []
    for report, _ in story(40.0):
        history.add(report)
        found.append(json.loads(json.dumps(snapshot(report, history))))
    return found


def told(row, state=None):
    return "\n".join(explain(row, state or {"mode": "enforce"}))


def test_every_moment_of_every_job_can_be_told(states):
    for state in states:
        for row in state["jobs"]:
            text = told(row, state)
            assert row["job"] in text
            assert "None" not in text
            assert "nan" not in text


def test_a_starving_job_is_told_with_its_numbers(states):
    row = next(one for one in states[80]["jobs"] if one["job"] == "resnet50")
    text = told(row, states[80])
    assert f"score {row['score']:.0f}, {row['level']}" in text
    assert "of its time is lost" in text
    assert "device_contention: others use the device" in text
    assert "normally" in text
    assert f"{row['queue_depth']:.0f}/8 batches are ready" in text
    assert "others would be capped if mode were not observe" in text
    assert "decisions, newest first" in text


def test_a_device_without_control_is_not_told_to_lack_a_capacity_that_may_be_declared(states):
    row = next(one for one in states[80]["jobs"] if one["job"] == "resnet50")
    observed = row | {"devices": [one | {"gate_open": None, "quota_bytes_per_second": None} for one in row["devices"]]}
    text = told(observed, states[80])
    assert "its capacity is not declared" in text
    assert "or this node cannot limit it" in text


@pytest.mark.parametrize(
    ("takeable", "words"),
    [
        (0.0, "5/8 batches are ready, but the next one in order is missing"),
        (2.0, "5/8 batches are ready, 2 of them in order"),
        (5.0, "5/8 batches are ready\n"),
    ],
)
def test_batches_behind_a_missing_one_are_told(states, takeable, words):
    row = next(one for one in states[80]["jobs"] if one["job"] == "resnet50")
    assert words in told(row | {"queue_depth": 5.0, "queue_capacity": 8.0, "queue_takeable": takeable}) + "\n"


def test_a_hint_that_tells_less_than_is_read_is_told_with_its_figures():
    report, _ = list(story(4.0))[-1]
    number, entry = next((number, one) for number, one in report.jobs.items() if one.job.training)

    def row_of(**changes):
        changed = entry._replace(signals=entry.signals._replace(**changes))
        return snapshot(replace(report, jobs={number: changed}))["jobs"][0]

    row = row_of(hinted_batch_bytes=3e6, read_batch_bytes=12e6, next_batch_bytes=4.5e6)
    assert (row["hinted_batch_bytes"], row["read_batch_bytes"]) == (3e6, 12e6)
    assert row["batch_note"] == "tells 3 MB a batch, reads 12 MB; taken for 4.5 MB, so its need is too low"
    assert "It tells 3 MB a batch, reads 12 MB; taken for 4.5 MB, so its need is too low (read-ahead" in told(row)
    for unsaid in ({"hinted_batch_bytes": None}, {"read_batch_bytes": 4.4e6, "next_batch_bytes": 4.4e6}):
        row = row_of(**{"hinted_batch_bytes": 3e6, "read_batch_bytes": 12e6, "next_batch_bytes": 4.5e6} | unsaid)
        assert row["batch_note"] == ""
        assert "too low" not in told(row)


def test_an_agent_of_an_earlier_version_told_no_order(states):
    row = {name: value for name, value in states[80]["jobs"][0].items() if name != "queue_takeable"}
    assert "batches are ready\n" in told(row) + "\n"


def test_a_healthy_job_is_told_shortly(states):
    row = next(one for one in states[-1]["jobs"] if one["job"] == "resnet50")
    text = told(row, states[-1])
    assert "does not wait for data" in text
    assert "nobody on the device starves" in text


def test_a_cap_is_told_with_its_reason(states):
    for state in states:
        for row in state["jobs"]:
            if row["devices"] and row["devices"][0]["quota_bytes_per_second"]:
                text = told(row, state)
                assert "capped at" in text
                assert row["devices"][0]["quota_why"] in text
                return
    raise AssertionError("the story has no cap")


@pytest.fixture
def row(states):
    return dict(states[80]["jobs"][0])


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"score": None}, "no score yet"),
        ({"iteration_source": "timer"}, "a timer stands in"),
        ({"blocked_seconds": 4.0}, "standing before an empty queue for 4 s"),
        ({"blocked_seconds": 0.0, "wait_seconds": None}, "not finished an iteration"),
        ({"pod": "p-0", "namespace": "ml"}, "(namespace ml, pod p-0)"),
    ],
)
def test_head_line(row, changes, words):
    assert words in headline(row | changes)


def test_what_no_bandwidth_cures_is_said(row):
    assert "controller is frozen" in told(row | {"actionable": False})


def test_no_device_and_unknown_capacity(row):
    assert "has not used any device" in told(row | {"devices": []})
    device = row["devices"][0] | {"gate_open": None, "quota_bytes_per_second": None, "quota_ratio": None}
    assert "prefetchd calibrate" in told(row | {"devices": [device]})


def test_every_cause_has_words():
    assert {*CAUSES, "none"} == set(Cause) == set(ADVICE)


def test_a_wait_without_a_known_cause_is_not_called_nothing(row):
    assert "none of the known causes shows" in told(
        row | {"cause": "none", "wait_seconds": 0.2, "compute_seconds": 0.1}
    )
    fed = {"cause": "none", "wait_seconds": 0.0, "blocked_seconds": 0.0, "starvation_by_cause": {"none": 2}}
    text = told(row | fed)
    assert "nothing holds it up" in text
    assert "2 times by no known cause" in text


@pytest.mark.parametrize(
    ("part", "words"),
    [
        (100.0, "look at the training process itself"),
        (20.0, "look at what its workers do"),
        (None, "look at what its workers do"),
    ],
)
def test_a_wait_before_a_full_queue_is_not_laid_at_the_workers_door(row, part, words):
    waits = {"cause": "none", "wait_seconds": 0.2, "compute_seconds": 0.1}
    assert words in told(row | waits | {"parts": row["parts"] | {"queue": part}})


def test_what_happened_once_is_told_so(row):
    assert "Starved so far: once by cpu_bound." in told(row | {"starvation_by_cause": {"cpu_bound": 1}})


def test_a_score_below_its_parts_is_explained(row):
    good = {"parts": dict.fromkeys(row["parts"], 98.0), "iterations": 9}
    text = told(row | good | {"score": 48.0, "blocked_seconds": 0.0074})
    assert "It stands before an empty queue: the longer, the fewer points, down to 30." in text
    text = told(row | good | {"score": 30.0, "blocked_seconds": 0.05})
    assert "It stands before an empty queue: 30 is the most it can score." in text
    assert "empty queue" not in told(row | good | {"score": 98.0, "blocked_seconds": 0.0})


def test_no_cause_of_a_job_whose_waits_cannot_be_seen_is_not_called_nothing(row):
    hidden = {"cause": "none", "iteration_source": "timer", "wait_seconds": None, "blocked_seconds": 0.0}
    text = told(row | hidden)
    assert "not known: its waits cannot be seen" in text
    assert "nothing holds it up" not in text


def test_one_decision_is_one(row):
    assert "decisions, newest first" in told(row)
    text = told(row | {"decisions": row["decisions"][-1:]})
    assert "\nLast decision\n" in text


@pytest.mark.parametrize("name", EVIDENCE)
def test_evidence_has_words_with_its_value(row, name):
    text = told(row | {"evidence": {name: 0.25, "something_new": 3.0}})
    assert "0.2" in text or "25 %" in text or "250 ms" in text
    assert "something_new 3" in text


ROWS = [
    {"job": "a", "pod": "a-0", "namespace": "x"},
    {"job": "a", "pod": "a-1", "namespace": "y"},
    {"job": "resnet", "pod": "", "namespace": ""},
]


def test_jobs_are_found_by_name_pod_and_namespace():
    assert find(ROWS, "resnet") is ROWS[2]
    assert find(ROWS, "a-1") is ROWS[1]
    assert find(ROWS, "x/a") is ROWS[0]
    with pytest.raises(UsageError, match="ambiguous; say which: x/a, y/a"):
        find(ROWS, "a")
    with pytest.raises(UsageError, match="No job 'resnett' is seen by the agent; it sees resnet"):
        find(ROWS, "resnett")
    with pytest.raises(UsageError, match="it sees none"):
        find([], "a")


def test_command(states):
    endpoint = Endpoint(MetricsSection(listen="127.0.0.1:0"), CollectorRegistry(), lambda: states[80], dict)
    endpoint.start()
    try:
        base = [sys.executable, "-m", "agent", "explain", "--address", f"127.0.0.1:{endpoint.port}"]
        words, numbers, missing = (
            subprocess.run([*base, *more], capture_output=True, text=True, check=False, timeout=30)
            for more in (["clip"], ["clip", "--json"], ["nobody"])
        )
    finally:
        endpoint.close()
    assert words.returncode == 0
    assert words.stdout.startswith("clip")
    assert "\x1b" not in words.stdout
    assert len(json.loads(numbers.stdout)["decisions"]) >= 1
    assert (missing.returncode, missing.stderr.count("\n")) == (2, 1)


def test_a_job_of_which_nothing_is_known_has_no_score(row):
    row |= {"score": 75.0, "confidence": 0.0, "level": "healthy", "parts": dict.fromkeys(row["parts"])}
    assert headline(row).endswith("no score yet; nothing could be measured so far.")
    assert "75" not in told(row).partition("Why this cause")[0]


def test_a_start_is_told_as_such(states):
    """Before the first batch a low score is that of a beginning, and what nothing was measured for is no score."""
    row = next(one for one in states[80]["jobs"] if one["job"] == "resnet50")
    begun = row["decisions"][0] | {"iteration": 0, "score": 0.0}
    text = told(row | {"iterations": 0, "blocked_seconds": 0.1, "decisions": [begun]})
    assert "iteration 0: score 0 (before its first batch)" in text
    assert "It waits for its first batch: 30 is the most it can score." in text
    assert "score 0 (" not in told(row | {"decisions": [begun | {"iteration": 7}]})


def test_what_the_operator_should_know_is_told(states):
    row = next(one for one in states[80]["jobs"] if one["job"] == "resnet50")
    note = "enforce was asked for, observing because the host runs the hybrid hierarchy"
    assert f"Note: {note}" in told(row, {"mode": "observe", "notes": [note]})
    assert "Note:" not in told(row, {"mode": "observe"})


def test_history_keeps_no_score_where_nothing_was_known():
    history = History()
    report = next(report for report, _ in story(1.0))
    entry = next(one for one in report.jobs.values() if one.health)
    history.add(replace(report, jobs={entry.job.id: replace_health(entry, 0.0)}))
    assert history.rows(entry.job.id)[0]["score"] is None
    history = History()
    history.add(replace(report, jobs={entry.job.id: replace_health(entry, 0.45)}))
    assert history.rows(entry.job.id)[0]["score"] == entry.health.score


def replace_health(entry, confidence):
    return entry._replace(health=entry.health._replace(confidence=confidence))
