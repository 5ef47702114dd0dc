from math import inf

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agent.simulate.blk_throttle import SLICE_SECONDS, Limits, Throttle
from agent.simulate.devices import Ssd, Unlimited
from agent.simulate.events import Events
from tests.unit.agent.simulate.builders import KIB, MIB, Load


def throttled(limits, **load):
    events = Events()
    throttle = Throttle(events, Unlimited(events))
    throttle.set_limits(limits)
    return events, throttle, Load(events, throttle, **load)


def test_without_a_limit_nothing_is_held():
    events, throttle, load = throttled(Limits())
    events.run(1.0)
    assert throttle.waiting == 0
    assert load.account.throttle[0] == 0.0


def test_a_slice_passes_its_budget_at_once_and_then_nothing():
    events, _, load = throttled(Limits(rbps=20 * MIB), threads=16)
    events.run(SLICE_SECONDS * 0.99)
    assert len(load.finished) == 8  # 100 ms worth of 20 MiB/s is 2 MiB, which is 8 requests
    assert max(load.finished) < 0.005
    events.run(SLICE_SECONDS * 1.9)
    assert 15 <= len(load.finished) <= 17


def test_gaps_are_as_long_as_measured():
    """At 20 MiB/s with 256 KiB reads the lab guest saw a mean of 10 ms, sd 30 and at most 111 ms (one reader)."""
    events, _, load = throttled(Limits(rbps=20 * MIB), threads=1)
    events.run(60.0)
    account = load.account
    mean = account.latency[0] / account.requests[0]
    deviation = (account.squares[0] / account.requests[0] - mean * mean) ** 0.5
    assert mean == pytest.approx(0.0125, rel=0.2)
    assert deviation == pytest.approx(0.030, rel=0.3)


@settings(deadline=None, max_examples=25)
@given(rate=st.floats(1 * MIB, 200 * MIB), size=st.sampled_from([4 * KIB, 64 * KIB, 256 * KIB, MIB]))
def test_a_cap_holds_in_the_long_run_and_is_used(rate, size):
    events, _, load = throttled(Limits(rbps=rate), size=size, threads=64)
    events.run(4.0)
    budget = rate * (4.0 + SLICE_SECONDS)
    assert load.account.bytes[0] <= budget + size
    assert load.account.bytes[0] >= rate * 4.0 * 0.93 - 2 * size


def test_requests_are_capped_as_well_as_bytes():
    events, _, load = throttled(Limits(riops=200), size=4 * KIB, threads=16)
    events.run(10.0)
    assert len(load.finished) / 10.0 == pytest.approx(200, rel=0.03)


def test_reads_and_writes_have_caps_of_their_own():
    events = Events()
    throttle = Throttle(events, Ssd(events, 1e12, 1e9))
    throttle.set_limits(Limits(wbps=10 * MIB))
    reads, writes = Load(events, throttle, cgroup=1), Load(events, throttle, cgroup=2, op=1)
    events.run(10.0)
    assert writes.rate == pytest.approx(10 * MIB, rel=0.05)
    assert reads.rate > 100 * writes.rate


def test_a_raise_releases_what_waits():
    events, throttle, load = throttled(Limits(rbps=256 * KIB), threads=8)
    events.run(1.0)
    held = throttle.waiting
    assert held >= 6
    throttle.set_limits(Limits())
    events.run(1.05)
    assert throttle.waiting == 0
    assert len(load.finished) > held


def test_rewriting_the_same_limit_lets_no_more_through():
    """As in the lab guest: what a slice has passed in advance is carried over."""
    events, throttle, load = throttled(Limits(rbps=20 * MIB), threads=32)
    for step in range(1, 140):
        events.run(0.07 * step)
        throttle.set_limits(Limits(rbps=20 * MIB))
    assert load.rate <= 20 * MIB * 1.05


def passed_after_a_cut(phase, again=()):
    """MiB in the 0.1 s after a cut from 24 to 4 MiB/s at a phase of a slice, and in the second after those."""
    events, throttle, load = throttled(Limits(rbps=24 * MIB, riops=792), threads=32)
    cut = SLICE_SECONDS * (5 + phase)
    events.run(cut)
    before = load.account.bytes[0]
    throttle.set_limits(Limits(rbps=4 * MIB, riops=132))
    events.run(cut + 0.1)
    burst = load.account.bytes[0]
    for rate in again:
        throttle.set_limits(Limits(rbps=rate * MIB, riops=33 * rate))
    events.run(cut + 1.1)
    return (burst - before) / MIB, (load.account.bytes[0] - burst) / MIB


def test_a_cut_below_what_is_left_of_the_slice_lets_go_and_then_holds_everything():
    """Measured in the lab guest: 3.3 to 15 MiB at once, then nothing for more than a second."""
    burst, then = passed_after_a_cut(0.2)
    assert burst >= 3.0  # the requests' limit alone holds: 13 of 256 KiB
    assert then <= 0.5


def test_a_cut_late_in_the_slice_is_clean():
    burst, then = passed_after_a_cut(0.92)
    assert burst <= 0.5
    assert then == pytest.approx(4.0, rel=0.15)


def test_another_change_while_the_debt_stands_lets_go_again():
    """Measured in the lab guest: each of a row of cuts 0.1 s apart passed what the requests' limit allowed."""
    assert passed_after_a_cut(0.2, again=(6,))[1] >= 4.0


def test_time_in_blk_throttle_is_told_apart():
    events, _, load = throttled(Limits(rbps=10 * MIB), threads=4)
    events.run(5.0)
    account = load.account
    assert account.throttle[0] > 0.9 * account.latency[0]
    counters = account.block_counters(0)
    assert counters.throttle_ns + counters.queue_ns + counters.device_ns == pytest.approx(counters.latency_ns, abs=10)


def test_a_limit_of_infinity_is_none():
    assert Limits() == (inf, inf, inf, inf)
