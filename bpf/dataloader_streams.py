"""Which loader of a process is which: the same one epoch after epoch, and training or validation. Pure.

A DataLoader without persistent workers makes new processes and pipes for every epoch, so a stream is recognised by
what its epochs have in common. Training is told from validation by these rules, the first that can be applied:

1. Where the optimizer's steps are seen (grade U), a stream whose batches are followed by none while those of another
   stream of the process are, is validation.
2. Else a stream is validation if another stream of its process has taken more batches and its own come in runs (two
   loaders that feed the same step take turns batch by batch instead).

A process with one stream trains, whatever it does.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from bpf.dataloader_events import Sampling
from bpf.dataloader_queue import Left
from bpf.samples import MAX_RECENT, IterationEvent, StreamCounters

MAX_STREAMS = 8
"""Per process; a loader that resembles none of so many goes to the one it resembles most."""

_SAME_LENGTH = 1.25
_MIN_RUN = 2.0
_GAP_WEIGHT = 0.1


class Features(NamedTuple):
    """What stays the same from epoch to epoch: workers, tasks primed, sampling, length of task 0's message."""

    workers: int
    primed: int
    sampling: Sampling
    length: int

    def distance(self, other: Features) -> float:
        """0 for the same loader; infinite where it cannot be."""
        if (self.workers, self.sampling) != (other.workers, other.sampling):
            return math.inf
        if self.length <= 0 or other.length <= 0:
            return 0.0 if self.primed == other.primed else math.inf
        apart = abs(math.log(self.length / other.length)) / math.log(_SAME_LENGTH)
        return apart + (self.primed != other.primed)  # a short data set primes fewer


@dataclass(slots=True, eq=False)
class Stream:
    """The counters of one loader of one process, over all its epochs.

    `grade` is that of the last wait, empty where it could not be seen; `validates` where that is sure already;
    `usual_gap_ns` the smoothed time between two batches.
    """

    name: str
    features: Features | None = None
    iterations: int = 0
    wait_ns: int | None = None
    last_iteration_ns: int = 0
    recent: deque[IterationEvent] = field(default_factory=lambda: deque(maxlen=MAX_RECENT))
    epoch: int = 0
    steps: int = 0
    runs: int = 0
    capacity: int | None = None
    unordered: bool = False
    validates: bool = False
    grade: str = ""
    usual_gap_ns: float = 0.0

    def count(self, iteration: IterationEvent) -> None:
        """One batch was taken."""
        if self.last_iteration_ns:
            gap_ns = max(0, iteration.time_ns - self.last_iteration_ns)
            self.usual_gap_ns += (gap_ns - self.usual_gap_ns) * (_GAP_WEIGHT if self.usual_gap_ns else 1.0)
        self.iterations += 1
        self.last_iteration_ns = iteration.time_ns
        if iteration.wait_ns is not None:
            self.wait_ns = (self.wait_ns or 0) + iteration.wait_ns
        self.recent.append(iteration)

    def counters(
        self,
        cgroup_id: int,
        *,
        validation: bool,
        left: Left,
        capacity: int | None,
        waiting_since_ns: int | None,
    ) -> StreamCounters:
        """The counters now; recent iterations are handed over once."""
        recent = tuple(self.recent)
        self.recent.clear()
        return StreamCounters(
            cgroup_id=cgroup_id,
            stream=self.name,
            source="dataloader",
            validation=validation,
            iterations=self.iterations,
            depth=left.depth,
            capacity=capacity,
            wait_ns=self.wait_ns,
            waiting_since_ns=waiting_since_ns,
            next_batch_bytes=None,
            last_iteration_ns=self.last_iteration_ns,
            recent=recent,
            grade=self.grade,
            epoch=self.epoch,
            takeable=left.takeable,
        )


def match(features: Features, idle: Iterable[Stream], *, any_will_do: bool = False) -> Stream | None:
    """The idle stream that a new epoch belongs to; among equals the one that has rested longest.

    A stream without features was met half-way through its first epoch; it may be any, if none resembles more. None
    where it is a stream of its own, unless `any_will_do`.
    """
    ranked = sorted(
        ((_distance(stream, features), stream.last_iteration_ns, stream) for stream in idle),
        key=lambda entry: entry[:2],
    )
    if ranked and (ranked[0][0] <= 1.0 or any_will_do):
        return ranked[0][2]
    return None


def _distance(stream: Stream, features: Features) -> float:
    return 1.0 if stream.features is None else stream.features.distance(features)


def is_validation(stream: Stream, streams: Iterable[Stream]) -> bool:
    """The rules at the head of this module."""
    others = [other for other in streams if other is not stream and other.iterations]
    if stream.steps or not others:
        return stream.validates
    stepping = [other for other in others if other.steps]
    if stream.validates:
        return True
    if stepping:
        batches_per_step = max(other.iterations / other.steps for other in stepping)
        return stream.iterations > 2 * batches_per_step
    busiest = max(other.iterations for other in others)
    return busiest > stream.iterations >= _MIN_RUN * max(1, stream.runs)
