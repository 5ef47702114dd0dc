"""The FUSE probe on this machine's kernel, against the server's own log and the client's clock."""

import threading
import time
from pathlib import Path

import pytest

from bpf.fuse import FuseProbe
from bpf.samples import FuseKey, ProbeState
from tests.native import workload
from tests.native.fuse_mount import mounted
from tests.native.fuse_server import READ, WRITE

pytestmark = pytest.mark.native

KIB, MIB = 1 << 10, 1 << 20
DELAY_S = 0.01


@pytest.fixture
def probe(loader):
    if not Path("/dev/fuse").exists():
        pytest.skip("this kernel has no FUSE, or its module is not loaded")
    made = FuseProbe(loader)
    assert made.status().state is not ProbeState.UNAVAILABLE, made.status().why
    yield made
    made.close()


def counters(probe, cgroup, mount, op):
    return probe.read(time.monotonic_ns()).fuse[FuseKey(cgroup.stat().st_ino, str(mount.where), op)]


def test_direct_requests_agree_with_the_server_and_the_clients_clock(probe, make_cgroup, tmp_path):
    cgroup = make_cgroup()
    probe.manage([cgroup.stat().st_ino])
    with mounted(tmp_path / "mnt", 4 * MIB, DELAY_S) as mount:
        report = workload.run(cgroup, "read", mount.data, 64 * KIB, 50)
        written = workload.run(cgroup, "write", mount.data, 64 * KIB, 20)
        reads, writes, others = (counters(probe, cgroup, mount, op) for op in ("read", "write", "other"))
    requests, size, served_ns = mount.served(READ)
    assert (reads.requests, reads.bytes) == (requests, size) == (50, report.bytes)
    assert served_ns <= reads.total_ns <= sum(report.times_ns)
    assert reads.total_ns >= 50 * DELAY_S * 1e9
    assert sum(reads.histogram) == 50
    mean_us = reads.total_ns / 50 / 1000
    assert reads.total_us_squared >= 50 * (mean_us - 1) ** 2
    assert (writes.requests, writes.bytes) == mount.served(WRITE)[:2] == (20, written.bytes)
    assert others.requests > 0, "the look-up and the open are requests too"


def test_readahead_belongs_to_who_reads(probe, make_cgroup, tmp_path):
    """Through the page cache requests are in the background, more at once than the mount lets through."""
    cgroup, other = make_cgroup(), make_cgroup()
    probe.manage([folder.stat().st_ino for folder in (cgroup, other)])
    with mounted(tmp_path / "mnt", 32 * MIB, 0.002) as mount:
        reports = workload.finish(
            workload.start(cgroup, "buffered", mount.data, 256 * KIB, 64),
            workload.start(other, "buffered", mount.data, 256 * KIB, 64, 16 * MIB),
        )
        mine, theirs = (counters(probe, folder, mount, "read") for folder in (cgroup, other))
    requests, size, served_ns = mount.served(READ)
    assert mine.requests + theirs.requests == requests
    assert mine.bytes + theirs.bytes == size
    assert mine.total_ns + theirs.total_ns >= served_ns
    for found, report in zip((mine, theirs), reports, strict=True):
        assert report.bytes == 16 * MIB <= found.bytes + 2 * MIB, "readahead crosses the border"
    assert probe.status().lost_events == 0


def test_two_mounts_are_told_apart_and_unmanaged_cgroups_leave_no_trace(probe, make_cgroup, tmp_path):
    cgroup, other = make_cgroup(), make_cgroup()
    probe.manage([cgroup.stat().st_ino])
    with mounted(tmp_path / "a", MIB) as first, mounted(tmp_path / "b", MIB) as second:
        workload.run(cgroup, "read", first.data, 64 * KIB, 3)
        workload.run(cgroup, "read", second.data, 64 * KIB, 5)
        workload.run(other, "read", second.data, 64 * KIB, 7)
        assert [counters(probe, cgroup, mount, "read").requests for mount in (first, second)] == [3, 5]
        assert {key.cgroup_id for key in probe.read(0).fuse} == {cgroup.stat().st_ino}
        probe.manage([])
        assert probe.read(0).fuse == {}
        assert probe.status().map_fill_ratio == 0


def test_a_request_that_ends_after_its_cgroup_was_let_go_leaves_nothing(probe, make_cgroup, tmp_path):
    cgroup, other = make_cgroup(), make_cgroup()
    probe.manage([folder.stat().st_ino for folder in (cgroup, other)])
    with mounted(tmp_path / "mnt", MIB, 0.3) as mount:
        running = workload.start(cgroup, "read", mount.data, 64 * KIB, 3)
        released = threading.Timer(0.15, probe.manage, [[other.stat().st_ino]])
        released.start()
        workload.finish(running)
        released.join()
    assert probe.read(0).fuse == {}
    assert probe.status().map_fill_ratio == 0


def test_a_tier_that_this_kernel_refuses_says_why(loader):
    probe = FuseProbe(loader, tiers=())
    assert probe.status().state is ProbeState.UNAVAILABLE
    assert "no tier" in probe.status().why
    probe.close()
    assert probe.read(0).fuse == {}
