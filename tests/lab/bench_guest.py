"""The benchmark's part inside the guest: one run of one scenario under one policy, measured.

`python -m tests.lab.bench_guest FILE --policy NAME --seed N --seconds S --out FILE.json`. The policies `paper` and
`adaptive` are the shipped agent in enforce mode with its default configuration.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import tempfile
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from agent.simulate.scenario import Scenario
from tests.lab import groups
from tests.lab.agent_config import write_configuration
from tests.lab.bench_plan import ALONE, CHOICES, OURS, load_subject
from tests.lab.cache import PROJECT
from tests.lab.disks import find_disk
from tests.lab.scenario_run import Run, run_scenario
from tests.lab.truth import read_truth

METRICS_URL = "http://127.0.0.1:9753/metrics"
STATISTICS = Path("/proc/sys/kernel/bpf_stats_enabled")


def measure(scenario: Scenario, policy: str, seed: int) -> dict[str, Any]:
    """Run once and return the summary of `scenario_run`, with `control_writes`, `bpf_seconds` and waits by second."""
    if policy == ALONE:
        alone = msgspec.structs.replace(scenario, best_effort=())
        return {**run_scenario(alone, seed, finish=waits_by_second), "policy": ALONE}
    if policy not in OURS:
        return run_scenario(scenario, seed, peer_name=policy, finish=waits_by_second)
    with tempfile.TemporaryDirectory() as folder, kernel_statistics():
        numbers = {device.name: find_disk(device.name).number for device in scenario.devices if device.kind != "nfs"}
        config = write_configuration(Path(folder) / "prefetchd.toml", scenario, numbers, policy)
        argv = [str(PROJECT / ".venv" / "bin" / "python"), "-m", "agent", "run"]
        argv += ["--mode", "enforce", "--config", str(config)]
        summary = run_scenario(scenario, seed, agent_argv=argv, finish=_costs)
    return {**summary, "policy": policy}


@contextlib.contextmanager
def kernel_statistics() -> Iterator[None]:
    """Let the kernel time every BPF program while the body runs."""
    before = STATISTICS.read_text()
    STATISTICS.write_text("1")
    try:
        yield
    finally:
        STATISTICS.write_text(before)


def _costs(run: Run) -> dict[str, Any]:
    """What the agent did and cost until now, by its own counters and the kernel's; it still runs."""
    with urllib.request.urlopen(METRICS_URL, timeout=10) as response:
        writes = control_writes(response.read().decode())
    return {"control_writes": writes, "bpf_seconds": bpf_seconds(groups.AGENT), **waits_by_second(run)}


def waits_by_second(run: Run) -> dict[str, Any]:
    """Return the mean wait (ms) of all training iterations by the second in which they began; None where none did."""
    bins: list[list[float]] = [[] for _ in range(int(run.scenario.duration_seconds))]
    for job in run.scenario.jobs:
        for row in read_truth(run.truth_file(job.name)).iterations:
            if 0 <= row.time_s < len(bins):
                bins[int(row.time_s)].append(row.wait_ms)
    return {"wait_ms_by_second": [round(sum(waits) / len(waits), 2) if waits else None for waits in bins]}


def control_writes(metrics: str) -> int:
    """Return how many writes to control files the agent's exposition text counts as done."""
    for line in metrics.splitlines():
        if line.startswith("prefetchd_control_writes_total") and 'result="written"' in line:
            return int(float(line.split()[-1]))
    raise ValueError("The agent's metrics hold no prefetchd_control_writes_total with result written.")


def bpf_seconds(cgroup: Path) -> float:
    """Return for how long the BPF programs that a cgroup's processes hold have run, where the kernel times them.

    Each program once, whoever holds it (proc_pid_fdinfo(5): prog_id, run_time_ns).
    """
    spent: dict[str, int] = {}
    for pid in (cgroup / "cgroup.procs").read_text().split():
        for info in Path(f"/proc/{pid}/fdinfo").glob("*"):
            with contextlib.suppress(OSError):
                fields = dict(line.split(":", 1) for line in info.read_text().splitlines() if ":" in line)
                if "run_time_ns" in fields:
                    spent[fields["prog_id"].strip()] = int(fields["run_time_ns"])
    return round(sum(spent.values()) / 1e9, 4)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.lab.bench_guest", description="Measure one run in the guest."
    )
    parser.add_argument("scenario")
    parser.add_argument("--policy", choices=CHOICES, required=True)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--seconds", type=float, required=True)
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args(argv)
    scenario = load_subject(arguments.scenario, arguments.seconds).scenario
    summary = measure(scenario, arguments.policy, arguments.seed)
    part = arguments.out.with_suffix(".part")
    part.write_text(json.dumps(summary))
    part.rename(arguments.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
