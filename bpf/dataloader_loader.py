"""What is known of one iterator over a DataLoader, and of one call of its `next()`. Values that change."""

from __future__ import annotations

from dataclasses import dataclass, field

from bpf.dataloader_events import Sampling
from bpf.dataloader_queue import Queue
from bpf.dataloader_streams import Stream
from bpf.samples import IterationEvent


@dataclass(slots=True)
class Taken:
    """A batch that was read and taken, while it is not known yet when `next()` returned."""

    time_ns: int
    asked_ns: int | None
    depth: int | None


@dataclass(slots=True, eq=False)
class Loader:
    """One iterator over a DataLoader: its index pipes, its result pipe, the queue of its present epoch.

    `proven` when one of its workers has been seen to wait for tasks as only the DataLoader's do. When it is exhausted,
    batches that were read early may be left to take. `early` are batches taken before its stream is known. `waited_ns`
    is how long the loop has waited for its pin-memory thread since the last batch.
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
    taken: Taken | None = None
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
        return bool(self.pipes) and self.closed_pipes >= self.pipes


@dataclass(slots=True, eq=False)
class Span:
    """One call of `next()`; `depths` are those of the loaders at its end, `stepped` whether the optimizer followed."""

    start_ns: int
    single: bool
    in_main_thread: bool
    end_ns: int = 0
    loader: Loader | None = None
    stepped: bool = False
    depths: dict[Loader, int | None] = field(default_factory=dict)

    @property
    def duration_ns(self) -> int:
        """From call to return."""
        return self.end_ns - self.start_ns

    @property
    def wait_ns(self) -> int | None:
        """How long the training loop waited; unknown where another thread consumes the loader for it."""
        return self.duration_ns if self.in_main_thread else None
