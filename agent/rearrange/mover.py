"""The process that makes files contiguous: looks at what jobs have open, moves what is badly fragmented.

Started by `agent.rearrange.process` like the helper that reads ahead, in another cgroup of the agent's own: its limits
hold for the file system's tool as well, which runs as its child. Everything here is idle class and one file at a time.
The agent names jobs and what may be moved again and again; where it stands still, or dies, the tool is ended, and this
process with it. An ended tool leaves the file where it was, or where it was moved to, in either case whole.
"""
# ruff: noqa: PTH115, PTH123  # pathlib would cost a megabyte

from __future__ import annotations

import ctypes
import json
import os
import signal
import socket
import threading
import time
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from contextlib import suppress
from typing import Any, NamedTuple

from agent.rearrange import files
from agent.rearrange.child import ignore, listen, live
from agent.rearrange.defragment import LATER, Leave, Mend, largest_file_bytes
from agent.rearrange.facts import mounts_of
from agent.rearrange.move import Move, Stopped
from agent.rearrange.places import Resolver
from agent.rearrange.window import FileId
from cgroup.mountinfo import Mount

LOOK_SECONDS = 0.3
TELL_SECONDS = 0.3
LEASE_SECONDS = 3.0
LATER_SECONDS = 5.0
"""A file that could not be moved now is looked at again after this."""
SOON_SECONDS = 0.5
"""The same for one that somebody had open: one that is read again and again is closed only for moments."""
GIVE_UP_SECONDS = 120.0
"""For this long after the first try."""
TRY_SECONDS = 0.02
"""Between two tries in vain: with many files open they would follow each other without end."""
MOST_FILES = 65536
END_SECONDS = 10.0

_CLONE_NEWNS = 0x00020000
_IOPRIO_IDLE = 3 << 13  # include/uapi/linux/ioprio.h
_SYS_IOPRIO_SET = {"x86_64": 251, "aarch64": 30}


class Target(NamedTuple):
    """A job to serve: the folder of its cgroup, its disks (maj:min), what may be used of them (bytes/s, requests/s)."""

    job: int
    folder: str
    devices: frozenset[str]
    bytes_per_second: float
    requests_per_second: float


class Known(NamedTuple):
    """A file that some job had open: whose it is, the name that it had there, the mounts of the process."""

    job: int
    path: str
    theirs: tuple[Mount, ...]


class Book:
    """What is known of files, and whose turn it is: first what nobody has looked at, then what can be moved."""

    def __init__(self) -> None:
        self.known: dict[FileId, Known] = {}
        self.leaves: dict[FileId, Leave] = {}
        self._unseen: dict[FileId, None] = {}
        self._fragmented: dict[FileId, int] = {}
        self._again_at: dict[FileId, float] = {}
        self._first_try: dict[FileId, float] = {}
        self._moved: dict[int, tuple[int, int]] = {}
        self.moving: FileId | None = None

    def note(self, file: FileId, known: Known) -> None:
        """A job has this file open: a new one, or one that a job that is no longer served had before."""
        if file not in self.known:
            self._unseen[file] = None
        self.known[file] = known

    def unseen(self, jobs: Collection[int]) -> FileId | None:
        """A file of these jobs that nobody has looked at."""
        return next((file for file in tuple(self._unseen) if self.known[file].job in jobs), None)

    def fragmented(self, jobs: Collection[int], now: float) -> FileId | None:
        """A file of these jobs that is to be moved, now (monotonic seconds)."""
        waiting = (file for file in self._fragmented if self.known[file].job in jobs)
        return next((file for file in waiting if self._again_at.get(file, 0.0) <= now), None)

    def looked_at(self, file: FileId, found: int | Leave) -> None:
        """What the first look said: bytes of a fragmented file, 0, or a reason."""
        self._unseen.pop(file, None)
        if isinstance(found, Leave):
            self.leaves[file] = found
        elif found:
            self._fragmented[file] = found

    def tried(self, file: FileId, found: int | Leave, now: float) -> None:
        """What became of moving it: bytes, 0 (it lies well by now), or a reason; some reasons pass by."""
        if isinstance(found, Leave):
            self.leaves[file] = found
            if found in LATER and now - self._first_try.setdefault(file, now) < GIVE_UP_SECONDS:
                self._again_at[file] = now + (SOON_SECONDS if found is Leave.OPEN else LATER_SECONDS)
                return
        else:
            self.leaves.pop(file, None)
            count, moved = self._moved.get(self.known[file].job, (0, 0))
            self._moved[self.known[file].job] = (count + (found > 0), moved + found)
        del self._fragmented[file]

    def mends(self) -> dict[int, Mend]:
        """How it stands, by job."""
        left: dict[int, list[int]] = {job: [] for job in {one.job for one in tuple(self.known.values())}}
        for file, size in tuple(self._fragmented.items()):
            left[self.known[file].job].append(size)
        moving = self.moving  # the other thread ends it at any moment
        mover = self.known[moving].job if moving is not None else None
        return {
            job: Mend(*self._moved.get(job, (0, 0)), len(sizes), sum(sizes), job == mover)
            for job, sizes in left.items()
        }


class Mover:
    """Serves the agent at the other end of a socket (SOCK_SEQPACKET, JSON)."""

    def __init__(self, agent: socket.socket, largest_bytes: int, folder: str) -> None:
        self._agent = agent
        self._folder = folder
        self._resolver = Resolver()
        self._targets: dict[int, Target] = {}
        self._mounts: dict[tuple[Mount, ...], tuple[Mount, ...]] = {}
        self._book = Book()
        self._move = Move(largest_bytes)
        self._renewed_at = self._told_at = self._looked_at = 0.0
        threading.Thread(target=self._work, daemon=True).start()

    def run(self) -> None:
        """Return when the agent is gone; the tool has ended then."""
        while listen(self._agent, 0.1 if self._targets else 1.0, self._obey):
            now = time.monotonic()
            if now - self._renewed_at > LEASE_SECONDS:
                self._targets = {}
            self._end_unserved()
            if self._targets and now - self._looked_at >= LOOK_SECONDS:
                self._looked_at = now
                self._look()
            if now - self._told_at >= TELL_SECONDS:
                self._told_at = now
                self._tell()
        devices = {device for target in self._targets.values() for device in target.devices}
        self._targets = {}
        self._move.close()
        self._uncap(devices)
        self._move.wait(END_SECONDS)

    def _end_unserved(self) -> None:
        """End the move of a file whose job is served no more: it has ended, or others waited for it."""
        moving = self._book.moving  # the other thread ends it at any moment
        if moving is not None and self._book.known[moving].job not in self._targets:
            self._move.stop()

    def _uncap(self, devices: Iterable[str]) -> None:
        """What waits behind the cap goes through at once: until then the tool cannot end."""
        for device in devices:
            with suppress(OSError), open(f"{self._folder}/io.max", "w", encoding="ascii") as file:
                file.write(f"{device} rbps=max wbps=max riops=max")

    def _obey(self, message: Mapping[str, Any]) -> None:
        found = [
            Target(one["job"], one["folder"], frozenset(one["devices"]), one["bytes_per_second"],
                   one["requests_per_second"]) for one in message["targets"]
        ]  # fmt: skip
        self._targets = {target.job: target for target in found}
        self._renewed_at = time.monotonic()

    def _look(self) -> None:
        """Note what files the jobs have open, on their disks; what a file is like is found out by the other thread."""
        for target in tuple(self._targets.values()):
            for pid in files.processes_of(target.folder).pids:
                fresh = [one for one in files.look_at(pid).files if self._is_fresh(one.file, target)]
                theirs = tuple(mounts_of(pid)) if fresh else ()
                theirs = self._mounts.setdefault(theirs, theirs)
                for one in fresh:
                    if path := files.name_of(one):
                        self._book.note(one.file, Known(target.job, path, theirs))

    def _is_fresh(self, file: FileId, target: Target) -> bool:
        """Whether it is on the job's disks, and nobody's yet or that of a job that is no longer served.

        That one may have ended; who reads its files now may be the same job, started again.
        """
        known = self._book.known.get(file)
        is_open = len(self._book.known) < MOST_FILES if known is None else known.job not in self._targets
        return is_open and bool(self._resolver.devices_of(file[0]) & target.devices)

    def _work(self) -> None:
        """The other thread: one file after the other."""
        while True:
            now, jobs = time.monotonic(), self._targets
            if (file := self._book.unseen(jobs)) is not None:
                known = self._book.known[file]
                self._book.looked_at(file, self._move.size_if_fragmented(known.path, file, known.theirs))
            elif (file := self._book.fragmented(jobs, now)) is not None:
                self._move_one(file, jobs)
            else:
                time.sleep(0.1)

    def _move_one(self, file: FileId, jobs: Mapping[int, Target]) -> None:
        known = self._book.known[file]
        target = jobs.get(known.job)
        if target is None:  # it has become another job's just now
            return
        self._move.bytes_per_second = target.bytes_per_second
        self._move.requests_per_second = target.requests_per_second
        self._book.moving = file
        with suppress(Stopped):
            self._book.tried(file, self._move.carry_out(known.path, file, known.theirs), time.monotonic())
        self._book.moving = None
        if file in self._book.leaves:
            time.sleep(TRY_SECONDS)

    def _tell(self) -> None:
        skips = Counter(tuple(self._book.leaves.values()))
        with suppress(OSError):
            message = json.dumps({"jobs": self._book.mends(), "skips": skips})
            self._agent.send(message.encode(), socket.MSG_DONTWAIT)


def become_idle() -> None:
    """Disk time that nobody else wants, where the scheduler knows priorities (bfq, mq-deadline), and CPU time too."""
    libc = ctypes.CDLL(None, use_errno=True)
    number = _SYS_IOPRIO_SET.get(os.uname().machine)
    if number is not None:
        libc.syscall(number, 1, 0, _IOPRIO_IDLE)
    with suppress(OSError):
        os.nice(19)


def enter_first_mounts() -> None:
    """See the mounts of process 1, the host's: the unit and the container see most of them read-only, or not at all.

    Only where it may; without it, files whose path is the same here can be moved all the same.
    """
    with suppress(OSError):
        if os.readlink("/proc/1/ns/mnt") == os.readlink("/proc/self/ns/mnt"):
            return
        descriptor = os.open("/proc/1/ns/mnt", os.O_RDONLY | os.O_CLOEXEC)
        ctypes.CDLL(None).setns(descriptor, _CLONE_NEWNS)
        os.close(descriptor)


def prepare() -> None:
    """SIGIO comes where somebody opens a file at the moment in which it is looked at."""
    ignore((signal.SIGIO,))
    become_idle()
    enter_first_mounts()


def main(arguments: list[str]) -> None:
    """See `live`; SETTINGS holds memory_bytes besides."""
    live(
        arguments,
        "prefetchd-move",
        800,
        prepare,
        lambda agent, settings: Mover(agent, largest_file_bytes(settings["memory_bytes"]), settings["folder"]).run(),
    )
