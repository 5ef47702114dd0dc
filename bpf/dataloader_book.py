"""What a training process has taken: iterations of its streams, from the first batch of an epoch to its last. Pure.

A batch that is taken waits here until it is known when `next()` was over and whose it is.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable

from bpf.dataloader_loader import Loader, Taken
from bpf.dataloader_queue import Left, Queue
from bpf.dataloader_single import SingleProcess
from bpf.dataloader_streams import MAX_STREAMS, Features, Stream, match
from bpf.samples import IterationEvent

EXHAUSTED_NS = 1_000_000_000
"""After so long without a message an exhausted loader is counted as taken to its end."""


class Book:
    """The loaders of one process and the streams that they make; `resolve_spans` counts every span that has ended.

    `sees_spans` and `sees_waits` tell what the waits are known from, `last_stream` who was counted last.
    """

    def __init__(self, process: int, resolve_spans: Callable[[], None]) -> None:
        self.process = process
        self.loaders: list[Loader] = []
        self.streams: list[Stream] = []
        self.sees_spans = False
        self.sees_waits = False
        self.last_stream: Stream | None = None
        self.single = SingleProcess(self._new_stream, self._count)
        self._resolve_spans = resolve_spans

    def begin_epoch(self, loader: Loader, now_ns: int) -> None:
        """Persistent workers start over.

        Of an epoch that was broken off, what is left is read and thrown away, perhaps before the workers are seen to
        be told; so what was read last counts only if a task was sent for it.
        """
        if loader.was_broken_off(now_ns):
            loader.left_over, loader.taken = loader.taken, []
        self._close_epoch(loader, now_ns)
        capacity, unordered = (loader.stream.capacity, loader.stream.unordered) if loader.stream else (None, False)
        loader.queue = Queue(capacity, unordered=unordered, from_start=True)
        loader.asked_ns, loader.has_read = None, False
        if loader.stream is not None:
            loader.stream.epoch += 1

    def _close_epoch(self, loader: Loader, now_ns: int) -> None:
        """Count the last batches, which no read or task has told, unless the epoch was broken off."""
        self._resolve_spans()
        self.settle(loader)
        self.link_early(loader)
        queue = loader.queue
        if self.sees_spans or not loader.proven or queue.unsettled or loader.was_broken_off(now_ns):
            return
        while queue.next_task() is not None and queue.take_silently():
            if loader.reader_is_pin:
                self.count_pinned(loader, now_ns)
            else:
                self.count_from(loader, now_ns, 0 if loader.reader_is_main else None, queue.left)

    def finish(self, loader: Loader, now_ns: int) -> None:
        """The loader's workers are told to end."""
        self._close_epoch(loader, now_ns)
        with contextlib.suppress(ValueError):  # exhausted and taken to the end before
            self.loaders.remove(loader)

    def is_done(self, loader: Loader, now_ns: int) -> bool:
        """Whether an exhausted loader has given its last batch; what it has read early is taken unseen on the pipes."""
        if not loader.is_exhausted:
            return False
        return loader.queue.is_over() or (not self.sees_spans and now_ns - loader.last_event_ns > EXHAUSTED_NS)

    def take_unread(self, loader: Loader, time_ns: int) -> None:
        """A batch was taken without a read of its own, or (unsettled) at a time that only the next task tells."""
        if not loader.proven or not loader.queue.take_silently():
            return
        asked_ns: int | None = time_ns
        if loader.has_read:
            asked_ns, loader.asked_ns, loader.has_read = loader.asked_ns, None, False
        if loader.reader_is_pin:
            self.count_pinned(loader, time_ns)
        else:
            loader.taken.append(Taken(time_ns, asked_ns, loader.queue.left, time_ns))

    def confirm(self, loader: Loader, sent_ns: int) -> None:
        """Count the batch that a task was sent for: at the end of `next()`, unless that was over before."""
        taken = loader.taken.pop(0)
        if taken.over_ns is None:
            taken.time_ns, taken.left = sent_ns, loader.queue.left
        self.count_taken(loader, taken)

    def settle(self, loader: Loader) -> None:
        """Count all that was taken, now that nothing more will be known of it."""
        for taken in loader.taken:
            self.count_taken(loader, taken)
        loader.taken.clear()

    def count_taken(self, loader: Loader, taken: Taken) -> None:
        """Count a batch of which all is known that will be."""
        wait_ns = None
        if taken.asked_ns is not None and loader.reader_is_main:
            wait_ns = max(0, taken.time_ns - taken.asked_ns)
        self.count_from(loader, taken.time_ns, wait_ns, taken.left)

    def count_pinned(self, loader: Loader, time_ns: int) -> None:
        """Count a batch that came from the pin-memory thread, with what was waited since the last one."""
        waited_ns, loader.waited_ns = loader.waited_ns if self.sees_waits else None, 0
        self.count_from(loader, time_ns, waited_ns, loader.queue.left)

    def count_from(self, loader: Loader, time_ns: int, wait_ns: int | None, left: Left | None) -> None:
        """Count a batch of a loader for its stream, once that is known; `left` is what it left in the queue."""
        if self.sees_spans or loader.early:
            self.link_early(loader)
        iteration = IterationEvent(time_ns, wait_ns, *(left or Left(None, None)))
        if loader.stream is None:
            loader.early.append(iteration)
        else:
            self._count_in(loader, loader.stream, iteration)

    def _count_in(self, loader: Loader, stream: Stream, iteration: IterationEvent) -> None:
        grade = "U" if self.sees_spans else "S1" if loader.reader_is_pin else "S2"
        stream.grade = "" if iteration.wait_ns is None else grade
        stream.unordered |= loader.queue.unordered
        if not loader.queue.unsettled and not loader.queue.is_over():
            stream.capacity = max(stream.capacity or 0, loader.queue.primed)
        self._count(stream, iteration)

    def _count(self, stream: Stream, iteration: IterationEvent) -> None:
        if stream is not self.last_stream:
            self.last_stream = stream
            stream.runs += 1
        stream.count(iteration)

    def link_early(self, loader: Loader) -> None:
        """Find the stream of a loader that has given its first batch, when all that primes its queue has been seen.

        The threads that send may be slower than a quick worker, so that is not before the loop asks again.
        """
        if loader.stream is not None or not loader.queue.taken:
            return
        stream = self._link(loader)
        early, loader.early = loader.early, []
        for iteration in early:
            self._count_in(loader, stream, iteration)

    def _link(self, loader: Loader) -> Stream:
        features = Features(len(loader.pipes), loader.queue.primed, loader.sampling, loader.first_length)
        busy = [other.stream for other in self.loaders if not other.is_exhausted]
        idle = [stream for stream in self.streams if not self.single.owns(stream) and stream not in busy]
        stream = match(features, idle, any_will_do=len(self.streams) >= MAX_STREAMS) or self._new_stream()
        if not loader.queue.starts_late:
            stream.features = features
        for other in [other for other in self.loaders if other.stream is stream]:
            self.finish(other, loader.last_event_ns)
        stream.epoch += 1
        loader.stream = stream
        loader.queue.unordered |= stream.unordered
        return stream

    def _new_stream(self) -> Stream:
        stream = Stream(f"{self.process}/{len(self.streams)}")
        self.streams.append(stream)
        return stream
