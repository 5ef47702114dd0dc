"""The page-cache probe on files that are known to be cold, warm, or half of each."""

import mmap
import os
import time

import pytest

from bpf.page_cache import PageCacheProbe
from bpf.samples import ProbeState
from tests.native import workload

pytestmark = pytest.mark.native

MIB = 1 << 20
SIZE = 16 * MIB
WARM = {"cold": 0, "half": SIZE // 2, "warm": SIZE}


@pytest.fixture(scope="module")
def probe(loader):
    made = PageCacheProbe(loader)
    assert made.status().state is not ProbeState.UNAVAILABLE, made.status().why
    yield made
    made.close()


def file_with_cached_part(folder, warm):
    """A file whose first `warm` bytes are in the page cache, and nothing else of it."""
    path = workload.make_file(folder / f"cache-{warm}", SIZE)
    with path.open("rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_RANDOM)
        for at in range(0, warm, MIB):
            os.pread(file.fileno(), MIB, at)
    return path


def counters_of(probe, cgroup, kind, path):
    probe.manage([cgroup.stat().st_ino])
    workload.run(cgroup, kind, path, 65536, SIZE // 65536)
    return probe.read(time.monotonic_ns()).cache[cgroup.stat().st_ino]


@pytest.mark.parametrize("part", WARM)
def test_read_calls(probe, make_cgroup, disk_folder, part):
    path = file_with_cached_part(disk_folder, WARM[part])
    counters = counters_of(probe, make_cgroup(), "buffered", path)
    # The process's own program is read, and faulted in, too.
    assert SIZE <= counters.read_bytes < SIZE + 8 * MIB
    assert counters.missed_bytes == pytest.approx(SIZE - WARM[part], abs=MIB)


@pytest.mark.parametrize("part", WARM)
def test_mapped_reads(probe, make_cgroup, disk_folder, part):
    if "mmap" in probe.status().why:
        pytest.skip(probe.status().why)
    path = file_with_cached_part(disk_folder, WARM[part])
    counters = counters_of(probe, make_cgroup(), "mapped", path)
    assert 0.9 * SIZE <= counters.read_bytes < 1.6 * SIZE
    assert counters.missed_bytes == pytest.approx(SIZE - WARM[part], abs=MIB)


@pytest.mark.parametrize("part", ["cold", "warm"])
def test_a_page_counts_once_though_its_fault_is_tried_again(probe, make_cgroup, disk_folder, part):
    if "mmap" in probe.status().why:
        pytest.skip(probe.status().why)
    path, calls = file_with_cached_part(disk_folder, WARM[part]), SIZE // mmap.PAGESIZE // 2
    cgroup = make_cgroup()
    probe.manage([cgroup.stat().st_ino])
    workload.run(cgroup, "apart", path, 2 * mmap.PAGESIZE, calls)
    counters = probe.read(time.monotonic_ns()).cache[cgroup.stat().st_ino]
    assert calls * mmap.PAGESIZE <= counters.read_bytes < 1.5 * calls * mmap.PAGESIZE


def test_direct_reads_and_pipes_are_no_cache_reads(probe, make_cgroup, disk_folder):
    path = workload.make_file(disk_folder / "direct", SIZE)
    counters = counters_of(probe, make_cgroup(), "read", path)
    assert counters.read_bytes < SIZE / 2


def test_pages_that_writes_add_are_no_misses(probe, make_cgroup, disk_folder):
    path = workload.make_file(disk_folder / "dirty", SIZE, fill=False)
    counters = counters_of(probe, make_cgroup(), "dirty", path)
    assert counters.missed_bytes < MIB


def test_cgroups_no_longer_managed_are_dropped(probe, make_cgroup, disk_folder):
    cgroup = make_cgroup()
    counters_of(probe, cgroup, "buffered", workload.make_file(disk_folder / "dropped", SIZE))
    probe.manage([])
    assert probe.read(time.monotonic_ns()).cache == {}
