"""The life around the loop: what looks on never ends it, and weights left by exec are read."""

import logging
import os
from types import SimpleNamespace

import pytest

from agent import loop
from agent.core import Core, CoreSettings
from agent.node import LocalNode
from agent.policies.base import PolicySettings, make_policy
from agent.snapshot import snapshot
from agent.types import Job
from bpf.samples import Sample
from cgroup.enforce import Enforcer
from cgroup.files import KernelFiles


def test_a_follower_that_fails_is_logged_and_the_loop_goes_on(caplog):
    def broken(report):
        raise RuntimeError("disk gone")

    loop._call(broken, None)
    assert "a follower of the loop failed" in caplog.text
    assert "disk gone" in caplog.text


def test_the_weight_that_exec_left_counts(tmp_path):
    folder = tmp_path / "prefetchd.slice" / "resnet"
    folder.mkdir(parents=True)
    try:
        os.setxattr(folder, "user.prefetchd.weight", b"300")
    except OSError as error:
        pytest.skip(f"no extended attributes in {tmp_path}: {error}")
    node = object.__new__(LocalNode)
    node._root = str(tmp_path)
    job = Job(1, "resnet", "/prefetchd.slice/resnet", training=True)
    assert node._weighed(job).weight == 300.0
    assert node._weighed(Job(2, "x", "/prefetchd.slice", training=True)).weight == 100.0
    assert node._weighed(Job(1, "resnet", "/prefetchd.slice/resnet", training=False)).weight == 100.0


class Waiting:
    """An enforcer with writes that wait, and flags whose sleep moves the clock."""

    def __init__(self, *due):
        self.dues, self.now, self.made = list(due), 0.0, []
        self.enforcer = self
        self.settings = SimpleNamespace(interval_seconds=0.1)
        self.node = SimpleNamespace(filenos=list)
        self.stop = self.disarm = None

    @property
    def due(self):
        return self.dues[0] if self.dues else None

    def reconcile_due(self, now):
        del now
        self.made.append((self.dues.pop(0), round(self.now, 3)))

    def wait(self, until, filenos=()):
        del filenos
        self.now = max(self.now, until)


def test_writes_that_wait_for_their_moment_are_made_before_the_next_pass():
    waiting = Waiting(0.03, 0.08, 0.17)
    loop._pause(waiting, 0.0, 0.01, waiting)
    assert waiting.made == [(0.03, 0.03), (0.08, 0.08)]
    assert waiting.now == 0.1
    assert waiting.due == 0.17


def test_a_stop_makes_no_write_that_waits():
    waiting = Waiting(0.03)
    waiting.stop = "SIGTERM"
    loop._pause(waiting, 0.0, 0.01, waiting)
    assert waiting.made == []


@pytest.mark.parametrize(("ended", "due"), [(0.05, 0.13), (0.2, 0.27)])
def test_a_pass_that_took_long_still_makes_the_writes_that_wait(ended, due):
    """The next one would forget them, plan them again and have them wait again."""
    waiting = Waiting(due, 0.41)
    loop._pause(waiting, 0.0, ended, waiting)
    assert waiting.made == [(due, due)]


def test_notes_that_stand_are_in_every_report(tmp_path):
    """The node's own notes come before those of the pass, so that `top` shows them first."""
    standing = "enforce was asked for, observing because io is missing"
    node = SimpleNamespace(
        jobs=lambda now: (),
        sample=Sample,
        devices=lambda sample, jobs: {},
        job_samples=lambda sample, jobs: {},
        probes=tuple,
    )
    core = Core(make_policy("adaptive", PolicySettings()), CoreSettings())
    enforcer = Enforcer(KernelFiles(str(tmp_path)), None, "observe")
    made = loop.Loop(node, core, enforcer, loop.LoopSettings(notes=(standing,)))
    for now in (1.0, 1.1):
        assert snapshot(made.tick(now))["notes"][0] == standing


def test_disarming_an_agent_that_observes_says_that_there_is_nothing_to_release(caplog):
    observing = SimpleNamespace(mode="observe")
    agent = loop.Loop(None, None, observing, loop.LoopSettings())
    with caplog.at_level(logging.INFO, "agent.loop"):
        agent.disarm("SIGUSR1")
    (record,) = caplog.records
    assert record.getMessage() == "mode observe: nothing is set, so there is nothing to release (SIGUSR1)"
