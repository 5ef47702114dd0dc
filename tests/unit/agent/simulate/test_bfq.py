import random

import pytest

from agent.simulate.bfq import IDLE_SECONDS, Bfq
from agent.simulate.events import Events
from agent.simulate.hdd import Geometry, Hdd
from agent.simulate.requests import Account, Request
from tests.unit.agent.simulate.builders import KIB, MIB, Load

SIZE = 4 << 30


def disk(events, queue=32):
    return Hdd(events, Geometry(SIZE, 150e6, queue=queue))


def run_of(start):
    return lambda number: start + number * 256 * KIB


def test_sequential_readers_keep_their_runs_apart():
    def total(through):
        events = Events()
        stage = through(events)
        loads = [Load(events, stage, threads=1, cgroup=index, offset=run_of(index * SIZE // 4)) for index in range(4)]
        events.run(10.0)
        return sum(load.rate for load in loads)

    def plain(events):
        return disk(events, queue=1)

    assert total(lambda events: Bfq(events, plain(events))) > 2 * total(plain)


def test_weights_divide_the_disk():
    events = Events()
    queue = Bfq(events, disk(events))
    queue.weights = {1: 300.0, 2: 100.0}
    loads = [Load(events, queue, threads=1, cgroup=index, offset=run_of(index * MIB * 100)) for index in (1, 2)]
    events.run(30.0)
    assert loads[0].rate / loads[1].rate == pytest.approx(3.0, rel=0.15)


def test_a_random_reader_does_not_shut_out_a_sequential_one():
    events = Events()
    queue = Bfq(events, disk(events))
    generator = random.Random(3)
    scan = Load(events, queue, threads=8, cgroup=1, offset=lambda number: generator.randrange(SIZE // MIB) * MIB)
    job = Load(events, queue, threads=1, cgroup=2, offset=run_of(0))
    events.run(20.0)
    assert scan.rate > 2 * MIB
    assert job.rate > 10 * MIB


def test_a_process_that_falls_silent_loses_its_turn_after_a_moment():
    events = Events()
    queue = Bfq(events, disk(events))
    served = []
    once = Request(Account(1), 0, 256 * KIB, 0, served.append)
    once.submit(0.0)
    queue.accept(once)
    other = Load(events, queue, threads=1, cgroup=2, offset=run_of(SIZE // 2))
    events.run(0.0)
    events.run(IDLE_SECONDS)
    assert not other.finished
    events.run(0.05)
    assert served == [once]
    assert other.finished
