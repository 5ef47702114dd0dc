import pytest

from agent.simulate.events import Events
from agent.simulate.processors import Processors, WorkerClock


def burn(workers, cpus, seconds=1.0):
    events, done, clock = Events(), [], WorkerClock()
    processors = Processors(events, cpus)
    for _ in range(workers):
        processors.burn(seconds, clock, lambda: done.append(events.now))
    events.run(100.0)
    return done, clock


def test_work_takes_its_time_while_cpus_are_free():
    done, clock = burn(workers=2, cpus=2)
    assert done == [pytest.approx(1.0)] * 2
    assert clock.on_cpu == pytest.approx(2.0)
    assert clock.runnable == pytest.approx(0.0, abs=1e-6)


def test_more_workers_than_cpus_wait_for_one():
    done, clock = burn(workers=6, cpus=2)
    assert max(done) == pytest.approx(3.0, rel=0.02)
    assert clock.on_cpu == pytest.approx(6.0)
    assert clock.runnable == pytest.approx(12.0, rel=0.05)
