"""The receiving side over a real socket; /proc and the cgroup tree are built, so no rights are needed."""

import array
import contextlib
import os
import select
import socket
import stat
import time
from dataclasses import replace
from pathlib import Path

import pytest

from agent import hint, hint_listener
from agent.hint_listener import HintListener
from agent.metrics import ReportCollector
from agent.snapshot import snapshot
from bpf.samples import ProbeState
from tests.unit.agent.made_reports import story

CLOCKS_DIFFER_NS = 2_000_000
"""The wall clock, by which the kernel stamps a datagram, may be slewed meanwhile."""


@pytest.fixture
def node(tmp_path):
    """(cgroup id of this process, cgroup root, proc root)."""
    job = tmp_path / "cgroup" / "job"
    job.mkdir(parents=True)
    mine = tmp_path / "proc" / str(os.getpid())
    mine.mkdir(parents=True)
    (mine / "stat").write_text(Path("/proc/self/stat").read_text())
    (mine / "cgroup").write_text("0::/job\n")
    return job.stat().st_ino, tmp_path / "cgroup", tmp_path / "proc"


@pytest.fixture
def path(tmp_path):
    return tmp_path / "run" / "hint.sock"


@pytest.fixture
def listener(node, path):
    opened = HintListener(path, node[1], node[2])
    opened.manage({node[0]})
    yield opened
    opened.close()


@pytest.fixture
def raw(listener, path):
    """A sender that can be as rude as it likes."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
        sender.connect(str(path))
        yield sender


def datagram(flags=hint.WAIT_KNOWN, stream=0, depth=2, wait_ns=5):
    return hint.WIRE.pack(b"PFH1", flags, stream, depth, 0, 0, 0, wait_ns)


def now():
    return time.monotonic_ns()


def test_hints_arrive_as_a_stream_of_the_senders_cgroup(listener, node, path, monkeypatch):
    monkeypatch.setenv(hint.SOCKET_VARIABLE, str(path))
    monkeypatch.setattr(hint, "_channel", hint._Channel())
    before = now()
    hint.iteration(1, 4, next_batch_bytes=100, wait_seconds=0.002)
    hint.iteration(0, 4, wait_seconds=0.003)
    after = now()
    hint._channel.close()
    time.sleep(0.05)
    read_from = now()
    sample = listener.read(read_from)
    took_ns = now() - read_from
    (stream,) = sample.streams
    assert stream.cgroup_id == node[0]
    assert stream.stream == f"{os.getpid()}/0"
    assert (stream.iterations, stream.wait_ns, stream.depth, stream.capacity) == (2, 5_000_000, 0, 4)
    assert len(stream.recent) == 2
    for event in stream.recent:  # sent, not read; an age is told at some moment of the reading
        assert before - took_ns - CLOCKS_DIFFER_NS <= event.time_ns <= after + CLOCKS_DIFFER_NS
    assert listener.read(now()).streams[0].recent == ()


def test_waiting_since_is_counted_from_the_send(listener, raw):
    before = now()
    raw.send(datagram(hint.WAITING | hint.WAIT_KNOWN, wait_ns=1_000_000_000))
    after = now()
    (stream,) = listener.read(after).streams
    took_ns = now() - after
    sent_ns = stream.waiting_since_ns + 1_000_000_000
    assert before - took_ns - CLOCKS_DIFFER_NS <= sent_ns <= after + CLOCKS_DIFFER_NS
    assert (stream.iterations, stream.depth) == (0, 0)


def test_socket_is_open_to_all_and_gone_after_close(listener, path):
    assert stat.S_IMODE(path.stat().st_mode) == 0o666
    assert list(path.parent.iterdir()) == [path]
    assert listener.status().state is ProbeState.ATTACHED
    listener.close()
    listener.close()
    assert not path.exists()
    assert listener.fileno() == -1
    assert listener.read(now()).streams == ()
    assert listener.status().state is ProbeState.UNAVAILABLE


def test_fileno_tells_of_datagrams(listener, raw):
    assert select.select([listener], [], [], 0)[0] == []
    raw.send(datagram())
    assert select.select([listener], [], [], 0)[0] == [listener]


def test_stale_socket_is_replaced(node, path):
    path.parent.mkdir()
    stale = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    stale.bind(str(path))
    stale.close()
    listener = HintListener(path, node[1], node[2])
    assert listener.status().state is ProbeState.ATTACHED
    listener.close()


def test_second_agent_stays_without_channel_and_takes_nothing_away(listener, node, path):
    second = HintListener(path, node[1], node[2])
    assert second.status().state is ProbeState.UNAVAILABLE
    assert "another agent" in second.status().why
    assert str(path) in second.status().why
    second.close()
    assert path.exists()


def test_other_file_at_the_path_is_left_alone(node, path):
    path.parent.mkdir()
    path.write_text("precious")
    listener = HintListener(path, node[1], node[2])
    assert (
        listener.status().why
        == f"the socket {str(path)!r} cannot be made (not a socket; remove it or choose another path)"
    )
    listener.close()
    assert path.read_text() == "precious"


def test_newer_socket_at_the_path_survives_our_close(listener, path):
    path.unlink()
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as newer:
        newer.bind(str(path))
        listener.close()
        assert path.exists()


def test_malformed_costs_a_counter_and_nothing_else(listener, raw):
    for bad in (b"x", b"", datagram() + b"x", b"PFH2" + datagram()[4:], os.urandom(4000)):
        raw.send(bad)
    raw.send(datagram())
    assert [stream.iterations for stream in listener.read(now()).streams] == [1]
    assert {result: count for result, count in listener.status().counts if count} == {"received": 6, "malformed": 5}


def test_what_became_of_hints_is_exported(listener, raw):
    """An operator whose training code sends from the wrong cgroup, or sends nonsense, finds out."""
    raw.send(b"x")
    raw.send(datagram())
    listener.read(now())
    listener.manage(set())
    raw.send(datagram())
    listener.read(now())
    report, _ = next(story(1.0))
    seen = replace(report, probes=(*report.probes, listener.status()))
    families = {family.name: family for family in ReportCollector(lambda: seen, "1").collect()}
    told = {sample.labels["result"]: sample.value for sample in families["prefetchd_hints"].samples}
    assert told == dict.fromkeys(hint_listener.RESULTS, 0) | {"received": 3, "malformed": 1, "unmanaged": 1}
    assert snapshot(seen)["probes"][-1]["counts"] == told


def test_flood_is_cut_and_counted(listener, raw, monkeypatch):
    monkeypatch.setattr(hint_listener, "MAX_DATAGRAMS_PER_SECOND", 20)
    began = now()
    for _ in range(10):
        for _ in range(5):
            raw.send(datagram())
        (stream,) = listener.read(now()).streams
    starts = 2 + (now() - began) // 1_000_000_000  # of seconds at most, the one that it began in included
    assert 20 <= stream.iterations <= min(20 * starts, 50)
    assert dict(listener.status().counts)["flooded"] == 50 - stream.iterations
    assert listener.status().lost_events == 50 - stream.iterations


def test_streams_of_one_sender_are_bounded(listener, raw):
    for stream in range(hint_listener.MAX_STREAMS_PER_SENDER + 3):
        raw.send(datagram(stream=stream))
        streams = listener.read(now()).streams
    assert len(streams) == hint_listener.MAX_STREAMS_PER_SENDER
    assert dict(listener.status().counts)["too_many_streams"] == 3


def test_one_read_takes_a_bounded_number(listener, raw, monkeypatch):
    monkeypatch.setattr(hint_listener, "MAX_DATAGRAMS_PER_READ", 3)
    for _ in range(5):
        raw.send(datagram())
    assert listener.read(now()).streams[0].iterations == 3
    assert listener.read(now()).streams[0].iterations == 5


class Clock:
    """The module `time` with a monotonic clock that a test moves."""

    def __init__(self, monotonic_ns):
        self.monotonic_ns = monotonic_ns

    def __getattr__(self, name):
        return getattr(time, name)


def test_strangers_that_take_long_to_identify_do_not_hold_up_the_agent(listener, raw, monkeypatch):
    """Thousands of processes may send one datagram each; the rest waits, and is dropped where there is no more room."""
    asked = []
    monkeypatch.setattr(hint_listener, "time", Clock(lambda: len(asked) * hint_listener.LONGEST_READ_NS // 4))
    monkeypatch.setattr(listener._senders, "find", lambda *who: asked.append(who))
    for _ in range(10):
        raw.send(datagram())
    for expected in (5, 10, 10):
        listener.read(now())
        assert len(asked) == expected


def test_unmanaged_sender_is_counted_and_ignored(listener, raw):
    listener.manage(set())
    raw.send(datagram())
    assert listener.read(now()).streams == ()
    assert dict(listener.status().counts)["unmanaged"] == 1


def passed_descriptors():
    """How many of this process stand for what its standard ones stand for."""
    meant = {os.fstat(number)[:3] for number in (0, 1, 2)}
    found = 0
    for descriptor in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):  # another thread's may be closed meanwhile
            found += os.fstat(int(descriptor.name))[:3] in meant
    return found


def test_passed_descriptors_are_not_taken(listener, raw):
    before = passed_descriptors()
    rights = array.array("i", [0, 1, 2])
    raw.sendmsg([datagram()], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)])
    assert listener.read(now()).streams[0].iterations == 1
    assert passed_descriptors() == before


def test_iterations_that_found_no_room_are_counted(listener, raw):
    raw.send(hint.WIRE.pack(b"PFH1", 0, 0, 1, 0, 9, 0, 0))
    assert listener.read(now()).streams[0].iterations == 10
    assert listener.status().lost_events == 9


@pytest.mark.parametrize(("before", "during"), [("10\n", "8192\n"), ("9000\n", "9000\n"), ("odd\n", "odd\n")])
def test_limit_of_queued_datagrams_is_raised_only_while_the_socket_is_made(tmp_path, before, during):
    sysctl = tmp_path / "max_dgram_qlen"
    sysctl.write_text(before)
    with hint_listener._longer_queue(sysctl):
        assert sysctl.read_text() == during
    assert sysctl.read_text() == before


def test_limit_that_may_not_be_written_stays(tmp_path):
    with hint_listener._longer_queue(tmp_path / "missing"):
        pass
    assert not (tmp_path / "missing").exists()


def test_a_socket_that_was_removed_is_made_again(listener, node, path, monkeypatch):
    monkeypatch.setenv(hint.SOCKET_VARIABLE, str(path))
    listener.read(now())
    path.unlink()
    path.parent.rmdir()
    listener.read(now() + hint_listener.LOOK_AGAIN_NS)
    assert stat.S_ISSOCK(path.lstat().st_mode)
    assert listener.status().state is ProbeState.ATTACHED
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
        sender.connect(str(path))
        sender.send(datagram())
    (stream,) = listener.read(now()).streams
    assert (stream.cgroup_id, stream.iterations) == (node[0], 1)


def test_where_another_file_took_its_place_those_connected_are_still_heard(listener, raw, path):
    listener.read(now())
    path.unlink()
    path.touch()
    listener.read(now() + hint_listener.LOOK_AGAIN_NS)
    status = listener.status()
    assert status.state is ProbeState.DEGRADED
    assert "not a socket" in status.why
    raw.send(datagram())
    assert len(listener.read(now()).streams) == 1
    listener.close()
    assert path.exists()


def test_a_path_that_is_too_long_is_said(tmp_path, node):
    opened = HintListener(tmp_path / ("x" * 120), node[1], node[2])
    assert opened.status().state is ProbeState.UNAVAILABLE
    assert "path too long" in opened.status().why
    opened.close()
