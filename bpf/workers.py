"""The worker probe: how the preparation workers of each job spend their time, with the program of workers.c.

It tells a job whose workers are busy on the CPU from one whose workers wait for storage. The scheduler's tracepoints
are attached only while a cgroup is managed. What a worker waits for is told from the system call that it is in; where
that cannot be had (before Linux 5.15, other architectures) waits for storage are those in uninterruptible sleep.
"""

from __future__ import annotations

import contextlib
import platform
from collections.abc import Collection
from pathlib import Path

from bpf.btf import BtfError
from bpf.loader import MEMORY_HEADER, Loader, Macros, ProbeError, Program
from bpf.owners import OWNER_HEADER, Owners
from bpf.reasons import Reason, failed, partly
from bpf.samples import ProbeState, ProbeStatus, Sample, WorkerTime

SOURCE = Path(__file__).with_name("workers.c")

WORKER_NAME = "pt_data_worker"
"""Given to its main thread by torch/utils/data/_utils/worker.py; workers of versions that give none are not seen."""

_FIELDS = {
    "OFF_TASK_FILES": "task_struct.files",
    "OFF_TASK_PID": "task_struct.pid",
    "OFF_TASK_RAN": "task_struct.se.sum_exec_runtime",
    "OFF_FILES_FDT": "files_struct.fdt",
    "OFF_FDT_FD": "fdtable.fd",
    "OFF_FDT_MAX_FDS": "fdtable.max_fds",
    "OFF_FILE_INODE": "file.f_inode",
    "OFF_INODE_MODE": "inode.i_mode",
    "OFF_INODE_SB": "inode.i_sb",
    "OFF_SB_MAGIC": "super_block.s_magic",
}
_TRACEPOINTS = {
    "sched_process_exit": "raw_exited",
    "sched_switch": "raw_switched",
    "sched_wakeup": "raw_woken",
    "task_rename": "raw_renamed",
}
_NUMBERS = {
    "x86_64": {
        "NR_READ": 0,
        "NR_POLL": 7,
        "NR_PREAD64": 17,
        "NR_READV": 19,
        "NR_CONNECT": 42,
        "NR_SENDTO": 44,
        "NR_RECVFROM": 45,
        "NR_SENDMSG": 46,
        "NR_RECVMSG": 47,
        "NR_PPOLL": 271,
        "NR_PREADV": 295,
        "NR_PREADV2": 327,
    },
    "aarch64": {
        "NR_READ": 63,
        "NR_READV": 65,
        "NR_PREAD64": 67,
        "NR_PREADV": 69,
        "NR_PPOLL": 73,
        "NR_CONNECT": 203,
        "NR_SENDTO": 206,
        "NR_RECVFROM": 207,
        "NR_SENDMSG": 211,
        "NR_RECVMSG": 212,
        "NR_PREADV2": 286,
    },
}
"""arch/x86/entry/syscalls/syscall_64.tbl and include/uapi/asm-generic/unistd.h."""

_REGISTERS = {
    "x86_64": {"REGS_NUMBER": "pt_regs.orig_ax", "REGS_FIRST": "pt_regs.di"},
    "aarch64": {"REGS_NUMBER": "pt_regs.syscallno", "REGS_FIRST": "pt_regs.orig_x0"},
}
_QUEUED = "task_struct.sched_info.run_delay"
"""Present with CONFIG_SCHED_INFO, that is with task delay accounting or scheduler statistics."""

_GUESSED = "what workers wait for is guessed"
_MISSED = ("arrivals", "departures", "wakeups")
_MAX_CGROUPS = 4096
_MAX_WORKERS = 16384


class WorkersProbe:
    """Time of the workers per cgroup; `calls=False` does without looking at system calls.

    A kernel without these tracepoints gives a probe that is `unavailable`; the constructor does not raise.
    """

    name = "workers"

    def __init__(self, loader: Loader, *, calls: bool = True, proc_root: Path = Path("/proc")) -> None:
        self._program: Program | None = None
        self._owners: Owners | None = None
        self._proc_root = proc_root
        self._nothing = self._guessed = Reason()
        try:
            self._program = self._climb(loader, calls=calls)
            self._owners = Owners(self._program)
        except (ProbeError, BtfError) as error:
            self._nothing = failed(error, [self._guessed.detail] if self._guessed.detail else ())

    def _climb(self, loader: Loader, *, calls: bool) -> Program:
        """The program that looks at system calls, else the one that does not; tried by attaching it once."""
        machine = platform.machine()
        if calls and machine in _NUMBERS:
            try:
                return _load(loader, loader.btf.offsets(_REGISTERS[machine]) | _NUMBERS[machine])
            except (ProbeError, BtfError) as error:
                self._guessed = partly(_GUESSED, [str(error)])
        else:
            self._guessed = partly(_GUESSED, [f"the system calls of {machine} are not known"] if calls else ())
        return _load(loader, {})

    def status(self) -> ProbeStatus:
        """Attached, degraded where system calls cannot be looked at, or unavailable."""
        if self._program is None:
            return ProbeStatus(self.name, ProbeState.UNAVAILABLE, self._nothing.why, detail=self._nothing.detail)
        missed = self.missed()
        lost = missed["departures"]
        why, detail = self._guessed
        if why:
            return ProbeStatus(self.name, ProbeState.DEGRADED, why, lost_events=lost, detail=detail)
        return ProbeStatus(self.name, ProbeState.ATTACHED, lost_events=lost)

    def missed(self) -> dict[str, int]:
        """Events that the kernel did not tell of, since the start.

        `arrivals` on a CPU and `wakeups` are mended from the kernel's own sums of time running and waiting to run (the
        latter where it keeps it). `departures`: so is the running time, but what was waited for is told as `other`.
        """
        if self._program is None:
            return dict.fromkeys(_MISSED, 0)
        counts = self._program.map("missed")
        return {name: int(counts[at].value) for at, name in enumerate(_MISSED)}

    def manage(self, cgroup_ids: Collection[int]) -> None:
        """Watch the workers of these cgroups and of what is below them, and no others."""
        if self._program is None or self._owners is None:
            return
        before, totals = self._owners.ids, self._program.map("totals")
        for cgroup in self._owners.replace(cgroup_ids):
            with contextlib.suppress(KeyError):
                del totals[totals.Key(cgroup)]
        if self._owners.ids and not before:
            _attach(self._program)
        elif before and not self._owners.ids:
            self._program.detach_all()
            self._program.map("workers").clear()  # their ends go unseen, and others get their numbers
        if self._owners.ids - before:
            self._adopt(self._program)

    def _adopt(self, program: Program) -> None:
        """Workers that had their name before anybody looked; whose they are shows when they are next switched."""
        workers = program.map("workers")
        for path in self._proc_root.glob("[0-9]*/comm"):
            with contextlib.suppress(OSError):
                if path.read_text(errors="replace").startswith(WORKER_NAME):
                    key = workers.Key(int(path.parent.name))
                    if key not in workers:
                        workers[key] = workers.Leaf()

    def read(self, now_ns: int) -> Sample:
        """The time so far; what goes on now is added when it ends."""
        if self._program is None or self._owners is None:
            return Sample(now_ns)
        times = {
            int(key.value): WorkerTime(*value.ns[:7])
            for key, value in self._owners.entries(self._program.map("totals"), lambda key: int(key.value))
        }
        return Sample(now_ns, workers=times)

    def close(self) -> None:
        """Detach and free; harmless when repeated."""
        if self._program is not None:
            self._program.close()
            self._program = self._owners = None
            if not self._nothing.why:
                self._nothing = Reason("closed")


def _load(loader: Loader, known: Macros) -> Program:
    btf = loader.btf
    state = "task_struct.__state" if btf.has("task_struct.__state") else "task_struct.state"  # since 5.14
    sizes = {"MAX_CGROUPS": _MAX_CGROUPS, "MAX_WORKERS": _MAX_WORKERS}
    fields = _FIELDS | {"OFF_TASK_STATE": state}
    if btf.has(_QUEUED):
        fields |= {"OFF_TASK_QUEUED": _QUEUED}
    macros = {**btf.offsets(fields), **known, **sizes}
    program = loader.load(SOURCE, macros, shared=[MEMORY_HEADER, OWNER_HEADER])
    try:
        _attach(program)
    except ProbeError:
        program.close()
        raise
    program.detach_all()
    return program


def _attach(program: Program) -> None:
    for tracepoint, function in _TRACEPOINTS.items():
        program.attach_raw_tracepoint(tracepoint, function)
