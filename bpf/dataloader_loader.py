"""What is known of one iterator over a DataLoader, and of one call of its `next()`. Values that change."""

from __future__ import annotations

from dataclasses import dataclass, field

from bpf.dataloader_events import Sampling
from bpf.dataloader_queue import Left, Queue
from bpf.dataloader_streams import Stream
from bpf.samples import IterationEvent

PASS_ON_NS = 300_000
"""The pin-memory thread's time from reading a batch to handing it over."""


@dataclass(slots=True)
class Taken:
    """A batch that was taken, going by the reads alone: no task has been sent for it yet.

    `time_ns` is when it was read; `over_ns` is when `next()` is known to have returned before, None while it may not
    have returned yet.
    """

    time_ns: int
    asked_ns: int | None
    left: Left
    over_ns: int | None = None


@dataclass(slots=True, eq=False)
class Loader:
    """One iterator over a DataLoader: its index pipes, its result pipe, the queue of its present epoch.

    `proven` when one of its workers has been seen to wait for tasks as only the DataLoader's do. When it is exhausted,
    batches that were read early may be left to take. `early` are batches taken before its stream is known. `waited_ns`
    is how long the loop has waited for its pin-memory thread since the last batch.

    Between two epochs of persistent workers `resuming` are the index pipes on which the message that starts the next
    one is still to come: what is sent there belongs to the last one. `left_over` is what was read last of an epoch that
    was broken off: taken only if a task still comes for it.
    """

    queue: Queue = field(default_factory=Queue)
    pipes: set[int] = field(default_factory=set)
    result_pipe: int | None = None
    proven: bool = False
    stream: Stream | None = None
    sampling: Sampling = Sampling.UNKNOWN
    first_length: int = 0
    asked_ns: int | None = None
    has_read: bool = False
    taken: list[Taken] = field(default_factory=list)
    resuming: set[int] = field(default_factory=set)
    left_over: list[Taken] = field(default_factory=list)
    reader_is_main: bool = True
    reader_is_pin: bool = False
    waited_ns: int = 0
    last_sent_ns: int = 0
    last_event_ns: int = 0
    closed_pipes: set[int] = field(default_factory=set)
    early: list[IterationEvent] = field(default_factory=list)

    @property
    def is_exhausted(self) -> bool:
        """Whether all workers have been told to end, each because its iterable was at its end."""
        return bool(self.pipes) and self.closed_pipes >= self.pipes and not self.queue.is_starting

    def was_broken_off(self, now_ns: int) -> bool:
        """Whether the loop, which now starts over or ends, has left batches of this epoch: else it has read them all.

        A pin-memory thread reads ahead, so only time tells whether the loop has taken what was read: after the last
        task was sent, the rest of a full epoch takes as many iterations as the queue holds.
        """
        if self.queue.unsettled:
            return False
        if not self.queue.is_complete():
            return True
        if not self.reader_is_pin or self.stream is None:
            return False
        return now_ns - self.last_sent_ns < 0.5 * self.stream.usual_gap_ns * len(self.queue.outstanding)

    def has_passed_on(self, now_ns: int) -> bool:
        """Whether the pin-memory thread has had the time to hand over the batch that is next."""
        if self.queue.unsettled or self.queue.next_task() not in self.queue.received:
            return False
        return now_ns - self.last_event_ns > PASS_ON_NS

    def returned(self, now_ns: int) -> None:
        """The calls of `next()` that gave what has been taken are over."""
        for taken in self.taken:
            taken.over_ns = taken.over_ns or now_ns

    def resumes(self, pipe: int) -> None:
        """The message that starts an epoch has been sent on a pipe; after the last one nothing more can be late."""
        self.resuming.discard(pipe)
        if not self.resuming:
            self.left_over.clear()


@dataclass(slots=True, eq=False)
class Span:
    """One call of `next()`; `left` is what the loaders hold at its end, `stepped` whether the optimizer followed."""

    start_ns: int
    single: bool
    in_main_thread: bool
    end_ns: int = 0
    loader: Loader | None = None
    stepped: bool = False
    left: dict[Loader, Left] = field(default_factory=dict)

    @property
    def duration_ns(self) -> int:
        """From call to return."""
        return self.end_ns - self.start_ns

    @property
    def wait_ns(self) -> int | None:
        """How long the training loop waited; unknown where another thread consumes the loader for it."""
        return self.duration_ns if self.in_main_thread else None
