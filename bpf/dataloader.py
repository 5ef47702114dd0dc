"""The DataLoader probe: iterations, prefetch queue and stalls of PyTorch jobs, with the program of dataloader.c.

System call tracepoints are attached only while a cgroup is managed. Where user-space probes work, PyTorch's profiler
hooks are traced too (grade U, and the only sight of loaders without workers); else the pipes alone tell (grade S2).
"""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Collection
from pathlib import Path
from typing import NamedTuple

import numpy as np

from bpf.btf import BtfError
from bpf.dataloader_events import EVENT, Kind, decode_event
from bpf.dataloader_libraries import Libraries
from bpf.dataloader_model import DataLoaderModel
from bpf.decode import Records
from bpf.loader import MEMORY_HEADER, Loader, ProbeError, Program
from bpf.owners import OWNER_HEADER, Owners
from bpf.reasons import Reason, failed, partly
from bpf.samples import ProbeState, ProbeStatus, Sample

SOURCE = Path(__file__).with_name("dataloader.c")
EVENT_HEADER = Path(__file__).with_name("dataloader_event.h")

RING_FULL, TOO_MANY = 0, 1
"""`enum drop_t` of dataloader_event.h."""

_FIELDS = {
    "OFF_TASK_FILES": "task_struct.files",
    "OFF_TASK_LEADER": "task_struct.group_leader",
    "OFF_TASK_PARENT": "task_struct.real_parent",
    "OFF_TASK_TGID": "task_struct.tgid",
    "OFF_TASK_COMM": "task_struct.comm",
    "OFF_FILES_FDT": "files_struct.fdt",
    "OFF_FDT_FD": "fdtable.fd",
    "OFF_FDT_MAX_FDS": "fdtable.max_fds",
    "OFF_FILE_INODE": "file.f_inode",
    "OFF_INODE_MODE": "inode.i_mode",
    "OFF_INODE_INO": "inode.i_ino",
}
_TRACEPOINTS = (
    "syscalls:sys_enter_write",
    "syscalls:sys_exit_read",
    "syscalls:sys_enter_read",
    "syscalls:sys_enter_poll",
    "syscalls:sys_enter_ppoll",
    "sched:sched_process_exit",
)
_POLL = "syscalls:sys_enter_poll"
_WAITS = ("syscalls:sys_exit_futex", "syscalls:sys_enter_futex")
"""Frequent calls, so they are traced only where nothing else shows a wait."""

_PIPES_ONLY = "stalls are seen on the pipes only"
_LOOKS_PER_READ = 8
_MAX_CANDIDATES = 4096
MAX_EVENTS_PER_READ = 10_000
"""A ring that is full, some 100 ms of work. What comes meanwhile stays there, and is lost when it is full again: a
flood may blind the probe, but must not hold up the agent."""

_LOOK_AGAIN_NS = tuple(500_000_000 << n for n in range(10))
"""A process shows itself when Python starts; PyTorch comes seconds later, from slow storage minutes."""

_CHECK_NS = 10_000_000_000
_INITIAL_PID_NAMESPACE = 0xEFFFFFFC  # include/linux/proc_ns.h, PROC_PID_INIT_INO


log = logging.getLogger(__name__)


class Limits(NamedTuple):
    """Sizes of the kernel's maps, and the events per second that one thread, and that one job may make."""

    cgroups: int = 4096
    owners: int = 8192
    threads: int = 16384
    processes: int = 16384
    ring_pages: int = 256
    events_per_second: int = 4000
    job_events_per_second: int = 30_000


class _Candidate(NamedTuple):
    look_at_ns: int
    looks: int


class DataLoaderProbe:
    """Streams of the managed cgroups' PyTorch processes.

    `hooks=False` does without the profiler's hooks. A kernel on which nothing works gives a probe that is
    `unavailable` and reads nothing; the constructor does not raise.
    """

    name = "dataloader"

    def __init__(self, loader: Loader, *, hooks: bool = True, limits: Limits = Limits()) -> None:  # noqa: B008
        self._model = DataLoaderModel()
        self._program: Program | None = None
        self._owners: Owners | None = None
        self._dropped: Records = np.zeros(2, np.uint64)
        self._nothing = Reason()
        self._hooks = hooks
        self._no_hooks = Reason() if hooks else partly(_PIPES_ONLY, ())
        self._libraries: Libraries | None = None
        self._candidates: dict[int, _Candidate] = {}
        self._looked_into: set[int] = set()
        self._can_trace_waits = True
        self._lost = 0
        self._checked_ns = 0
        try:
            self._start(loader, limits)
        except (ProbeError, BtfError) as error:
            self._nothing = failed(error)
            self.close()

    def _start(self, loader: Loader, limits: Limits) -> None:
        self._tracepoints = [name for name in _TRACEPOINTS if name != _POLL or loader.tracepoint_exists(name)]
        macros = loader.btf.offsets(_FIELDS) | {
            "MAX_CGROUPS": limits.cgroups,
            "MAX_OWNERS": limits.owners,
            "MAX_THREADS": limits.threads,
            "MAX_PROCESSES": limits.processes,
            "RING_PAGES": limits.ring_pages,
            "MAX_EVENTS_PER_SECOND": limits.events_per_second,
            "MAX_JOB_EVENTS_PER_SECOND": limits.job_events_per_second,
        }
        if _POLL in self._tracepoints:
            macros["HAVE_POLL"] = 1
        program = self._program = loader.load(SOURCE, macros, shared=[MEMORY_HEADER, OWNER_HEADER, EVENT_HEADER])
        self._owners = Owners(program)
        self._dropped = np.frombuffer(program.view("dropped", self._dropped.nbytes), np.uint64, 2)
        self._libraries = Libraries(program)
        program.open_ring("events", self._receive)
        self._attach(program)  # tried once, so that status() tells before anything is managed
        program.detach_all()

    def _attach(self, program: Program) -> None:
        for tracepoint in self._tracepoints:
            _attach_tracepoint(program, tracepoint)

    def status(self) -> ProbeStatus:
        """Attached with the hooks or where none was needed yet, degraded where only the pipes are seen."""
        if self._program is None:
            return ProbeStatus(self.name, ProbeState.UNAVAILABLE, self._nothing.why, detail=self._nothing.detail)
        lost = int(self._dropped.sum())
        why, detail = self._no_hooks
        if why:
            return ProbeStatus(self.name, ProbeState.DEGRADED, why, "pipes", lost, detail=detail)
        return ProbeStatus(self.name, ProbeState.ATTACHED, tier="pipes and hooks", lost_events=lost)

    def manage(self, cgroup_ids: Collection[int]) -> None:
        """Watch these cgroups and what is below them, and no others."""
        if self._program is None or self._owners is None:
            return
        before = self._owners.ids
        self._owners.replace(cgroup_ids)
        if self._owners.ids and not before:
            try:
                self._attach(self._program)
            except ProbeError as error:
                self._nothing = failed(error)
                self.close()
                return
        elif before and not self._owners.ids:
            self._detach_tracepoints(self._program)
        self._model.keep(self._owners.ids)

    def _detach_tracepoints(self, program: Program) -> None:
        """From now on processes end unseen, and others get their numbers: none is known any longer."""
        self._model.see_waits(sees=False)
        for tracepoint in (*self._tracepoints, *_WAITS):
            program.detach(f"tracepoint:{tracepoint}")
        program.map("processes").clear()
        self._candidates.clear()

    def _trace_waits(self, program: Program) -> None:
        """Trace futex calls while some loop needs it."""
        traced = f"tracepoint:{_WAITS[0]}" in program.attached
        if self._model.needs_waits and not traced and self._can_trace_waits:
            try:
                for tracepoint in _WAITS:
                    _attach_tracepoint(program, tracepoint)
                self._model.see_waits(sees=True)
            except ProbeError as error:
                self._can_trace_waits = False
                log.warning("waits for pin-memory threads are not seen: %s", error)
        elif traced and not self._model.needs_waits:
            self._model.see_waits(sees=False)
            for tracepoint in _WAITS:
                program.detach(f"tracepoint:{tracepoint}")

    def read(self, now_ns: int) -> Sample:
        """Drain the ring and return all streams."""
        if self._program is None:
            return Sample(now_ns)
        self._program.drain_rings(MAX_EVENTS_PER_READ)
        lost = int(self._dropped[RING_FULL])
        if lost != self._lost:
            self._lost = lost
            self._model.lose()
        self._look_for_libraries(now_ns)
        self._trace_waits(self._program)
        if now_ns - self._checked_ns > _CHECK_NS:
            self._checked_ns = now_ns
            self._drop_dead(now_ns)
            self._look_again(now_ns)
        return Sample(now_ns, streams=self._model.take(now_ns))

    def _receive(self, address: int) -> None:
        event = decode_event(ctypes.string_at(address, EVENT.size))
        if event.kind == Kind.EXIT:
            self._ended(event.process)
            self._model.feed(event)
        elif self._owners is None or event.cgroup_id not in self._owners.ids:
            return  # told before its cgroup was let go
        elif event.kind != Kind.PROCESS:
            self._model.feed(event)
        elif self._hooks:
            self._candidates[event.process] = _Candidate(event.time_ns, 0)
            if len(self._candidates) > _MAX_CANDIDATES:  # their ends were lost
                del self._candidates[next(iter(self._candidates))]

    def _ended(self, process: int) -> None:
        """A batch job starts thousands of processes a minute, more than are looked into."""
        self._candidates.pop(process, None)
        if self._libraries is not None:
            self._libraries.ended(process)

    def _drop_dead(self, now_ns: int) -> None:
        """The end of a process is an event like others, and can be lost. Pids mean nothing in another namespace."""
        knows_pids = Path("/proc/self/ns/pid").stat().st_ino == _INITIAL_PID_NAMESPACE

        def is_alive(process: int) -> bool:
            return not knows_pids or Path(f"/proc/{process}").exists()

        for process in [process for process in self._model.processes if not is_alive(process)]:
            self._model.process_ended(process, now_ns)
        if self._libraries is not None:
            self._libraries.release_unused(is_alive, now_ns)

    # The hooks

    def _look_for_libraries(self, now_ns: int) -> None:
        if self._libraries is None:
            return
        due = [process for process, candidate in self._candidates.items() if candidate.look_at_ns <= now_ns]
        for process in due[:_LOOKS_PER_READ]:
            looks = self._candidates.pop(process).looks
            try:
                found = self._libraries.look_into(process)
            except OSError:
                continue  # ended
            if self._libraries.refusal:
                self._no_hooks = partly(_PIPES_ONLY, [self._libraries.refusal])
            if found:
                self._looked_into.add(process)
            elif looks < len(_LOOK_AGAIN_NS):
                self._candidates[process] = _Candidate(now_ns + _LOOK_AGAIN_NS[looks], looks + 1)

    def _look_again(self, now_ns: int) -> None:
        """Processes that turned out to train, although their library was not found in time."""
        trainers = set(self._model.processes)
        self._looked_into &= trainers
        for process in trainers - self._looked_into - self._candidates.keys() if self._hooks else ():
            self._candidates[process] = _Candidate(now_ns, len(_LOOK_AGAIN_NS))

    def close(self) -> None:
        """Detach and free; harmless when repeated."""
        self._dropped = self._dropped.copy()
        if self._program is not None:
            if self._libraries is not None:
                self._libraries.close()
                self._libraries = None
            self._program.close()
            self._program = self._owners = None
            if not self._nothing.why:
                self._nothing = Reason("closed")


def _attach_tracepoint(program: Program, tracepoint: str) -> None:
    program.attach_tracepoint(tracepoint, f"tracepoint__{tracepoint.replace(':', '__')}")
