"""PyTorch's DataLoader played in virtual time: the events that its messages make, and what really happened.

Follows torch/utils/data/dataloader.py, `_MultiProcessingDataLoaderIter._next_data`. Workers take `load(task)` ns per
batch; the loop computes between batches. Times in ns, from 1 s on.
"""

import itertools
import math
from dataclasses import dataclass, field

from bpf.dataloader_events import IN_PIN_THREAD, IN_WORKER, NO_TASK, Event, Kind
from bpf.dataloader_model import DataLoaderModel

US = 1_000
MS = 1_000_000
READ_NS = 100 * MS
STOP = b"\x8c\x1etorch.utils.data._utils"
TENSOR = b"\x8c!torch.multiprocessing.re"
SHUFFLED = b"]\x94(K\x37K\x05K\x81K\x10"
SEQUENTIAL = b"]\x94(K\x00K\x01K\x02K\x03"
ITERABLE = b"]\x94(NNNN"
MULTI = b"_MultiProcessingDataLoad"
SINGLE = b"_SingleProcessDataLoader"


@dataclass
class Batch:
    """What the loop would write down about a batch."""

    asked: int
    got: int
    depth: int
    takeable: int = 0


@dataclass
class Script:
    """One training process; play loaders, then look at `events()` and at the lists of batches."""

    process: int = 100
    cgroup: int = 7
    hooks: bool = False
    pinned: bool = False
    named: bool = True
    thread: int = 0
    now: int = 1_000 * MS
    raw: list = field(default_factory=list)
    pids: itertools.count = field(default_factory=lambda: itertools.count(1000))
    pipes: itertools.count = field(default_factory=lambda: itertools.count(50_000))

    def tell(self, kind, time, *, pipe=0, process=None, thread=None, task=NO_TASK, head=b"", start=None, length=0):
        process = process or self.process
        thread = thread or (self.thread or process if process == self.process else process)
        worker = process != self.process
        flags = IN_WORKER if worker and self.named else 0
        if kind in {Kind.READ, Kind.POLL, Kind.CONTROL_READ} and not worker and self.pinned:
            flags, thread = IN_PIN_THREAD, self.process + 1
        parent = self.process if worker else 1
        start = time if start is None else start
        head = head[:24].ljust(24, b"\0")
        event = Event(time, start, pipe, self.cgroup, process, thread, parent, length, task, int(kind), flags, head)
        self.raw.append(event)

    def events(self):
        return sorted(self.raw, key=lambda event: event.time_ns)

    def step(self):
        if self.hooks:
            self.tell(Kind.STEP, self.now)

    def end(self):
        self.tell(Kind.EXIT, self.now)


class Loader:
    """One DataLoader with workers."""

    def __init__(
        self,
        script,
        *,
        workers=2,
        prefetch=2,
        load=lambda task: 20 * MS,
        head=SHUFFLED,
        length=60,
        in_order=True,
        persistent=False,
        share=None,
        lag=lambda task: 30 * US,
    ):
        self.script = script
        self.workers = workers
        self.prefetch = prefetch
        self.load = load
        self.head = head
        self.length = length
        self.in_order = in_order
        self.persistent = persistent
        self.share = share  # batches of each worker's iterable
        self.lag = lag  # of the thread that sends
        self.alive = False

    def _start(self):
        script = self.script
        self.result_pipe = next(script.pipes)
        self.index_pipes = [next(script.pipes) for _ in range(self.workers)]
        self.pids = [next(script.pids) for _ in range(self.workers)]
        self.told = dict.fromkeys(self.index_pipes, 0)
        for pipe, pid in zip(self.index_pipes, self.pids, strict=True):
            script.tell(Kind.POLL, script.now, pipe=pipe, process=pid)
        self.alive = True

    def _tell_worker(self, kind, pipe, task=NO_TASK, **event):
        """Write to an index pipe when the thread that sends there gets to run; each keeps its own order."""
        self.told[pipe] = max(self.told[pipe] + 10 * US, self.script.now + self.lag(task))
        thread = self.script.process + 10 + self.index_pipes.index(pipe)
        self.script.tell(kind, self.told[pipe], pipe=pipe, thread=thread, task=task, **event)
        return self.told[pipe]

    def iterate(self, batches, *, take=None):
        """One epoch of `batches`, of which the loop takes `take`; yields each Batch, and lets the caller compute."""
        script = self.script
        resumed = self.alive
        if not resumed:
            self._start()
        leftover = sorted(self.arrivals) if resumed and not script.pinned else []
        busy = self.free if resumed else []
        self.free = [script.now + MS] * self.workers
        self.left = list(self.share) if self.share else None
        self.active = [True] * self.workers
        self.cycle = itertools.cycle(range(self.workers))
        self.to_send, self.sent, self.received_next = batches, 0, 0
        self.owner, self.stored, self.arrivals, self.dead = {}, set(), [], set()
        self.finished = {}
        if resumed:
            self._resume(leftover, busy)
        for _ in range(self.workers * self.prefetch):
            self._send()
        taken = 0
        while take is None or taken < take:
            batch = self._next()
            if batch is None:
                break
            taken += 1
            yield batch
        if not self.persistent:
            self._shut_down()

    def _resume(self, leftover, busy):
        """Tell the workers; read what is left of an epoch broken off, perhaps before the telling has got through."""
        script = self.script
        script.now += 10 * US
        answers = [(arrival, task) for arrival, task, _ in leftover]
        for pipe, free in zip(self.index_pipes, busy, strict=True):
            told = self._tell_worker(Kind.CONTROL, pipe, head=STOP, length=81)
            answers.append((max(told, free) + 50 * US, NO_TASK))
        for arrival, task in sorted(answers):
            script.tell(Kind.POLL, script.now, pipe=self.result_pipe)
            script.now = max(script.now, arrival) + 10 * US
            kind, head = (Kind.CONTROL_READ, STOP) if task == NO_TASK else (Kind.READ, TENSOR)
            script.tell(kind, script.now, pipe=self.result_pipe, task=task, head=head, length=430)
            script.now += 200 * US

    def _shut_down(self):
        script = self.script
        for worker, pipe in enumerate(self.index_pipes):
            if self.active[worker]:
                self._tell_worker(Kind.CONTROL, pipe)
        self.alive = False
        script.now = max(script.now, *self.told.values()) + MS  # when they have ended

    def _send(self):
        if self.sent >= self.to_send and self.share is None:
            return
        for _ in range(self.workers):
            worker = next(self.cycle)
            if self.active[worker]:
                break
        else:
            return
        script, task = self.script, self.sent
        self.sent += 1
        self.owner[task] = worker
        script.now += 10 * US
        pipe, pid = self.index_pipes[worker], self.pids[worker]
        sent = self._tell_worker(Kind.WRITE, pipe, task, head=self.head, length=self.length)
        if task in self.dead or (self.left is not None and self.left[worker] < 0):
            return
        begun = max(self.free[worker], sent + 10 * US)
        script.tell(Kind.READ, begun, pipe=pipe, process=pid, task=task, head=self.head, length=self.length)
        stops = self.left is not None and self.left[worker] == 0
        finish = begun + (100 * US if stops else self.load(task))
        self.free[worker] = finish + 20 * US
        script.tell(Kind.POLL, finish, pipe=pipe, process=pid, task=task)
        script.tell(
            Kind.WRITE, finish + 10 * US, pipe=self.result_pipe, process=pid, task=task,
            head=STOP if stops else TENSOR, length=104 if stops else 430,
        )  # fmt: skip
        if self.left is not None:
            self.left[worker] -= 1
        if not stops:
            self.finished[task] = finish
        arrival = finish + 15 * US
        if script.pinned:  # its thread reads at once and hands over
            self._read(arrival + 20 * US, task, stops, arrival + 10 * US)
            arrival += 400 * US
        self.arrivals.append((arrival, task, stops))

    def _read(self, time, task, stops, start):
        self.script.tell(
            Kind.READ, time, start=start, pipe=self.result_pipe, task=task, head=STOP if stops else TENSOR,
            length=104 if stops else 430,
        )  # fmt: skip

    def _receive(self):
        """Read the next result; True where it is a batch to be taken now."""
        script = self.script
        self.arrivals.sort()
        arrival, task, stops = self.arrivals.pop(0)
        if script.pinned:
            self._wait_for_pin_thread(arrival)
        else:
            script.tell(Kind.POLL, script.now, pipe=self.result_pipe)
            begun = max(script.now, arrival) + 20 * US
            script.now = begun + 10 * US
            self._read(script.now, task, stops, begun)
        script.now += 100 * US  # unpickling
        if stops:
            self.active[self.owner[task]] = False
            if not self.persistent:
                self._tell_worker(Kind.CONTROL, self.index_pipes[self.owner[task]])
            self._send()
            return None
        return task

    def _wait_for_pin_thread(self, arrival):
        script = self.script
        if arrival > script.now and not script.hooks:
            script.tell(Kind.WAIT, script.now)
            script.tell(Kind.WAIT_END, arrival, start=script.now)
        script.now = max(script.now, arrival)

    def _next(self):
        script, asked = self.script, self.script.now
        if script.hooks:
            script.tell(Kind.NEXT_ENTER, asked, head=MULTI)
        script.now += 20 * US
        taken = self._find()
        if taken is not None:
            del self.owner[taken]
            self._send()
        script.now += 20 * US
        if script.hooks:
            script.tell(Kind.NEXT_END, script.now, start=asked, head=MULTI)
        if taken is None:
            return None
        finished = self.finished.pop(taken)
        assert finished < script.now
        depth = sum(time <= script.now for time in self.finished.values())
        return Batch(asked, script.now, depth, self._in_order() if self.in_order else depth)

    def _in_order(self):
        """How many of the next tasks are finished."""
        still = (task for task in sorted(self.owner) if self.finished.get(task, math.inf) > self.script.now)
        missing = next(still, self.sent)
        return sum(task < missing for task in self.finished)

    def _find(self):
        while True:
            while self.received_next < self.sent:
                task = self.received_next
                if task in self.owner and (task in self.stored or self.active[self.owner[task]]):
                    break
                self.owner.pop(task, None)
                self.received_next += 1
            else:
                return None
            task = self.received_next
            if task in self.stored:
                self.stored.discard(task)
                self.received_next += 1
                return task
            got = self._receive()
            if got is None:
                continue
            if got == task or not self.in_order:
                self.received_next += got == task
                return got
            self.stored.add(got)


def single(script, batches, load=20 * MS):
    """One epoch of a loader without workers."""
    for _ in range(batches):
        asked = script.now
        script.tell(Kind.NEXT_ENTER, asked, head=SINGLE)
        script.now += load
        script.tell(Kind.NEXT_END, script.now, start=asked, head=SINGLE)
        yield Batch(asked, script.now, 0)
    script.tell(Kind.NEXT_ENTER, script.now, head=SINGLE)
    script.now += 15 * US
    script.tell(Kind.NEXT_END, script.now, start=script.now - 15 * US, head=SINGLE)


def train(script, loader_epoch, compute=5 * MS):
    """The loop over one epoch: batches taken, a step after each."""
    taken = []
    for batch in loader_epoch:
        taken.append(batch)
        script.now += compute
        script.step()
    return taken


def check(script, loader_epoch, compute=2 * MS):
    """A validation loop: no steps."""
    taken = []
    for batch in loader_epoch:
        taken.append(batch)
        script.now += compute
    return taken


class Seen:
    """What the model tells when it is read every 100 ms: last counters and all iterations of each stream."""

    def __init__(self, events, *, after=0, model=None):
        self.model = model or DataLoaderModel()
        self.last = {}
        self.iterations = {}
        self.last_read = []
        read_at = events[0].time_ns
        for event in events:
            while event.time_ns > read_at:
                self.read(read_at)
                read_at += READ_NS
            self.model.feed(event)
        for extra in range(after // READ_NS + 1):
            self.read(read_at + extra * READ_NS)

    def read(self, now):
        self.last_read = self.model.take(now)
        for stream in self.last_read:
            self.last[stream.stream] = stream
            self.iterations.setdefault(stream.stream, []).extend(stream.recent)

    def only(self):
        ((name, stream),) = self.last.items()
        return stream, self.iterations[name]
