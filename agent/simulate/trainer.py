"""A simulated training job: workers read batches into a bounded queue, a loop takes one per iteration and computes."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from agent.hint_wire import Hint, Stream
from agent.simulate.chance import stream
from agent.simulate.events import Events
from agent.simulate.machine import Machine
from agent.simulate.processors import Processors, WorkerClock
from agent.simulate.requests import Request
from agent.simulate.scenario import Job
from agent.simulate.source import Source
from bpf.samples import StreamCounters

RESTART_SECONDS = 1.0
"""From the end of a life to the next (the scenarios' definition of a restart)."""
WAITING_AFTER_SECONDS = 0.010
"""A loop that has stood before an empty queue for so long says that it waits (agent/hint.py)."""
COMPUTE_SPREAD = 0.05
"""Compute time is within 5 % of its nominal value, as in the lab's trainer."""


class Iteration(NamedTuple):
    """What really happened: begin of the wait (s), the wait (s), batches ready before it, how many since the start.

    `taken` is False where the end came before the batch.
    """

    time: float
    wait: float
    depth: int
    number: int
    life: int
    taken: bool


class Warmth(NamedTuple):
    """A job that is already running: its queue is full and this many batches, the cold ones among them, are done."""

    batches_done: int


class _Worker:
    """One preparation worker: reads its batch one request after the other, then prepares it on a CPU."""

    __slots__ = ("first", "job", "left", "life", "number", "random", "since", "source")

    def __init__(self, job: Trainer, life: int, generator: random.Random) -> None:
        self.job = job
        self.life = life
        self.random = generator
        self.left = 0
        self.number = 0
        self.first = 0
        self.since = 0.0
        self.source = job.sources[0]

    def begin(self, first: int, count: int) -> None:
        self.first, self.number, self.left = first, 0, count
        self.read()

    def read(self) -> None:
        """Read until a request has to be waited for."""
        job = self.job
        while self.left and self.life == job.life:
            self.left -= 1
            elsewhere = job.slow_ratio > 0.0 and self.random.random() < job.slow_ratio
            self.source = job.sources[elsewhere]
            block = self.random.getrandbits(40) if job.random_order else self.first + self.number
            self.number += 1
            self.since = job.events.now
            if self.source.transfer(block, self.arrived):
                return
            job.events.after(self.source.copy_seconds, self.copied)
            return
        if self.life == job.life:
            job.read_batch(self)

    def copied(self, _: object) -> None:
        self.read()

    def arrived(self, _: Request) -> None:
        spent = self.job.events.now - self.since
        clock = self.job.clock
        if self.source.remote:
            clock.nfs += spent
        else:
            clock.block += spent
        if self.job.machine.read_seconds > 0.0:
            self.job.events.after(self.job.machine.read_seconds, self.copied)
        else:
            self.read()


class Trainer:
    """One job of a scenario, from its start over its restarts to its end.

    `sources` are its data on `device` and, if it has one, on `slow_device`. With `warm` it begins as a job that has
    been running; with `shift_bursts` each life begins somewhere between two bursts. Truth is kept in `iterations`; the
    agent sees `stream()` alone. Workers of a life that has ended finish their request and stop.
    """

    def __init__(
        self,
        events: Events,
        spec: Job,
        cgroup: int,
        sources: Sequence[Source],
        processors: Processors,
        *,
        seed: int,
        duration: float,
        machine: Machine,
        warm: Warmth | None = None,
        shift_bursts: bool = False,
    ) -> None:
        self.events = events
        self.spec = spec
        self.cgroup = cgroup
        self.sources = tuple(sources)
        self.slow_ratio = spec.slow_ratio if len(self.sources) > 1 else 0.0
        self.random_order = spec.pattern == "random"
        self.machine = machine
        self.clock = WorkerClock()
        self.iterations: list[Iteration] = []
        self.life = -1
        self.alive = False
        self._processors = processors
        self._seed = seed
        self._shifts = shift_bursts
        self._shift = 0
        self._random = stream(seed, spec.name, "compute")
        self._idle: list[_Worker] = []
        self._next_read = 0
        self._loader = Stream()
        self._depth_before = 0
        self._began = 0.0
        self._waiting = False
        self._reset(0)
        stop = duration if spec.stop_seconds is None else min(duration, spec.stop_seconds)
        ends = [at for at in sorted(spec.restarts_seconds) if spec.start_seconds < at < stop]
        self._ends = [*ends, stop]
        events.at(spec.start_seconds, self._start, warm)

    def _reset(self, batches_done: int) -> None:
        self._next_batch = self._taken = self._base = batches_done
        self._ready = 0

    def _start(self, warm: Warmth | None) -> None:
        self.life += 1
        self.alive = True
        self._reset(warm.batches_done if warm else 0)
        self._idle = []
        self._loader = Stream()
        self._shift = self._drawn_shift()
        workers = [
            _Worker(self, self.life, stream(self._seed, self.spec.name, self.life, number))
            for number in range(self.spec.workers)
        ]
        if warm:
            self._ready = self.spec.queue_batches
            self._next_batch += self._ready
        for worker in workers:
            self._give_work(worker)
        self._take(self.life)

    def _drawn_shift(self) -> int:
        burst = self.spec.burst
        if burst is None or not self._shifts:
            return 0
        return stream(self._seed, self.spec.name, self.life, "burst").randrange(burst.length, burst.every)

    def _factor(self, batch: int) -> int:
        """How many times its normal size a batch of this life has."""
        if self._shift and batch >= self.spec.cold_batches:
            return self.spec.batch_factor(batch + self._shift)
        return self.spec.batch_factor(batch)

    def _give_work(self, worker: _Worker) -> None:
        if self._next_batch - self._taken >= self.spec.queue_batches:
            self._idle.append(worker)
            return
        count = self.spec.batch_reads * self._factor(self._next_batch)
        first = self._next_read
        self._next_batch += 1
        self._next_read += count
        worker.begin(first, count)

    def read_batch(self, worker: _Worker) -> None:
        """All reads of a batch are there: prepare it."""
        if self.spec.prepare_cpu_ms > 0.0:
            self._processors.burn(self.spec.prepare_cpu_ms / 1e3, self.clock, lambda: self._produced(worker))
        else:
            self._produced(worker)

    def _produced(self, worker: _Worker) -> None:
        if worker.life != self.life:
            return
        self._ready += 1
        if self._waiting:
            self._waiting = False
            self.events.after(self.machine.wake_seconds, self._got, self.life)
        self._give_work(worker)

    def _take(self, life: int) -> None:
        """The loop asks for the next batch."""
        if life != self.life:
            return
        now = self.events.now
        if now >= self._ends[self.life]:
            self._end()
            return
        self._began = now
        self._depth_before = self._ready
        if self._ready:
            self.events.after(self.machine.take_seconds, self._got, life)
            return
        self._waiting = True
        self.events.at(now + WAITING_AFTER_SECONDS, self._tell_waiting, (life, self._taken))
        self.events.at(self._ends[life], self._gave_up, (life, self._taken))

    def _still_waiting(self, since: tuple[int, int]) -> bool:
        return self._waiting and since == (self.life, self._taken)

    def _tell_waiting(self, since: tuple[int, int]) -> None:
        if self._still_waiting(since):
            self._tell(waiting=True, wait=self.events.now - self._began)

    def _gave_up(self, since: tuple[int, int]) -> None:
        """The end of a life comes while the loop waits."""
        if self._still_waiting(since):
            self._waiting = False
            self._record(taken=False)
            self._end()

    def _got(self, life: int) -> None:
        if life != self.life:
            return
        self._ready -= 1
        self._taken += 1
        self._record(taken=True)
        self._tell(waiting=False, wait=self.events.now - self._began)
        if self._idle:
            self._give_work(self._idle.pop())
        compute = self.spec.compute_ms / 1e3 * self._random.uniform(1 - COMPUTE_SPREAD, 1 + COMPUTE_SPREAD)
        self.events.after(compute, self._take, life)

    def _tell(self, *, waiting: bool, wait: float) -> None:
        """What the loop says of itself at each iteration (agent/hint.py); a probe sees the same, but for the bytes."""
        upcoming = self.spec.batch_reads * self._factor(self._next_batch) * self.spec.read_size
        told = Hint(
            stream=0,
            validation=False,
            took_batch=not waiting,
            waiting=waiting,
            missed=0,
            depth=None if waiting else self._ready,
            capacity=self.spec.queue_batches,
            next_batch_bytes=upcoming if self.spec.hints else None,
            wait_ns=int(wait * 1e9),
        )
        self._loader.apply(told, int(self.events.now * 1e9))

    def _record(self, *, taken: bool) -> None:
        number = self._taken - self._base
        wait = self.events.now - self._began
        self.iterations.append(Iteration(self._began, wait, self._depth_before, number, self.life, taken))

    def _end(self) -> None:
        """This life is over; the next begins after a pause, if there is one."""
        self.alive = False
        self._ready = 0
        if self.life + 1 < len(self._ends):
            self.events.after(RESTART_SECONDS, self._start)
        else:
            self.life += 1

    def stream(self) -> StreamCounters | None:
        """The job's loader as the agent's probes see it; None before the first sign of a life and between two."""
        loader = self._loader
        if not self.alive or (not loader.iterations and loader.waiting_since_ns is None):
            return None
        counters = loader.take(self.cgroup, f"{self.life}/0")
        if self.spec.hints:
            return counters
        return replace(counters, source="dataloader", grade="U", depth=self._ready, takeable=self._ready)
