import random

import pytest

from agent.simulate.events import Events
from agent.simulate.hdd import Geometry, Hdd
from tests.unit.agent.simulate.builders import KIB, MIB, Load

SIZE = 4 << 30
DRIVE = Geometry(SIZE, 150e6)


def rate(geometry, *, threads, size=256 * KIB, scattered=True, seconds=20.0):
    events = Events()
    generator = random.Random(7)
    places = (lambda number: generator.randrange(SIZE // size) * size) if scattered else (lambda number: number * size)
    load = Load(events, Hdd(events, geometry), size=size, threads=threads, offset=places)
    events.run(seconds)
    assert load.account.bytes[0] <= geometry.bytes_per_second * seconds
    return load.rate


def test_sequential_reads_run_near_the_media_rate():
    assert rate(DRIVE, threads=1, scattered=False) > 0.65 * 150e6


def test_random_reads_cost_several_times_as_much():
    assert rate(DRIVE, threads=1) < 0.3 * rate(DRIVE, threads=1, scattered=False)


def test_random_reads_in_order_take_mean_seek_half_a_turn_and_transfer():
    seconds = DRIVE.mean_positioning_seconds + 256 * KIB / 150e6 + DRIVE.overhead_seconds
    assert rate(DRIVE._replace(queue=1), threads=8) == pytest.approx(256 * KIB / seconds, rel=0.05)


def test_a_queue_to_choose_from_gains():
    deep, shallow = rate(DRIVE, threads=16), rate(DRIVE._replace(queue=1), threads=16)
    assert deep > 1.2 * shallow


def test_a_longer_way_takes_longer_to_seek():
    disk = Hdd(Events(), DRIVE._replace(revolution_seconds=1e-9))
    near, far = (disk.positioning_seconds(distance, 0.0) for distance in (16 * MIB, 2 << 30))
    assert 0.001 < near < far < 0.009
    assert disk.positioning_seconds(0, 0.0) == 0.0


def test_nobody_waits_much_longer_than_the_oldest_may():
    events = Events()
    disk = Hdd(events, DRIVE)
    Load(events, disk, threads=31, size=64 * KIB, offset=lambda number: number % 64 * 64 * KIB)
    waits = []
    lone = Load(events, disk, threads=1, size=64 * KIB, cgroup=2, offset=lambda number: SIZE - MIB)
    for second in range(1, 10):
        events.run(float(second))
        waits.append(lone.account.latency[0] / max(1, lone.account.requests[0]))
    assert lone.account.requests[0] > 5
    assert max(waits) < 1.0
