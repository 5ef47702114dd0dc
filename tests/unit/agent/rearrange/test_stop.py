"""When reading ahead starts and stops: gate, gain, hits, harm, cool-down."""

import pytest

from agent.rearrange.stop import Disk, Judge, Reading, State, Stop, StopSettings, gate, hit_ratio

MIB = 1 << 20
SETTINGS = StopSettings()
STARVING = 0.030


class Job:
    """A made-up job: steps of 0.1 s, two iterations each."""

    def __init__(self, judge=None, time=100.0):
        self.judge = judge or Judge(SETTINGS)
        self.now = Reading(time, 0, 0.0, 0, 0, 0, 0, 0, {7: (0, 0.0)})
        self.stops = []

    def run(self, seconds, *, wait=STARVING, asked=True, gate_says="", ahead=0, hits=1.0, other=0.010, iterations=2):
        """`wait` and `other` are seconds an iteration, `ahead` MiB a second, `hits` of that are found by the job."""
        for _ in range(round(seconds * 10)):
            last, moved = self.now, int(ahead * MIB / 10)
            read = 2 * MIB
            self.now = Reading(
                last.time + 0.1,
                last.iterations + iterations,
                last.wait_seconds + iterations * wait,
                last.ahead_bytes + moved,
                last.used_bytes,
                last.unused_bytes,
                last.read_bytes + read,
                last.missed_bytes + read - min(read, int(hits * moved)),
                {7: (last.others[7][0] + 1, last.others[7][1] + other)},
            )
            stop = self.judge.step(self.now, asked=asked, gate_says=gate_says)
            if stop:
                self.stops.append((stop, self.now.time))
        return self.judge.state


def started(**judge):
    job = Job(**judge)
    job.run(4.0, asked=False)
    assert job.judge.state is State.IDLE
    assert job.run(0.1) is State.RUNNING
    return job


def test_starts_only_when_asked_and_the_gate_is_open():
    job = Job()
    assert job.run(5, asked=False) is State.IDLE
    assert job.run(5, gate_says="the queue is full") is State.IDLE
    assert job.judge.why == "the queue is full"
    assert job.run(0.1) is State.RUNNING


def test_goes_on_while_it_pays_though_nobody_asks_any_more():
    job = started()
    assert job.run(120, wait=0.001, asked=False, ahead=20) is State.RUNNING
    assert job.judge.gain_seconds == pytest.approx(STARVING - 0.001)
    assert job.judge.hit_ratio == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("during", "cause"),
    [
        ({"wait": STARVING}, Stop.NO_GAIN),
        ({"wait": 0.9 * STARVING}, Stop.NO_GAIN),
        ({"wait": 0.001, "hits": 0.5}, Stop.UNUSED),
        ({"wait": 0.001, "other": 0.012}, Stop.HARM),
        ({"wait": 0.001, "ahead": 0}, Stop.NOTHING_TO_READ),
    ],
)
def test_stops_where_it_does_not_pay_within_two_windows(during, cause):
    job = started()
    began = job.now.time
    job.run(5, **{"asked": False, "ahead": 20, **during})
    assert [stop for stop, _ in job.stops] == [cause]
    assert job.stops[0][1] - began <= 2 * SETTINGS.window_seconds + 0.3
    assert job.judge.state is State.COOLING


def test_harm_below_the_tolerance_is_none():
    job = started()
    assert job.run(30, wait=0.001, ahead=20, other=0.0114, asked=False) is State.RUNNING


def test_one_bad_window_is_forgiven():
    job = started()
    for _ in range(5):
        job.run(2.0, ahead=20)
        job.run(4.1, wait=0.001, ahead=20)
    assert (job.judge.state, job.stops) == (State.RUNNING, [])


def test_cool_down_doubles_and_is_bounded():
    job = started()
    pauses = []
    while len(job.stops) < 9:
        stops = len(job.stops)
        while len(job.stops) == stops:
            job.run(0.1, ahead=20)
        stopped = job.now.time
        while job.judge.state is not State.RUNNING:
            job.run(0.1, ahead=20)
        pauses.append(job.now.time - stopped)
    expected = [min(30.0 * 2**k, 1800.0) for k in range(9)]
    assert pauses == pytest.approx(expected, abs=0.3)


def test_a_success_between_failures_shortens_the_next_pause():
    job = started()
    job.run(5, ahead=20)
    assert job.stops[-1][0] is Stop.NO_GAIN
    while job.judge.state is not State.RUNNING:
        job.run(0.1)
    while len(job.stops) < 2:
        job.run(0.1, wait=0.0001, ahead=20, asked=False)
    assert job.stops[-1][0] is Stop.CHECKED
    assert job.run(0.2) is State.IDLE, "there is nothing yet to compare with"
    job.run(2)
    assert job.judge.state is State.RUNNING, "it is asked for again, so it was still needed"
    job.run(5, ahead=20, asked=False)
    stopped = job.stops[-1][1]
    while job.judge.state is not State.RUNNING:
        job.run(0.1)
    assert job.now.time - stopped == pytest.approx(30.0, abs=0.3)


def test_a_loop_that_stands_still_ends_it_without_blame():
    job = started()
    job.run(16, iterations=0, ahead=20, asked=False)
    assert [stop for stop, _ in job.stops] == [Stop.LOOP_IDLE]
    assert job.judge.state is State.IDLE


def test_a_wait_that_cannot_be_seen_is_no_gain():
    judge = Judge(SETTINGS)
    stops = []
    for step in range(100):
        reading = Reading(step / 10, step, None, step * MIB)
        stops.append(judge.step(reading, asked=True, gate_says=""))
    assert Stop.NO_GAIN in stops


@pytest.mark.parametrize(
    ("disk", "says"),
    [
        (Disk(0.95, 4.0, 131072), ""),
        (Disk(0.95, 12.0, 131072), ""),
        (Disk(0.95, 4.0, 1048576), ""),
        (Disk(0.95, 12.0, 1048576), "its queue is full (12 requests of 1024 KiB)"),
        (Disk(0.5, 4.0, 131072), "the disk has work for 50% of the time only"),
        (None, "the disk was not watched for long enough"),
    ],
)
def test_gate(disk, says):
    assert gate(disk) == says


@pytest.mark.parametrize(
    ("last", "own", "ratio"),
    [
        (Reading(1, 1, 1.0, ahead_bytes=0, read_bytes=100, missed_bytes=0), 0.0, None),
        (Reading(1, 1, 1.0, ahead_bytes=100, read_bytes=100, missed_bytes=30), 0.0, 0.7),
        (Reading(1, 1, 1.0, ahead_bytes=100, read_bytes=100, missed_bytes=0), 0.4, 0.6),
        (Reading(1, 1, 1.0, ahead_bytes=50, read_bytes=100, missed_bytes=0), 0.0, 1.0),
        (Reading(1, 1, 1.0, ahead_bytes=100, used_bytes=30, unused_bytes=10), 0.0, 0.75),
        (Reading(1, 1, 1.0, ahead_bytes=100), 0.0, None),
    ],
)
def test_hit_ratio(last, own, ratio):
    probed = last.read_bytes is not None
    first = Reading(0, 0, 0.0, read_bytes=0 if probed else None, missed_bytes=0 if probed else None)
    assert hit_ratio(first, last, own) == (None if ratio is None else pytest.approx(ratio))
