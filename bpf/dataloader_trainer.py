"""One training process: what it is seen to do, and so what it takes from its loaders and how it waits. Pure.

The wait is seen in one of these grades. U: spans of PyTorch's own profiler hooks around `next()`. S2: from the loop's
poll on the result pipe to the next task that it sends (all of `next()`), or to the end of the read where none follows.
S1: the waits for a pin-memory thread that reads for the loop (true starvation only). None: where another thread
consumes the loader, since the loop's own waits cannot be told from others.
"""

from __future__ import annotations

from bpf.dataloader_book import Book
from bpf.dataloader_events import IN_PIN_THREAD, Event, is_own_object, is_single_process, sampling
from bpf.dataloader_loader import Loader, Span, Taken
from bpf.dataloader_queue import Left
from bpf.dataloader_streams import Stream, is_validation
from bpf.samples import StreamCounters

SETTLE_NS = 20_000_000
"""How long an iteration may wait for the task that its taking sends, by a thread of its own."""

UNPACK_NS = 2_000_000_000
"""How long `next()` may go on after the read, where no span shows its end: unpacking needs the worker's help."""

_SURELY_WAITING_NS = 2_000_000
"""A loop that is in `next()` for so long has found nothing in the queue of its pin-memory thread."""

LEFT_OVER_NS = 100_000_000
"""After a read for which no task is sent, how long it may yet turn out to throw away the rest of an epoch."""

_REORDERED_AT_MOST = 8
_MANY_THREADS = 64

LONG_AGO_NS = 10_000_000_000
"""After so long without another call of `next()` a batch is counted without knowing whether a step follows it."""


class Trainer:
    """Follows one process; what it takes goes into its `book`, which holds its loaders and streams."""

    def __init__(self, process: int, cgroup_id: int) -> None:
        self.process = process
        self.cgroup_id = cgroup_id
        self.book = Book(process, self.resolve_all)
        self.loaders, self.streams = self.book.loaders, self.book.streams
        self._sent_since_span = 0
        self._open: dict[int, Span] = {}
        self._ended: dict[int, Span] = {}
        self._last_loader: dict[int, Loader] = {}

    # What happens on the pipes

    def task_sent(self, loader: Loader, event: Event) -> None:
        """The loop has sent a task to a worker."""
        queue = loader.queue
        if event.task == 0:
            loader.sampling, loader.first_length = sampling(event.head), event.length
        loader.last_sent_ns = loader.last_event_ns = event.start_ns
        if not queue.send(event.task, event.pipe, len(loader.pipes)):
            return
        if self.book.sees_spans:
            self._note_sent_in_span(loader, event)
            self._doubt_spans(loader)
        elif queue.is_silent():
            self.book.take_unread(loader, event.start_ns)
            self.book.settle(loader)
        elif loader.taken and loader.taken[0].time_ns <= event.start_ns:
            self.book.confirm(loader, event.start_ns)

    def _doubt_spans(self, loader: Loader) -> None:
        """Batches are taken but no spans come any more: the hooks were lost."""
        self._sent_since_span += 1
        if self._sent_since_span > 2 * loader.queue.primed + _REORDERED_AT_MOST:
            self.book.sees_spans = False
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
        if self.book.sees_spans:
            loader.asked_ns = None
        if loader.reader_is_pin or self.book.sees_spans:
            return
        loader.has_read = True
        if loader.queue.takes(event.task):
            loader.returned(event.start_ns)
            loader.queue.take(event.task)
            loader.taken.append(Taken(event.time_ns, loader.asked_ns, loader.queue.left))
            loader.asked_ns, loader.has_read = None, False

    def asked(self, loader: Loader, event: Event) -> None:
        """A thread of the process waits on the result pipe, so it has taken all that it had read before."""
        if event.flags & IN_PIN_THREAD:
            return
        self._note_in_span(loader, event)
        if not self.book.sees_spans:
            loader.returned(event.start_ns)
            self.book.link_early(loader)
            queue = loader.queue
            while not queue.unsettled and not queue.unordered and queue.next_task() in queue.received:
                self.book.take_unread(loader, event.start_ns)
        if loader.asked_ns is None:
            loader.asked_ns = event.start_ns

    def resumed(self, loader: Loader, event: Event) -> None:
        """A worker is told to start over, each on a pipe of its own; the first one begins the epoch."""
        if event.pipe not in loader.resuming and loader.queue.sent:
            self.book.begin_epoch(loader, event.start_ns)
            loader.resuming = set(loader.pipes)
        loader.resumes(event.pipe)

    def sent_late(self, loader: Loader) -> None:
        """A task of the last epoch was sent after others were told of the next one, by a thread slower than theirs."""
        if loader.left_over:
            self.book.count_taken(loader, loader.left_over.pop(0))

    # How the loop waits for its pin-memory thread

    @property
    def needs_waits(self) -> bool:
        """Whether only WAIT events can show how the loop waits."""
        return not self.book.sees_spans and any(loader.reader_is_pin for loader in self.loaders)

    def wait_began(self, event: Event) -> None:
        """The loop found the queue of its pin-memory thread empty, so it has taken all that came in order before."""
        loader = self._pinned_loader()
        if loader is None:
            return
        while loader.has_passed_on(event.start_ns) and loader.queue.take_silently():
            self.book.count_pinned(loader, event.start_ns)
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

    # What the profiler's hooks tell

    def next_entered(self, event: Event) -> None:
        """The loop asks for a batch."""
        if not self.book.sees_spans:
            for loader in self.loaders:
                self.book.settle(loader)
            self.book.sees_spans = True
        self._sent_since_span = 0
        self._resolve(event.thread)
        self._open[event.thread] = Span(event.start_ns, is_single_process(event.head), event.in_main_thread)

    def next_ended(self, event: Event) -> None:
        """The loop has its batch, or knows that there are no more."""
        span = self._open.pop(event.thread, None)
        if span is None:
            return
        span.end_ns = event.time_ns
        span.left = {loader: loader.queue.left for loader in self.loaders}
        self._ended[event.thread] = span

    def stepped(self, event: Event) -> None:
        """The optimizer has made a step."""
        span = self._ended.get(event.thread)
        if span is not None:
            span.stepped = True
        elif self.book.last_stream is not None:
            self.book.last_stream.steps += 1

    # What follows

    def flush(self, now_ns: int) -> None:
        """Count what no later event can tell more about."""
        for loader in self.loaders:
            if now_ns - loader.last_event_ns > UNPACK_NS:
                self.book.settle(loader)
                self.book.link_early(loader)
            while loader.taken and now_ns - (loader.taken[0].over_ns or now_ns) > LEFT_OVER_NS:
                self.book.count_taken(loader, loader.taken.pop(0))
        for thread, span in list(self._ended.items()):
            if now_ns - span.end_ns > (LONG_AGO_NS if span.single else SETTLE_NS):
                self._resolve(thread)
        for loader in [loader for loader in self.loaders if self.book.is_done(loader, now_ns)]:
            self.book.finish(loader, now_ns)

    def resolve_all(self) -> None:
        """Count every span that has ended."""
        for thread in list(self._ended):
            self._resolve(thread)

    def end(self) -> None:
        """The process has ended: nothing more will be told."""
        self.resolve_all()
        self.book.single.release()

    def counters(self) -> list[StreamCounters]:
        """The counters of every stream that has been seen to give batches or to make the loop wait."""
        live = {id(loader.stream): loader for loader in self.loaders if loader.stream is not None}
        return [self._counters(stream, live.get(id(stream))) for stream in self.streams]

    def _counters(self, stream: Stream, loader: Loader | None) -> StreamCounters:
        queue = loader.queue if loader is not None and not loader.queue.is_over() else None
        return stream.counters(
            self.cgroup_id,
            validation=is_validation(stream, self.streams),
            left=Left(None, None) if queue is None else queue.left,
            capacity=stream.capacity if queue is None else queue.capacity,
            waiting_since_ns=self._waiting_since(stream, loader),
        )

    def _waiting_since(self, stream: Stream, loader: Loader | None) -> int | None:
        span = self._open.get(self.process)
        if span is None:
            sees_loop = loader is not None and (loader.reader_is_main or loader.reader_is_pin)
            return loader.asked_ns if loader is not None and sees_loop and not self.book.sees_spans else None
        if span.single:
            return span.start_ns if stream is self.book.single.latest else None
        here = span.loader or self._last_loader.get(self.process)
        if loader is None or here is not loader:
            return None
        is_dry = loader.queue.takeable == 0 if loader.reader_is_pin else loader.asked_ns is not None
        return span.start_ns if is_dry else None

    def _is_waited_for(self, event: Event, *, by_pin_thread: bool) -> bool:
        """Whether the result just read is the one that the loop is waiting for."""
        if not by_pin_thread:
            return True
        span = self._open.get(self.process)
        return span is not None and event.start_ns - span.start_ns > _SURELY_WAITING_NS

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
            self.book.single.add(span)
        elif self._resolve_with_workers(span, thread) and span.stepped and self.book.last_stream is not None:
            self.book.last_stream.steps += 1

    def _resolve_with_workers(self, span: Span, thread: int) -> bool:
        loader = span.loader or self._last_loader.get(thread)
        if loader is None or loader not in self.loaders or not loader.proven:
            return False
        self._last_loader[thread] = loader
        if len(self._last_loader) > _MANY_THREADS:  # one for each epoch: what they took from is over
            self._last_loader = {one: last for one, last in self._last_loader.items() if last in self.loaders}
        if not loader.queue.take_in_span():
            return False
        left = span.left.get(loader)
        self.book.count_from(loader, span.end_ns, span.wait_ns, None if left is None else left.after_one())
        return True
