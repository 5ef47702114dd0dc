"""A process that passes for a DataLoader worker, and what the worker probe tells of it meanwhile."""

import json
import subprocess
import sys
import time
from pathlib import Path

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

def naps():
    waited = schedstat()[1]
    while schedstat()[1] - waited < 60_000_000:
        time.sleep(0.001)
        end = time.thread_time() + 0.01
        while time.thread_time() < end:
            pass

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

def read():
    fd = os.open(path, os.O_RDONLY)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    while os.read(fd, 1 << 20):
        pass
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

    def begin(self, phase):
        self.process.stdin.write(phase + "\n")
        self.process.stdin.flush()

    def end(self):
        """What it says of the phase, once that has ended."""
        return json.loads(self.process.stdout.readline())

    def do(self, phase):
        self.begin(phase)
        return self.end()

    def booked(self):
        """What the kernel has booked for its main thread: running and runnable ns, and how often it came to a CPU."""
        return [int(field) for field in Path(f"/proc/{self.process.pid}/schedstat").read_text().split()]

    def settle(self):
        """Wait until it sleeps: a stretch of running or of waiting for a CPU is booked when it ends."""
        deadline = time.monotonic() + 60
        while Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()[0] != "S":
            assert time.monotonic() < deadline, "the worker never sleeps"
            time.sleep(0.005)
        time.sleep(0.05)

    def close(self):
        self.process.stdin.close()
        self.process.wait()
        self.process.stdout.close()


def times(probe, cgroup):
    return probe.read(time.monotonic_ns()).workers[cgroup.stat().st_ino]


def during(probe, cgroup, worker, phase):
    """What the probe added while the worker was in a phase, and what the worker says of it."""
    worker.settle()
    before = times(probe, cgroup)
    said = worker.do(phase)
    worker.settle()
    after = times(probe, cgroup)
    names = ("on_cpu_ns", "block_ns", "nfs_ns", "network_ns", "fault_ns", "other_ns", "runnable_ns")
    return {name: getattr(after, name) - getattr(before, name) for name in names}, said


def close_to(seen_ns, true_ns, part=0.1, slack_ns=30_000_000):
    return abs(seen_ns - true_ns) <= part * true_ns + slack_ns
