"""The prefetch queue of one epoch of one DataLoader, kept from the messages about its tasks. Pure.

torch/utils/data/dataloader.py, `_MultiProcessingDataLoaderIter`: the loop primes the queue with prefetch_factor x
num_workers tasks, numbered from 0, and then sends one more for every batch that it takes; results may come in any
order and are taken in that of the numbers, unless `in_order=False`. At the end of an epoch no more tasks are sent, so
what is taken shows only where a result is read just before.
"""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

_REORDERING = 64
"""Each worker's tasks are sent by a thread of their own, so neighbouring numbers may be seen in another order."""

_MIN_OBSERVATIONS = 4
_MAX_UNSETTLED = 1024
_MAX_OUTSTANDING = 8192
"""No loader sends so far ahead; what looks like one and never takes anything must not fill the memory."""


class Left(NamedTuple):
    """Batches left in a queue, as in `bpf.samples.StreamCounters`; None is unknown."""

    depth: int | None
    takeable: int | None

    def after_one(self) -> Left:
        """What is left when the loop has taken one of them; one that was not seen to be ready cannot be missing."""
        return Left(*(None if count is None else max(0, count - 1) for count in self))


class Queue:
    """Counts and sets of task numbers; `workers` is how many index pipes are known.

    `from_start` where the beginning of the epoch was seen, so that task 0 is still to come if others come first.
    A queue that was first seen in the middle of an epoch, or of which events were lost, is `unsettled`: its depth is
    unknown, and each further task counts as a batch taken, until the distance between the task sent and the batch
    just taken shows where the loop stands.
    """

    def __init__(self, capacity: int | None = None, *, unordered: bool = False, from_start: bool = False) -> None:
        self._from_start = from_start
        self.known_capacity = capacity
        self.unordered = unordered
        self.sent = 0
        self.top = -1
        self.primed = 0
        self.taken = 0
        self.received_count = 0
        self.outstanding: dict[int, int] = {}
        self.ready: set[int] = set()
        self.received: set[int] = set()
        self.unsettled = False
        self._first_seen: int | None = None
        self._confirmed = 0
        self._stops = 0
        self._missing: set[int] = set()
        self._ended_pipes: set[int] = set()
        self._distances: Counter[int] = Counter()
        self._direct: int | None = None
        self._uncounted: int | None = None

    @property
    def depth(self) -> int | None:
        """Batches ready and not taken; None while unsettled."""
        return None if self.unsettled else len(self.ready)

    @property
    def takeable(self) -> int | None:
        """Batches that the loop could take without waiting; None while unsettled.

        In order, those are the ready ones from the next on: what comes before its turn is kept until then
        (dataloader.py, `_next_data`).
        """
        if self.unsettled or self.unordered:
            return self.depth
        count = 0
        for task in sorted(self.outstanding):
            if task not in self.ready:
                break
            count += 1
        return count

    @property
    def left(self) -> Left:
        """Both counts now."""
        return Left(self.depth, self.takeable)

    @property
    def capacity(self) -> int | None:
        """How many batches the queue holds: what was primed.

        In the last batches of an epoch, which the loop no longer replaces, it is those still to come, so that a queue
        that runs out because the epoch does is not a sick one.
        """
        if self.unsettled or not self.received_count:
            return self.known_capacity
        left = len(self.outstanding)
        return left if 0 < left < self.primed - 1 else self.primed

    def is_over(self) -> bool:
        """Whether everything that was sent has been taken."""
        return self.sent > 0 and not self.outstanding and not self.unsettled

    @property
    def has_begun(self) -> bool:
        """Whether task 0 of this epoch, or one far from it, has been sent."""
        return self._first_seen == 0 or self.top > _REORDERING

    @property
    def starts_late(self) -> bool:
        """Whether the first tasks of this epoch were not seen."""
        return bool(self._first_seen) and not self._from_start

    @property
    def is_starting(self) -> bool:
        """Whether task 0 may yet be seen, sent by a slower thread than the first one seen, and no batch has come."""
        return self.starts_late and not self.received_count

    def expects(self, task: int) -> bool:
        """Whether a task on a pipe not seen before may belong here.

        It does if its number is about to come or was left out, or may have been missed just before the first one.
        """
        if not self.sent:
            return False
        if task < (self._first_seen or 0):
            return self._from_start or self.received_count == 0
        return task in self._missing or self.top < task <= self.top + _REORDERING

    def send(self, task: int, pipe: int, workers: int) -> bool:
        """A task was sent; True where that tells of a batch taken (or of a worker that ended)."""
        self.sent += 1
        self._note_number(task)
        if pipe not in self._ended_pipes:
            self.outstanding[task] = pipe
        if len(self.outstanding) > _MAX_OUTSTANDING:
            self.unsettle()
        if self.unsettled:
            self._confirmed += 1
            self._observe(task, workers)
            return True
        return self._is_confirmation()

    def _note_number(self, task: int) -> None:
        """Keep which numbers have been seen: the lowest, the highest, and what is missing between them."""
        lowest, self._first_seen = self._first_seen, task if self._first_seen is None else min(task, self._first_seen)
        if lowest is not None and task < lowest:
            self._missing.update(range(task + 1, min(lowest, task + _REORDERING)))
        elif lowest is not None and task > self.top:
            self._missing.update(range(max(self.top + 1, task - _REORDERING), task))
        self._missing.discard(task)
        self.top = max(self.top, task)
        if len(self._missing) > 2 * _REORDERING:  # what is so late never comes; numbers of others have gaps
            self._missing = {number for number in self._missing if number >= self.top - _REORDERING}

    def _is_confirmation(self) -> bool:
        """A batch must be received before it is taken, so what is sent earlier still primes the queue."""
        refilling = self.primed < self.known_capacity if self.known_capacity else False
        if refilling or self.received_count + self._stops <= self._confirmed:
            self.primed += 1
            return False
        self._confirmed += 1
        return True

    def is_silent(self) -> bool:
        """After a confirmation: whether it is for a batch that has not been counted as taken."""
        return self._confirmed > self.taken + self._stops

    def produce(self, task: int) -> None:
        """A worker has finished a task."""
        if task in self.outstanding:
            self.ready.add(task)

    def stop(self, task: int) -> None:
        """A worker found its iterable exhausted at this task: it answers none of its later ones."""
        pipe = self.outstanding.get(task)
        if pipe is None:
            return
        self._ended_pipes.add(pipe)
        for dead in [number for number, owner in self.outstanding.items() if owner == pipe and number >= task]:
            self._forget(dead)

    def has_ended(self, pipe: int) -> bool:
        """Whether the worker of this index pipe has said that it is exhausted."""
        return pipe in self._ended_pipes

    def receive_stop(self, task: int) -> None:
        """The loop has read that a worker is exhausted."""
        self._stops += 1
        self.stop(task)

    def receive(self, task: int, *, waited: bool) -> None:
        """The loop, or its pin-memory thread, has read a result; `waited` where it was for this one."""
        if self.received_count == 0 and self.starts_late:  # task 0 was sent before anybody looked
            self.unsettle(self._first_seen)
        self.received_count += 1
        if task in self.outstanding:
            self.ready.add(task)
            self.received.add(task)
        self._direct = self._uncounted = task if waited else None

    def next_task(self) -> int | None:
        """The task whose batch the loop takes next, in order; None where nothing is left."""
        return min(self.outstanding, default=None)

    def takes(self, task: int) -> bool:
        """Whether the loop takes a result that it has just read, or keeps it for later."""
        return not self.unsettled and (self.unordered or task == self.next_task())

    def take_silently(self) -> bool:
        """Take the batch that the loop must have taken although no read was for it; False where there is none."""
        if self.unsettled:
            return self.take(None)
        task = self.next_task()
        if task in self.received:
            return self.take(task)
        if self.received:  # the next one is still missing: this loop does not care for the order
            self.unordered = True
            return self.take(min(self.received))
        return False

    def take(self, task: int | None) -> bool:
        """Count a batch as taken; `task` None where its number is unknown."""
        self.taken += 1
        self._uncounted = None
        if task is not None:
            self._forget(task)
        return True

    def take_in_span(self) -> bool:
        """Count a batch that a span shows; False if none was left, so that the span was the end of the epoch."""
        if self.unsettled:
            return self.take(None)
        if not self.outstanding:
            return False
        task = self.next_task()
        if self.received and task not in self.received:  # a batch was given, and it was not the next one
            self.unordered = True
        if self.unordered and self.received:
            task = self._uncounted if self._uncounted in self.received else min(self.received)
        return self.take(task)

    def is_complete(self) -> bool:
        """Whether all that is left has been read, as at the end of an epoch that was not broken off."""
        return not self.unsettled and self.outstanding.keys() <= self.received

    def unsettle(self, first_seen: int | None = None) -> None:
        """Forget where the loop stands; what was sent before `first_seen` is not known."""
        self.unsettled, self._from_start = True, False
        start = self.top + 1 if first_seen is None else first_seen
        self._first_seen = start
        self._missing.clear()
        self._distances.clear()
        self._confirmed = self.taken + self._stops
        for task in [number for number in self.outstanding if number < start]:
            self._forget(task)

    def _forget(self, task: int) -> None:
        self.outstanding.pop(task, None)
        self.ready.discard(task)
        self.received.discard(task)

    def _observe(self, task: int, workers: int) -> None:
        """In order, a task is sent for the batch just taken, so its distance from that is the queue's length."""
        if len(self.outstanding) > _MAX_UNSETTLED:
            self._forget(next(iter(self.outstanding)))
        taken, self._direct = self._direct, None
        if taken is None:
            return
        self._distances[task - taken] += 1
        length = self._length(workers)
        if task - taken == length and taken >= (self._first_seen or 0):
            self._settle(taken, length)

    def _settle(self, taken: int, length: int) -> None:
        counted = self._uncounted != taken
        for old in [number for number in self.outstanding if number < taken + counted]:
            self._forget(old)
        self.primed = length
        self._confirmed = self.taken + self._stops + (not counted)
        self.received_count = self.taken + len(self.received | ({taken} if not counted else set()))
        self.unsettled = False

    def _length(self, workers: int) -> int | None:
        """The most frequent distance, a multiple of the number of workers; None before it is sure."""
        if self.known_capacity and self._distances[self.known_capacity]:
            return self.known_capacity
        if sum(self._distances.values()) < max(_MIN_OBSERVATIONS, 2 * workers):
            return None
        distance = self._distances.most_common(1)[0][0]
        return -(-distance // workers) * workers if workers and distance > 0 else None
