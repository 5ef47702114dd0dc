"""The sender that training code imports: what it sends, and that it never blocks and never raises."""

import ast
import os
import shutil
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent import hint


class Receiver:
    """A plain datagram socket in the agent's place."""

    def __init__(self, path):
        self.path = path
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
        self.socket.settimeout(30)
        self.socket.bind(str(path))

    def take(self):
        return hint.WIRE.unpack(self.socket.recv(64))

    def drain(self):
        self.socket.settimeout(0)
        got = []
        try:
            while True:
                got.append(self.take())
        except BlockingIOError:
            self.socket.settimeout(30)
            return got

    def close(self):
        self.socket.close()
        self.path.unlink(missing_ok=True)


@pytest.fixture
def channel(monkeypatch):
    fresh = hint._Channel()
    monkeypatch.setattr(hint, "_channel", fresh)
    yield
    hint._channel.close()


@pytest.fixture
def path(tmp_path, monkeypatch, channel):
    monkeypatch.setenv(hint.SOCKET_VARIABLE, str(tmp_path / "hint.sock"))
    return tmp_path / "hint.sock"


@pytest.fixture
def receiver(path):
    opened = Receiver(path)
    yield opened
    opened.close()


def test_datagram_layout_is_the_documented_one(receiver):
    hint.iteration(3, 8, next_batch_bytes=0x1122334455, wait_seconds=0.5, stream=7, validation=True)
    datagram = receiver.socket.recv(64)
    assert datagram == (
        b"PFH1"
        b"\x0f\0\0\0"  # validation, capacity, bytes and wait known
        b"\x07\0\0\0"
        b"\x03\0\0\0"
        b"\x08\0\0\0"
        b"\0\0\0\0"
        b"\x55\x44\x33\x22\x11\0\0\0"
        b"\x00\x65\xcd\x1d\0\0\0\0"  # 500,000,000 ns
    )


def test_what_is_not_given_is_flagged_unknown(receiver):
    hint.iteration(None)
    hint.waiting(stream=2, wait_seconds=0.25)
    hint.done(stream=2)
    assert receiver.take() == (b"PFH1", hint.DEPTH_UNKNOWN, 0, 0, 0, 0, 0, 0)
    assert receiver.take() == (b"PFH1", hint.WAITING | hint.WAIT_KNOWN, 2, 0, 0, 0, 0, 250_000_000)
    assert receiver.take() == (b"PFH1", hint.DONE, 2, 0, 0, 0, 0, 0)


def test_no_agent_costs_one_look_up_per_interval(path, monkeypatch):
    attempts = []
    real = socket.socket.connect
    monkeypatch.setattr(socket.socket, "connect", lambda *a: attempts.append(a) or real(*a))
    for _ in range(1000):
        hint.iteration(1)
    assert len(attempts) == 1


def test_full_socket_never_blocks_and_the_missed_count_follows(receiver):
    for _ in range(2000):  # the first that waited for room would wait for ever
        hint.iteration(1, stream=5)
    arrived = len(receiver.drain())
    assert 0 < arrived < 2000
    hint.iteration(1, stream=5)
    assert receiver.take()[5] == 2000 - arrived
    hint.iteration(1, stream=5)
    assert receiver.take()[5] == 0


def test_restarted_agent_is_found_again(receiver, path, monkeypatch):
    hint.iteration(1)
    receiver.drain()
    receiver.close()
    hint.iteration(1)  # notices that the agent is gone
    again = Receiver(path)
    try:
        hint.iteration(1)
        assert again.drain() == []  # not looked for again so soon
        monkeypatch.setattr(hint._channel, "_next_attempt", 0.0)
        hint.iteration(4)
        assert [got[3] for got in again.drain()] == [4]
    finally:
        again.close()


def test_forked_child_opens_its_own_socket(receiver):
    hint.iteration(1)
    receiver.drain()
    parents = hint._channel._socket.fileno()
    child = os.fork()
    if child == 0:
        hint.iteration(2)
        os._exit(0 if hint._channel._socket.fileno() != parents and hint._channel.pid == os.getpid() else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    hint.iteration(3)
    assert [got[3] for got in receiver.drain()] == [2, 3]


def test_threads_lose_nothing_while_there_is_room(receiver):
    total, got, room = 400, [], threading.Semaphore(8)  # of the 10 that Linux lets wait where nobody changed it
    hint.iteration(0, stream=99)
    receiver.drain()

    def send(stream):
        for n in range(total // 4):
            room.acquire()
            hint.iteration(n, stream=stream)

    threads = [threading.Thread(target=send, args=(stream,)) for stream in range(4)]
    for thread in threads:
        thread.start()
    while len(got) < total:
        got.append(receiver.take())
        room.release()
    for thread in threads:
        thread.join()
    assert receiver.drain() == []
    assert {datagram[5] for datagram in got} == {0}
    for stream in range(4):
        assert [datagram[3] for datagram in got if datagram[2] == stream] == list(range(total // 4))


class _Hostile:
    def __index__(self):
        raise RuntimeError("hostile")

    __mul__ = __bool__ = __index__


@given(*[st.one_of(st.integers(), st.floats(), st.text(), st.none(), st.builds(_Hostile))] * 5)
def test_no_argument_makes_it_raise(depth, capacity, size, wait, stream):
    hint.iteration(depth, capacity, next_batch_bytes=size, wait_seconds=wait, stream=stream)
    hint.waiting(stream, wait)
    hint.done(stream)


def test_no_argument_makes_it_raise_with_an_agent_either(receiver):
    for bad in (-1, 1 << 40, "x", None, float("nan"), float("inf"), _Hostile(), []):
        hint.iteration(bad, bad, next_batch_bytes=bad, wait_seconds=bad, stream=bad)
        hint.waiting(bad, bad)
        receiver.drain()
    hint.iteration(6)
    assert receiver.take()[3] == 6


def test_watch_tells_waits_depth_and_the_end_of_the_epoch(receiver):
    def slow():
        for item in ("a", "b"):
            time.sleep(0.05)
            yield item

    depths = iter([0, 1, 1, 0, 0])
    watched = hint.watch(slow(), stream=3, depth=lambda: next(depths), capacity=4, batch_bytes=len)
    began = time.monotonic_ns()
    assert list(watched) == ["a", "b"]
    took_ns = time.monotonic_ns() - began
    told = receiver.drain()
    flags = [datagram[1] for datagram in told]
    took = hint.CAPACITY_KNOWN | hint.BYTES_KNOWN | hint.WAIT_KNOWN
    assert flags == [hint.WAITING | hint.WAIT_KNOWN, took, took, hint.WAITING | hint.WAIT_KNOWN, hint.DONE]
    assert [datagram[3] for datagram in told[1:3]] == [1, 0]
    assert [datagram[6] for datagram in told[1:3]] == [1, 1]
    assert all(datagram[7] >= 45e6 for datagram in told[1:3])
    assert sum(datagram[7] for datagram in told[1:3]) <= took_ns


def test_watch_passes_errors_of_the_loader_and_swallows_its_own(receiver):
    def broken():
        yield 1
        raise KeyError("theirs")

    def depth():
        raise ValueError("ours")

    with pytest.raises(KeyError, match="theirs"):
        list(hint.watch(broken(), depth=depth))
    assert receiver.drain()[-1][1] == hint.DONE


def test_watch_can_be_left_repeated_and_measured(receiver):
    watched = hint.watch([1, 2, 3], validation=True)
    assert len(watched) == 3
    for _ in watched:
        break
    assert receiver.drain()[-1][1] == hint.DONE | hint.VALIDATION
    assert list(watched) == [1, 2, 3]
    assert list(watched) == [1, 2, 3]


def test_works_as_a_single_copied_file_without_site_packages(receiver, tmp_path):
    shutil.copy(Path(hint.__file__), tmp_path / "vendored_hint.py")
    code = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); import vendored_hint; vendored_hint.iteration(9)"
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-W", "error", "-c", code],
        env={hint.SOCKET_VARIABLE: str(receiver.path)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stderr == ""
    assert receiver.take()[3] == 9


def test_source_stays_readable_for_python_3_8():
    tree = ast.parse(Path(hint.__file__).read_text(), feature_version=(3, 8))
    imported = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    assert imported <= set(sys.stdlib_module_names)
