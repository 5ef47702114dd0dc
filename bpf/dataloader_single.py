"""Loaders without workers: only the spans of `next()` and the optimizer's steps are seen. Pure.

All of `next()` is loading, so all of it is waiting, and there is no queue. Two things must be guessed. The call that
ends an epoch loads nothing, so it is far shorter than the others, follows none of its kind, and no step follows it.
And the spans do not say whose they are: in a process that steps, batches without steps are validation, unless steps
come after every few batches (gradients are accumulated) and a step is due. So batches are held until that is clear.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from statistics import median

from bpf.dataloader_loader import Span
from bpf.dataloader_streams import Stream
from bpf.samples import IterationEvent

_HISTORY = 32
_SHORT_NS = 200_000
_SHORT_RATIO = 0.25
_VERY_SHORT_RATIO = 0.05

Count = Callable[[Stream, IterationEvent], None]


class SingleProcess:
    """Sorts spans into a training and a validation stream, which `new_stream` makes when they are needed."""

    def __init__(self, new_stream: Callable[[], Stream], count: Count) -> None:
        self._new_stream = new_stream
        self._count = count
        self._durations_ns: deque[int] = deque(maxlen=_HISTORY)
        self._held: list[Span] = []
        self._between_epochs = True
        self.training: Stream | None = None
        self.validation: Stream | None = None
        self.latest: Stream | None = None

    def owns(self, stream: Stream) -> bool:
        """Whether the stream is one of these two."""
        return stream is self.training or stream is self.validation

    def add(self, span: Span) -> None:
        """Take a span into account that is over, with the step that followed it if there was one."""
        if self._is_end_of_epoch(span):
            self.release()
            self._between_epochs = True
            return
        self._durations_ns.append(span.duration_ns)
        self._held.append(span)
        if span.stepped or self.training is None or not self.training.steps:
            self._release_to_training()
        elif len(self._held) > 2 * self._batches_per_step() - 1:
            self.release()

    def release(self) -> None:
        """Count what is held; nothing tells any more that it belonged to a step."""
        if not self._held:
            return
        if self.training is None or not self.training.steps:
            self._release_to_training()
            return
        if self.validation is None:
            self.validation = self._new_stream()
            self.validation.validates = True
        self._give(self.validation)

    def _release_to_training(self) -> None:
        if self.training is None:
            self.training = self._new_stream()
        stepped = sum(span.stepped for span in self._held)
        self._give(self.training)
        self.training.steps += stepped

    def _give(self, stream: Stream) -> None:
        stream.epoch += self._between_epochs
        self._between_epochs = False
        self.latest = stream
        stream.grade = "U"
        for span in self._held:
            self._count(stream, IterationEvent(span.end_ns, span.wait_ns, None))
        self._held.clear()

    def _batches_per_step(self) -> float:
        if self.training is None or not self.training.steps:
            return 1.0
        return self.training.iterations / self.training.steps

    def _is_end_of_epoch(self, span: Span) -> bool:
        if span.stepped or not self._durations_ns or (self._between_epochs and not self._held):
            return False
        usual_ns = median(self._durations_ns)
        limit = _SHORT_RATIO if span.duration_ns < _SHORT_NS else _VERY_SHORT_RATIO
        return span.duration_ns < limit * usual_ns
