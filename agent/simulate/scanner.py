"""A best-effort neighbour: threads that read or write without a pause."""

from __future__ import annotations

import random

from agent.simulate.chance import stream
from agent.simulate.events import Events
from agent.simulate.machine import Machine
from agent.simulate.requests import Request
from agent.simulate.scenario import Neighbour
from agent.simulate.source import Source

RUN_BLOCKS = 8
"""A thread takes so many consecutive blocks at a time, as in the lab."""


class _Thread:
    __slots__ = ("left", "next", "random", "scanner")

    def __init__(self, scanner: Scanner, generator: random.Random) -> None:
        self.scanner = scanner
        self.random = generator
        self.left = 0
        self.next = 0

    def step(self, _: object = None) -> None:
        scanner = self.scanner
        if scanner.events.now >= scanner.stop:
            return
        if not self.left:
            self.left, self.next = RUN_BLOCKS, scanner.take_run()
        self.left -= 1
        block = self.random.getrandbits(40) if scanner.random_order else self.next
        self.next += 1
        scanner.source.transfer(block, self.done)

    def done(self, _: Request) -> None:
        pause = self.scanner.read_seconds
        if pause > 0.0:
            self.scanner.events.after(pause, self.step)
        else:
            self.step()


class Scanner:
    """All threads of one neighbour over its `source`."""

    def __init__(
        self,
        events: Events,
        spec: Neighbour,
        cgroup: int,
        source: Source,
        *,
        seed: int,
        duration: float,
        machine: Machine,
    ) -> None:
        self.events = events
        self.spec = spec
        self.cgroup = cgroup
        self.source = source
        self.random_order = spec.pattern == "random"
        self.read_seconds = machine.read_seconds
        self.stop = duration if spec.stop_seconds is None else min(duration, spec.stop_seconds)
        self._position = 0
        for number in range(spec.threads):
            events.at(spec.start_seconds, _Thread(self, stream(seed, spec.name, number)).step)

    def take_run(self) -> int:
        """Number of the first of the next consecutive blocks."""
        first = self._position
        self._position += RUN_BLOCKS
        return first

    @property
    def alive(self) -> bool:
        """Whether its cgroup exists now."""
        return self.spec.start_seconds <= self.events.now < self.stop
