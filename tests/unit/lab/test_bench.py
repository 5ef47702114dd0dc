"""The benchmark without a guest: what runs in which order, medians and paired ratios, goals, the page, spoiled runs."""

import contextlib
import json
import os
import re
from xml.etree import ElementTree as ET

import pytest

from agent.errors import UsageError
from agent.simulate.scenario import parse_scenario
from tests.lab import __main__ as command_line
from tests.lab import bench
from tests.lab import bench_results as results
from tests.lab.bench_guest import bpf_seconds, control_writes
from tests.lab.bench_plan import (
    ALONE,
    CHOICES,
    OURS,
    PARAMETERS,
    SHIPPED,
    Cell,
    Subject,
    find_scenario,
    in_order,
    load_plan,
    load_subject,
    machines,
    matrix,
)
from tests.lab.bench_report import STYLES, Bar, bar_plot, render
from tests.lab.bench_table import default_lines, goals, lines, matrix_lines, wait_text
from tests.lab.errors import LabBroken, LabTimeout

MIB = 1 << 20


def summary(wait=10.0, events=4, neighbour=50 * MIB, agent=None, **changes):
    """What the guest says of one run."""
    job = {"wait_ms": {"mean": wait}, "starvation_events": events, "utilisation": 0.9, "bytes_per_second": 1}
    return {
        "wait_ms": {"mean": wait, "p50": 0.0, "p99": 5 * wait, "max": 9 * wait},
        "iterations": 100,
        "starvation_events": events,
        "samples_per_second": 200.0,
        "utilisation": 0.9,
        "worst_job": "text",
        "worst_utilisation": 0.8,
        "neighbour_bytes_per_second": neighbour,
        "wait_ms_by_second": [wait, None, 2 * wait],
        "machine": {"kernel": "6.1.0", "accelerator": "tcg"},
        "agent": agent,
        "stuck": {},
        "jobs": {"text": {**job, "io_max": {"changes": [[0, ""], [3, "8:0 rbps=1"]]}}},
        "best_effort": {"scan": {"bytes_per_second": neighbour, "read_ms": {}, "io_max": {"changes": [[0, ""]]}}},
        **changes,
    }


AGENT = {"status": 0, "cpu_seconds": 1.2, "resident_bytes": 100 * MIB}


def cell(scenario="ssd-greedy", policy="none", seed=1, seconds=24):
    return Cell(load_subject(scenario, seconds), policy, seed)


def record(scenario="ssd-greedy", policy="none", seed=1, **figures):
    agent = AGENT if policy in OURS else None
    about = {"attempt": 1, "revision": "abc", "host_load": 1.0, "wall_seconds": 30.0}
    return results.run_record(cell(scenario, policy, seed), summary(agent=agent, **figures), **about)


def document(*runs):
    made = results.new_document({"cpu": "a CPU", "cpus": 2}, 24)
    made["runs"] += runs
    made["scenarios"] = results.aggregate(made["runs"])
    return made


def test_shipped_plan_holds_what_it_promises():
    cells = load_plan(SHIPPED, None)
    names = {one.subject.name for one in cells}
    assert 75 <= len(cells) <= 110
    assert {"ssd-greedy", "hdd-hot", "nfs-congested", "cpu-bound", "late-rush", "late-verify", "late-save"} <= names
    for name in ("ssd-greedy", "ssd-writer"):
        assert {one.seed for one in cells if one.subject.name == name and one.policy == "adaptive"} == {1, 2, 3}
    assert len(set(machines({one.subject.name: one.subject for one in cells}.values()).values())) == 1


def test_untuned_scenarios_say_so():
    for name in ("late-rush", "late-verify", "late-save"):
        assert find_scenario(name).read_text().startswith("# Never used for tuning")


def test_policies_take_turns_within_a_seed():
    cells = matrix(["ssd-greedy", "ssd-95"], ["none", "bfqw", "adaptive"], [2, 1], None)
    keys = [one.key for one in cells]
    assert [key[2] for key in keys] == [1] * 6 + [2] * 6
    assert [key[0] for key in keys[:6]] == ["ssd-greedy"] * 3 + ["ssd-95"] * 3
    assert [key[1] for key in keys[:3]] == ["none", "bfqw", "adaptive"]
    assert [key[1] for key in keys[6:9]] == ["bfqw", "adaptive", "none"]
    assert len(in_order([*cells, *cells])) == 12


def test_run_length_is_that_of_all():
    subject = load_subject("ssd-greedy", 12)
    assert subject.scenario.duration_seconds == 12
    assert subject.digest != load_subject("ssd-greedy", None).digest


@pytest.mark.parametrize(
    ("call", "quoted"),
    [
        (lambda: matrix(["ssd-greedy"], ["nonesuch"], [1], None), "nonesuch"),
        (lambda: matrix(["ssd-greedy"], [], [1], None), "none given"),
        (lambda: matrix(["nonesuch"], ["none"], [1], None), "'nonesuch'"),
        (lambda: matrix(["x" * 5000], ["none"], [1], None), "neither a file nor shipped"),
        (lambda: bench.numbers("1,x"), "'1,x'"),
        (lambda: bench.numbers("3,-1"), "'3,-1'"),
        (lambda: bench.numbers(""), "''"),
    ],
)
def test_what_does_not_exist_is_refused(call, quoted):
    with pytest.raises(UsageError, match=quoted):
        call()


def test_plan_with_a_misspelt_key_is_refused(tmp_path):
    plan = tmp_path / "plan.toml"
    plan.write_text('[[run]]\nscenario = "ssd-95"\npolicy = ["none"]\nseeds = [1]\n')
    with pytest.raises(UsageError, match=r"plan\.toml.*policy"):
        load_plan(plan, None)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (b"\xff\xfe", "no UTF-8 text"), (b"a = " + b"[" * 100_000, "nested too deeply"), (b"", "'run' is missing"),
        (b"run = []", r"'run' has the value \[\]"), (b"run = 3", "'run' has the value 3"),
        (b"[[run]]\nscenario = 'ssd-95'\npolicies = ['none']\nseeds = []", r"seeds' has the value \[\]"),
        (b"[[run]]\nscenario = 'ssd-95'\npolicies = ['none']\nseeds = [-1]", r"seeds\[0\]' has the value -1"),
        (b"[[run]]\nscenario = 'ssd-95'\npolicies = 'none'\nseeds = [1]", "policies' has the value 'none'"),
    ],
)  # fmt: skip
def test_a_plan_that_cannot_be_used_is_told_in_a_sentence(tmp_path, text, why):
    plan = tmp_path / "plan.toml"
    plan.write_bytes(text)
    with pytest.raises(UsageError, match=why):
        load_plan(plan, None)


def small(device, rate="100 MiB"):
    text = f"""name = "s-{device}-{rate[:3].strip()}"
description = "text."
duration_seconds = 5
[[devices]]
name = "{device}"
kind = "ssd"
bytes_per_second = "{rate}"
[[jobs]]
name = "job"
device = "{device}"
batch_reads = 8
read_size = "128 KiB"
compute_ms = 50
"""
    return Subject(None, parse_scenario(text, "s"), "")


def test_scenarios_share_a_guest_unless_a_disk_differs():
    found = machines([small("ssd0"), small("ssd1"), small("ssd0", "200 MiB")])
    assert {disk.name for disk in found["s-ssd0-100"]} == {"ssd0", "ssd1"}
    assert found["s-ssd0-100"] == found["s-ssd1-100"]
    assert [disk.bytes_per_second for disk in found["s-ssd0-200"]] == [200 * MIB]


def test_every_policy_is_described_and_drawn():
    assert set(PARAMETERS) == set(CHOICES) == set(STYLES)
    assert len(set(STYLES.values())) == len(CHOICES)


def test_medians_and_spread_over_seeds():
    runs = [record(seed=seed, wait=wait) for seed, wait in ((2, 12.0), (1, 10.0), (3, 50.0))]
    figures = results.aggregate(runs)["ssd-greedy"]["none"]
    assert figures["wait_ms"] == {"mean": 12.0, "p50": 0.0, "p99": 60.0}
    assert figures["spread"]["wait_ms"]["mean"] == [10.0, 50.0]
    assert figures["seeds"] == [1, 2, 3]
    assert figures["agent_cpu_ratio"] is None
    assert figures["control_writes"] == 0
    assert figures["starvation_events"] == 4
    assert figures["neighbour_bytes_per_second"] == 50 * MIB


def test_costs_of_the_agent():
    one = record(policy="adaptive", control_writes=17, bpf_seconds=0.24)
    assert (one["control_writes"], one["agent_cpu_ratio"], one["bpf_ratio"]) == (17, 0.05, 0.01)
    assert one["agent_resident_bytes"] == 100 * MIB
    assert one["io_max_changes_seen"] == 1


def test_ratios_are_paired_by_seed():
    runs = [record(seed=1, wait=100.0), record(seed=2, wait=10.0), record(seed=3, wait=1.0)]
    runs += [record(policy="adaptive", seed=1, wait=10.0), record(policy="adaptive", seed=2, wait=2.0)]
    runs += [record(policy="bfqw", seed=2, wait=4.0, neighbour=100 * MIB)]
    adaptive = results.aggregate(runs)["ssd-greedy"]["adaptive"]
    assert adaptive["ratio_to_none"]["wait"] == pytest.approx(0.15)  # 0.1 and 0.2; seed 3 has no partner
    assert adaptive["ratio_to_none"]["seeds"] == [1, 2]
    assert adaptive["ratio_to_none"]["wait_spread"] == [0.1, 0.2]
    assert adaptive["ratio_to_best_peer"]["peer"] == "bfqw"
    assert adaptive["ratio_to_best_peer"]["wait"] == 0.5
    assert adaptive["ratio_to_best_peer"]["neighbour_throughput"] == 0.5


def test_doing_nothing_can_be_the_best_peer_and_ours_never_is():
    runs = {"none": [record(wait=2.0)], "static": [record(policy="static", wait=9.0)]}
    runs["adaptive"] = [record(policy="adaptive", wait=1.0)]
    assert results.best_peer(runs) == "none"
    assert results.best_peer({"paper": runs["adaptive"]}) is None


def test_training_alone_is_no_peer():
    runs = [record(wait=9.0), record(policy="adaptive", wait=2.0), record(policy="bfqw", wait=4.0)]
    made = document(*runs, record(policy=ALONE, wait=1.0, neighbour=0))
    assert made["scenarios"]["ssd-greedy"]["adaptive"]["ratio_to_best_peer"]["peer"] == "bfqw"
    head, _, row = matrix_lines(made)
    assert head == "| scenario (seeds) | alone | none | bfqw | adaptive |"
    assert row == "| ssd-greedy (1) | 1.00 / 4 | 9.00 / 4 / 50 | 4.00 / 4 / 50 | **2.00 / 4 / 50** |"
    assert 'class="mark fill alone"' in render(made)
    first = document(record(policy=ALONE, wait=1.0, neighbour=0))
    assert lines(first)[2] == "| ssd-greedy (1) | 1.00 / 4 |"
    assert 'class="mark fill alone"' in render(first)


def test_training_alone_is_run_only_where_there_are_neighbours():
    cells = matrix(["ssd-flood", "ssd-greedy"], [ALONE, "none"], [1], 24)
    assert [cell.key for cell in cells] == [
        ("ssd-flood", "none", 1), ("ssd-greedy", ALONE, 1), ("ssd-greedy", "none", 1),
    ]  # fmt: skip


def test_ratio_of_nothing():
    assert results.ratio(0.0, 0.0) == 1.0
    assert results.ratio(1.0, 0.0) is None
    assert results.ratio(1.0, 4.0) == 0.25


@pytest.mark.parametrize(
    ("ours", "other", "reference", "worse"),
    [
        (1.0, 50.0, 0.02, False),
        (1.29, 50.0, 0.02, False),  # 29 % above, but less than 0.3 ms
        (1.31, 50.0, 0.02, True),
        (12.4, 50.0, 0.2, False),
        (12.6, 50.0, 0.2, True),
        (0.2, 0.0, 1.0, False),
        (0.4, 0.0, 1.0, True),
    ],
)
def test_a_regression_is_more_than_a_quarter_and_more_than_noise(ours, other, reference, worse):
    assert results.regressed(ours, other, reference) is worse


def test_only_missing_runs_are_made_and_others_are_refused():
    cells = matrix(["ssd-greedy"], ["none", "adaptive"], [1, 2], 24)
    made = document(record(seed=1), record(policy="adaptive", seed=2))
    assert [one.key[1:] for one in results.missing(made, cells)] == [("adaptive", 1), ("none", 2)]
    with pytest.raises(UsageError, match="runs of 24 s, not 40 s"):
        results.missing(made, matrix(["ssd-greedy"], ["none"], [1], None))


def test_document_survives_the_disk(tmp_path):
    path = tmp_path / "out.json"
    results.save(document(record()), path)
    again = results.load(path)
    assert again["scenarios"]["ssd-greedy"]["none"]["wait_ms"]["mean"] == 10.0
    assert not list(tmp_path.glob("*.part"))
    path.write_text('{"format": 99}')
    with pytest.raises(UsageError, match="format 1"):
        results.load(path)


def measured():
    """A document with a win, a loss beyond the noise, and one within it."""
    return document(
        record(wait=80.0, neighbour=100 * MIB),
        record(policy="bfqw", wait=1.6, neighbour=60 * MIB),
        record(policy="adaptive", wait=1.0, neighbour=58 * MIB, control_writes=9, bpf_seconds=0.1),
        record("ssd-flood", wait=4.0, neighbour=0),
        record("ssd-flood", "bfqw", wait=1.3, neighbour=0),
        record("ssd-flood", "adaptive", wait=2.0, neighbour=0),
        record("ssd-95", wait=0.2, neighbour=0),
        record("ssd-95", "adaptive", wait=0.4, neighbour=0),
    )


def test_goals_name_what_is_missed():
    by_text = {goal.text: goal for goal in goals(measured())}
    greedy, flood, worse, better, neighbour = by_text.values()
    assert greedy.met
    assert greedy.measured == "98.8%"
    assert not flood.met
    assert not worse.met
    assert worse.measured == "ssd-flood (+0.70 ms)"
    assert not better.met
    assert better.measured == "1 of 3: ssd-greedy"
    assert neighbour.met


def test_a_neighbour_that_is_starved_misses_the_goal():
    runs = [
        record(policy="nbcap", wait=2.0, neighbour=50 * MIB),
        record(policy="adaptive", wait=1.0, neighbour=40 * MIB),
    ]
    assert [goal.measured for goal in goals(document(*runs)) if not goal.met] == ["ssd-greedy (-20 %)"]


def test_tables():
    matrix_text, default = "\n".join(matrix_lines(measured())), "\n".join(default_lines(measured()))
    assert "| ssd-greedy (1) | 80.0 / 4 / 100 | 1.60 / 4 / 60 | **1.00 / 4 / 58** |" in matrix_text
    assert "| ssd-flood (1) | 4.00 / 4 | **1.30 / 4** | 2.00 / 4 |" in matrix_text
    assert "| ssd-95 (1) | **0.20 / 4** | - | **0.40 / 4** |" in matrix_text
    assert "| ssd-greedy | -99 % | bfqw | -38 % | -3 % |" in default
    assert len({line.count("|") for line in matrix_lines(measured())}) == 1
    assert any("missed" in line for line in lines(measured()))


@pytest.mark.parametrize(("value", "text"), [(0.814, "0.81"), (9.97, "10.0"), (76.84, "76.8"), (412.3, "412")])
def test_digits_of_a_wait(value, text):
    assert wait_text(value) == text


def test_page_is_complete_and_asks_for_nothing():
    made = measured()
    made["spoiled"].append({"scenario": "ssd-95", "policy": "none", "seed": 1, "attempt": 1, "why": "<hung>"})
    page = render(made)
    assert "&lt;hung&gt;" in page
    assert not re.search(r'(src|href)="(?!#)', page)
    assert PARAMETERS["bfqw"] in page
    assert PARAMETERS["static"] not in page
    for svg in re.findall(r"<svg.*?</svg>", page, re.DOTALL):
        ET.fromstring(svg)
    assert page.count("<svg") == 2 * (3 + 2 + 2)  # bars of waits and over time each, of neighbours where there are any


def test_whiskers_only_where_seeds_differ():
    apart, alone = Bar("none", 3.0, 2.0, 4.0, "3 ms"), Bar("adaptive", 1.0, 1.0, 1.0, "1 ms")
    assert bar_plot("t", "ms", [apart, alone], 336).count("whisker") == 1


def test_written_lines_are_read_from_the_exposition():
    text = 'prefetchd_control_writes_total{result="error"} 3.0\nprefetchd_control_writes_total{result="written"} 12.0\n'
    assert control_writes(text) == 12
    with pytest.raises(ValueError, match="written"):
        control_writes("")


def test_a_cgroup_without_processes_ran_no_program(tmp_path):
    (tmp_path / "cgroup.procs").write_text("")
    assert bpf_seconds(tmp_path) == 0.0


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({}, ""),
        ({"stuck": {"scan": "io.max ''"}}, "scan hung"),
        ({"iterations": 0}, "no training job"),
        ({"agent": {"status": -11}}, "status -11"),
        ({"agent": AGENT}, ""),
    ],
)
def test_what_spoils_a_run(changes, why):
    assert why in bench.spoiled_by({**summary(), **changes})
    assert bool(bench.spoiled_by({**summary(), **changes})) is bool(why)


class FakeGuest:
    """A guest that does with each run what `outcomes` say: a summary, a status, or an error."""

    def __init__(self, out_dir, outcomes):
        self.out_dir, self.outcomes, self.commands = out_dir, outcomes, []

    def run(self, command, timeout):
        self.commands.append(command)
        outcome = self.outcomes.pop(0)
        if isinstance(outcome, Exception):
            raise outcome
        output = self.out_dir / "output"
        output.write_text("Traceback")
        if isinstance(outcome, dict):
            (self.out_dir / "run.json").write_text(json.dumps(outcome))
        return type("Result", (), {"status": 0 if isinstance(outcome, dict) else outcome, "output": output})


@pytest.fixture
def lab(monkeypatch, tmp_path):
    """Replace the lab; gives the outcomes of runs to come and the list of boots."""
    outcomes, boots = [], []

    class FakeLab:
        def __init__(self, out_dir, **options):
            self.out_dir = out_dir

        @contextlib.contextmanager
        def boot(self):
            if boots and isinstance(boots[-1], Exception):
                raise boots[-1]
            boots.append(self)
            yield FakeGuest(self.out_dir, outcomes)

    monkeypatch.setattr(bench, "Lab", FakeLab)
    monkeypatch.setattr(bench, "trainer_program", lambda: None)
    return outcomes, boots


def run_bench(tmp_path, *words):
    return command_line.main(["bench", "--json", str(tmp_path / "b.json"), "--seconds", "24", *words])


PAIR = ("--scenario", "ssd-greedy", "--policy", "none,adaptive", "--seed", "1")


def test_one_guest_serves_many_runs_and_the_same_command_makes_none(lab, tmp_path, capsys):
    outcomes, boots = lab
    outcomes += [summary(wait=80.0), summary(wait=1.0, agent=AGENT)]
    assert run_bench(tmp_path, *PAIR, "--report", str(tmp_path / "r.html")) == 0
    assert len(boots) == 1
    made = results.load(tmp_path / "b.json")
    assert made["scenarios"]["ssd-greedy"]["adaptive"]["ratio_to_none"]["wait"] == 0.0125
    assert "ssd-greedy" in (tmp_path / "r.html").read_text()
    told = capsys.readouterr()
    assert "[2/2] ssd-greedy adaptive 1: wait 1.00 ms" in told.err
    assert "| ssd-greedy (1) |" in told.out
    assert run_bench(tmp_path, *PAIR) == 0
    assert len(boots) == 1


@pytest.mark.parametrize("spoiler", [LabTimeout("locked up"), 1, summary(stuck={"scan": "queued"}), LabBroken("")])
def test_a_spoiled_run_is_told_and_made_again_in_a_new_guest(lab, tmp_path, spoiler):
    outcomes, boots = lab
    outcomes += [spoiler, summary(wait=80.0), summary(wait=1.0, agent=AGENT)]
    assert run_bench(tmp_path, *PAIR) == 0
    assert len(boots) == 2
    made = results.load(tmp_path / "b.json")
    assert [(note["policy"], note["attempt"]) for note in made["spoiled"]] == [("none", 1)]
    assert [run["attempt"] for run in made["runs"]] == [2, 1]
    assert made["scenarios"]["ssd-greedy"]["none"]["wait_ms"]["mean"] == 80.0


def test_a_run_spoiled_twice_is_left_out_and_the_rest_goes_on(lab, tmp_path, capsys):
    outcomes, _ = lab
    outcomes += [1, 1, summary(wait=1.0, agent=AGENT)]
    assert run_bench(tmp_path, *PAIR) == 1
    made = results.load(tmp_path / "b.json")
    assert [run["policy"] for run in made["runs"]] == ["adaptive"]
    assert "none 1 was spoiled 2 times" in capsys.readouterr().err
    outcomes.append(summary(wait=80.0))
    assert run_bench(tmp_path, *PAIR) == 0


def test_a_lab_that_never_boots_ends_the_benchmark_with_what_is_there(lab, tmp_path, monkeypatch):
    outcomes, boots = lab
    outcomes.append(summary(wait=80.0))
    made_first = bench._attempt

    def then_no_boot(guest, one):
        if outcomes:
            return made_first(guest, one)
        boots.append(LabBroken("no boot"))
        raise LabBroken("gone")

    monkeypatch.setattr(bench, "_attempt", then_no_boot)
    assert run_bench(tmp_path, *PAIR) == 125
    assert [run["policy"] for run in results.load(tmp_path / "b.json")["runs"]] == ["none"]


def test_table_of_a_result(tmp_path, capsys):
    results.save(measured(), tmp_path / "b.json")
    assert command_line.main(["bench", "--table", str(tmp_path / "b.json")]) == 0
    assert "| ssd-greedy (1) |" in capsys.readouterr().out


@pytest.mark.parametrize(
    "words", [["--scenario", "ssd-95"], ["--json", "x"], ["--json", "x", "--seconds", "0", "--scenario", "ssd-95"]]
)
def test_incomplete_command_lines_are_refused(words, capsys):
    assert command_line.main(["bench", *words]) == 2
    assert capsys.readouterr().err


@pytest.mark.parametrize("seconds", ["nan", "inf", "1e308", "-1"])
def test_a_length_that_is_none_is_refused(lab, seconds, tmp_path, capsys):
    words = ["bench", "--json", str(tmp_path / "b.json"), "--scenario", "ssd-95", "--seconds", seconds]
    assert command_line.main(words) == 2
    assert seconds.replace("e", "e+") in capsys.readouterr().err
    assert not lab[1]


def test_where_nothing_is_left_to_run_it_says_so(lab, tmp_path, capsys):
    assert run_bench(tmp_path, "--scenario", "ssd-95", "--policy", ALONE) == 2
    assert "'alone' is for scenarios with neighbours" in capsys.readouterr().err
    assert not lab[1]


@pytest.mark.parametrize("option", ["--json", "--report"])
@pytest.mark.parametrize("name", ["/proc/x", "file/x", "/proc/self/x/x", "x" * 300])
def test_what_could_not_be_written_is_refused_before_the_first_run(lab, option, name, tmp_path, capsys):
    (tmp_path / "file").touch()
    assert run_bench(tmp_path, *PAIR, option, str(tmp_path / name)) == 2
    told = capsys.readouterr().err
    assert f"/{name.strip('/')}' cannot be " in told
    assert told.count("\n") == 1
    assert not lab[1]
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


@pytest.mark.parametrize(
    "text",
    [
        '{"format": 1}', '{"format": 1, "runs": null}', "[" * 200_000, '{"format": 1, "runs": [', "[]",
        json.dumps(document(record()) | {"runs": [{}]}), json.dumps(document(record()) | {"machine": {}}),
        json.dumps(document({**record(), "policy": "other"})), json.dumps(document({**record(), "guest": None})),
        json.dumps(document({**record(), "seconds": None})),
        json.dumps(document(record()) | {"runs": [{**record(), "utilisation": "0.9"}]}),
        json.dumps(document(record()) | {"runs": [{**record(), "samples_per_second": {}}]}),
    ],
)  # fmt: skip
@pytest.mark.parametrize("option", ["--table", "--json"])
def test_a_damaged_result_is_refused_and_stays(lab, option, text, tmp_path, capsys):
    path = tmp_path / "b.json"
    path.write_text(text)
    assert command_line.main(["bench", option, str(path), *(PAIR if option == "--json" else ())]) == 2
    told = capsys.readouterr().err
    assert told.startswith(f"Result {str(path)!r} ")
    assert told.count("\n") == 1
    assert path.read_text() == text
    assert not lab[1]


def test_a_result_without_an_end_is_not_read_to_it(tmp_path, capsys):
    (tmp_path / "b.json").touch()
    os.truncate(tmp_path / "b.json", 10 * 2**30)
    assert command_line.main(["bench", "--table", str(tmp_path / "b.json")]) == 2
    assert "has more than 64 MiB; give the --json of a benchmark" in capsys.readouterr().err


def test_names_in_a_result_steer_no_terminal(tmp_path, capsys):
    (tmp_path / "b.json").write_text(json.dumps(document({**record(), "scenario": "\x1b[31mred"})))
    assert command_line.main(["bench", "--table", str(tmp_path / "b.json")]) == 0
    assert "\\x1b[31mred" in capsys.readouterr().out


def test_a_pipe_is_no_result(tmp_path, capsys):
    os.mkfifo(tmp_path / "pipe")
    assert command_line.main(["bench", "--table", str(tmp_path / "pipe")]) == 2
    assert "is no regular file" in capsys.readouterr().err
