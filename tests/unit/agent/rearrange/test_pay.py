"""When moving files begins, and when it ends: paid for by the gain, never by another job."""

import pytest

from agent.rearrange.defragment import Mend
from agent.rearrange.pay import MoveJudge, MoveStop, PaySettings
from agent.rearrange.stop import Reading, StopSettings

MIB = 1 << 20


class Job:
    """A job that iterates 10 times a second and waits as it is told; another one beside it."""

    def __init__(self, **changes):
        self.judge = MoveJudge(PaySettings(StopSettings(), **changes))
        self.now, self.wait, self.waited = 0.0, 0.2, 0.0
        self.iterations, self.other_wait, self.other = 0, 0.01, (0, 0.0)
        self.mend, self.asked = Mend(0, 0, 10, 640 * MIB), True
        self.seen = True

    def run(self, seconds, moves=0):
        """So many seconds, in each of which `moves` bytes of the left ones are moved. Returns the stop, if any."""
        for step in range(round(seconds * 10)):
            self.now += 0.1
            self.iterations += 1
            self.waited += self.wait
            self.other = (self.other[0] + 1, self.other[1] + self.other_wait)
            if moves and step % 10 == 0:
                left = max(0, self.mend.left_bytes - moves)
                self.mend = Mend(self.mend.files + 1, self.mend.bytes + moves, -(-left // (64 * MIB)), left)
            waited = self.waited if self.seen else None
            reading = Reading(self.now, self.iterations, waited, others={2: self.other})
            stop = self.judge.step(reading, self.mend, asked=self.asked)
            if stop is not None:
                return stop
        return None


@pytest.fixture
def job():
    return Job()


def test_it_begins_where_it_is_asked_and_enough_was_seen_before(job):
    assert job.run(1.9) is None
    assert not job.judge.is_running
    job.run(0.4)
    assert job.judge.is_running


def test_nobody_asks_nothing_begins(job):
    job.asked = False
    job.run(10)
    assert not job.judge.is_running


def test_how_it_was_before_it_starved_is_no_base(job):
    job.asked, job.wait = False, 0.0
    job.run(20)
    job.asked, job.wait = True, 0.2
    job.run(1.8)
    assert not job.judge.is_running
    for _ in range(3):
        job.asked = not job.asked  # it may flicker
        job.run(0.3)
    assert job.judge.is_running
    job.wait = 0.1
    job.run(2.5, moves=MIB)
    assert job.judge.gain_seconds == pytest.approx(0.1, abs=0.03)


def test_it_goes_on_while_the_wait_falls_with_what_is_moved(job):
    job.run(2.5)
    for _ in range(5):
        job.wait -= 0.03
        assert job.run(3, moves=32 * MIB) is None
    assert job.judge.gain_seconds == pytest.approx(0.15, abs=0.02)


def test_it_stops_where_the_wait_does_not_fall(job):
    job.run(2.5)
    assert job.run(30, moves=64 * MIB) == MoveStop.NO_GAIN
    assert job.mend.bytes <= 384 * MIB, "two checks are enough"
    job.run(20)
    assert not job.judge.is_running, "it stays away"
    job.run(15)
    assert job.judge.is_running
    assert job.run(30, moves=64 * MIB) == MoveStop.NO_GAIN
    job.run(45)
    assert not job.judge.is_running, "longer the second time"


def test_a_wait_that_is_not_seen_is_no_gain(job):
    job.seen = False
    job.run(2.5)
    assert job.run(30, moves=64 * MIB) == MoveStop.NO_GAIN


def test_it_stops_where_another_job_waits_longer(job):
    job.run(2.5)
    job.wait, job.other_wait = 0.01, 0.0120
    assert job.run(10, moves=MIB) == MoveStop.HARM
    job.other_wait = 0.01
    job.run(36)
    job.other_wait = 0.0112
    assert job.run(10, moves=MIB) is None, "a tenth and half a millisecond are allowed"


def test_one_bad_window_is_none(job):
    job.run(2.5)
    job.wait, job.other_wait = 0.01, 0.02
    assert job.run(1.6, moves=MIB) is None
    job.other_wait = 0.01
    assert job.run(10, moves=MIB) is None


def test_it_is_done_when_nothing_is_left_and_may_begin_again_at_once(job):
    job.run(2.5)
    job.wait, job.mend = 0.01, Mend(10, 640 * MIB, 0, 0)
    assert job.run(30) == MoveStop.DONE
    job.run(2.5)
    assert job.judge.is_running


def test_where_nothing_can_be_moved_it_stays_away(job):
    job.mend = Mend(0, 0, 3, 3 * MIB)
    assert job.run(30) == MoveStop.NOTHING_TO_MOVE
    job.run(20)
    assert not job.judge.is_running


def test_a_file_that_takes_long_is_given_its_time(job):
    job.mend = Mend(0, 0, 3, 3 * MIB, is_moving=True)
    assert job.run(60) is None
    job.mend = Mend(1, MIB, 2, 2 * MIB)
    job.wait = 0.01
    assert job.run(19) is None
    assert job.run(5) == MoveStop.NOTHING_TO_MOVE, "two are left, and none is under way"


def test_a_job_that_is_well_again_needs_no_more(job):
    job.run(2.5)
    job.asked, job.wait = False, 0.0
    assert job.run(9, moves=MIB) is None, "the trigger may flicker"
    assert job.run(5, moves=MIB) == MoveStop.DONE
