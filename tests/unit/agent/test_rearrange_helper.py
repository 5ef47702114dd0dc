"""The helper that reads ahead, without processes to look at: how often it looks, whose windows it asks for."""

import socket
import threading
import time
from itertools import pairwise

import pytest

from agent import rearrange_files as files
from agent.rearrange import LEAST_RATE, MIB, Piece, Skip
from agent.rearrange_helper import Asker, Helper, Order, Target


@pytest.fixture
def helper():
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    made = Helper(theirs, 1 << 20)
    yield made
    ours.close()
    theirs.close()


def test_it_rests_as_long_as_a_look_takes(helper, monkeypatch):
    """Hundreds of processes with hundreds of files each take longer to look at than the time between two looks."""
    looks, looked = [], threading.Event()

    def look(_target, _now):
        began = time.monotonic()
        time.sleep(0.1)
        looks.append((began, time.monotonic()))
        if len(looks) == 4:
            looked.set()

    monkeypatch.setattr(helper, "_serve", look)
    helper._targets = {7: Target(7, "/sys/fs/cgroup/job", frozenset({"8:0"}), 1e6, 0)}
    helper._renewed = time.monotonic() + 3600  # its lease does not end
    thread = threading.Thread(target=helper.run, daemon=True)
    thread.start()
    try:
        assert looked.wait(30)
    finally:
        helper._agent.shutdown(socket.SHUT_RDWR)
        thread.join(30)
    for (began, ended), (again, _) in pairwise(looks):
        assert again - ended >= 0.99 * (ended - began)


@pytest.fixture
def asker(monkeypatch):
    """An asker for whom nothing is in the cache."""
    monkeypatch.setattr(files, "missing_bytes", lambda descriptor, offset, length: length)
    return Asker()


def served(job, rate):
    return Target(job, "", frozenset(), rate, 0)


def window(job, path, size, *devices):
    path.write_bytes(b"x")
    status = path.stat()
    file = (status.st_dev, status.st_ino)
    pieces = tuple(Piece(at, file, at, MIB) for at in range(0, size, MIB))
    return Order(job, pieces, {file: str(path)}, {file: frozenset(devices)})


def wait_for(condition):
    """Far less than what was waited for before: a minute, and twelve days."""
    deadline = time.monotonic() + 20.0
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.005)


@pytest.mark.parametrize("rate", [0.0, LEAST_RATE])
def test_a_job_that_is_served_no_more_keeps_nobody_waiting(asker, tmp_path, rate):
    asker.targets = {1: served(1, rate), 2: served(2, 1e9)}
    asker.put(window(1, tmp_path / "one", 64 * MIB))
    wait_for(lambda: asker.is_free)
    time.sleep(0.1)
    asker.targets = {2: served(2, 1e9)}
    asker.put(window(2, tmp_path / "two", MIB))
    wait_for(lambda: asker.ahead_bytes[2] == MIB)
    assert asker.ahead_bytes[1] < 32 * MIB


def test_a_rate_that_changes_holds_for_what_is_under_way(asker, tmp_path):
    asker.targets = {1: served(1, LEAST_RATE)}
    asker.put(window(1, tmp_path / "one", 64 * MIB))
    wait_for(lambda: asker.ahead_bytes[1] >= MIB)
    asker.targets = {1: served(1, 1e9)}
    wait_for(lambda: asker.ahead_bytes[1] == 64 * MIB)


def test_without_a_rate_nothing_is_read_and_nobody_else_waits(asker, tmp_path):
    """The elastic part is lent out, and the job got nothing before: its share is nothing."""
    asker.targets = {1: served(1, 0.0), 2: served(2, 1e9)}
    asker.put(window(1, tmp_path / "one", 2 * MIB))
    wait_for(lambda: asker.is_free)
    asker.put(window(2, tmp_path / "two", MIB))
    wait_for(lambda: asker.ahead_bytes[2] == MIB)
    assert asker.ahead_bytes[1] == 0


def test_bytes_count_on_the_disk_that_they_came_from(asker, tmp_path):
    asker.targets = {1: served(1, 1e9)}
    for name, devices in (("one", ["8:0"]), ("striped", ["8:0", "8:16"])):
        wait_for(lambda: asker.is_free)
        asker.put(window(1, tmp_path / name, 2 * MIB, *devices))
    wait_for(lambda: asker.ahead_bytes[1] == 4 * MIB)
    wait_for(lambda: asker.device_bytes[1] == {"8:0": 3 * MIB, "8:16": MIB})


def test_of_a_job_with_too_much_open_the_rest_is_left_out_and_counted(helper, monkeypatch):
    monkeypatch.setattr(files, "processes_of", lambda folder: [77])
    monkeypatch.setattr(files, "look_at", lambda pid: files.Looked((), {}, too_many=True))
    for _ in range(3):
        helper._serve(served(7, 1e6), time.monotonic())
    assert helper._follows[7].skips == {Skip.TOO_MANY_FILES: 1}
