"""The full agent killed at random instants while its caps stand: none outlives it by more than two seconds."""

import random
import subprocess
import time
from pathlib import Path

import pytest

from agent.simulate.scenario import parse_scenario
from tests.lab import groups
from tests.lab.agent_config import write_configuration
from tests.lab.cache import PROJECT
from tests.lab.disks import find_disk
from tests.lab.scenario_run import running
from tests.unit.cgroup.kills import VARIANTS, Agent, kill_once, wait_until

pytestmark = [pytest.mark.guest, pytest.mark.nightly, pytest.mark.timeout(1500)]

KILLS = 10
PREFETCHD = str(PROJECT / ".venv" / "bin" / "prefetchd")
PRESSURE = parse_scenario(
    """
name = "pressure"
description = "a job that starves beside a scan for as long as the kills take"
duration_seconds = 1200
[[devices]]
name = "ssd0"
kind = "ssd"
bytes_per_second = "120 MiB"
[[jobs]]
name = "hungry"
device = "ssd0"
batch_reads = 8
read_size = "256 KiB"
workers = 4
queue_batches = 8
compute_ms = 50
[[best_effort]]
name = "scan"
device = "ssd0"
threads = 24
read_size = "256 KiB"
""",
    "pressure",
)


def test_ten_kills_of_the_full_agent(tmp_path):
    state = tmp_path / "state"
    config = write_configuration(tmp_path / "node.toml", PRESSURE, {"ssd0": find_disk("ssd0").number})
    config.write_text(config.read_text() + f'\n[enforcement]\nstate_directory = "{state}"\n')
    rng = random.Random(KILLS)
    lives = []
    with running(PRESSURE, seed=1) as run, (tmp_path / "log").open("a") as log:

        def limits():
            return {name: groups.io_max(folder) for name, folder in run.folders.items()}

        prior = limits()
        for number in range(KILLS):
            agent = Agent(
                [PREFETCHD, "run", "--mode", "enforce", "--config", str(config)], state / "journal", stderr=log
            )
            try:
                assert wait_until(lambda: limits() != prior, 120.0) is not None, Path(log.name).read_text()[-3000:]
                time.sleep(rng.random())
                variant = VARIANTS[number % len(VARIANTS)]
                seconds = kill_once(agent, variant, lambda: limits() == prior, lambda: restore(state))
                assert seconds is not None, f"kill {number} ({variant}): {limits()} stayed"
                assert seconds < 2.0, f"kill {number} ({variant}) took {seconds:.2f} s"
                lives.append(seconds)
            finally:
                agent.end()
        assert limits() == prior
    print(f"{len(lives)} SIGKILLs of the full agent: limits back after {max(lives):.2f} s at most; 0 stale limits")


def restore(state):
    """What the next start does first; nothing else may need to be known."""
    done = subprocess.run(
        [PREFETCHD, "restore", "--state-directory", str(state)], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
