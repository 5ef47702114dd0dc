"""The trainer with a real DataLoader on this machine: the same log as the plain one's, the same times."""

import subprocess
import sys
import time

import pytest

from agent.simulate.scenario import ScenarioError, load_scenario, parse_scenario
from tests.lab.agent_config import configuration
from tests.lab.bench_plan import find_scenario
from tests.lab.trainer import TORCH, Extent, job_arguments
from tests.lab.truth import read_truth

MIB = 1 << 20
DATALOADER = load_scenario(find_scenario("dataloader"))


def test_what_the_dataloader_cannot_do_is_refused():
    text = find_scenario("dataloader").read_text()
    for change in ("hints = true", "hints = false\nprepare_cpu_ms = 3"):
        with pytest.raises(ScenarioError, match="trained by torch"):
            parse_scenario(text.replace("hints = false", change), "s")


def test_the_agents_own_view_of_loaders_is_on_where_there_is_one():
    assert "dataloader = true" in configuration(DATALOADER, {"ssd0": "8:0"}, "adaptive")
    assert "dataloader = false" in configuration(load_scenario(find_scenario("ssd-95")), {"ssd0": "8:0"}, "paper")


def test_two_lives_of_a_real_loader(tmp_path):
    file, log = tmp_path / "data", tmp_path / "log"
    file.write_bytes(bytes(8 * MIB))
    job = DATALOADER.jobs[0]
    words = job_arguments(job, DATALOADER, {job.device: Extent(file, 0, 8 * MIB)})
    words += ["--log", str(log), "--buffered", "1", "--compute-us", "20000", "--read-size", "65536"]
    words += ["--stop-ms", "5000", "--restart-ms", "2000"]
    process = subprocess.Popen([sys.executable, str(TORCH), *words], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdout.readline() == b"ready\n"
    process.communicate(f"{time.monotonic_ns()}\n".encode(), timeout=60)
    assert process.returncode == 0
    found = read_truth(log)
    assert {row.life for row in found.iterations} == {0, 1}
    assert 1 < sum(row.life == 0 for row in found.iterations) <= 100
    assert found.end["bytes"] == found.end["reads"] * 65536
    assert max(row.depth_before for row in found.iterations) <= job.queue_batches
    assert found.iterations[0].bytes_total >= job.cold_factor * job.batch_reads * 65536
    assert all(row.taken or row.time_s > 1 for row in found.iterations)
