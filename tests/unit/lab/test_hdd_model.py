"""The seek-time model: sequential is cheap, distance and rotation cost, a queue is served in a good order."""

import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.lab.hdd_model import (
    MAX_WAIT_SECONDS,
    READ_AHEAD_BYTES,
    REVOLUTION_SECONDS,
    SEEK_FIXED_SECONDS,
    SEEK_FULL_STROKE_SECONDS,
    Disk,
    Drive,
    Head,
    Request,
    choose,
    config,
    seek_seconds,
    service_seconds,
)

GIB = 1 << 30
DRIVE = Drive(4 * GIB, 150e6)


def request(offset, arrived=0.0):
    return Request(offset, 4096, arrived, threading.Event())


def test_sequential_costs_the_transfer_alone():
    cost = service_seconds(DRIVE, Head(GIB, 10.0), GIB, 1 << 20, 10.0)
    assert cost == pytest.approx((1 << 20) / 150e6 + (1 << 20) / 500e6)


def test_read_ahead_serves_what_follows():
    at_once = service_seconds(DRIVE, Head(GIB, 10.0), GIB, 1 << 20, 10.0)
    later = service_seconds(DRIVE, Head(GIB, 10.0), GIB, 1 << 20, 11.0)
    assert later == pytest.approx((1 << 20) / 500e6)
    assert later < at_once


def test_small_gap_is_passed_over():
    assert service_seconds(DRIVE, Head(0, 0.0), 65536, 4096, 0.0) == pytest.approx((65536 + 4096) / 150e6)


@given(st.integers(0, 4 * GIB - 4096), st.integers(0, 4 * GIB - 4096), st.floats(0, 1000))
def test_positioning_stays_within_the_drive(position, offset, start):
    cost = service_seconds(DRIVE, Head(position, 0.0), offset, 4096, start)
    slowest = SEEK_FIXED_SECONDS + SEEK_FULL_STROKE_SECONDS + REVOLUTION_SECONDS + 4096 / 150e6
    assert 0 < cost <= slowest + READ_AHEAD_BYTES / 150e6


def test_seek_grows_with_the_root_of_the_distance():
    assert seek_seconds(0, GIB) == 0
    near, far = seek_seconds(GIB // 100, GIB), seek_seconds(GIB, GIB)
    assert far == pytest.approx(SEEK_FIXED_SECONDS + SEEK_FULL_STROKE_SECONDS)
    assert near - SEEK_FIXED_SECONDS == pytest.approx(SEEK_FULL_STROKE_SECONDS / 10)


def test_queue_picks_the_nearest_and_no_queue_the_oldest():
    pending = [request(3 * GIB), request(GIB + (1 << 16))]
    head = Head(GIB, 0.0)
    assert choose(DRIVE, head, pending, 0.0) is pending[1]
    assert choose(Drive(4 * GIB, queue=1), head, pending, 0.0) is pending[0]


def test_nobody_waits_for_ever():
    pending = [request(3 * GIB), request(GIB + (1 << 16), MAX_WAIT_SECONDS)]
    assert choose(DRIVE, Head(GIB, 0.0), pending, MAX_WAIT_SECONDS * 1.01) is pending[0]


def test_running_disk_serves_and_takes_its_time():
    disk = Disk(Drive(4 * GIB, bytes_per_second=1e12))
    disk.start()
    threads = [threading.Thread(target=disk.serve, args=(n * GIB, 4096)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(5)
    assert not any(thread.is_alive() for thread in threads)


def test_unknown_setting_is_refused():
    with pytest.raises(ValueError, match="'speed'"):
        config("speed", "9")
