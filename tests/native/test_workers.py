"""The worker probe against what the kernel books per thread (schedstat) and what the process itself clocked."""

import contextlib
import os
import subprocess
import time
from pathlib import Path

import pytest

from bpf.samples import ProbeState
from bpf.workers import WorkersProbe
from tests.native import workload
from tests.native.conftest import missing
from tests.native.worker_process import Worker, close_to, during, times

pytestmark = pytest.mark.native

MIB = 1 << 20


@pytest.fixture(scope="module", params=["calls", "states"])
def any_probe(request, loader):
    made = WorkersProbe(loader, calls=request.param == "calls")
    expected = ProbeState.ATTACHED if request.param == "calls" else ProbeState.DEGRADED
    assert made.status().state is expected, made.status().why
    yield made
    made.close()


@pytest.fixture
def probe(any_probe):
    yield any_probe
    any_probe.manage([])


@pytest.fixture
def start():
    started = []

    def begin(*arguments):
        started.append(Worker(*arguments))
        return started[-1]

    yield begin
    for worker in started:
        worker.close()


@pytest.fixture(scope="module")
def data(disk_folder):
    return workload.make_file(disk_folder / "workers-data", 64 * MIB)


@pytest.fixture
def watched(probe, make_cgroup, start, data):
    cgroup = make_cgroup()
    probe.manage([cgroup.stat().st_ino])
    return cgroup, start(cgroup, data)


def test_running_and_runnable_time_are_the_kernels_own(probe, watched):
    seen, said = during(probe, *watched, "cpu")
    assert close_to(seen["on_cpu_ns"], said["run"], 0.02)
    assert close_to(seen["runnable_ns"], said["wait"], 0.02)
    assert seen["on_cpu_ns"] >= 450_000_000
    assert seen["block_ns"] + seen["nfs_ns"] + seen["network_ns"] + seen["fault_ns"] < 30_000_000


@contextlib.contextmanager
def deaf_to(probe, tracepoint):
    """Events of a tracepoint do not reach the probe's program, as on kernels that hide tasks from tracing."""
    program = probe._program
    program.detach(f"raw_tracepoint:{tracepoint}")
    try:
        yield
    finally:
        function = {"sched_switch": "raw_switched", "sched_wakeup": "raw_woken"}[tracepoint]
        program.attach_raw_tracepoint(tracepoint, function)


@pytest.fixture
def crowd():
    """More to run than there are CPUs."""
    busy = [subprocess.Popen(["sh", "-c", "while :; do :; done"]) for _ in range(2 * len(os.sched_getaffinity(0)))]
    yield
    for process in busy:
        process.kill()
    for process in busy:
        process.wait()


def unseen(probe, cgroup, worker, tracepoint, phase, enough):
    """(running, runnable) ns that the probe added and that the kernel booked; the first events are missed.

    `enough`: the ns that the worker has to wait for a CPU, and how often it has to come to one, before they are seen.
    """
    worker.settle()
    before, booked = times(probe, cgroup), worker.booked()
    unseen_until = [early + least for early, least in zip(booked[1:], enough, strict=True)]
    deadline = time.monotonic() + 60
    with deaf_to(probe, tracepoint):
        worker.begin(phase)
        while any(now < least for now, least in zip(worker.booked()[1:], unseen_until, strict=True)):
            assert time.monotonic() < deadline, "the worker does not wait for a CPU"
    worker.end()
    worker.settle()
    after, now = times(probe, cgroup), worker.booked()
    seen = (after.on_cpu_ns - before.on_cpu_ns, after.runnable_ns - before.runnable_ns)
    return seen, (now[0] - booked[0], now[1] - booked[1])


def test_a_worker_that_was_not_seen_to_come_to_the_cpu_has_run(probe, watched):
    missed = probe.missed()
    seen, booked = unseen(probe, *watched, "sched_switch", "cpu", (0, 1))
    assert probe.missed()["arrivals"] > missed["arrivals"]
    assert booked[0] > 450_000_000
    assert close_to(seen[0], booked[0], 0.02)


def test_a_worker_that_was_not_seen_to_wake_waited_as_long_as_the_kernel_says(probe, watched, crowd):
    missed = probe.missed()
    seen, booked = unseen(probe, *watched, "sched_wakeup", "naps", (30_000_000, 2))
    assert probe.missed()["wakeups"] > missed["wakeups"]
    assert booked[1] >= 60_000_000
    assert close_to(seen[1], booked[1], 0.02, 2_000_000)
    assert close_to(seen[0], booked[0], 0.02, 2_000_000)


def test_direct_reads_are_waits_for_the_disk(probe, watched):
    seen, said = during(probe, *watched, "direct")
    assert close_to(seen["block_ns"], said["off"] - said["wait"])
    assert seen["block_ns"] > 20_000_000, "nothing was waited for"


@pytest.fixture
def block_device(data):
    done = subprocess.run(["losetup", "--find", "--show", data], capture_output=True, text=True, check=False)
    if done.returncode:
        missing(f"no loop device to read from: {done.stderr.strip()}")
    yield Path(done.stdout.strip())
    subprocess.run(["losetup", "--detach", done.stdout.strip()], check=True)


def test_reads_of_a_device_without_a_file_system_are_waits_for_it(probe, make_cgroup, start, block_device):
    cgroup = make_cgroup()
    probe.manage([cgroup.stat().st_ino])
    seen, said = during(probe, cgroup, start(cgroup, block_device), "direct")
    assert close_to(seen["block_ns"], said["off"] - said["wait"])
    assert seen["block_ns"] > 5_000_000, "nothing was waited for"


def test_sleep_and_pipes_are_no_stall(probe, watched):
    for phase in ("sleep", "pipe"):
        seen, _ = during(probe, *watched, phase)
        assert seen["other_ns"] > 380_000_000
        assert seen["block_ns"] + seen["nfs_ns"] + seen["network_ns"] + seen["fault_ns"] < 20_000_000


def test_sockets_are_waits_for_the_network(any_probe, probe, watched):
    seen, _ = during(probe, *watched, "network")
    looks_at_calls = any_probe.status().state is ProbeState.ATTACHED
    assert seen["network_ns" if looks_at_calls else "other_ns"] > 380_000_000


def test_page_faults_on_a_mapped_file(any_probe, probe, watched):
    seen, said = during(probe, *watched, "fault")
    waited = said["off"] - said["wait"]
    assert waited > 5_000_000, "nothing was waited for"
    if any_probe.status().state is ProbeState.ATTACHED:
        assert close_to(seen["fault_ns"], waited, 0.2)


def test_worker_named_before_anybody_looked(probe, make_cgroup, start, data):
    cgroup = make_cgroup()
    worker = start(cgroup, data)
    worker.do("sleep")
    probe.manage([cgroup.stat().st_ino])
    worker.do("sleep")  # its first switch shows whose it is
    seen, said = during(probe, cgroup, worker, "cpu")
    assert close_to(seen["on_cpu_ns"], said["run"], 0.02)


def test_other_processes_and_other_cgroups_do_not_count(probe, make_cgroup, start, data):
    cgroup, elsewhere = make_cgroup(), make_cgroup()
    probe.manage([cgroup.stat().st_ino])
    start(cgroup, data, "python").do("cpu")
    start(elsewhere, data).do("cpu")
    assert probe.read(time.monotonic_ns()).workers == {}


def test_job_that_is_no_longer_managed_is_gone(probe, watched, make_cgroup):
    cgroup, worker = watched
    worker.do("sleep")
    assert cgroup.stat().st_ino in probe.read(time.monotonic_ns()).workers
    probe.manage([make_cgroup().stat().st_ino])
    worker.do("sleep")
    assert probe.read(time.monotonic_ns()).workers == {}
    assert len(probe._program.map("totals")) == 0, "what it did last, in whose name it was still known"


def test_a_process_with_the_number_of_a_worker_that_ended_unseen_is_none(probe, make_cgroup, start, data):
    """While no job is managed nothing is traced."""
    cgroup = make_cgroup()
    probe.manage([cgroup.stat().st_ino])
    workers = probe._program.map("workers")
    other = start(cgroup, data, "python")
    workers[workers.Key(other.process.pid)] = workers.Leaf()  # as if a worker had had its number
    probe.manage([])
    probe.manage([cgroup.stat().st_ino])
    other.do("cpu")
    assert probe.read(time.monotonic_ns()).workers == {}


def test_ended_workers_leave_nothing_behind(any_probe, probe, make_cgroup, start, data):
    cgroup = make_cgroup()
    probe.manage([cgroup.stat().st_ino])
    worker = start(cgroup, data)
    known = any_probe._program.map("workers")  # those of other training on this machine are in it too
    key = known.Key(worker.process.pid)
    assert key in known
    worker.close()
    assert key not in known
