"""A probe that fails in every way that it can, beside the agent that goes on."""

import logging

import pytest

from agent.guarded import AGAIN_NS, Guarded, made
from bpf.samples import CacheCounters, IterationEvent, ProbeState, ProbeStatus, Sample, StreamCounters

STREAM = StreamCounters(7, "1/0", "hint", False, 1, 1, 8, 0, None, None, 5, recent=(IterationEvent(5, 0, 1),))


class Probe:
    name = "made up"

    def __init__(self):
        self.fails, self.managed, self.closed = "", None, False

    def _do(self, what):
        if self.fails == what:
            raise Exception("Could not update table: Argument list too long")  # noqa: TRY002 - as BCC does

    def status(self):
        self._do("status")
        return ProbeStatus(self.name, ProbeState.ATTACHED)

    def manage(self, cgroup_ids):
        self._do("manage")
        self.managed = cgroup_ids

    def read(self, now_ns):
        self._do("read")
        return Sample(now_ns, streams=(STREAM,), cache={7: CacheCounters(9, 1)})

    def close(self):
        self.closed = True


@pytest.fixture
def probe():
    return Probe()


def test_a_probe_that_works_is_what_it_was(probe):
    guarded = Guarded(probe)
    guarded.manage([7])
    assert probe.managed == {7}
    assert guarded.read(1) == probe.read(1)
    assert guarded.status() == probe.status()
    guarded.close()
    assert probe.closed


def test_counters_stand_while_a_probe_cannot_be_read(probe, caplog):
    """Without them its return would count all that they ever counted as done in one pass."""
    guarded = Guarded(probe)
    before = guarded.read(1)
    probe.fails = "read"
    with caplog.at_level(logging.ERROR):
        during = [guarded.read(now) for now in (2, 3)]
    assert [one.cache for one in during] == [before.cache] * 2
    assert [one.time_ns for one in during] == [2, 3]
    assert [one.streams[0].recent for one in during] == [(), ()], "no iteration counts twice"
    assert len(caplog.records) == 1
    assert guarded.status().state is ProbeState.UNAVAILABLE
    assert guarded.status().why == "its reading fails (Could not update table: Argument list too long)"
    probe.fails = ""
    assert guarded.read(4).streams[0].recent
    assert guarded.status().state is ProbeState.ATTACHED


def test_jobs_that_a_probe_could_not_take_are_told_again(probe):
    guarded, probe.fails = Guarded(probe), "manage"
    guarded.manage([7])
    assert guarded.status().why.startswith("taking the jobs fails")
    guarded.read(0)
    probe.fails = ""
    guarded.read(AGAIN_NS - 1)
    assert guarded.status().state is ProbeState.UNAVAILABLE
    guarded.read(AGAIN_NS)
    assert (probe.managed, guarded.status().state) == ({7}, ProbeState.ATTACHED)


def test_a_status_that_cannot_be_told_says_so(probe):
    guarded, probe.fails = Guarded(probe), "status"
    assert (guarded.status().name, guarded.status().state) == ("made up", ProbeState.UNAVAILABLE)
    probe.fails = ""
    assert guarded.status().state is ProbeState.ATTACHED


def test_a_probe_that_cannot_be_made_says_why(probe, caplog):
    def fail():
        raise OSError(28, "No space left on device", "/tmp")

    absent = made("block", fail)
    absent.manage([7])
    assert absent.read(3) == Sample(3)
    absent.close()
    why = "it cannot be made ([Errno 28] No space left on device: '/tmp')"
    assert absent.status() == ProbeStatus("block", ProbeState.UNAVAILABLE, why)
    assert "probe block cannot be made" in caplog.text
    assert made("made up", lambda: probe) is probe
