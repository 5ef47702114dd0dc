"""From a pid to the managed cgroup: identity, moves, reuse, bounds. Real processes, a built /proc and cgroup tree."""

import contextlib
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from agent import hint_senders
from agent.hint_senders import RESOLVE_AGAIN_NS, SenderTable, cgroup_ids, start_ticks
from agent.hint_wire import Stream


class Node:
    """A cgroup tree and a /proc of plain files; the processes are real."""

    def __init__(self, root: Path):
        self.cgroups = root / "cgroup"
        self.proc = root / "proc"
        self.cgroups.mkdir()
        self.proc.mkdir()
        self.children = []

    def cgroup(self, path):
        directory = self.cgroups / path
        directory.mkdir(parents=True, exist_ok=True)
        return directory.stat().st_ino

    def place(self, pid, path, *, ticks=None):
        folder = self.proc / str(pid)
        folder.mkdir(exist_ok=True)
        real = Path(f"/proc/{pid}/stat").read_text() if ticks is None else f"1 (x) S {'0 ' * 18}{ticks} 0\n"
        (folder / "stat").write_text(real)
        (folder / "cgroup").write_text(f"4:memory:/elsewhere\n0::{path}\n")

    def process(self, path):
        child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
        self.children.append(child)
        self.place(child.pid, path)
        return child

    def end(self, child):
        child.stdin.close()
        child.wait()


@pytest.fixture
def node(tmp_path):
    built = Node(tmp_path)
    yield built
    for child in built.children:
        child.kill()
        child.stdin.close()
        child.wait()


@pytest.fixture
def table(node):
    opened = SenderTable(node.cgroups, node.proc)
    yield opened
    opened.close()


def open_pidfds():
    """How many of this process stand for processes; other threads of the suite have files and sockets of their own."""
    found = 0
    for descriptor in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            found += "pidfd" in str(descriptor.readlink())
    return found


def test_start_ticks_reads_past_hostile_names(node):
    (node.proc / "7").mkdir()
    (node.proc / "7" / "stat").write_text("7 (a) b) 3 (S) R " + "0 " * 18 + "4242 1\n")
    assert start_ticks(node.proc, 7) == 4242
    assert start_ticks(Path("/proc"), os.getpid()) > 0


def test_cgroup_ids_go_from_leaf_to_root(node):
    leaf, job = node.cgroup("job/leaf"), node.cgroup("job")
    node.place(os.getpid(), "/job/leaf")
    assert cgroup_ids(node.proc, node.cgroups, os.getpid()) == (leaf, job)


@pytest.mark.parametrize("path", ["/", "/../../other", "/removed (deleted)", "/gone"])
def test_no_cgroup_under_the_root_is_nobody(node, path):
    node.place(os.getpid(), path)
    assert cgroup_ids(node.proc, node.cgroups, os.getpid()) == ()


@pytest.mark.parametrize("sign", ["\r", "\x0b", "\x0c", "\x1c", "\x85", "\u2028"])
def test_a_name_that_looks_like_another_line_is_a_name(node, sign):
    """Whoever may make cgroups of a v1 hierarchy, which come first, could speak for any job."""
    job, own = node.cgroup("victim"), node.cgroup("own")
    node.place(7, "/own", ticks=1)
    (node.proc / "7" / "cgroup").write_bytes(f"1:name=systemd:/user/x{sign}0::/victim\n0::/own\n".encode())
    assert cgroup_ids(node.proc, node.cgroups, 7) == (own,)
    (node.proc / "7" / "cgroup").write_bytes(f"0::/own/x{sign}0::/victim\n".encode())
    assert job not in cgroup_ids(node.proc, node.cgroups, 7)


def test_v1_only_process_is_nobody(node):
    node.place(os.getpid(), "/x")
    (node.proc / str(os.getpid()) / "cgroup").write_text("4:memory:/job\n")
    assert cgroup_ids(node.proc, node.cgroups, os.getpid()) == ()


def test_descendants_belong_to_the_nearest_managed_ancestor(node, table):
    outer, inner = node.cgroup("slice"), node.cgroup("slice/pod")
    node.cgroup("slice/pod/container")
    child = node.process("/slice/pod/container")
    table.manage({outer, inner})
    assert table.find(child.pid, 0, 0).managed == inner
    table.manage({outer})
    assert table.find(child.pid, 0, 0).managed == outer
    table.manage(set())
    assert len(table) == 0


def test_unmanaged_is_refused_until_it_is_managed(node, table):
    job = node.cgroup("job")
    child = node.process("/job")
    assert table.find(child.pid, 0, 0) is None
    assert table.find(child.pid, 10, 0) is None
    assert table.refusals == {"unmanaged": 2}
    table.manage({job})
    assert table.find(child.pid, 20, 0).managed == job


def test_refusal_is_forgotten_after_a_while(node, table):
    node.cgroup("other")
    job = node.cgroup("job")
    child = node.process("/other")
    table.manage({job})
    assert table.find(child.pid, 0, 0) is None
    node.place(child.pid, "/job")
    assert table.find(child.pid, hint_senders.REFUSE_NS - 1, 0) is None
    assert table.find(child.pid, hint_senders.REFUSE_NS, 0).managed == job


def test_dead_and_foreign_pids_are_unknown(node, table):
    child = node.process("/job")
    node.end(child)
    assert table.find(child.pid, 0, 0) is None
    assert table.find(0, 0, 0) is None
    assert table.refusals == {"unknown_sender": 2}


def test_process_younger_than_its_datagram_is_not_the_sender(node, table):
    job = node.cgroup("job")
    child = node.process("/job")
    table.manage({job})
    assert table.find(child.pid, 0, age_ns=time.clock_gettime_ns(time.CLOCK_BOOTTIME)) is None
    assert table.refusals == {"unknown_sender": 1}


def test_ended_sender_keeps_its_last_words_until_dropped(node, table):
    job = node.cgroup("job")
    child = node.process("/job")
    table.manage({job})
    sender = table.find(child.pid, 0, 0)
    node.end(child)
    table.note_ended()
    assert table.find(child.pid, 1, 0) is sender
    table.drop_ended()
    assert len(table) == 0
    assert table.find(child.pid, 2, 0) is None


def test_reused_pid_is_another_sender(node, table):
    job, other = node.cgroup("job"), node.cgroup("other")
    child = node.process("/job")
    node.place(child.pid, "/job", ticks=1)  # the pid's former owner, as the table got to know it
    table.manage({job, other})
    first = table.find(child.pid, 0, 0)
    node.place(child.pid, "/other")
    table._ended_pids.add(child.pid)  # what note_ended reports for the former owner's pidfd
    second = table.find(child.pid, 1, 0)
    assert second is not first
    assert (first.managed, second.managed) == (job, other)
    table.drop_ended()
    assert list(table) == [second]


def test_moved_process_is_followed_and_starts_afresh(node, table):
    job, other = node.cgroup("job"), node.cgroup("other")
    child = node.process("/job")
    table.manage({job, other})
    sender = table.find(child.pid, 0, 0)
    sender.streams[0] = Stream(iterations=5)
    node.place(child.pid, "/other")
    assert table.find(child.pid, RESOLVE_AGAIN_NS - 1, 0).managed == job
    assert table.find(child.pid, RESOLVE_AGAIN_NS, 0).managed == other
    assert sender.streams == {}
    node.place(child.pid, "/")
    assert table.find(child.pid, 2 * RESOLVE_AGAIN_NS, 0) is None


def test_one_cgroup_cannot_push_out_another(node, table, monkeypatch):
    monkeypatch.setattr(hint_senders, "MAX_SENDERS_PER_CGROUP", 2)
    job, greedy = node.cgroup("job"), node.cgroup("greedy")
    quiet = node.process("/job")
    table.manage({job, greedy})
    table.find(quiet.pid, 0, 0)
    crowd = [node.process("/greedy") for _ in range(4)]
    for child in crowd:
        table.find(child.pid, 1, 0)
    assert [sender.pid for sender in table] == [quiet.pid, crowd[2].pid, crowd[3].pid]
    assert table.refusals == {"evicted": 2}


def test_full_table_lets_the_least_recently_heard_go(node, table, monkeypatch):
    monkeypatch.setattr(hint_senders, "MAX_SENDERS", 2)
    ids = [node.cgroup(name) for name in "abc"]
    first, second, third = (node.process(f"/{name}") for name in "abc")
    table.manage(ids)
    table.find(first.pid, 0, 0)
    table.find(second.pid, 1, 0)
    table.find(first.pid, 2, 0)
    table.find(third.pid, 3, 0)
    assert [sender.pid for sender in table] == [first.pid, third.pid]


def test_rate_limit_is_per_second(node, table):
    job = node.cgroup("job")
    child = node.process("/job")
    table.manage({job})
    sender = table.find(child.pid, 0, 0)
    second = 1_000_000_000
    assert [sender.allow(n, per_second=2) for n in (second, second + 1, second + 2)] == [True, True, False]
    assert sender.allow(2 * second, per_second=2)


def test_churn_leaks_no_descriptors(node, table):
    job = node.cgroup("job")
    table.manage({job})
    before = open_pidfds()
    for _ in range(20):
        child = node.process("/job")
        assert table.find(child.pid, 0, 0) is not None
        assert open_pidfds() == before + 1
        node.end(child)
        table.note_ended()
        table.drop_ended()
    assert len(table) == 0
    assert open_pidfds() == before
