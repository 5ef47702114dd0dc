"""The worker probe on a stock kernel: running time, disk, page faults and NFS told apart."""

import os

import pytest

from bpf.loader import Loader
from bpf.samples import ProbeState
from bpf.workers import WorkersProbe
from tests.lab import nfs
from tests.lab.disks import mounted
from tests.native.worker_process import Worker, close_to, during

pytestmark = pytest.mark.guest

MIB = 1 << 20
SLACK_NS = 60_000_000


@pytest.fixture(scope="module")
def probe():
    with Loader() as loader:
        made = WorkersProbe(loader)
        assert made.status().state is ProbeState.ATTACHED, made.status().why
        yield made
        made.close()


@pytest.fixture
def watched(probe, cgroup):
    probe.manage([cgroup.stat().st_ino])
    yield cgroup
    probe.manage([])


@pytest.fixture
def worker(watched):
    started = []

    def start(path):
        started.append(Worker(watched, path))
        return started[-1]

    yield start
    for process in started:
        process.close()


def test_disk_faults_and_running_time(probe, watched, worker, ssd):
    with mounted(ssd) as folder:
        path = folder / "data"
        path.write_bytes(os.urandom(64 * MIB))
        os.sync()
        process = worker(path)
        seen, said = during(probe, watched, process, "cpu")
        assert close_to(seen["on_cpu_ns"], said["run"], 0.05, SLACK_NS)
        for phase, state in (("direct", "block_ns"), ("read", "block_ns"), ("fault", "fault_ns")):
            seen, said = during(probe, watched, process, phase)
            waited = said["off"] - said["wait"]
            print(f"{phase}: waited {waited / 1e6:.0f} ms, { ({name: round(ns / 1e6) for name, ns in seen.items()}) }")
            assert waited > 20_000_000, "nothing was waited for"
            assert close_to(seen[state], waited, 0.2, 10_000_000)
        process.close()


def test_nfs(probe, watched, worker):
    with nfs.served(bytes_per_second=10 * MIB, round_trip_ms=2) as mount:
        (nfs.EXPORT / "data").write_bytes(os.urandom(8 * MIB))
        process = worker(mount / "data")
        seen, said = during(probe, watched, process, "read")
        waited = said["off"] - said["wait"]
        assert waited > SLACK_NS, "nothing was waited for"
        assert close_to(seen["nfs_ns"], waited, 0.2, SLACK_NS)
        process.close()
