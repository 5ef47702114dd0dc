"""Jobs that come and go leave nothing behind in any probe: no map entries, descriptors or memory."""

import time
from pathlib import Path

import pytest

from bpf.block import UNATTRIBUTED, BlockProbe
from bpf.dataloader import DataLoaderProbe
from bpf.fuse import FuseProbe
from bpf.object_store import ObjectStoreProbe
from bpf.page_cache import PageCacheProbe
from bpf.samples import ProbeState
from bpf.workers import WorkersProbe
from tests.native import workload

pytestmark = pytest.mark.native

BUSY = 20
"""How many of the jobs do any IO."""
WARM_UP = 50
MOST_GROWTH = 4 << 20


def resident_bytes():
    """Anonymous memory of this process: what it allocated, without the maps' shared pages."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon:"))


def descriptors():
    return len(list(Path("/proc/self/fd").iterdir()))


@pytest.fixture
def probes(loader):
    made = [BlockProbe(loader), PageCacheProbe(loader), WorkersProbe(loader), ObjectStoreProbe(loader)]
    made.append(DataLoaderProbe(loader))
    if Path("/dev/fuse").exists():
        made.append(FuseProbe(loader))
    running = [probe for probe in made if probe.status().state is not ProbeState.UNAVAILABLE]
    assert isinstance(running[0], BlockProbe), made[0].status().why
    yield running
    for probe in made:
        probe.close()


def bytes_read(probe, folder):
    """What the probe knows of a job once its requests have ended; a missed end is found within a second or two."""
    deadline = time.monotonic() + 10
    while True:
        blocks = probe.read(time.monotonic_ns()).blocks
        mine = [one for key, one in blocks.items() if key.cgroup_id == folder.stat().st_ino and key.op == "read"]
        if not any(one.in_flight for one in mine) or time.monotonic() > deadline:
            return sum(one.bytes for one in mine)
        time.sleep(0.1)


def live(probes, parent, data, jobs):
    """So many jobs, one after another, three at a time; now and then one that reads."""
    folders = []
    for at in range(jobs):
        folder = parent / str(at)
        folder.mkdir()
        folders.append(folder)
        for probe in probes:
            probe.manage([one.stat().st_ino for one in folders])
        if at % max(1, jobs // BUSY) == 0:
            report = workload.run(folder, "read", data, 4096, 3)
            assert bytes_read(probes[0], folder) == report.fetched
        for probe in probes[1:]:
            probe.read(time.monotonic_ns())
        if len(folders) == 3:
            folders.pop(0).rmdir()
    for folder in folders:
        folder.rmdir()
    for probe in probes:
        probe.manage([])


@pytest.mark.parametrize("jobs", [400, pytest.param(10_000, marks=[pytest.mark.nightly, pytest.mark.timeout(1800)])])
def test_nothing_is_left_behind(probes, make_cgroup, disk_folder, jobs):
    data = workload.make_file(disk_folder / "churn", 1 << 20)
    parent = make_cgroup()
    live(probes, parent, data, WARM_UP)
    before = descriptors(), resident_bytes()
    live(probes, parent, data, jobs)
    after = descriptors(), resident_bytes()
    assert after[0] == before[0]
    assert after[1] - before[1] < MOST_GROWTH
    for probe in probes:
        assert (probe.status().map_fill_ratio or 0.0) < 0.02, probe.name  # unknown: its tables are LRU
    losses = probes[0].losses()
    assert losses["slots_full"] == losses["in_flight_full"] == 0
    sample = [probe.read(time.monotonic_ns()) for probe in probes]
    assert {key.cgroup_id for key in sample[0].blocks} <= {UNATTRIBUTED}
    assert not any(one.cache or one.objects or one.fuse or one.workers or one.streams for one in sample)
