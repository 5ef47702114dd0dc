"""A short scenario with real trainers: what they log agrees with the kernel, and nothing is left behind."""

import json

import pytest

from agent.simulate.scenario import parse_scenario
from tests.lab import groups
from tests.lab.disks import find_disk
from tests.lab.peers import current_scheduler, peer
from tests.lab.scenario_run import run_scenario, running
from tests.lab.truth import read_truth

pytestmark = pytest.mark.guest

SHORT = parse_scenario(
    """
name = "short"
description = "one job, one restart, one neighbour"
duration_seconds = 6
[[devices]]
name = "ssd0"
kind = "ssd"
bytes_per_second = "120 MiB"
[[jobs]]
name = "job"
device = "ssd0"
batch_reads = 8
read_size = "128 KiB"
compute_ms = 50
cold_batches = 4
restarts_seconds = [3]
[[best_effort]]
name = "scan"
device = "ssd0"
threads = 16
start_seconds = 1
stop_seconds = 5
""",
    "short",
)


def read_bytes(folder, number):
    for line in (folder / "io.stat").read_text().splitlines():
        if line.startswith(f"{number} "):
            return int(dict(word.split("=") for word in line.split()[1:])["rbytes"])
    return 0


@pytest.fixture(scope="module")
def short_run(tmp_path_factory):
    out = tmp_path_factory.mktemp("short")
    disk = find_disk("ssd0")
    with running(SHORT, seed=1) as run:
        run.wait()
        rbytes = {name: read_bytes(folder, disk.number) for name, folder in run.folders.items()}
        logs = {name: read_truth(run.truth_file(name)) for name in run.folders}
    return out, rbytes, logs


def test_truth_agrees_with_the_kernel(short_run):
    _, rbytes, logs = short_run
    assert rbytes == {name: log.end["bytes"] for name, log in logs.items()}
    assert all(count > 0 for count in rbytes.values())


def test_time_of_a_job_is_wait_and_compute(short_run):
    rows = short_run[2]["job"].iterations
    spent = sum(row.wait_ms for row in rows) / 1e3 + 0.050 * len(rows)
    assert spent == pytest.approx(5.0, rel=0.08)  # six seconds without the pause of the restart
    assert [row.time_s for row in rows] == sorted(row.time_s for row in rows)
    assert {row.life for row in rows} == {0, 1}


def test_neighbour_keeps_its_times(short_run):
    rows = short_run[2]["scan"].iterations
    assert 1.0 <= rows[0].time_s < 1.5
    assert 4.5 < rows[-1].time_s <= 5.1


def test_peer_is_undone_and_cgroups_are_gone(tmp_path):
    summary = run_scenario(SHORT, 2, out=tmp_path, peer_name="nbcap")
    caps = summary["best_effort"]["scan"]["io_max"]
    assert caps["before"] == caps["after"] == ""
    assert "rbps=12582912" in caps["changes"][1][1]
    assert summary["neighbour_bytes_per_second"] < 1.3 * 12582912
    assert json.loads((tmp_path / "summary.json").read_text())["scenario"] == "short"
    assert not groups.TRAIN.exists()
    assert not groups.BATCH.exists()


@pytest.mark.parametrize("name", ["bfqw", "iocostw"])
def test_weights_hold_back_the_neighbour(name):
    free = run_scenario(SHORT, 3)
    held = run_scenario(SHORT, 3, peer_name=name)
    print(f"{name}: job's reads take {free['jobs']['job']['read_ms']} free, {held['jobs']['job']['read_ms']} held")
    assert held["jobs"]["job"]["read_ms"]["mean"] < 0.8 * free["jobs"]["job"]["read_ms"]["mean"]
    disk = find_disk("ssd0")
    assert current_scheduler(disk.scheduler.read_text()) == "none"
    assert "enable=1" not in (groups.ROOT / "io.cost.qos").read_text()


def test_unknown_peer_is_refused():
    with pytest.raises(KeyError), peer("nonesuch", SHORT, {}):
        pass
