"""The node's CPUs as preparation workers share them."""

from __future__ import annotations

from collections.abc import Callable

from agent.simulate.events import Events

QUANTUM_SECONDS = 0.005


class Processors:
    """`count` CPUs shared fairly: work is done in quanta that last longer while more workers than CPUs run.

    Not modelled: priorities, cpu.max, the cost of switching, the cores that the training loop itself keeps busy.
    """

    __slots__ = ("_events", "_running", "count")

    def __init__(self, events: Events, count: int) -> None:
        self._events = events
        self._running = 0
        self.count = count

    def burn(self, seconds: float, spent: WorkerClock, done: Callable[[], None]) -> None:
        """Run for `seconds` of CPU time, then call `done`."""
        self._running += 1
        self._slice((seconds, spent, done))

    def _slice(self, work: tuple[float, WorkerClock, Callable[[], None]]) -> None:
        seconds, spent, done = work
        if seconds <= 1e-9:
            self._running -= 1
            done()
            return
        quantum = min(seconds, QUANTUM_SECONDS)
        took = quantum * max(1.0, self._running / self.count)
        spent.on_cpu += quantum
        spent.runnable += took - quantum
        self._events.after(took, self._slice, (seconds - quantum, spent, done))


class WorkerClock:
    """Seconds that a job's workers spent on a CPU, waiting for one, and blocked on block devices and on mounts."""

    __slots__ = ("block", "nfs", "on_cpu", "runnable")

    def __init__(self) -> None:
        self.on_cpu = 0.0
        self.runnable = 0.0
        self.block = 0.0
        self.nfs = 0.0
