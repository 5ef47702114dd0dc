"""What the drives of a testbed could do at best: a fluid model with perfect devices, divided by one who knows all.

No request takes time of its own, no head moves, no cap leaves a gap, and every byte that a drive can deliver goes at
once to whom the rule says. What still waits then waits because the jobs of one drive want more than it has. It is no
proof of a least wait, but the least of several rules, one of which knows what no agent can.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from agent.simulate.chance import stream
from agent.simulate.paper import WindowFigures
from agent.simulate.run import starved_phases
from agent.simulate.scenario import Job
from agent.simulate.testbed import Testbed, Window, windows
from agent.simulate.trainer import RESTART_SECONDS, Iteration, Warmth

STEP_SECONDS = 0.02
TINY = 1e-6


class Figures(NamedTuple):
    """Of the jobs on local drives in one window: iterations, seconds waited, and phases of starving."""

    iterations: int
    wait_seconds: float
    events: int


class Loop:
    """One job: bytes come in, batches fill a queue, the loop takes one per computation."""

    def __init__(self, spec: Job, warm: Warmth, seed: int) -> None:
        self.spec = spec
        self.iterations: list[Iteration] = []
        self.alive = False
        self.life = -1
        self.ready = self.made = self.shift = 0
        self.left = self.busy = self.waited = 0.0
        self._seed, self._warm = seed, warm
        self._batch = float(spec.batch_reads * spec.read_size)
        self._starts = spec.start_seconds
        self._ends = [at for at in sorted(spec.restarts_seconds) if at > spec.start_seconds]

    def turn(self, now: float) -> None:
        """End a life whose time has come, begin the next."""
        if self.alive and self._ends and now >= self._ends[0]:
            self._starts = self._ends.pop(0) + RESTART_SECONDS
            self.alive = False
        if not self.alive and now >= self._starts:
            self._begin()

    def _begin(self) -> None:
        self.life += 1
        self.alive = True
        burst = self.spec.burst
        draws = stream(self._seed, self.spec.name, self.life, "burst")
        self.shift = draws.randrange(burst.length, burst.every) if burst else 0
        self.ready = 0 if self.life else self.spec.queue_batches
        self.made = 0 if self.life else self._warm.batches_done + self.ready
        self.left, self.busy, self.waited = self._size(self.made), 0.0, 0.0

    def _size(self, batch: int) -> float:
        shift = self.shift if batch >= self.spec.cold_batches else 0
        return self.spec.batch_factor(batch + shift) * self._batch

    @property
    def wanted(self) -> float:
        """Bytes that its queue has room for."""
        room = self.spec.queue_batches - self.ready
        return self.left + (room - 1) * self._size(self.made + 1) if self.alive and room > 0 else 0.0

    @property
    def price(self) -> float:
        """Bytes of the next batch for each millisecond that the loop computes on it."""
        return self._size(self.made) / self.spec.compute_ms

    @property
    def heavy_batches_left(self) -> int:
        """How many batches the present cold start or burst still has; 0 outside."""
        if self.made < self.spec.cold_batches:
            return self.spec.cold_batches - self.made
        burst = self.spec.burst
        place = (self.made + self.shift) % burst.every if burst else 0
        return burst.length - place if burst and place < burst.length else 0

    def give(self, size: float) -> None:
        """Take in bytes."""
        while size > 0.0 and self.ready < self.spec.queue_batches:
            if size < self.left - TINY:
                self.left -= size
                return
            size -= self.left
            self.ready += 1
            self.made += 1
            self.left = self._size(self.made)

    def compute(self, now: float) -> None:
        """Let the loop run for one step from `now`."""
        rest = STEP_SECONDS if self.alive else 0.0
        while rest > TINY:
            if self.busy > 0.0:
                spent = min(rest, self.busy)
                self.busy -= spent
                rest -= spent
            elif self.ready:
                self.ready -= 1
                self.busy = self.spec.compute_ms / 1e3
                at = now + STEP_SECONDS - rest - self.waited
                self.iterations.append(Iteration(at, self.waited, 0, self.made, self.life, taken=True))
                self.waited = 0.0
            else:
                self.waited += rest
                rest = 0.0


Rule = Callable[[Sequence[Loop], float], None]
"""Hands out so many bytes."""


def equally(loops: Sequence[Loop], size: float) -> None:
    """Max-min: what one does not want goes to the others."""
    order = sorted(loops, key=lambda loop: loop.wanted)
    for index, loop in enumerate(order):
        part = min(loop.wanted, size / (len(order) - index))
        loop.give(part)
        size -= part


def in_order(key: Callable[[Loop], float]) -> Rule:
    """One after the other, the lowest key first."""

    def rule(loops: Sequence[Loop], size: float) -> None:
        for loop in sorted(loops, key=key):
            part = min(loop.wanted, size)
            loop.give(part)
            size -= part

    return rule


RULES: Mapping[str, Rule] = {
    "max-min": equally,
    "cheapest first": in_order(lambda loop: loop.price),
    "whose burst ends first": in_order(lambda loop: loop.heavy_batches_left),
}
"""The last needs to know how long bursts are."""


def ideal(testbed: Testbed, window: Window, seed: int, rule: Rule) -> Figures:
    """One window under a rule; each tier carries its part of the bytes, and only the fast one may be short."""
    kinds = {device.name: device for device in window.scenario.devices}
    loops = [
        Loop(spec, window.warm[spec.name], seed) for spec in window.scenario.jobs if kinds[spec.device].kind != "nfs"
    ]
    drives: dict[str, list[Loop]] = {}
    for loop in loops:
        drives.setdefault(loop.spec.device, []).append(loop)
    rates = {
        name: float(kinds[name].bytes_per_second) / (1.0 - here[0].spec.slow_ratio) for name, here in drives.items()
    }
    for number in range(int(window.scenario.duration_seconds / STEP_SECONDS)):
        now = number * STEP_SECONDS
        for loop in loops:
            loop.turn(now)
        for name, here in drives.items():
            rule(here, rates[name] * STEP_SECONDS)
        for loop in loops:
            loop.compute(now)
    since, smoothing, share = testbed.settle_seconds, testbed.event_smoothing_seconds, testbed.event_wait_share
    counted = [one for loop in loops for one in loop.iterations if one.time >= since]
    events = sum(starved_phases(loop.iterations, smoothing, share, since) for loop in loops)
    return Figures(len(counted), sum(one.wait for one in counted), events)


def ideals(
    testbed: Testbed, seeds: Sequence[int], count: int | None, elsewhere: Sequence[WindowFigures]
) -> dict[str, dict[str, float]]:
    """Every rule over all windows: wait per iteration of all jobs, events per job and hour.

    `elsewhere` is what the same windows gave with disks that are never short: the waits for the gateway.
    """
    places = [(seed, index, window) for seed in seeds for index, window in enumerate(windows(testbed, seed, count))]
    remote = sum(one.mode_iterations["remote_congestion"] for one in elsewhere)
    waited = sum(one.wait_seconds for one in elsewhere)
    found = {}
    for name, rule in RULES.items():
        parts = [ideal(testbed, window, seed * 10_000 + index, rule) for seed, index, window in places]
        iterations = remote + sum(part.iterations for part in parts)
        events = sum(one.events for one in elsewhere) + sum(part.events for part in parts)
        hours = sum(one.jobs * one.seconds for one in elsewhere) / 3600.0
        found[name] = {
            "wait_ms": round(1e3 * (waited + sum(part.wait_seconds for part in parts)) / max(1, iterations), 2),
            "events_per_hour": round(events / hours, 2),
        }
    return found
