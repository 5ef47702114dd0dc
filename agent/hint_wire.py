"""What a hint datagram means, and the counters of the stream it speaks for. Pure.

The wire format stands in `agent.hint`, which has to work as a single file in other people's code.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from agent import hint
from bpf.samples import MAX_RECENT, IterationEvent, StreamCounters

_MAX_BATCHES = 1_000_000
_MAX_BATCH_BYTES = 1 << 44
_MAX_WAIT_NS = 7 * 86_400 * 1_000_000_000
_KNOWN_FLAGS = (
    hint.VALIDATION
    | hint.CAPACITY_KNOWN
    | hint.BYTES_KNOWN
    | hint.WAIT_KNOWN
    | hint.WAITING
    | hint.DEPTH_UNKNOWN
    | hint.DONE
)


@dataclass(frozen=True, slots=True)
class Hint:
    """One well-formed datagram; unknown is None.

    `missed` counts earlier iterations of the stream whose own datagram found no room.
    """

    stream: int
    validation: bool
    took_batch: bool
    waiting: bool
    missed: int
    depth: int | None
    capacity: int | None
    next_batch_bytes: int | None
    wait_ns: int | None


def parse_hint(datagram: bytes) -> Hint | None:
    """The datagram's meaning; None where size, magic, flags or a value cannot be a hint's."""
    if len(datagram) != hint.WIRE.size:
        return None
    magic, flags, stream, depth, capacity, missed, next_bytes, wait_ns = hint.WIRE.unpack(datagram)
    if magic != hint.MAGIC or flags & ~_KNOWN_FLAGS or max(depth, capacity, missed) > _MAX_BATCHES:
        return None
    if next_bytes > _MAX_BATCH_BYTES or wait_ns > _MAX_WAIT_NS:
        return None
    took_batch = not flags & (hint.WAITING | hint.DONE)
    return Hint(
        stream=stream,
        validation=bool(flags & hint.VALIDATION),
        took_batch=took_batch,
        waiting=bool(flags & hint.WAITING),
        missed=missed,
        depth=depth if took_batch and not flags & hint.DEPTH_UNKNOWN else None,
        capacity=capacity if flags & hint.CAPACITY_KNOWN and capacity else None,
        next_batch_bytes=next_bytes if flags & hint.BYTES_KNOWN else None,
        wait_ns=wait_ns if flags & hint.WAIT_KNOWN else None,
    )


@dataclass(slots=True)
class Stream:
    """The counters of one stream as they grow."""

    validation: bool = False
    iterations: int = 0
    depth: int | None = None
    capacity: int | None = None
    wait_ns: int | None = None
    waiting_since_ns: int | None = None
    next_batch_bytes: int | None = None
    last_iteration_ns: int = 0
    recent: deque[IterationEvent] = field(default_factory=lambda: deque(maxlen=MAX_RECENT))

    def apply(self, told: Hint, time_ns: int) -> None:
        """Count one hint that was sent at `time_ns` (monotonic)."""
        self.validation = told.validation
        self.iterations += told.missed + told.took_batch
        if told.waiting:
            self.depth, self.waiting_since_ns = 0, time_ns - (told.wait_ns or 0)
            return
        self.waiting_since_ns = None
        if not told.took_batch:
            return
        self.depth, self.last_iteration_ns = told.depth, time_ns
        self.capacity = self.capacity if told.capacity is None else told.capacity
        self.next_batch_bytes = self.next_batch_bytes if told.next_batch_bytes is None else told.next_batch_bytes
        if told.wait_ns is not None:
            self.wait_ns = (self.wait_ns or 0) + told.wait_ns
        self.recent.append(IterationEvent(time_ns, told.wait_ns, told.depth, told.depth))

    def take(self, cgroup_id: int, name: str) -> StreamCounters:
        """The counters now; the recent iterations are handed over once."""
        recent = tuple(self.recent)
        self.recent.clear()
        return StreamCounters(
            cgroup_id=cgroup_id,
            stream=name,
            source="hint",
            validation=self.validation,
            iterations=self.iterations,
            depth=self.depth,
            capacity=self.capacity,
            wait_ns=self.wait_ns,
            waiting_since_ns=self.waiting_since_ns,
            next_batch_bytes=self.next_batch_bytes,
            last_iteration_ns=self.last_iteration_ns,
            recent=recent,
            takeable=self.depth,
        )
