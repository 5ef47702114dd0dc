"""Reading ahead on a disk with moving parts: what a job waits with it and without, under the same policy.

Buffered readers with 96 MiB of memory, so that nothing stays in the cache by itself. Two agents run one after the other
over the same files; the second one reads ahead. Every kind runs with three seeds; `-k "small"` or `-k "1]"` chooses.
"""

import contextlib
import hashlib
import os
import statistics
import time
from collections import defaultdict
from pathlib import Path

import pytest

from tests.lab import groups
from tests.lab.disks import find_disk, mounted
from tests.lab.rearrange_data import CHUNK, MIB, SHARD_BYTES, lay_out, pieces
from tests.lab.rearrange_runs import (
    FILE_SYSTEMS,
    PLANS,
    agent_of,
    demanding,
    run_seeds,
    started,
    state,
)

pytestmark = [pytest.mark.guest, pytest.mark.nightly, pytest.mark.timeout(1800)]

SEEDS = [1, 2, 3]
HELPED = ["small", "contiguous", "interleaved", "ahead", "unqueued", "xfs"]
LEFT_ALONE = ["direct", "full"]
READ_AHEAD_KB = {"full": 768}
"""Of the disk itself while a kind runs; a request of the lab's disk holds at most 1016 KiB."""


@pytest.fixture(scope="module")
def data():
    """Gives the folder of a set on a disk, laid out when it is first asked for."""
    with contextlib.ExitStack() as stack:
        mounts, made = {}, {}

        def get(name, serial="hdd0"):
            if serial not in mounts:
                disk = find_disk(serial)
                mounts[serial] = stack.enter_context(mounted(disk, FILE_SYSTEMS.get(serial, "ext4")))
            if (serial, name) not in made:
                made[serial, name] = lay_out(mounts[serial], name)
            return made[serial, name]

        yield get


@pytest.fixture(scope="module")
def runs(request, tmp_path_factory, data):
    """Outcomes by (reads ahead, kind, seed), of the kinds and seeds that are selected, disk by disk."""
    chosen = [item.callspec.params for item in request.session.items if hasattr(item, "callspec")]
    kinds = [kind for kind in PLANS if any(one.get("kind") == kind for one in chosen)]
    seeds = sorted({one["seed"] for one in chosen if "seed" in one}) or SEEDS
    by_disk = defaultdict(list)
    for kind in kinds:
        by_disk[PLANS[kind].get("disk", "hdd0")].append(kind)
    found = {}
    for serial, here in by_disk.items():
        folders = {kind: data(PLANS[kind]["data"], serial) for kind in here}
        os.sync()
        disk = find_disk(serial)
        own = read_ahead_of(disk).read_text()
        plans = {}
        for reads_ahead in (False, True):
            enabled = f"enabled = {str(reads_ahead).lower()}"
            with agent_of(tmp_path_factory.mktemp("agent"), disk.number, enabled):
                for kind in here:
                    read_ahead_of(disk).write_text(str(READ_AHEAD_KB.get(kind, own)))
                    if kind not in plans:
                        plans[kind] = demanding(folders[kind], kind)
                    found |= {
                        (reads_ahead, kind, seed): one
                        for seed, one in run_seeds(folders[kind], kind, plans[kind], seeds)
                    }
        read_ahead_of(disk).write_text(own)
    return found


def read_ahead_of(disk):
    return Path(f"/sys/block/{disk.name}/queue/read_ahead_kb")


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("kind", HELPED)
def test_it_halves_the_wait(runs, kind, seed):
    without, with_it = runs[False, kind, seed], runs[True, kind, seed]
    print(f"{kind}, seed {seed}: {without.mean_ms:.1f} -> {with_it.mean_ms:.1f} ms per iteration")
    assert without.mean_ms > 5.0, "the job does not starve, so nothing can be shown"
    assert with_it.mean_ms <= 0.5 * without.mean_ms
    assert with_it.rearrange["ahead_bytes"] > 20 * MIB
    assert with_it.rearrange["hit_ratio"] >= 0.7


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("kind", LEFT_ALONE)
def test_where_it_cannot_help_it_does_nothing(runs, kind, seed):
    """Direct readers, and readers that keep the queue full of large requests by themselves."""
    without, with_it = runs[False, kind, seed], runs[True, kind, seed]
    print(f"{kind}, seed {seed}: {without.iteration_ms:.2f} -> {with_it.iteration_ms:.2f} ms an iteration")
    assert with_it.rearrange.get("ahead_bytes", 0) == 0
    assert with_it.mean_ms <= 1.1 * without.mean_ms + 0.5


@pytest.mark.parametrize("kind", LEFT_ALONE)
def test_where_it_cannot_help_it_costs_nothing(runs, kind):
    """The median over seeds of what an iteration takes: at most 2 % more."""
    seeds = [seed for is_on, one, seed in runs if is_on and one == kind]
    costs = [runs[True, kind, seed].iteration_ms / runs[False, kind, seed].iteration_ms - 1.0 for seed in seeds]
    print(f"{kind}: costs {[f'{cost:+.1%}' for cost in costs]} of an iteration")
    assert statistics.median(costs) <= 0.02


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("kind", ["three"])
def test_several_jobs_at_once_are_not_harmed(runs, kind, seed):
    """Their windows meet in one queue: too much in flight would make each wait for what the others need later."""
    without, with_it = runs[False, kind, seed], runs[True, kind, seed]
    print(f"{kind}, seed {seed}: {without.mean_ms:.1f} -> {with_it.mean_ms:.1f} ms, worst job "
          f"{without.worst_ms:.1f} -> {with_it.worst_ms:.1f} ms")  # fmt: skip
    assert with_it.mean_ms <= 1.1 * without.mean_ms + 0.5
    assert with_it.worst_ms <= 1.1 * without.worst_ms + 0.5


def no_helper():
    names = [path.read_text().strip() for path in Path("/proc").glob("[0-9]*/comm")]
    return "prefetchd-ahead" not in names and not (groups.ROOT / "prefetchd-rearrange").exists()


def checksums(folder):
    return {path: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.rglob("*") if path.is_file()}


def test_killed_in_the_middle_it_leaves_nothing_behind(hdd, data, tmp_path):
    """The agent dies by SIGKILL while it reads ahead: its helper goes, the job goes on, every file is what it was."""
    folder = data("contiguous")
    before = checksums(folder)
    plan = PLANS["contiguous"] | {"root": str(folder), "seed": 1, "compute_seconds": 0.02, "seconds": 60}
    with (
        agent_of(tmp_path, hdd.number) as agent,
        groups.cgroups(["victim"], []) as folders,
        started(plan, folders["victim"], tmp_path / "log") as job,
    ):
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
    assert checksums(folder) == before


def devices_of_jobs():
    return [device for job in state().get("jobs", ()) for device in job["devices"]]


@pytest.mark.parametrize("serial", ["hdd0", "hdd2"])
@pytest.mark.parametrize(
    ("name", "least", "most"),
    [("contiguous", 1, 3), ("interleaved", SHARD_BYTES // CHUNK // 2, 10**6), ("small", 1, 2)],
)
def test_files_lie_as_they_should(data, serial, name, least, most):
    """On ext4 and on xfs."""
    found = [pieces(path) for path in sorted(data(name, serial).rglob("*")) if path.is_file()]
    assert all(least <= count <= most for count in found), found
