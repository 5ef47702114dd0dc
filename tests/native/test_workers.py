"""The worker probe against what the kernel books per thread (schedstat) and what the process itself clocked."""

import json
import subprocess
import sys
import time

import pytest

from bpf.samples import ProbeState
from bpf.workers import WorkersProbe
from tests.native import workload

pytestmark = pytest.mark.native

MIB = 1 << 20

# A process that names itself as PyTorch's workers do and passes its time in phases; prints the ns of each, and its own
# running and runnable time from schedstat.
WORKER = """
import ctypes, json, mmap, os, socket, sys, threading, time
cgroup, path, name = sys.argv[1:4]
libc = ctypes.CDLL(None)

def schedstat():
    return [int(field) for field in open("/proc/self/schedstat").read().split()[:2]]

def cpu():
    end = time.thread_time() + 0.5
    while time.thread_time() < end:
        pass

def sleep():
    time.sleep(0.4)

def direct():
    fd = os.open(path, os.O_RDONLY | os.O_DIRECT)
    buffer = mmap.mmap(-1, 1 << 20)
    for n in range(300):
        os.preadv(fd, [buffer], n % 64 << 20)
    os.close(fd)

def fault():
    fd = os.open(path, os.O_RDONLY)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    with mmap.mmap(fd, 0, prot=mmap.PROT_READ) as view:
        view.madvise(mmap.MADV_RANDOM)
        for at in range(0, len(view), 1 << 16):
            view[at]
    os.close(fd)

def network():
    ours, theirs = socket.socketpair()
    threading.Timer(0.4, lambda: theirs.send(b"x")).start()
    ours.recv(1)

def pipe():
    reader, writer = os.pipe()
    threading.Timer(0.4, lambda: os.write(writer, b"x")).start()
    os.read(reader, 1)

open(cgroup + "/cgroup.procs", "w").write("0")
libc.prctl(15, name.encode())
print("ready", flush=True)
for line in sys.stdin:
    before, began, used = schedstat(), time.monotonic_ns(), time.thread_time_ns()
    globals()[line.strip()]()
    off = time.monotonic_ns() - began - (time.thread_time_ns() - used)
    run, wait = (after - early for after, early in zip(schedstat(), before))
    print(json.dumps({"off": off, "run": run, "wait": wait}), flush=True)
"""


class Worker:
    def __init__(self, cgroup, path, name="pt_data_worker"):
        self.process = subprocess.Popen(
            [sys.executable, "-c", WORKER, str(cgroup), str(path), name],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self.process.stdout.readline() == "ready\n"

    def do(self, phase):
        self.process.stdin.write(phase + "\n")
        self.process.stdin.flush()
        return json.loads(self.process.stdout.readline())

    def close(self):
        self.process.stdin.close()
        self.process.wait()
        self.process.stdout.close()


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


def times(probe, cgroup):
    return probe.read(time.monotonic_ns()).workers[cgroup.stat().st_ino]


def during(probe, cgroup, worker, phase):
    """What the probe added while the worker was in a phase, and what the worker says of it."""
    before = times(probe, cgroup)
    said = worker.do(phase)
    time.sleep(0.05)  # until it waits for the next phase
    after = times(probe, cgroup)
    names = ("on_cpu_ns", "block_ns", "nfs_ns", "network_ns", "fault_ns", "other_ns", "runnable_ns")
    return {name: getattr(after, name) - getattr(before, name) for name in names}, said


def close_to(seen_ns, true_ns, part=0.1, slack_ns=30_000_000):
    return abs(seen_ns - true_ns) <= part * true_ns + slack_ns


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


def test_direct_reads_are_waits_for_the_disk(probe, watched):
    seen, said = during(probe, *watched, "direct")
    assert close_to(seen["block_ns"], said["off"] - said["wait"])
    assert seen["block_ns"] > 20_000_000, "nothing was waited for"


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


def test_ended_workers_leave_nothing_behind(any_probe, probe, make_cgroup, start, data):
    cgroup = make_cgroup()
    probe.manage([cgroup.stat().st_ino])
    worker = start(cgroup, data)
    assert len(any_probe._program.map("workers")) == 1
    worker.close()
    assert len(any_probe._program.map("workers")) == 0
