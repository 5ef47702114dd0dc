"""The helper that reads ahead, without processes to look at: how often it looks, whose windows it asks for."""

import os
import socket
import threading
import time
from itertools import pairwise

import pytest

from agent.rearrange import files
from agent.rearrange.asker import Ahead, Asker, Order, Target
from agent.rearrange.helper import Helper
from agent.rearrange.window import LEAST_RATE, MIB, Piece, Skip


@pytest.fixture
def helper():
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    made = Helper(theirs, 1 << 20)
    yield made
    made._take({})
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
    helper._renewed_at = time.monotonic() + 3600  # its lease does not end
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
def nothing_cached(monkeypatch):
    monkeypatch.setattr(files, "missing_bytes", lambda descriptor, offset, length: length)


@pytest.fixture
def asker(nothing_cached):
    made = Asker(served(1, 1e9), Ahead())
    yield made
    made.close()


def served(job, rate):
    return Target(job, "", frozenset(), rate, 0)


def window(path, size, *devices):
    path.write_bytes(b"x")
    status = path.stat()
    file = (status.st_dev, status.st_ino)
    pieces = tuple(Piece(at, file, at, MIB) for at in range(0, size, MIB))
    return Order(pieces, {file: str(path)}, {file: frozenset(devices)})


def wait_for(condition):
    """Far less than what was waited for before: a minute, and twelve days."""
    deadline = time.monotonic() + 20.0
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.005)


@pytest.mark.parametrize("rate", [0.0, LEAST_RATE])
def test_a_job_that_may_read_little_keeps_nobody_waiting(helper, nothing_cached, tmp_path, rate):
    helper._take({1: served(1, rate), 2: served(2, 1e9)})
    helper._askers[1].put(window(tmp_path / "one", 64 * MIB))
    helper._askers[2].put(window(tmp_path / "two", 64 * MIB))
    wait_for(lambda: helper._ahead[2].bytes == 64 * MIB)
    assert helper._ahead[1].bytes < 32 * MIB


def test_of_a_job_that_is_served_no_more_nothing_is_asked_for_and_no_thread_stays(helper, nothing_cached, tmp_path):
    before = set(threading.enumerate())
    helper._take({1: served(1, LEAST_RATE)})
    for name in ("under-way", "waiting"):
        wait_for(lambda: helper._askers[1].is_free)
        helper._askers[1].put(window(tmp_path / name, 64 * MIB))
    helper._take({})
    wait_for(lambda: set(threading.enumerate()) <= before)
    assert helper._ahead[1].bytes < 32 * MIB
    helper._take({1: served(1, 1e9)})
    helper._askers[1].put(window(tmp_path / "again", 64 * MIB))
    wait_for(lambda: helper._ahead[1].bytes >= 64 * MIB)


def test_a_window_is_asked_for_in_its_order(asker, monkeypatch, tmp_path):
    asked = []  # threads of other tests may be at their last pieces
    monkeypatch.setattr(files, "ask_for", lambda fd, offset, length: asked.append((os.fstat(fd).st_ino, offset)))
    asker.put(window(tmp_path / "one", 32 * MIB))
    wait_for(lambda: asker.ahead.bytes == 32 * MIB)
    inode = (tmp_path / "one").stat().st_ino
    assert [offset for number, offset in asked if number == inode] == list(range(0, 32 * MIB, MIB))


def test_a_rate_that_changes_holds_for_what_is_under_way(asker, tmp_path):
    asker.target = served(1, LEAST_RATE)
    asker.put(window(tmp_path / "one", 64 * MIB))
    wait_for(lambda: asker.ahead.bytes >= MIB)
    asker.target = served(1, 1e9)
    wait_for(lambda: asker.ahead.bytes == 64 * MIB)


def test_without_a_rate_nothing_is_read(asker, tmp_path):
    """The elastic part is lent out, and the job got nothing before: its share is nothing."""
    asker.target = served(1, 0.0)
    for name in ("one", "two"):
        wait_for(lambda: asker.is_free)
        asker.put(window(tmp_path / name, 2 * MIB))
    wait_for(lambda: asker.is_free)
    assert asker.ahead.bytes == 0


def test_bytes_count_on_the_disk_that_they_came_from(asker, tmp_path):
    for name, devices in (("one", ["8:0"]), ("striped", ["8:0", "8:16"])):
        wait_for(lambda: asker.is_free)
        asker.put(window(tmp_path / name, 2 * MIB, *devices))
    wait_for(lambda: asker.ahead.bytes == 4 * MIB)
    wait_for(lambda: asker.ahead.device_bytes == {"8:0": 3 * MIB, "8:16": MIB})


@pytest.mark.parametrize(
    ("processes", "opened", "why"),
    [(False, True, {Skip.TOO_MANY_FILES: 1}), (True, False, {Skip.TOO_MANY_PROCESSES: 1}), (False, False, {})],
)
def test_of_a_job_with_too_much_to_look_at_the_rest_is_left_out_and_counted(
    helper, monkeypatch, processes, opened, why
):
    monkeypatch.setattr(files, "processes_of", lambda folder: files.Processes((77, 78), too_many=processes))
    monkeypatch.setattr(files, "look_at", lambda pid: files.Looked((), {}, too_many=opened))
    for _ in range(3):
        helper._serve(served(7, 1e6), time.monotonic())
    assert helper._follows[7].skips == why


@pytest.mark.parametrize("more", [0, 1])
def test_whether_a_job_has_more_processes_than_are_looked_at(tmp_path, more):
    """Some of them in cgroups below its own, some of these empty."""
    here, below = files.MOST_PROCESSES // 2, files.MOST_PROCESSES // 2 + more
    for name, numbers in ((".", range(here)), ("below", range(here, here + below)), ("below/empty", ()), ("none", ())):
        (tmp_path / name).mkdir(exist_ok=True)
        (tmp_path / name / "cgroup.procs").write_text("".join(f"{number}\n" for number in numbers))
    found = files.processes_of(str(tmp_path))
    assert found == (tuple(range(files.MOST_PROCESSES)), bool(more))
