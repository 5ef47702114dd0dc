"""The DataLoader probe: iterations, prefetch queue and stalls of PyTorch jobs, with the program of dataloader.c.

System call tracepoints are attached only while a cgroup is managed. Where user-space probes work, PyTorch's profiler
hooks are traced too (grade U, and the only sight of loaders without workers); else the pipes alone tell (grade S2).
"""

from __future__ import annotations

import ctypes
import logging
import mmap
from collections.abc import Collection
from pathlib import Path
from typing import NamedTuple

import numpy as np

from bpf.btf import BtfError
from bpf.dataloader_events import EVENT, Kind, decode_event
from bpf.dataloader_model import DataLoaderModel
from bpf.decode import Records
from bpf.elf import ElfError, find_symbols
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

_LIBRARY = "libtorch_cpu.so"
_HOOKS = {
    "_ZN2at14RecordFunction3endEv": "span_ended",
    "_ZN2at14RecordFunctionC1ENS_11RecordScopeE": "span_constructed",
    "_ZN5torch8autograd8profiler25record_function_enter_new": "span_entered",
}
"""Beginnings of the names of C++ functions (ATen/record_function.h, torch/csrc/autograd/record_function_ops.cpp).

The one that begins a span comes last, so that no span is seen to begin whose end is not.
"""

_MAX_LIBRARIES = 16
_PIPES_ONLY = "stalls are seen on the pipes only"
_LOOKS_PER_READ = 8
_LOOK_AGAIN_NS = tuple(500_000_000 << n for n in range(10))
"""A process shows itself when Python starts; PyTorch comes seconds later, from slow storage minutes."""

_CHECK_NS = 10_000_000_000
_INITIAL_PID_NAMESPACE = 0xEFFFFFFC  # include/linux/proc_ns.h, PROC_PID_INIT_INO


log = logging.getLogger(__name__)


class Limits(NamedTuple):
    """Sizes of the kernel's maps, and the events per second that one thread may make."""

    cgroups: int = 4096
    owners: int = 8192
    threads: int = 16384
    processes: int = 16384
    ring_pages: int = 256
    events_per_second: int = 4000


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
        self._libraries: dict[tuple[str, int], list[str]] = {}
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
        }
        if _POLL in self._tracepoints:
            macros["HAVE_POLL"] = 1
        program = self._program = loader.load(SOURCE, macros, shared=[MEMORY_HEADER, OWNER_HEADER, EVENT_HEADER])
        self._owners = Owners(program)
        self._dropped = np.frombuffer(program.view("dropped", self._dropped.nbytes), np.uint64, 2)
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
        self._model.see_waits(sees=False)
        for tracepoint in (*self._tracepoints, *_WAITS):
            program.detach(f"tracepoint:{tracepoint}")

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
        self._program.drain_rings()
        lost = int(self._dropped[RING_FULL])
        if lost != self._lost:
            self._lost = lost
            self._model.lose()
        self._look_for_libraries(self._program, now_ns)
        self._trace_waits(self._program)
        if now_ns - self._checked_ns > _CHECK_NS:
            self._checked_ns = now_ns
            self._drop_dead(now_ns)
            self._look_again(now_ns)
        return Sample(now_ns, streams=self._model.take(now_ns))

    def _receive(self, address: int) -> None:
        event = decode_event(ctypes.string_at(address, EVENT.size))
        if event.kind == Kind.EXIT:
            self._model.feed(event)
        elif self._owners is None or event.cgroup_id not in self._owners.ids:
            return  # told before its cgroup was let go
        elif event.kind != Kind.PROCESS:
            self._model.feed(event)
        elif self._hooks:
            self._candidates[event.process] = _Candidate(event.time_ns, 0)

    def _drop_dead(self, now_ns: int) -> None:
        """The end of a process is an event like others, and can be lost. Pids mean nothing in another namespace."""
        if Path("/proc/self/ns/pid").stat().st_ino != _INITIAL_PID_NAMESPACE:
            return
        for process in [process for process in self._model.processes if not Path(f"/proc/{process}").exists()]:
            self._model.process_ended(process, now_ns)

    # The hooks

    def _look_for_libraries(self, program: Program, now_ns: int) -> None:
        due = [process for process, candidate in self._candidates.items() if candidate.look_at_ns <= now_ns]
        for process in due[:_LOOKS_PER_READ]:
            looks = self._candidates.pop(process).looks
            try:
                found = self._look_into(program, process)
            except OSError:
                continue  # ended
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

    def _look_into(self, program: Program, process: int) -> bool:
        """Attach to the library that a process has loaded; False where it has none (yet)."""
        for line in Path(f"/proc/{process}/maps").read_text(encoding="utf-8", errors="surrogateescape").splitlines():
            if not line.endswith(_LIBRARY):
                continue
            _, _, _, device, inode, path = line.split(maxsplit=5)
            key = device, int(inode)
            if key not in self._libraries:
                self._make_room(program)
                self._libraries[key] = self._attach_hooks(program, Path(f"/proc/{process}/root{path}"))
            return True
        return False

    def _make_room(self, program: Program) -> None:
        if len(self._libraries) >= _MAX_LIBRARIES:
            for target in reversed(self._libraries.pop(next(iter(self._libraries)))):
                program.detach(target)

    def _attach_hooks(self, program: Program, library: Path) -> list[str]:
        """Attach to one copy of the library; without success the pipes still tell."""
        before, refused = program.attached, False
        try:
            with library.open("rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as image:
                symbols = find_symbols(image, _HOOKS)
            for prefix, function in _HOOKS.items():
                program.attach_uprobe(library, symbols.get(prefix, prefix), function)
        except (ProbeError, ElfError, OSError) as error:
            self._no_hooks, refused = partly(_PIPES_ONLY, [str(error)]), True
        attached = [target for target in program.attached if target not in before]
        if not refused:
            return attached
        for target in attached:
            program.detach(target)
        return []

    def close(self) -> None:
        """Detach and free; harmless when repeated."""
        self._dropped = self._dropped.copy()
        if self._program is not None:
            self._program.close()
            self._program = self._owners = None
            if not self._nothing.why:
                self._nothing = Reason("closed")


def _attach_tracepoint(program: Program, tracepoint: str) -> None:
    program.attach_tracepoint(tracepoint, f"tracepoint__{tracepoint.replace(':', '__')}")
