"""The life of the loop: the cadence of passes, whatever the cgroup tree does, and the ways to end."""

import itertools
import os
import signal
import time

import pytest

from agent import loop as module
from agent.loop import Loop, LoopSettings, run
from agent.stopping import SignalFlags


class Node:
    """A node without jobs whose tree changes as long as `busy`."""

    def __init__(self):
        self.reading, self.writing = os.pipe()
        self.busy = False

    def change(self):
        if not self.busy:
            os.write(self.writing, b".")
            self.busy = True

    def calm(self):
        if self.busy:
            os.read(self.reading, 1)
            self.busy = False

    def filenos(self):
        return (self.reading,)

    def close(self):
        os.close(self.reading)
        os.close(self.writing)


class Passes(Loop):
    """A loop whose passes do nothing but note when they were made."""

    def __init__(self, node, interval):
        self.node = node
        self.settings = LoopSettings(interval_seconds=interval)
        self.times = []
        self.disarmed = ""

    def tick(self, now, wall=0.0):
        self.times.append(now)

    def took(self, seconds):
        pass

    def disarm(self, why):
        self.disarmed = why


@pytest.fixture
def node():
    node = Node()
    yield node
    node.close()


def intervals(times):
    return [after - before for before, after in itertools.pairwise(times)]


def test_passes_keep_their_interval(node):
    passes = Passes(node, 0.1)
    with SignalFlags() as flags:
        assert "1 s is over" in run(passes, flags, duration=1.0)
    assert 5 <= len(passes.times) <= 11
    assert min(intervals(passes.times)) >= 0.099


def test_changes_of_the_tree_bring_passes_forward_but_not_at_will(node):
    passes = Passes(node, 0.5)
    node.change()
    with SignalFlags() as flags:
        run(passes, flags, duration=1.0)
    assert len(passes.times) > 5
    assert min(intervals(passes.times)) >= module.SHORTEST_INTERVAL_SECONDS - 0.001


def test_after_many_changes_the_next_pass_is_due_as_ever(node):
    passes = Passes(node, 0.2)
    node.change()
    with SignalFlags() as flags:
        run(passes, flags, duration=1.0, after_tick=[lambda _: node.calm() if len(passes.times) > 8 else None])
    calm = intervals(passes.times[9:])
    assert calm
    assert min(calm) >= 0.199


def test_a_signal_ends_a_long_interval(node):
    passes = Passes(node, 5.0)
    with SignalFlags() as flags:
        signal.setitimer(signal.ITIMER_REAL, 0.2)
        before = signal.signal(signal.SIGALRM, lambda *_: os.kill(os.getpid(), signal.SIGTERM))
        began = time.monotonic()
        try:
            assert run(passes, flags, duration=None) == "SIGTERM"
        finally:
            signal.signal(signal.SIGALRM, before)
        assert time.monotonic() - began < 4.0


def test_sigusr1_disarms_before_the_next_pass(node):
    passes = Passes(node, 0.1)
    with SignalFlags() as flags:
        os.kill(os.getpid(), signal.SIGUSR1)
        run(passes, flags, duration=0.3)
    assert passes.disarmed == "SIGUSR1"
