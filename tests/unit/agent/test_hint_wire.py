"""Datagrams become hints, hints become the counters of a stream."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent import hint
from agent.hint_wire import Stream, parse_hint
from bpf.samples import MAX_RECENT, IterationEvent

KNOWN = hint.CAPACITY_KNOWN | hint.BYTES_KNOWN | hint.WAIT_KNOWN


def datagram(*, flags=KNOWN, stream=0, depth=2, capacity=4, missed=0, size=1000, wait_ns=5, magic=b"PFH1"):
    return hint.WIRE.pack(magic, flags, stream, depth, capacity, missed, size, wait_ns)


def test_full_hint():
    told = parse_hint(datagram(flags=KNOWN | hint.VALIDATION, stream=3, missed=2))
    assert (told.stream, told.validation, told.took_batch, told.waiting, told.missed) == (3, True, True, False, 2)
    assert (told.depth, told.capacity, told.next_batch_bytes, told.wait_ns) == (2, 4, 1000, 5)


def test_unknown_is_none():
    told = parse_hint(datagram(flags=hint.DEPTH_UNKNOWN))
    assert (told.depth, told.capacity, told.next_batch_bytes, told.wait_ns) == (None, None, None, None)


@pytest.mark.parametrize(
    "bad",
    [
        b"",
        datagram()[:-1],
        datagram() + b"\0",
        datagram(magic=b"PFH2"),
        datagram(flags=1 << 7),
        datagram(flags=1 << 31),
        datagram(depth=1 << 31),
        datagram(capacity=1_000_001),
        datagram(missed=1_000_001),
        datagram(size=1 << 45),
        datagram(wait_ns=1 << 63),
    ],
)
def test_malformed_is_refused(bad):
    assert parse_hint(bad) is None


@given(st.binary(max_size=64))
def test_no_bytes_make_it_raise(noise):
    parse_hint(noise)
    parse_hint(b"PFH1" + noise[:36].ljust(36, b"\0"))


def test_stream_counts_and_hands_recent_iterations_over_once():
    stream = Stream()
    stream.apply(parse_hint(datagram(depth=1, wait_ns=10)), 100)
    stream.apply(parse_hint(datagram(depth=0, wait_ns=30, missed=4)), 200)
    counters = stream.take(7, "12/0")
    assert (counters.cgroup_id, counters.stream, counters.source, counters.grade) == (7, "12/0", "hint", "hint")
    assert (counters.iterations, counters.wait_ns, counters.depth, counters.capacity) == (6, 40, 0, 4)
    assert (counters.last_iteration_ns, counters.next_batch_bytes) == (200, 1000)
    assert counters.recent == (IterationEvent(100, 10, 1, 1), IterationEvent(200, 30, 0, 0))
    assert counters.takeable == 0
    assert stream.take(7, "12/0").recent == ()
    assert stream.take(7, "12/0").iterations == 6


def test_waiting_is_no_iteration_and_ends_with_the_next_one():
    stream = Stream()
    stream.apply(parse_hint(datagram(flags=hint.WAITING | hint.WAIT_KNOWN, wait_ns=40)), 1000)
    counters = stream.take(7, "12/0")
    assert (counters.iterations, counters.depth, counters.waiting_since_ns, counters.wait_ns) == (0, 0, 960, None)
    assert counters.takeable == 0
    stream.apply(parse_hint(datagram(flags=hint.DEPTH_UNKNOWN)), 2000)
    counters = stream.take(7, "12/0")
    assert (counters.iterations, counters.depth, counters.waiting_since_ns) == (1, None, None)
    assert counters.takeable is None


def test_done_ends_waiting_without_an_iteration():
    stream = Stream()
    stream.apply(parse_hint(datagram()), 500)
    stream.apply(parse_hint(datagram(flags=hint.WAITING)), 1000)
    stream.apply(parse_hint(datagram(flags=hint.DONE, missed=1)), 1100)
    counters = stream.take(7, "12/0")
    assert (counters.iterations, counters.waiting_since_ns, counters.last_iteration_ns) == (2, None, 500)


def test_what_was_known_once_stays_known():
    stream = Stream()
    stream.apply(parse_hint(datagram()), 1)
    stream.apply(parse_hint(datagram(flags=0)), 2)
    counters = stream.take(7, "12/0")
    assert (counters.capacity, counters.next_batch_bytes, counters.wait_ns) == (4, 1000, 5)


def test_recent_is_bounded():
    stream = Stream()
    for n in range(MAX_RECENT + 10):
        stream.apply(parse_hint(datagram()), n)
    counters = stream.take(7, "12/0")
    assert counters.iterations == MAX_RECENT + 10
    assert [event.time_ns for event in counters.recent] == list(range(10, MAX_RECENT + 10))
