"""The hint channel between real processes in real cgroups."""

import contextlib
import os
import select
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from agent import hint
from agent.hint_listener import HintListener

pytestmark = pytest.mark.native

SENDER = """
import sys, time
sys.path.insert(0, {root!r})
from agent import hint
open({cgroup!r} + "/cgroup.procs", "w").write("0")
print("ready", flush=True)
for line in sys.stdin:
    for n in range(int(line)):
        hint.iteration(n % 4, 4, next_batch_bytes=1 << 20, wait_seconds=0.001)
        time.sleep(0.0005)
    print("sent", flush=True)
"""


class Process:
    def __init__(self, cgroup, path):
        code = SENDER.format(root=str(Path(hint.__file__).parents[1]), cgroup=str(cgroup))
        self.process = subprocess.Popen(
            [sys.executable, "-c", code],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {hint.SOCKET_VARIABLE: str(path)},
        )
        assert self.process.stdout.readline() == "ready\n"

    def send(self, count, listener):
        self.process.stdin.write(f"{count}\n")
        self.process.stdin.flush()
        while True:
            ready, _, _ = select.select([listener, self.process.stdout], [], [], 30)
            assert ready, "the sender neither sends nor ends"
            listener.read(time.monotonic_ns())
            if self.process.stdout in ready:
                assert self.process.stdout.readline() == "sent\n"
                return

    def end(self):
        self.process.stdin.close()
        self.process.wait()
        self.process.stdout.close()


@pytest.fixture
def path(tmp_path):
    return tmp_path / "hint.sock"


@pytest.fixture
def start(path):
    started = []

    def begin(cgroup):
        started.append(Process(cgroup, path))
        return started[-1]

    yield begin
    for process in started:
        process.end()


@pytest.fixture
def listener(make_cgroup, path):
    root = make_cgroup().parent
    opened = HintListener(path, root)
    yield opened
    opened.close()


def streams(listener):
    return {stream.cgroup_id: stream for stream in listener.read(time.monotonic_ns()).streams}


def test_two_jobs_are_told_apart_and_strangers_ignored(make_cgroup, listener, start):
    first, second, stranger = make_cgroup(), make_cgroup(), make_cgroup()
    inner = make_cgroup(parent=second)
    ids = [folder.stat().st_ino for folder in (first, second)]
    listener.manage(ids)
    for count, cgroup in ((30, first), (50, inner), (20, stranger)):
        start(cgroup).send(count, listener)
    seen = streams(listener)
    assert {cgroup: stream.iterations for cgroup, stream in seen.items()} == {ids[0]: 30, ids[1]: 50}
    assert seen[ids[0]].wait_ns == 30 * 1_000_000
    assert seen[ids[0]].capacity == 4
    assert dict(listener.status().counts)["unmanaged"] == 20


def test_stream_goes_with_its_process(make_cgroup, listener, start):
    cgroup = make_cgroup()
    listener.manage([cgroup.stat().st_ino])
    process = start(cgroup)
    process.send(5, listener)
    assert len(streams(listener)) == 1
    process.end()
    listener.read(time.monotonic_ns())
    assert streams(listener) == {}


def test_socket_holds_what_comes_between_two_reads(listener, path, monkeypatch):
    limit = Path("/proc/sys/net/unix/max_dgram_qlen").read_text()
    monkeypatch.setenv(hint.SOCKET_VARIABLE, str(path))
    monkeypatch.setattr(hint, "_channel", hint._Channel())
    for _ in range(200):  # one sender's own buffer holds some 270
        hint.iteration(1)
    hint._channel.close()
    listener.read(time.monotonic_ns())
    assert dict(listener.status().counts)["received"] == 200
    assert Path("/proc/sys/net/unix/max_dgram_qlen").read_text() == limit


def test_strangers_that_flood_leave_room_for_jobs(make_cgroup, listener, start, path):
    cgroup = make_cgroup()
    listener.manage([cgroup.stat().st_ino])
    job = start(cgroup)
    with contextlib.ExitStack() as stack:
        for _ in range(10):
            stranger = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK))
            stranger.connect(str(path))
            with contextlib.suppress(BlockingIOError):
                while True:
                    stranger.send(b"x" * hint.WIRE.size)
        job.process.stdin.write("20\n")
        job.process.stdin.flush()
        assert job.process.stdout.readline() == "sent\n"
        while select.select([listener], [], [], 0)[0]:
            seen = streams(listener)
    assert seen[cgroup.stat().st_ino].iterations == 20
    counts = dict(listener.status().counts)
    assert (counts["missed"], counts["received"] - counts["malformed"]) == (0, 20)


def test_hint_costs_little_with_and_without_an_agent(listener, path, monkeypatch):
    """Microseconds per call, far below anything that a training iteration would notice."""
    for where in (path, path.with_name("nobody")):
        monkeypatch.setenv(hint.SOCKET_VARIABLE, str(where))
        monkeypatch.setattr(hint, "_channel", hint._Channel())
        best = min(_microseconds(listener) for _ in range(5))
        hint._channel.close()
        assert best < 50


def _microseconds(listener, calls=5):
    started = time.perf_counter()
    for _ in range(calls):
        hint.iteration(1, 4, wait_seconds=0.001)
    taken = time.perf_counter() - started
    listener.read(time.monotonic_ns())
    return taken / calls * 1e6
