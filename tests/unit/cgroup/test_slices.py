import pytest
from hypothesis import given
from hypothesis import strategies as st

from cgroup.lines import Line
from cgroup.plan import Write
from cgroup.slices import DEEPEST, LATEST, MARGIN, SLICE_SECONDS, Slices, moment, softened

MIB = 1 << 20
LINE = Line(7, "/batch/scan", "8:0", "io.max")


def cut(before, after, verdict="write"):
    return Write(LINE, {"rbps": before, "wbps": None}, {"rbps": after}, "test", verdict)


class Clock:
    now = 100.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def slices(clock):
    slices = Slices(clock)
    slices.written(LINE)
    return slices


def at(clock, phase, whole=3):
    clock.now = 100.0 + (whole + phase) * SLICE_SECONDS


@pytest.mark.parametrize(
    ("before", "after", "expected"),
    [(100, 90, 0.1 + MARGIN), (100, 50, 0.5 + MARGIN), (100, 5, DEEPEST), (100, 100, 0.0), (100, 200, 0.0)],
)
def test_a_cut_waits_for_the_part_it_takes_away(before, after, expected):
    assert moment(cut(before, after)) == pytest.approx(expected)


def test_a_first_limit_and_a_raise_wait_for_nothing():
    assert moment(cut(None, 5)) == 0.0
    assert moment(cut(5, None)) == 0.0


def test_a_release_waits_for_the_end_of_the_slice():
    """What it carries over would meet the next first limit."""
    assert moment(cut(5, None, "release")) == DEEPEST


def test_a_cut_in_time_is_made_at_once(slices, clock):
    at(clock, 0.7)
    write = cut(100, 50)
    assert slices.ready([write]) == [write]
    assert slices.due is None


def test_a_cut_too_early_waits_for_its_moment(slices, clock):
    at(clock, 0.2)
    (told,) = slices.ready([cut(100, 50)])
    assert (told.verdict, told.after) == ("rate_limited", {})
    assert slices.due == pytest.approx(100.0 + 3.58 * SLICE_SECONDS)
    assert slices.take_due() == []
    at(clock, 0.6)
    assert slices.take_due() == [cut(100, 50)]
    assert slices.due is None


def test_a_cut_too_late_waits_for_the_next_slice(slices, clock):
    at(clock, 0.97)
    slices.ready([cut(100, 50)])
    assert slices.due == pytest.approx(100.0 + 4.58 * SLICE_SECONDS)


def test_who_misses_the_moment_waits_once_more(slices, clock):
    at(clock, 0.2)
    slices.ready([cut(100, 20)])
    at(clock, 0.05, whole=4)
    (told,) = slices.take_due()
    assert told.verdict == "rate_limited"
    assert slices.due == pytest.approx(100.0 + (4 + DEEPEST) * SLICE_SECONDS)


def test_a_deep_cut_goes_as_far_as_the_slice_allows(slices, clock):
    at(clock, DEEPEST)
    (write,) = slices.ready([cut(100, 2)])
    assert write.after == {"rbps": 30}  # 1 - 0.78 + 0.08 of it


def test_a_new_plan_replaces_what_waits(slices, clock):
    at(clock, 0.2)
    slices.ready([cut(100, 50)])
    slices.ready([])
    assert slices.due is None


def test_a_line_never_written_or_forgotten_does_not_wait(clock):
    slices = Slices(clock)
    assert slices.ready([cut(100, 5)]) == [cut(100, 5)]
    slices.written(LINE)
    slices.forget(LINE)
    assert slices.ready([cut(100, 5)]) == [cut(100, 5)]


def test_without_a_clock_nothing_waits():
    slices = Slices(None)
    slices.written(LINE)
    assert slices.ready([cut(100, 5)]) == [cut(100, 5)]
    assert slices.take_due() == []


def test_conflicts_never_wait(slices, clock):
    at(clock, 0.0)
    write = cut(100, 5, "conflict")
    assert slices.ready([write]) == [write]


@given(phase=st.floats(0.0, LATEST), before=st.integers(16, 10**10), after=st.integers(16, 10**10))
def test_no_write_goes_below_what_the_rest_of_the_slice_has_passed_in_advance(phase, before, after):
    """The debt is (1 - phase) of the old limit's slice; the new one's budget must hold it. A raise stays as it is."""
    got = softened(cut(before, after), phase).after["rbps"]
    if after >= before:
        assert got == after
    else:
        assert after <= got <= before
        assert got >= min(before, (1.0 - phase) * before)
