"""Jobs that read through the page cache of a disk with moving parts, under an agent that reads ahead or does not."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import statistics
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.lab import groups
from tests.lab.cache import PROJECT
from tests.lab.rearrange_data import CHUNK, MANY_SHARDS, MIB
from tests.lab.truth import percentile

SECONDS = float(os.environ.get("REARRANGE_SECONDS", "24"))
SETTLED_SECONDS = 10.0
MEMORY_BYTES = 96 * MIB
CONFIG = """
[[jobs]]
cgroup = "/train.slice/*"
[[devices]]
device = "{device}"
medium = "hdd"
read_bytes_per_second = 150_000_000
write_bytes_per_second = 150_000_000
read_requests_per_second = 120
write_requests_per_second = 120
[rearrange]
{rearrange}
[probes]
nfs = false
object_store = false
fuse = false
dataloader = false
workers = false
"""
NUMBERED = {"kind": "numbered", "workers": 4, "queue": 16, "batch": 4, "batch_bytes": 4 * CHUNK, "data": "small"}
SHARDS = {"kind": "shards", "workers": 4, "queue": 6, "batch_bytes": 4 * MIB}
FULL_WORKERS = MANY_SHARDS
PLANS: dict[str, dict[str, Any]] = {
    "small": NUMBERED,
    "contiguous": SHARDS | {"data": "contiguous"},
    "interleaved": SHARDS | {"data": "interleaved"},
    "ahead": NUMBERED | {"kind": "ahead", "opened": 3},
    "unqueued": NUMBERED | {"disk": "hdd1"},
    "xfs": NUMBERED | {"disk": "hdd2"},
    "direct": NUMBERED | {"direct": True},
    "full": SHARDS | {"data": "many", "workers": FULL_WORKERS, "queue": 2 * FULL_WORKERS, "memory_bytes": 192 * MIB},
    "three": NUMBERED | {"jobs": 3, "workers": 2, "queue": 8},
}
"""`disk` is another one than hdd0; `jobs` run at the same time, each with numbers of its own."""
FILE_SYSTEMS = {"hdd2": "xfs"}
DEMAND = {"contiguous": 1.2}
USUAL_DEMAND = 1.5
"""A job that computes as long as the disk needs for a batch, divided by this, loses a third of its time without help.

Of contiguous shards the kernel's own read-ahead gets most of what the disk can give, so less can be asked for."""


@dataclass
class Outcome:
    """One run: waits (ms) by job once it had settled, what /state said of the job on the disk last, files left out."""

    plan: Mapping[str, Any]
    waits_ms: list[list[float]]
    rearrange: Mapping[str, Any]
    skips: Mapping[str, int]

    @property
    def mean_ms(self) -> float:
        """Over the iterations of all jobs."""
        return statistics.fmean(wait for waits in self.waits_ms for wait in waits)

    @property
    def worst_ms(self) -> float:
        """The mean of the job that waits longest."""
        return max(map(statistics.fmean, self.waits_ms))

    @property
    def p99_ms(self) -> float:
        return percentile([wait for waits in self.waits_ms for wait in waits], 0.99)

    @property
    def iteration_ms(self) -> float:
        """Mean time of an iteration, the computation included."""
        return self.mean_ms + 1e3 * float(self.plan["compute_seconds"])


def state() -> dict[str, Any]:
    """What the agent says, {} where none answers."""
    try:
        with urllib.request.urlopen("http://127.0.0.1:9753/state", timeout=5) as response:
            found: dict[str, Any] = json.load(response)
            return found
    except OSError:
        return {}


def drop_caches() -> None:
    os.sync()
    Path("/proc/sys/vm/drop_caches").write_text("3")


@contextlib.contextmanager
def started(plan: Mapping[str, Any], cgroup: Path, log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A job that runs in its cgroup; killed afterwards where it still does."""
    (cgroup / "memory.max").write_text(str(plan.get("memory_bytes", MEMORY_BYTES)))
    words = {**plan, "cgroup": str(cgroup), "log": str(log)}
    job = subprocess.Popen([sys.executable, "-m", "tests.lab.rearrange_job", json.dumps(words)], cwd=PROJECT)
    try:
        yield job
    finally:
        job.kill()
        job.wait()


def rows_of(log: Path) -> list[list[float]]:
    """[when (s), waited (s), depth] of every iteration."""
    return [[float(word) for word in line.split()] for line in log.read_text().splitlines()]


def run_jobs(folder: Path, plan: Mapping[str, Any], seed: int, seconds: float, settled_seconds: float) -> Outcome:
    """Run the plan's jobs in cgroups of their own under the agent that is there."""
    names = [f"job{time.monotonic_ns()}-{k}" for k in range(plan.get("jobs", 1))]
    logs = {name: Path(f"/run/{name}.log") for name in names}
    drop_caches()
    told: dict[str, Any] = {}
    skips: dict[str, int] = {}
    with groups.cgroups(names, []) as folders, contextlib.ExitStack() as stack:
        running = []
        for k, name in enumerate(names):
            words = {**plan, "root": str(folder), "seconds": seconds, "seed": 10 * seed + k}
            running.append(stack.enter_context(started(words, folders[name], logs[name])))
        while any(job.poll() is None for job in running):
            time.sleep(1.0)
            told, skips = _looked(names, told, skips)
        rows = [rows_of(log) for log in logs.values()]
    settled = [[1e3 * waited for at, waited, _ in one if at - one[0][0] >= settled_seconds] for one in rows]
    return Outcome(plan, settled, told, skips)


def _looked(names: list[str], told: dict[str, Any], skips: dict[str, int]) -> tuple[dict[str, Any], dict[str, int]]:
    """What the agent says of the first job it reads ahead for; what it said last, where it says nothing."""
    now = state()
    for row in now.get("jobs", ()):
        here = next((one["rearrange"] for one in row["devices"] if one["rearrange"]), None)
        if any(row["cgroup"].endswith(name) for name in names):
            print("   ", row["score"], row["iterations"], row["wait_seconds"], here)
            if here:
                return here, now["rearrange"]["skips"]
    return told, skips


def demanding(folder: Path, kind: str) -> dict[str, Any]:
    """The plan with a computation that leaves the job short: by what the disk gives a job that does not compute."""
    plan = PLANS[kind]
    alone = run_jobs(folder, plan | {"compute_seconds": 0.0}, 0, 10.0, 3.0)
    return plan | {"compute_seconds": alone.mean_ms / 1e3 / DEMAND.get(kind, USUAL_DEMAND)}


@contextlib.contextmanager
def agent_of(
    folder: Path, device: str, *rearrange: str, mode: str = "enforce", memory_mib: int = 96
) -> Iterator[subprocess.Popen[bytes]]:
    """A running agent that is ready, with these lines in [rearrange]; asked to end afterwards, if it still lives."""
    config, log = folder / "agent.toml", folder / "agent.log"
    lines = [f"memory_mib = {memory_mib}", *rearrange]
    config.write_text(CONFIG.format(device=device, rearrange="\n".join(lines)))
    with running_agent(config, log, mode) as agent:
        yield agent


@contextlib.contextmanager
def running_agent(config: Path, log: Path, mode: str = "enforce") -> Iterator[subprocess.Popen[bytes]]:
    """An agent with this configuration, once it answers."""
    argv = [str(PROJECT / ".venv/bin/prefetchd"), "run", "--mode", mode, "--config", str(config)]
    with log.open("wb") as file:
        agent = subprocess.Popen(argv, stdout=file, stderr=file)
    try:
        deadline = time.monotonic() + 300
        while "jobs" not in state():
            assert agent.poll() is None, log.read_text()[-3000:]
            assert time.monotonic() < deadline, log.read_text()[-3000:]
            time.sleep(0.5)
        yield agent
    finally:
        agent.send_signal(signal.SIGTERM)
        try:
            agent.wait(60)
        finally:
            agent.kill()  # or it would refuse every agent after it
        words = ("ahead", "helper", "contiguous")
        print("\n".join(line for line in log.read_text().splitlines() if any(word in line for word in words)))


def run_seeds(folder: Path, kind: str, plan: Mapping[str, Any], seeds: list[int]) -> Iterator[tuple[int, Outcome]]:
    """One kind with all seeds under the agent that runs."""
    for seed in seeds:
        one = run_jobs(folder, plan, seed, SECONDS, SETTLED_SECONDS)
        told = f"computes {1e3 * plan['compute_seconds']:.1f} ms, {[len(waits) for waits in one.waits_ms]} iterations"
        print(f"{kind}, seed {seed}: waits {one.mean_ms:.1f} ms (p99 {one.p99_ms:.0f}), {told}, "
              f"{one.rearrange} {one.skips}", flush=True)  # fmt: skip
        yield seed, one
