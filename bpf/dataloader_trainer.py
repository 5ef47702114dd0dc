"""One training process: its loaders, what it takes from them and how long it waits for that. Pure.

The wait is seen in one of these grades. U: spans of PyTorch's own profiler hooks around `next()`. S2: from the loop's
poll on the result pipe to the next task that it sends (all of `next()`), or to the end of the read where none follows.
S1: the waits for a pin-memory thread that reads for the loop (true starvation only). None: where another thread
consumes the loader, since the loop's own waits cannot be told from others.
"""

from __future__ import annotations

import contextlib

from bpf.dataloader_events import IN_PIN_THREAD, Event, is_own_object, is_single_process, sampling
from bpf.dataloader_loader import Loader, Span, Taken
from bpf.dataloader_queue import Queue
from bpf.dataloader_single import SingleProcess
from bpf.dataloader_streams import MAX_STREAMS, Features, Stream, is_validation, match
from bpf.samples import IterationEvent, StreamCounters

SETTLE_NS = 20_000_000
"""How long an iteration may wait for the task that its taking sends, by a thread of its own."""

UNPACK_NS = 2_000_000_000
"""How long `next()` may go on after the read, where no span shows its end: unpacking needs the worker's help."""

_SURELY_WAITING_NS = 2_000_000
"""A loop that is in `next()` for so long has found nothing in the queue of its pin-memory thread."""

LEFT_OVER_NS = 100_000_000
"""After a read for which no task is sent, how long it may yet turn out to throw away the rest of an epoch."""

EXHAUSTED_NS = 1_000_000_000
"""After so long without a message an exhausted loader is counted as taken to its end."""

_REORDERED_AT_MOST = 8

LONG_AGO_NS = 10_000_000_000
"""After so long without another call of `next()` a batch is counted without knowing whether a step follows it."""


class Trainer:
    """The loaders of one process and the streams that they make."""

    def __init__(self, process: int, cgroup_id: int) -> None:
        self.process = process
        self.cgroup_id = cgroup_id
        self.loaders: list[Loader] = []
        self.streams: list[Stream] = []
        self.sees_spans = False
        self.sees_waits = False
        self._sent_since_span = 0
        self._open: dict[int, Span] = {}
        self._ended: dict[int, Span] = {}
        self._last_loader: dict[int, Loader] = {}
        self._last_stream: Stream | None = None
        self._single = SingleProcess(self._new_stream, self._count)

    # What happens on the pipes

    def task_sent(self, loader: Loader, event: Event) -> None:
        """The loop has sent a task to a worker."""
        queue = loader.queue
        if event.task == 0:
            loader.sampling, loader.first_length = sampling(event.head), event.length
        loader.last_sent_ns = loader.last_event_ns = event.start_ns
        if not queue.send(event.task, event.pipe, len(loader.pipes)):
            return
        if self.sees_spans:
            self._note_sent_in_span(loader, event)
            self._doubt_spans(loader)
        elif queue.is_silent():
            self._take_unread(loader, event.start_ns)
            self._settle(loader)
        elif loader.taken and loader.taken[0].time_ns <= event.start_ns:
            self._confirm(loader, event.start_ns)

    def _doubt_spans(self, loader: Loader) -> None:
        """Batches are taken but no spans come any more: the hooks were lost."""
        self._sent_since_span += 1
        if self._sent_since_span > 2 * loader.queue.primed + _REORDERED_AT_MOST:
            self.sees_spans = False
            self._open.clear()
            loader.queue.unsettle()

    def result_read(self, loader: Loader, event: Event) -> None:
        """A result was read by a thread of the process."""
        if not loader.proven:
            return
        loader.last_event_ns = event.time_ns
        if not loader.queue.sent:  # left of an epoch that was broken off
            loader.asked_ns = None
            return
        if is_own_object(event.head):
            loader.queue.receive_stop(event.task)
            return
        loader.reader_is_pin = bool(event.flags & IN_PIN_THREAD)
        loader.reader_is_main = event.in_main_thread
        loader.queue.receive(event.task, waited=self._is_waited_for(event, by_pin_thread=loader.reader_is_pin))
        self._note_in_span(loader, event)
        if self.sees_spans:
            loader.asked_ns = None
        if loader.reader_is_pin or self.sees_spans:
            return
        loader.has_read = True
        if loader.queue.takes(event.task):
            loader.returned(event.start_ns)
            loader.queue.take(event.task)
            loader.taken.append(Taken(event.time_ns, loader.asked_ns, loader.queue.depth))
            loader.asked_ns, loader.has_read = None, False

    def asked(self, loader: Loader, event: Event) -> None:
        """A thread of the process waits on the result pipe, so it has taken all that it had read before."""
        if event.flags & IN_PIN_THREAD:
            return
        self._note_in_span(loader, event)
        if not self.sees_spans:
            loader.returned(event.start_ns)
            self._link_early(loader)
            queue = loader.queue
            while not queue.unsettled and not queue.unordered and queue.next_task() in queue.received:
                self._take_unread(loader, event.start_ns)
        if loader.asked_ns is None:
            loader.asked_ns = event.start_ns

    def resumed(self, loader: Loader, event: Event) -> None:
        """A worker is told to start over, each on a pipe of its own; the first one begins the epoch."""
        if event.pipe not in loader.resuming and loader.queue.sent:
            self.begin_epoch(loader, event.start_ns)
            loader.resuming = set(loader.pipes)
        loader.resumes(event.pipe)

    def sent_late(self, loader: Loader) -> None:
        """A task of the last epoch was sent after others were told of the next one, by a thread slower than theirs."""
        if loader.left_over:
            self._count_taken(loader, loader.left_over.pop(0))

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

    def finish(self, loader: Loader, now_ns: int) -> None:
        """The loader's workers are told to end."""
        self._close_epoch(loader, now_ns)
        with contextlib.suppress(ValueError):  # exhausted and taken to the end before
            self.loaders.remove(loader)

    # How the loop waits for its pin-memory thread

    @property
    def needs_waits(self) -> bool:
        """Whether only WAIT events can show how the loop waits."""
        return not self.sees_spans and any(loader.reader_is_pin for loader in self.loaders)

    def wait_began(self, event: Event) -> None:
        """The loop found the queue of its pin-memory thread empty, so it has taken all that came in order before."""
        loader = self._pinned_loader()
        if loader is None:
            return
        while loader.has_passed_on(event.start_ns) and loader.queue.take_silently():
            self._count_pinned(loader, event.start_ns)
        loader.asked_ns = event.start_ns

    def wait_ended(self, event: Event) -> None:
        """It waits no longer."""
        loader = self._pinned_loader()
        if loader is not None:
            loader.waited_ns += event.time_ns - event.start_ns
            loader.asked_ns = None

    def _pinned_loader(self) -> Loader | None:
        """The loader that the loop waits for: of those with a pin-memory thread the one that last gave or got."""
        pinned = [loader for loader in self.loaders if loader.reader_is_pin and loader.proven]
        return max(pinned, key=lambda loader: loader.last_event_ns, default=None)

    def _count_pinned(self, loader: Loader, time_ns: int) -> None:
        waited_ns, loader.waited_ns = loader.waited_ns if self.sees_waits else None, 0
        self._count_from(loader, time_ns, waited_ns, loader.queue.depth)

    # What the profiler's hooks tell

    def next_entered(self, event: Event) -> None:
        """The loop asks for a batch."""
        if not self.sees_spans:
            for loader in self.loaders:
                self._settle(loader)
            self.sees_spans = True
        self._sent_since_span = 0
        self._resolve(event.thread)
        self._open[event.thread] = Span(event.start_ns, is_single_process(event.head), event.in_main_thread)

    def next_ended(self, event: Event) -> None:
        """The loop has its batch, or knows that there are no more."""
        span = self._open.pop(event.thread, None)
        if span is None:
            return
        span.end_ns = event.time_ns
        span.depths = {loader: loader.queue.depth for loader in self.loaders}
        self._ended[event.thread] = span

    def stepped(self, event: Event) -> None:
        """The optimizer has made a step."""
        span = self._ended.get(event.thread)
        if span is not None:
            span.stepped = True
        elif self._last_stream is not None:
            self._last_stream.steps += 1

    # What follows

    def flush(self, now_ns: int) -> None:
        """Count what no later event can tell more about."""
        for loader in self.loaders:
            if now_ns - loader.last_event_ns > UNPACK_NS:
                self._settle(loader)
                self._link_early(loader)
            while loader.taken and now_ns - (loader.taken[0].over_ns or now_ns) > LEFT_OVER_NS:
                self._count_taken(loader, loader.taken.pop(0))
        for thread, span in list(self._ended.items()):
            if now_ns - span.end_ns > (LONG_AGO_NS if span.single else SETTLE_NS):
                self._resolve(thread)
        for loader in [loader for loader in self.loaders if self._is_done(loader, now_ns)]:
            self.finish(loader, now_ns)

    def _is_done(self, loader: Loader, now_ns: int) -> bool:
        """Whether an exhausted loader has given its last batch; what it has read early is taken unseen on the pipes."""
        if not loader.is_exhausted:
            return False
        return loader.queue.is_over() or (not self.sees_spans and now_ns - loader.last_event_ns > EXHAUSTED_NS)

    def resolve_all(self) -> None:
        """Count every span that has ended."""
        for thread in list(self._ended):
            self._resolve(thread)

    def end(self) -> None:
        """The process has ended: nothing more will be told."""
        self.resolve_all()
        self._single.release()

    def counters(self) -> list[StreamCounters]:
        """The counters of every stream that has been seen to give batches or to make the loop wait."""
        live = {id(loader.stream): loader for loader in self.loaders if loader.stream is not None}
        return [self._counters(stream, live.get(id(stream))) for stream in self.streams]

    def _counters(self, stream: Stream, loader: Loader | None) -> StreamCounters:
        queue = loader.queue if loader is not None and not loader.queue.is_over() else None
        return stream.counters(
            self.cgroup_id,
            validation=is_validation(stream, self.streams),
            depth=None if queue is None else queue.depth,
            capacity=stream.capacity if queue is None else queue.capacity,
            waiting_since_ns=self._waiting_since(stream, loader),
        )

    def _waiting_since(self, stream: Stream, loader: Loader | None) -> int | None:
        span = self._open.get(self.process)
        if span is None:
            sees_loop = loader is not None and (loader.reader_is_main or loader.reader_is_pin)
            return loader.asked_ns if loader is not None and sees_loop and not self.sees_spans else None
        if span.single:
            return span.start_ns if stream is self._single.latest else None
        here = span.loader or self._last_loader.get(self.process)
        if loader is None or here is not loader:
            return None
        is_dry = loader.queue.depth == 0 if loader.reader_is_pin else loader.asked_ns is not None
        return span.start_ns if is_dry else None

    def _is_waited_for(self, event: Event, *, by_pin_thread: bool) -> bool:
        """Whether the result just read is the one that the loop is waiting for."""
        if not by_pin_thread:
            return True
        span = self._open.get(self.process)
        return span is not None and event.start_ns - span.start_ns > _SURELY_WAITING_NS

    def _link_early(self, loader: Loader) -> None:
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
        idle = [stream for stream in self.streams if not self._single.owns(stream) and stream not in busy]
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

    def _count(self, stream: Stream, iteration: IterationEvent) -> None:
        if stream is not self._last_stream:
            self._last_stream = stream
            stream.runs += 1
        stream.count(iteration)

    def _count_from(self, loader: Loader, time_ns: int, wait_ns: int | None, depth: int | None) -> None:
        if self.sees_spans or loader.early:
            self._link_early(loader)
        iteration = IterationEvent(time_ns, wait_ns, depth)
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

    def _take_unread(self, loader: Loader, time_ns: int) -> None:
        """A batch was taken without a read of its own, or (unsettled) at a time that only the next task tells."""
        if not loader.proven or not loader.queue.take_silently():
            return
        asked_ns: int | None = time_ns
        if loader.has_read:
            asked_ns, loader.asked_ns, loader.has_read = loader.asked_ns, None, False
        if loader.reader_is_pin:
            self._count_pinned(loader, time_ns)
        else:
            loader.taken.append(Taken(time_ns, asked_ns, loader.queue.depth, time_ns))

    def _confirm(self, loader: Loader, sent_ns: int) -> None:
        """Count the batch that a task was sent for: at the end of `next()`, unless that was over before."""
        taken = loader.taken.pop(0)
        if taken.over_ns is None:
            taken.time_ns, taken.depth = sent_ns, loader.queue.depth
        self._count_taken(loader, taken)

    def _settle(self, loader: Loader) -> None:
        """Count all that was taken, now that nothing more will be known of it."""
        for taken in loader.taken:
            self._count_taken(loader, taken)
        loader.taken.clear()

    def _count_taken(self, loader: Loader, taken: Taken) -> None:
        wait_ns = None
        if taken.asked_ns is not None and loader.reader_is_main:
            wait_ns = max(0, taken.time_ns - taken.asked_ns)
        self._count_from(loader, taken.time_ns, wait_ns, taken.depth)

    def _close_epoch(self, loader: Loader, now_ns: int) -> None:
        """Count the last batches, which no read or task has told, unless the epoch was broken off."""
        self.resolve_all()
        self._settle(loader)
        self._link_early(loader)
        queue = loader.queue
        if self.sees_spans or not loader.proven or queue.unsettled or loader.was_broken_off(now_ns):
            return
        while queue.next_task() is not None and queue.take_silently():
            if loader.reader_is_pin:
                self._count_pinned(loader, now_ns)
            else:
                self._count_from(loader, now_ns, 0 if loader.reader_is_main else None, queue.depth)

    def _note_in_span(self, loader: Loader, event: Event) -> None:
        span = self._open.get(event.thread)
        if span is not None:
            span.loader = loader

    def _note_sent_in_span(self, loader: Loader, event: Event) -> None:
        """A task is sent for a batch taken, in a span that may have ended before the sending thread got to run."""
        for span in (*self._ended.values(), *self._open.values()):
            if span.loader is None and not span.single and span.start_ns <= event.start_ns:
                span.loader = loader
                return

    def _resolve(self, thread: int) -> None:
        """Count the batch of a span that has ended."""
        span = self._ended.pop(thread, None)
        if span is None:
            return
        if span.single:
            self._single.add(span)
        elif self._resolve_with_workers(span, thread) and span.stepped and self._last_stream is not None:
            self._last_stream.steps += 1

    def _resolve_with_workers(self, span: Span, thread: int) -> bool:
        loader = span.loader or self._last_loader.get(thread)
        if loader is None or loader not in self.loaders or not loader.proven:
            return False
        self._last_loader[thread] = loader
        if not loader.queue.take_in_span():
            return False
        depth = span.depths.get(loader)
        if depth is not None:
            depth = max(0, depth - 1)
        self._count_from(loader, span.end_ns, span.wait_ns, depth)
        return True
