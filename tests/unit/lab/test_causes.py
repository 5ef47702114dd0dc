"""Labelled runs: what is drawn stays what its label says, and a verdict is what the agent said most."""

import json

import pytest

from agent.errors import UsageError
from agent.simulate.scenario import _check
from tests.lab import causes
from tests.lab.causes_results import Look, confusion, judge, lines, precision, recall, starving_spans
from tests.lab.causes_runs import DRIVE, LABELS, SUBJECT, labelled
from tests.lab.truth import Iteration

SEEDS = range(20)


def looks(*causes, start=1.0, every=0.25):
    return [Look(start + every * index, cause, 30.0) for index, cause in enumerate(causes)]


def needs(job):
    return job.need_bytes_per_second / float(DRIVE.bytes_per_second)


class TestRuns:
    @pytest.mark.parametrize("label", LABELS)
    def test_the_lab_can_run_every_one(self, label):
        for number in SEEDS:
            run = labelled(label, number, 1)
            _check(run.scenario, run.name)
            assert run.scenario.jobs[0].name == SUBJECT
            assert run.begin < run.scenario.duration_seconds - 4.0
            assert run.parameters

    def test_parameters_follow_from_seed_label_and_number(self):
        assert labelled("none", 3, 1) == labelled("none", 3, 1)
        drawn = {json.dumps(labelled("none", number, seed).parameters) for number in SEEDS for seed in (1, 2)}
        assert len(drawn) == 2 * len(SEEDS)

    def test_nobody_is_short_of_bandwidth_but_who_should_be(self):
        for label in ("none", "device_contention", "self_throttled", "cpu_bound"):
            for number in SEEDS:
                assert sum(map(needs, labelled(label, number, 1).scenario.jobs)) < 0.85, label

    def test_an_own_cap_lies_below_the_need(self):
        for number in SEEDS:
            run = labelled("self_throttled", number, 1)
            job = run.scenario.jobs[0]
            rate = run.own_rate or run.own_requests * job.read_size
            assert 0.3 < rate / job.need_bytes_per_second < 0.9

    def test_data_does_not_fit_into_the_shared_memory(self):
        for number in SEEDS:
            run = labelled("cache_thrash", number, 1)
            assert run.shared_memory < 0.6 * sum(job.data for job in run.scenario.jobs)

    def test_a_link_is_smaller_than_the_need(self):
        for number in SEEDS:
            scenario = labelled("remote_congestion", number, 1).scenario
            assert sum(job.need_bytes_per_second for job in scenario.jobs) > 1.2 * scenario.devices[1].bytes_per_second

    def test_preparation_takes_longer_than_the_step(self):
        for number in SEEDS:
            (job,) = labelled("cpu_bound", number, 1).scenario.jobs
            assert job.prepare_cpu_ms / job.workers > 1.3 * job.compute_ms


class TestVerdict:
    def test_what_is_named_most_while_it_starves(self):
        seen = looks(*["cold_start"] * 3, *["cpu_bound"] * 5, *["none"] * 20)
        verdict, named, starving = judge(seen, [(0.5, 3.0)])
        assert verdict == "cpu_bound"
        assert starving == 13  # from 1.0 to 4.0 s: a second beyond the last wait
        assert named == {"cold_start": 3, "cpu_bound": 5, "none": 5}

    def test_a_job_that_starves_without_a_cause(self):
        assert judge(looks(*["none"] * 6, "cpu_bound"), [(0.5, 3.0)])[0] == "none"

    def test_a_job_that_does_not_starve_may_hear_a_cause_now_and_then(self):
        assert judge(looks(*["none"] * 19, "cpu_bound"), [])[0] == "none"
        assert judge(looks(*["none"] * 8, *["cpu_bound"] * 2), [])[0] == "cpu_bound"

    def test_waits_with_batches_ready_are_no_starvation(self):
        rows = [
            Iteration(1.0, 50.0, 0, 0, taken=True, bytes_total=1),
            Iteration(2.0, 50.0, 3, 0, taken=True, bytes_total=2),
            Iteration(3.0, 9.0, 0, 0, taken=True, bytes_total=3),
        ]
        assert starving_spans(rows) == [(1.0, 1.05)]


RESULTS = [{"label": "none", "verdict": "none"}] * 3 + [
    {"label": "cpu_bound", "verdict": "cpu_bound"},
    {"label": "cpu_bound", "verdict": "none"},
]


def test_matrix_recall_and_precision():
    table = confusion(RESULTS)
    assert recall(table, "cpu_bound") == 0.5
    assert precision(table, "cpu_bound") == 1.0
    assert precision(table, "none") == 0.75
    assert recall(table, "cold_start") is None
    text = lines(RESULTS)
    assert len(text) == 2 + len(LABELS)
    assert "| `cpu_bound` |  |  |  |  |  | 1 | 1 | 0.50 | 1.00 |" in text


class TestDocument:
    def test_results_are_taken_in_once_and_hung_runs_kept_apart(self, tmp_path):
        document, path = {"seed": 2, "runs": [], "spoiled": []}, tmp_path / "causes.json"
        good = {"label": "none", "number": 0, "looks": 9, "stuck": {}}
        (tmp_path / "out").mkdir()
        (tmp_path / "out" / "none-0.json").write_text(json.dumps(good))
        (tmp_path / "out" / "none-1.json").write_text(json.dumps({**good, "number": 1, "stuck": {"subject": "hung"}}))
        causes.take_in(document, path, tmp_path / "out")
        causes.take_in(document, path, tmp_path / "out")
        assert [one["number"] for one in document["runs"]] == [0]
        assert [one["number"] for one in document["spoiled"]] == [1]
        assert json.loads(path.read_text()) == document

    def test_runs_of_another_seed_are_not_mixed_in(self, tmp_path):
        path = tmp_path / "causes.json"
        path.write_text('{"seed": 1, "runs": [], "spoiled": []}')
        arguments = causes.argparse.Namespace(cause="none", json=path, runs=1, seed=2)
        with pytest.raises(UsageError, match="holds runs of seed 1, not 2"):
            causes.run(arguments, print)

    def test_an_unknown_cause_is_refused(self, tmp_path):
        arguments = causes.argparse.Namespace(cause="none,hunger", json=tmp_path / "x", runs=1, seed=2)
        with pytest.raises(UsageError, match="hunger"):
            causes.run(arguments, print)


class FakeGuest:
    """Leaves a result, says so, and then hangs for as long as it is allowed to."""

    def __init__(self, out_dir):
        self.out_dir = out_dir

    def run(self, command, *, on_output, timeout, silence):
        result = {"label": "none", "number": 0, "looks": 9, "stuck": {}}
        (self.out_dir / "none-0.json").write_text(json.dumps(result))
        on_output(b"none:0: none\n")
        raise AssertionError(f"it waited {timeout} s for {command}")


def test_a_guest_that_hangs_after_its_last_result_is_not_waited_for(tmp_path):
    document = {"seed": 1, "runs": [], "spoiled": []}
    causes._make(FakeGuest(tmp_path), document, tmp_path / "causes" / "all.json", [("none", 0)])
    assert len(document["runs"]) == 1
