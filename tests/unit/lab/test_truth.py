"""From a trainer's log to numbers."""

import pytest

from agent.simulate.scenario import parse_scenario
from tests.lab import truth
from tests.lab.summary import summarise

LOG = """# time_s wait_ms depth_before life taken bytes_total
0.0000 40.000 0 0 1 1000000
0.1000 0.100 3 0 1 2000000
0.2000 12.000 0 0 1 3000000
0.3000 15.000 0 0 1 4000000
0.4000 5.000 0 0 1 5000000
1.5000 30.000 0 1 1 6000000
1.6000 90.000 0 1 0 6500000
# end reads=26 bytes=6500000 read_ms_mean=2.500 read_ms_max=9.000 lives=2
"""
SCENARIO = parse_scenario(
    """
name = "s"
description = "d"
duration_seconds = 2
[[devices]]
name = "ssd0"
kind = "ssd"
bytes_per_second = "100 MB"
[[jobs]]
name = "job"
device = "ssd0"
batch_reads = 4
read_size = "64 KiB"
compute_ms = 50
[[best_effort]]
name = "scan"
device = "ssd0"
start_seconds = 1
""",
    "s",
)


def test_rows_and_end():
    log = truth.parse_truth(LOG)
    assert len(log.iterations) == 7
    assert log.iterations[0] == truth.Iteration(0.0, 40.0, 0, 0, taken=True, bytes_total=1000000)
    assert not log.iterations[-1].taken
    assert log.end == {"reads": 26, "bytes": 6500000, "read_ms_mean": 2.5, "read_ms_max": 9.0, "lives": 2}


def test_cut_off_line_is_left_out():
    log = truth.parse_truth(LOG[: LOG.index(" 5000000")])
    assert len(log.iterations) == 4
    assert log.end == {}


def test_episodes_one_after_the_other_are_one():
    rows = truth.parse_truth(LOG).iterations
    assert [row.starved for row in rows] == [True, False, True, True, False, True, True]
    assert truth.starvation_events(rows) == 3
    assert truth.starvation_events([]) == 0


def test_new_life_begins_a_new_episode():
    rows = truth.parse_truth(LOG).iterations
    assert truth.starvation_events([rows[3], rows[5]]) == 2


@pytest.mark.parametrize(("ratio", "value"), [(0.0, 1), (0.5, 2), (0.51, 3), (0.99, 4), (1.0, 4)])
def test_percentile(ratio, value):
    assert truth.percentile([4, 1, 3, 2], ratio) == value


def test_no_values():
    assert truth.wait_summary([]) == {"mean": 0, "p50": 0, "p99": 0, "max": 0}
    assert truth.utilisation([], 50) == 0


def test_bytes_between_two_times():
    rows = truth.parse_truth(LOG).iterations
    assert truth.bytes_between(rows, 0.1, 0.45) == 3000000
    assert truth.bytes_between(rows, 5, 6) == 0


def test_utilisation():
    assert truth.utilisation([50, 50], 50) == 0.5


def test_summary_of_a_run(tmp_path):
    for name in ("job", "scan"):
        (tmp_path / f"{name}.log").write_text(LOG)
    limits = {"scan": [(0.0, ""), (1.2, "259:0 rbps=1"), (2.0, "")]}
    summary = summarise(SCENARIO, lambda name: tmp_path / f"{name}.log", limits)
    job = summary["jobs"]["job"]
    assert job["iterations"] == 6
    assert job["starvation_events"] == summary["starvation_events"] == 3
    assert job["samples_per_second"] == 6 * 4 / 2
    assert job["lives"] == 2
    assert job["wait_ms"]["max"] == 90
    assert summary["worst_job"] == "job"
    assert summary["neighbour_bytes_per_second"] == 6500000
    assert summary["best_effort"]["scan"]["io_max"]["before"] == ""
    assert list(summary["best_effort"]["scan"]["io_max"]["changes"][1]) == [1.2, "259:0 rbps=1"]
