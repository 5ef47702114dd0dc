"""Reading ahead on a disk with moving parts: what a job waits with it and without, under the same policy.

Buffered readers with 96 MiB of memory, so that nothing stays in the cache by itself. Two agents run one after the other
over the same files; the second one reads ahead.
"""

import contextlib
import hashlib
import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.lab import groups
from tests.lab.cache import PROJECT
from tests.lab.disks import mounted
from tests.lab.rearrange_data import CHUNK, MIB, SHARD_BYTES, lay_out, pieces
from tests.lab.truth import percentile

pytestmark = [pytest.mark.guest, pytest.mark.nightly, pytest.mark.timeout(900)]

SECONDS = float(os.environ.get("REARRANGE_SECONDS", "30"))
SETTLED_SECONDS = 10.0
MEMORY_BYTES = 96 * MIB
CONFIG = """
[[jobs]]
cgroup = "/train.slice/*"
[[devices]]
device = "{device}"
medium = "hdd"
read_bytes_per_second = 150_000_000
read_requests_per_second = 120
[rearrange]
enabled = {enabled}
memory_mib = 96
[probes]
nfs = false
object_store = false
fuse = false
dataloader = false
workers = false
"""
NUMBERED = {"kind": "numbered", "workers": 4, "queue": 16, "batch": 4, "batch_bytes": 4 * CHUNK, "data": "small"}
SHARDS = {"kind": "shards", "workers": 4, "queue": 6, "batch_bytes": 4 * MIB}
PLANS = {
    "small": NUMBERED,
    "contiguous": SHARDS | {"data": "contiguous"},
    "interleaved": SHARDS | {"data": "interleaved"},
    "ahead": NUMBERED | {"kind": "ahead", "opened": 3},
    "direct": NUMBERED | {"direct": True},
}
DEMAND = {"contiguous": 1.2}
USUAL_DEMAND = 1.5
"""A job that computes as long as the disk needs for a batch, divided by this, loses a third of its time without help.

Of contiguous shards the kernel's own read-ahead gets most of what the disk can give, so less can be asked for."""


@dataclass
class Outcome:
    """One run: its plan, waits (ms) once it had settled, what /state said of it on the disk last, files left out."""

    plan: dict
    waits_ms: list[float]
    rearrange: dict
    skips: dict

    @property
    def mean_ms(self):
        return sum(self.waits_ms) / len(self.waits_ms)

    @property
    def p99_ms(self):
        return percentile(self.waits_ms, 0.99)


def state():
    try:
        with urllib.request.urlopen("http://127.0.0.1:9753/state", timeout=5) as response:
            return json.load(response)
    except OSError:
        return {}


def run_job(folder, plan, seconds, settled_seconds):
    """Run one job in a cgroup of its own under the agent that is there."""
    name = f"job{time.monotonic_ns()}"
    Path("/proc/sys/vm/drop_caches").write_text("3")
    with groups.cgroups([name], []) as folders:
        (folders[name] / "memory.max").write_text(str(MEMORY_BYTES))
        log = Path(f"/run/{name}.log")
        words = {"root": str(folder), "cgroup": str(folders[name]), "log": str(log), "seconds": seconds, "seed": 1}
        command = [sys.executable, "-m", "tests.lab.rearrange_job", json.dumps(plan | words)]
        job = subprocess.Popen(command, cwd=PROJECT)
        told, skips = {}, {}
        try:
            while job.poll() is None:
                time.sleep(1.0)
                told, skips = looked(name, told, skips)
        finally:
            job.kill()
            job.wait()
        rows = [[float(word) for word in line.split()] for line in log.read_text().splitlines()]
    began = rows[0][0]
    return Outcome(plan, [1e3 * waited for at, waited, _ in rows if at - began >= settled_seconds], told, skips)


def looked(name, told, skips):
    """What the agent says of the job now; what it said last, where it says nothing."""
    now = state()
    row = next((one for one in now.get("jobs", ()) if one["cgroup"].endswith(name)), None)
    here = next((one for one in row["devices"] if one["rearrange"]), None) if row else None
    if row:
        print("   ", round(row["score"]), row["iterations"], row["wait_seconds"], here and here["rearrange"])
    return (here["rearrange"], now["rearrange"]["skips"]) if here else (told, skips)


def demanding(folder, kind, plan):
    """The plan with a computation that leaves the job short: by what the disk gives a job that does not compute."""
    alone = run_job(folder, plan | {"compute_seconds": 0.0}, 10.0, 3.0)
    return plan | {"compute_seconds": alone.mean_ms / 1e3 / DEMAND.get(kind, USUAL_DEMAND)}


@contextlib.contextmanager
def agent_of(tmp, device, enabled):
    """A running agent that is ready; asked to end afterwards, if it still lives."""
    config = tmp / f"agent-{enabled}.toml"
    config.write_text(CONFIG.format(device=device, enabled=str(enabled).lower()))
    log = tmp / f"agent-{enabled}.log"
    argv = [str(PROJECT / ".venv/bin/prefetchd"), "run", "--mode", "enforce", "--config", str(config)]
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
        agent.wait(30)
        print("\n".join(line for line in log.read_text().splitlines() if "ahead" in line or "helper" in line))


def run_kinds(folders, plans):
    """All kinds under the agent that runs; gives outcomes by kind."""
    outcomes = {}
    for kind, plan in plans.items():
        one = outcomes[kind] = run_job(folders[plan["data"]], plan, SECONDS, SETTLED_SECONDS)
        told = f"computes {1e3 * plan['compute_seconds']:.1f} ms, {len(one.waits_ms)} iterations"
        print(
            f"{kind}: waits {one.mean_ms:.1f} ms (p99 {one.p99_ms:.0f}), {told}, {one.rearrange} {one.skips}",
            flush=True,
        )
    return outcomes


@pytest.fixture(scope="module")
def data(hdd):
    with mounted(hdd) as mount:
        made = {}
        yield lambda name: made.get(name) or made.setdefault(name, lay_out(mount, name))


@pytest.fixture(scope="module")
def runs(request, tmp_path_factory, hdd, data):
    """Outcomes without and with reading ahead, of the kinds that are selected."""
    tmp = tmp_path_factory.mktemp("rearrange")
    names = [item.name for item in request.session.items]
    kinds = [kind for kind in PLANS if any(f"[{kind}]" in name for name in names)]
    folders = {PLANS[kind]["data"]: data(PLANS[kind]["data"]) for kind in kinds}
    os.sync()
    with agent_of(tmp, hdd.number, False):
        plans = {kind: demanding(folders[PLANS[kind]["data"]], kind, PLANS[kind]) for kind in kinds}
        without = run_kinds(folders, plans)
    with agent_of(tmp, hdd.number, True):
        return {False: without, True: run_kinds(folders, plans)}


@pytest.mark.parametrize("kind", ["small", "contiguous", "interleaved", "ahead"])
def test_it_halves_the_wait(runs, kind):
    without, with_it = runs[False][kind], runs[True][kind]
    print(f"{kind}: {without.mean_ms:.1f} -> {with_it.mean_ms:.1f} ms per iteration")
    assert without.mean_ms > 5.0, "the job does not starve, so nothing can be shown"
    assert with_it.mean_ms <= 0.5 * without.mean_ms
    assert with_it.rearrange["ahead_bytes"] > 20 * MIB
    assert with_it.rearrange["hit_ratio"] >= 0.7


@pytest.mark.parametrize("kind", ["direct"])
def test_direct_readers_are_left_alone(runs, kind):
    without, with_it = runs[False][kind], runs[True][kind]
    assert with_it.rearrange.get("ahead_bytes", 0) == 0
    assert with_it.mean_ms <= 1.1 * without.mean_ms + 0.5


def no_helper():
    names = [path.read_text().strip() for path in Path("/proc").glob("[0-9]*/comm")]
    return "prefetchd-ahead" not in names and not (groups.ROOT / "prefetchd-rearrange").exists()


def checksums(folder):
    return {path: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.rglob("*") if path.is_file()}


def test_killed_in_the_middle_it_leaves_nothing_behind(hdd, data, tmp_path):
    """The agent dies by SIGKILL while it reads ahead: its helper goes, the job goes on, every file is what it was."""
    folder = data("contiguous")
    before = checksums(folder)
    with agent_of(tmp_path, hdd.number, True) as agent, groups.cgroups(["victim"], []) as folders:
        (folders["victim"] / "memory.max").write_text(str(MEMORY_BYTES))
        words = PLANS["contiguous"] | {"root": str(folder), "cgroup": str(folders["victim"]), "seed": 1}
        words |= {"compute_seconds": 0.02, "log": str(tmp_path / "log"), "seconds": 60}
        job = subprocess.Popen([sys.executable, "-m", "tests.lab.rearrange_job", json.dumps(words)], cwd=PROJECT)
        deadline = time.monotonic() + 50
        while not any(one["rearrange"] and one["rearrange"]["ahead_bytes"] for one in devices_of_jobs()):
            assert time.monotonic() < deadline, state()
            time.sleep(0.2)
        assert not no_helper()
        agent.kill()
        agent.wait(10)
        deadline = time.monotonic() + 10
        while not no_helper():
            assert time.monotonic() < deadline, "the helper outlives the agent"
            time.sleep(0.1)
        assert job.poll() is None
        job.kill()
        job.wait()
    assert checksums(folder) == before


def devices_of_jobs():
    return [device for job in state().get("jobs", ()) for device in job["devices"]]


@pytest.mark.parametrize(
    ("name", "least", "most"), [("contiguous", 1, 3), ("interleaved", SHARD_BYTES // CHUNK // 2, 10**6)]
)
def test_files_lie_as_they_should(data, name, least, most):
    found = [pieces(path) for path in sorted(data(name).iterdir())]
    assert all(least <= count <= most for count in found), found
