import json
import random

import msgspec
import pytest

from agent.__main__ import main
from agent.config import ByteRate
from agent.errors import UsageError
from agent.simulate.ideal import RULES, equally, ideal, ideals
from agent.simulate.machine import LAB
from agent.simulate.paper import BOUNDS, Estimate, PolicyFigures, WindowFigures, paper_testbed, reduction, run_testbed
from agent.simulate.run import simulate, summarise
from agent.simulate.tables import paper_document, paper_lines, scenario_document, scenario_lines
from agent.simulate.testbed import load_testbed, scenario_devices, scenario_jobs, windows
from tests.unit.agent.simulate.builders import job, scan, scenario

SHORT = 60.0


@pytest.fixture(scope="module")
def testbed():
    whole = paper_testbed()
    return msgspec.structs.replace(whole, window_seconds=SHORT, settle_seconds=10.0)


@pytest.fixture(scope="module")
def found(testbed):
    return run_testbed(testbed, ["none", "static", "adaptive", *BOUNDS], [1], count=2)


def test_the_testbed_is_the_papers():
    whole = paper_testbed()
    kinds = [device.kind for device in scenario_devices(whole)]
    assert (kinds.count("ssd"), kinds.count("hdd")) == (4, 12)
    assert len(scenario_jobs(whole)) == 32
    assert whole.days == 7
    assert all(job.cold_batches == 10 for _, job, _ in scenario_jobs(whole))
    compute = [job.compute_ms for _, job, _ in scenario_jobs(whole)]
    assert sum(compute) / len(compute) == pytest.approx(246, rel=0.03)


def test_every_disk_and_drive_is_used():
    used = {name for _, job, _ in scenario_jobs(paper_testbed()) for name in (job.device, job.slow_device) if name}
    assert used == {device.name for device in scenario_devices(paper_testbed())}


def test_the_reporting_seeds_are_not_those_it_was_tuned_on():
    assert not {1, 2, 3} & set(paper_testbed().tuning_seeds)


def test_windows_are_spread_over_the_week_and_depend_on_the_seed(testbed):
    starts = [window.start for window in windows(testbed, 1, 7)]
    assert [int(start // 86400) for start in starts] == list(range(7))
    assert starts != [window.start for window in windows(testbed, 2, 7)]
    assert windows(testbed, 1, 7) == windows(testbed, 1, 7)


def test_starts_come_as_often_as_said():
    whole = paper_testbed()
    many = windows(whole, 1, 40)
    starts = sum(len(job.restarts_seconds) for window in many for job in window.scenario.jobs)
    hours = sum(window.scenario.duration_seconds for window in many) * 32 / 3600
    assert starts / hours == pytest.approx(60 / whole.start_minutes, rel=0.15)


def test_foreign_traffic_is_there_for_its_share_of_the_time():
    whole = paper_testbed()
    many = windows(whole, 1, 100)
    busy = sum(one.stop - one.start for window in many for one in window.foreign)
    total = sum(window.scenario.duration_seconds for window in many)
    congestion = whole.congestion[0]
    share = congestion.mean_busy_seconds / (congestion.mean_busy_seconds + congestion.mean_quiet_seconds)
    assert busy / total == pytest.approx(share, abs=0.1)


def test_static_waits_most_and_unlimited_storage_hardly(found):
    assert found["static"].wait_ms.mean > found["adaptive"].wait_ms.mean > found["unlimited"].wait_ms.mean
    assert found["unlimited"].wait_ms.mean < 1.0
    assert found["static"].samples_per_second.mean < found["unlimited"].samples_per_second.mean


def test_the_default_policy_does_no_harm(found):
    none = found["none"].wait_ms.mean
    assert found["adaptive"].wait_ms.mean <= max(1.05 * none, none + 0.3)


def test_no_local_cap_moves_a_congested_gateway(found):
    rates = [found[policy].mode_wait_ms("remote_congestion") for policy in ("static", "adaptive")]
    assert rates[0] == pytest.approx(rates[1])


def test_disks_that_are_never_short_leave_nothing_but_the_gateway(found):
    bound = found["local"]
    assert bound.mode_wait_ms("remote_congestion") == pytest.approx(found["static"].mode_wait_ms("remote_congestion"))
    assert bound.mode_wait_ms("cache_thrash") < 0.1
    assert found["unlimited"].wait_ms.mean <= bound.wait_ms.mean < found["adaptive"].wait_ms.mean


@pytest.fixture(scope="module")
def best(testbed, found):
    return ideals(testbed, [1], 2, found["local"].windows)


def test_perfect_drives_leave_less_wait_than_any_policy_and_more_than_drives_without_end(found, best):
    for rule in RULES:
        assert found["local"].wait_ms.mean < best[rule]["wait_ms"] < found["adaptive"].wait_ms.mean
    assert best["whose burst ends first"]["wait_ms"] <= best["max-min"]["wait_ms"]


def test_a_drive_that_is_wide_enough_leaves_no_wait(testbed):
    window = windows(testbed, 1, 2)[0]
    wide = [msgspec.structs.replace(one, bytes_per_second=ByteRate(1e12)) for one in window.scenario.devices]
    scenario = msgspec.structs.replace(window.scenario, devices=tuple(wide))
    figures = ideal(testbed, window._replace(scenario=scenario), 1, equally)
    assert figures.wait_seconds < 1e-3 * figures.iterations
    assert figures.events == 0


def test_the_document_has_the_papers_figures_and_ours(testbed, found, best):
    document = json.loads(json.dumps(paper_document(testbed, found, [1], 10.0, best)))
    assert document["paper"]["static"]["wait_ms"] == 85.3
    adaptive = document["policies"]["adaptive"]
    for name in ("wait_ms", "events_per_hour", "samples_per_second"):
        assert adaptive[name] >= 0
        assert adaptive["confidence_95"][name] >= 0
    assert set(adaptive["modes"]) == {"cold_start", "cache_thrash", "remote_congestion"}
    assert 0 < adaptive["share_of_unlimited"] <= adaptive["share_of_local"] <= 1
    assert document["policies"]["local"]["share_of_reachable_reduction"] == 1
    assert 0 < adaptive["share_of_reachable_reduction"] < 1
    assert adaptive["control_microseconds_per_job_and_tick"] > 0
    assert document["policies"]["static"]["wait_reduction"] == 0
    text = "\n".join(paper_lines(document))
    for words in (
        "85.3",
        "27.8",
        "1488",
        "fewer failures: cold start",
        "of the wait that local control can take away",
        "samples/s, of the bound's",
        "mean loan on SSDs, iterations",
        "mean loan on HDDs, iterations",
        "seeds 1 (tuned on 101",
        "control core per job and tick: adaptive",
        "divided by an oracle",
    ):
        assert words in text
    several, single = ("\n".join(paper_lines(document | {"windows": count})) for count in (3, 1))
    assert "3 windows" in several
    assert f"{adaptive['wait_ms']:.1f} ± {adaptive['confidence_95']['wait_ms']:.1f}" in several
    assert "1 window," in single
    assert "±" not in single


def test_an_interval_covers_the_mean_as_often_as_it_says():
    generator = random.Random(5)
    covered = 0
    for _ in range(2000):
        estimate = Estimate.of([generator.gauss(10, 3) for _ in range(8)])
        covered += abs(estimate.mean - 10) <= estimate.half_width
    assert covered / 2000 == pytest.approx(0.95, abs=0.015)


def test_a_reduction_is_known_better_than_either_figure_where_windows_differ_alike():
    references = [10.0, 50.0, 90.0, 20.0, 70.0]
    halved = reduction(
        [0.5 * value + 0.1 * sign for value, sign in zip(references, (1, -1, 1, -1, 1), strict=True)], references
    )
    assert halved.mean == pytest.approx(0.5, abs=0.01)
    assert halved.half_width < 0.01
    assert reduction([1.0, 2.0], [0.0, 0.0]) == Estimate(0.0, 0.0)


def test_one_window_has_no_interval():
    assert Estimate.of([3.0]) == Estimate(3.0, 0.0)
    assert PolicyFigures((WindowFigures(iterations=2, wait_seconds=0.1, jobs=1, seconds=1),)).wait_ms.mean == 50


def test_a_testbed_that_cannot_be_read_says_why(tmp_path):
    path = tmp_path / "bad.toml"
    path.write_text("name = 3")
    with pytest.raises(UsageError, match=r"bad\.toml"):
        load_testbed(path)


def test_a_scenarios_document_holds_medians_and_spread():
    spec = scenario(job(compute_ms=20.0), best_effort=(scan(),), seconds=5)
    runs = {name: [summarise(simulate(spec, name, seed)) for seed in (1, 2, 3)] for name in ("none", "nbcap")}
    document = json.loads(json.dumps(scenario_document(spec, LAB, runs, (1, 2, 3))))
    none = document["policies"]["none"]
    assert none["spread"]["wait_ms"][0] <= none["wait_ms"] <= none["spread"]["wait_ms"][1]
    assert len(none["runs"]) == 3
    lines = scenario_lines(document)
    assert lines[1].startswith("none")
    assert lines[2].startswith("nbcap")


SCENARIO = """
name = "mine"
description = "made up"
duration_seconds = 4
[[devices]]
name = "ssd0"
kind = "ssd"
bytes_per_second = "100 MiB"
[[jobs]]
name = "job"
device = "ssd0"
batch_reads = 4
read_size = "256 KiB"
compute_ms = 50
"""


def test_the_command_prints_a_table_and_writes_json(tmp_path, capsys):
    path, result = tmp_path / "mine.toml", tmp_path / "out.json"
    path.write_text(SCENARIO)
    words = ["simulate", "--scenario", str(path), "--policy", "none,adaptive", "--seed", "1,2", "--duration", "3"]
    assert main([*words, "--json", str(result)]) == 0
    out = capsys.readouterr().out
    assert "adaptive" in out
    document = json.loads(result.read_text())
    assert document["duration_seconds"] == 3
    assert set(document["policies"]) == {"none", "adaptive"}
    assert main([*words, "--json", "-"]) == 0
    assert json.loads(capsys.readouterr().out)["scenario"] == "mine"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--scenario", "nowhere"], "'nowhere'"),
        (["--scenario", "paper", "--policy", "magic"], "magic"),
        (["--scenario", "paper", "--seed", "x"], "'x'"),
        (["--scenario", "paper", "--seed", "1,,2"], "'1,,2'"),
    ],
)
def test_a_command_line_that_cannot_be_used_is_one_sentence(words, said, capsys):
    assert main(["simulate", *words]) == 2
    error = capsys.readouterr().err
    assert said in error
    assert error.count("\n") == 1


def test_a_result_that_cannot_be_written_is_one_sentence(tmp_path, capsys):
    path = tmp_path / "mine.toml"
    path.write_text(SCENARIO)
    words = ["simulate", "--scenario", str(path), "--policy", "none", "--json", str(tmp_path / "none" / "out.json")]
    assert main(words) == 2
    assert "is in a folder that does not exist" in capsys.readouterr().err
