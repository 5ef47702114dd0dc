"""The FUSE probe on a stock kernel, where the file system is a module and functions can be traced."""

import subprocess
import time
from pathlib import Path

import pytest

from bpf.fuse import FuseProbe
from bpf.loader import Loader
from bpf.samples import FuseKey, ProbeState
from tests.native import workload
from tests.native.fuse_mount import mounted
from tests.native.fuse_server import READ, WRITE

pytestmark = pytest.mark.guest

KIB, MIB = 1 << 10, 1 << 20
DELAY_S = 0.02


@pytest.fixture(scope="module")
def loader():
    with Loader() as made:
        yield made


def counters(probe, cgroup, mount, op):
    return probe.read(time.monotonic_ns()).fuse[FuseKey(cgroup.stat().st_ino, str(mount.where), op)]


def test_the_module_may_be_loaded_later_and_requests_agree_with_server_and_client(loader, cgroup, tmp_path):
    for holder in ("virtiofs", "fuse"):  # the guest loads the former, nothing uses it; the latter may go along with it
        subprocess.run(["modprobe", "-r", holder], check=False, capture_output=True)
    probe = FuseProbe(loader)
    probe.manage([cgroup.stat().st_ino])
    why = "the file system fuse is missing: the module is not loaded"
    assert (probe.status().state, probe.status().why) == (ProbeState.UNAVAILABLE, why)
    subprocess.run(["modprobe", "fuse"], check=True)
    assert probe.read(time.monotonic_ns()).fuse == {}
    assert (probe.status().state, probe.status().tier) == (ProbeState.ATTACHED, "kprobe"), probe.status().why
    with mounted(tmp_path / "mnt", 8 * MIB, DELAY_S) as mount:
        report = workload.run(cgroup, "read", mount.data, 64 * KIB, 20)
        direct = counters(probe, cgroup, mount, "read")
        written = workload.run(cgroup, "write", mount.data, 64 * KIB, 10)
        workload.run(
            cgroup, "buffered", mount.data, 256 * KIB, 32
        )  # in the background, more than the mount lets through
        reads, writes, others = (counters(probe, cgroup, mount, op) for op in ("read", "write", "other"))
    requests, size, served_ns = mount.served(READ)
    assert (direct.requests, direct.bytes) == (20, report.bytes)
    assert 20 * DELAY_S * 1e9 <= direct.total_ns <= sum(report.times_ns)
    assert (reads.requests, reads.bytes) == (requests, size)
    assert reads.total_ns >= served_ns
    assert (writes.requests, writes.bytes) == mount.served(WRITE)[:2] == (10, written.bytes)
    assert others.requests > 0
    probe.close()
    assert Path("/proc/filesystems").read_text().count("\tfuse\n") == 1
