"""From events to streams: which pipe is whose, told from the messages alone. Pure.

An index pipe is written by the training process and read by one worker, which waits on it with poll; the result pipe
is written by the workers and read by the training process. Workers are known by the name of their main thread
(`pt_data_worker`), or, in versions of PyTorch that give none, as children that read what their parent wrote. Other
users of multiprocessing send pickles that look alike; their children do not poll for the next one, so what they do
never becomes a stream.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping

from bpf.dataloader_events import IN_WORKER, NO_TASK, Event, Kind, is_own_object
from bpf.dataloader_loader import Loader
from bpf.dataloader_trainer import Trainer
from bpf.samples import StreamCounters

_MAX_TRAINERS = 4096
_MAX_WORKERS = 65536
_MAX_ORPHANS = 1024
_MAX_LOADERS = 64
_MAX_PIPES = 1024
"""Per process, and per loader: no training has as many, but processes that talk alike may take new pipes for ever."""


class DataLoaderModel:
    """Feed it the events in their order, then `take` what they amount to."""

    def __init__(self) -> None:
        self._trainers: dict[int, Trainer] = {}
        self._ended: list[Trainer] = []
        self._sees_waits = False
        self._index_pipes: dict[int, tuple[Trainer, Loader]] = {}
        self._result_pipes: dict[int, tuple[Trainer, Loader]] = {}
        self._writers: dict[int, int] = {}
        self._workers: dict[int, int] = {}
        self._orphans: dict[int, list[Event]] = {}
        self._handlers: Mapping[int, Callable[[Event], None]] = {
            Kind.WRITE: self._written,
            Kind.READ: self._read,
            Kind.POLL: self._polled,
            Kind.CONTROL: self._controlled,
            Kind.CONTROL_READ: self._control_read,
            Kind.NEXT_ENTER: lambda event: self._trainer(event).next_entered(event),
            Kind.NEXT_END: lambda event: self._trainer(event).next_ended(event),
            Kind.STEP: lambda event: self._trainer(event).stepped(event),
            Kind.WAIT: lambda event: self._trainer(event).wait_began(event),
            Kind.WAIT_END: lambda event: self._trainer(event).wait_ended(event),
            Kind.EXIT: lambda event: self.process_ended(event.process, event.time_ns),
        }

    @property
    def processes(self) -> Collection[int]:
        """The training processes known."""
        return self._trainers.keys()

    @property
    def needs_waits(self) -> bool:
        """Whether some loop waits for a pin-memory thread and nothing but its WAIT events can show that."""
        return any(trainer.needs_waits for trainer in self._trainers.values())

    def see_waits(self, *, sees: bool) -> None:
        """Say whether WAIT events are told from now on, so that their absence means something."""
        self._sees_waits = sees
        for trainer in self._trainers.values():
            trainer.book.sees_waits = sees

    def feed(self, event: Event) -> None:
        """Take one event into account; kinds that say nothing about queues are ignored."""
        handler = self._handlers.get(event.kind)
        if handler is not None:
            handler(event)

    def take(self, now_ns: int) -> tuple[StreamCounters, ...]:
        """All streams as they stand; those of ended processes for the last time."""
        for trainer in self._trainers.values():
            trainer.flush(now_ns)
        streams = [counters for trainer in (*self._trainers.values(), *self._ended) for counters in trainer.counters()]
        self._ended.clear()
        return tuple(streams)

    def keep(self, cgroup_ids: Collection[int]) -> None:
        """Drop the processes of all other cgroups; where there is none, workers too: their ends are no longer told."""
        for trainer in list(self._trainers.values()):
            if trainer.cgroup_id not in cgroup_ids:
                self._forget(trainer)
        if not cgroup_ids:
            self._workers.clear()
            self._orphans.clear()

    def lose(self) -> None:
        """Events were lost: nobody knows any longer where the loops stand."""
        for trainer in self._trainers.values():
            for loader in trainer.loaders:
                loader.queue.unsettle()
                loader.resuming.clear()
                loader.left_over.clear()

    def process_ended(self, process: int, now_ns: int) -> None:
        """A process has ended, a training process or a worker."""
        self._workers.pop(process, None)
        trainer = self._trainers.get(process)
        if trainer is not None:
            trainer.end()
            for loader in list(trainer.loaders):
                self._finish(trainer, loader, now_ns)
            self._forget(trainer)
            self._ended.append(trainer)

    def _trainer(self, event: Event) -> Trainer:
        trainer = self._trainers.get(event.process)
        if trainer is None:
            if len(self._trainers) >= _MAX_TRAINERS:
                self._forget(next(iter(self._trainers.values())))
            trainer = self._trainers[event.process] = Trainer(event.process, event.cgroup_id)
            trainer.book.sees_waits = self._sees_waits
        trainer.cgroup_id = event.cgroup_id
        return trainer

    def _forget(self, trainer: Trainer) -> None:
        self._trainers.pop(trainer.process, None)
        for pipes in (self._index_pipes, self._result_pipes):
            for pipe in [pipe for pipe, (owner, _) in pipes.items() if owner is trainer]:
                del pipes[pipe]
        for pipe in [pipe for pipe, writer in self._writers.items() if writer == trainer.process]:
            del self._writers[pipe]

    # Messages

    def _written(self, event: Event) -> None:
        if self._is_worker(event):
            self._result_written(event)
        else:
            self._task_sent(event)

    def _is_worker(self, event: Event) -> bool:
        return bool(event.flags & IN_WORKER) or event.process in self._workers

    def _task_sent(self, event: Event) -> None:
        trainer = self._trainer(event)
        self._writers[event.pipe] = event.process
        owner, loader = self._index_pipes.get(event.pipe, (None, None))
        if owner is not trainer or loader is None:
            loader = self._loader_for(trainer, event)
            loader.pipes.add(event.pipe)
            self._index_pipes[event.pipe] = trainer, loader
        elif event.pipe in loader.resuming:
            trainer.sent_late(loader)
            return
        elif event.task == 0 and loader.queue.has_begun:
            trainer.book.begin_epoch(loader, event.start_ns)
        trainer.task_sent(loader, event)

    def _loader_for(self, trainer: Trainer, event: Event) -> Loader:
        """The loader that a new index pipe belongs to: one whose queue expects just this task, else a new one."""
        for loader in reversed(trainer.loaders):
            if loader.queue.expects(event.task) and len(loader.pipes) < _MAX_PIPES:
                return loader
        if len(trainer.loaders) >= _MAX_LOADERS:
            oldest = min(trainer.loaders, key=lambda one: (one.proven, one.last_event_ns))
            self._release_pipes(oldest)
            trainer.loaders.remove(oldest)
        loader = Loader()
        trainer.loaders.append(loader)
        return loader

    def _result_written(self, event: Event) -> None:
        index_pipe = self._workers.get(event.process, 0)
        trainer, loader = self._index_pipes.get(index_pipe, (None, None))
        if trainer is None or loader is None:
            return
        if loader.result_pipe != event.pipe:
            self._bind(trainer, loader, index_pipe, event.pipe)
            trainer, loader = self._index_pipes[index_pipe]
        if is_own_object(event.head):
            loader.queue.stop(event.task)
        else:
            loader.queue.produce(event.task)

    def _bind(self, trainer: Trainer, loader: Loader, index_pipe: int, result_pipe: int) -> None:
        """A worker's result pipe is known now; if another loader has it, the index pipe is that one's too."""
        _, other = self._result_pipes.get(result_pipe, (None, None))
        if other is not None and other is not loader and other in trainer.loaders:
            loader.pipes.discard(index_pipe)
            other.pipes.add(index_pipe)
            self._index_pipes[index_pipe] = trainer, other
            return
        loader.result_pipe = result_pipe
        self._result_pipes[result_pipe] = trainer, loader
        for event in self._orphans.pop(result_pipe, ()):
            self.feed(event)

    def _read(self, event: Event) -> None:
        if self._reads_tasks(event):
            self._know_worker(event)
            return
        trainer, loader = self._result_pipes.get(event.pipe, (None, None))
        if trainer is None or loader is None:
            self._keep_orphan(event)
        elif trainer.process == event.process:
            trainer.result_read(loader, event)

    def _know_worker(self, event: Event) -> None:
        self._workers[event.process] = event.pipe
        if len(self._workers) > _MAX_WORKERS:
            del self._workers[next(iter(self._workers))]

    def _reads_tasks(self, event: Event) -> bool:
        """Whether the reader is a worker, and if so, make it one."""
        if self._is_worker(event):
            return True
        writer = self._writers.get(event.pipe)
        if writer is None or writer != event.parent:
            return False
        imposter = self._trainers.get(event.process)
        if imposter is not None and not imposter.streams:
            self._forget(imposter)
        return True

    def _polled(self, event: Event) -> None:
        trainer, loader = self._result_pipes.get(event.pipe, (None, None))
        if trainer is not None and loader is not None:
            if trainer.process == event.process:
                trainer.asked(loader, event)
            return
        if not self._is_worker(event):
            self._keep_orphan(event)
            return
        self._know_worker(event)
        _, loader = self._index_pipes.get(event.pipe, (None, None))
        if loader is not None:
            loader.proven = True
            if event.task != NO_TASK:
                loader.queue.produce(event.task)

    def _keep_orphan(self, event: Event) -> None:
        """The loop may be seen to wait, and even to read, before the worker that wrote is seen to have written."""
        if event.pipe in self._index_pipes:
            return
        kept = self._orphans.setdefault(event.pipe, [])
        if event.kind == Kind.POLL and kept and kept[-1].kind == Kind.POLL:
            return  # the same wait, begun anew by its time-out
        kept.append(event)
        del kept[:-4]
        if len(self._orphans) > _MAX_ORPHANS:
            del self._orphans[next(iter(self._orphans))]

    def _controlled(self, event: Event) -> None:
        """Workers are told to start another epoch, or to end."""
        trainer, loader = self._index_pipes.get(event.pipe, (None, None))
        if trainer is None or loader is None or trainer.process != event.process:
            return
        if is_own_object(event.head):
            trainer.resumed(loader, event)
        elif not loader.queue.has_ended(event.pipe):
            self._finish(trainer, loader, event.start_ns)
        else:
            loader.closed_pipes.add(event.pipe)
            if loader.is_exhausted:
                self._release_pipes(loader)

    def _control_read(self, event: Event) -> None:
        """The loop has read that a worker is ready for another epoch: what it waited for was no batch."""
        trainer, loader = self._result_pipes.get(event.pipe, (None, None))
        if trainer is not None and loader is not None and trainer.process == event.process:
            loader.asked_ns = None

    def _finish(self, trainer: Trainer, loader: Loader, now_ns: int) -> None:
        trainer.book.finish(loader, now_ns)
        self._release_pipes(loader)

    def _release_pipes(self, loader: Loader) -> None:
        for pipe in loader.pipes:
            self._index_pipes.pop(pipe, None)
            self._writers.pop(pipe, None)
        if loader.result_pipe is not None:
            self._result_pipes.pop(loader.result_pipe, None)
