"""The process that reads ahead: looks at what jobs have open, asks the kernel for what they read next, tells the agent.

Started by `agent.rearranger` with nothing but the standard library and this package. It moves to a cgroup of the
agent's own, so that what it reads is charged there and bounded, and serves the jobs that the agent names. The agent
names them again at least once in `LEASE_SECONDS`; where it stands still, nothing more is read ahead. When the agent's
end of the socket closes, however the agent died, this process goes back to the cgroup that it came from, removes its
own, and ends. Files are opened for reading alone and only while a window of theirs is asked for.

Looking must not wait for the disk, so other threads do what may block: `Resolver` finds out where files lie, `Asker`
asks for windows.
"""

from __future__ import annotations

import json
import os
import queue
import resource
import socket
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, NamedTuple

from agent import rearrange_files as files
from agent.rearrange import LEAST_RATE, FileId, Piece, Skip, job_window_bytes
from agent.rearrange_child import listen, live
from agent.rearrange_follow import Follow, Seen
from agent.rearrange_index import Task, tasks_in
from agent.rearrange_places import JobPlaces, Resolver
from bpf.regular_file import NotRegular, open_regular

LOOK_SECONDS = 0.03
TELL_SECONDS = 0.1
LEASE_SECONDS = 3.0
BURST_SECONDS = 0.05
GIVE_WAY_SECONDS = 0.1
"""The longest wait of one request for room in the disk's queue: where others keep it full, this still goes on."""
POLL_SECONDS = 0.002
PACE_SECONDS = 0.05
"""A window that waits for its rate is given up this soon after its job is served no more."""
OPEN_FILES = 4096


class Target(NamedTuple):
    """A job to read ahead for: the folder of its cgroup, its disks (maj:min), bytes/s that may be asked for.

    `in_flight`: see `agent.rearrange_process.Target`.
    """

    job: int
    folder: str
    devices: frozenset[str]
    bytes_per_second: float
    in_flight: int


class Order(NamedTuple):
    """A window to ask for: whose it is, pieces in physical order, a path to each of their files, and its disks."""

    job: int
    pieces: tuple[Piece, ...]
    paths: Mapping[FileId, str]
    devices: Mapping[FileId, frozenset[str]]


class Asker:
    """Asks for one window after the other, at no more than the rate of its job; one window may wait.

    `targets` is who is served now: what is under way for anybody else is given up, or others would wait behind it.
    """

    def __init__(self) -> None:
        self.targets: Mapping[int, Target] = {}
        self._orders: queue.Queue[Order] = queue.Queue(1)
        self._free_at: dict[int, float] = {}
        self.ahead_bytes: Counter[int] = Counter()
        self.device_bytes: defaultdict[int, Counter[str]] = defaultdict(Counter)
        self.skips: Counter[Skip] = Counter()
        threading.Thread(target=self._run, daemon=True).start()

    @property
    def is_free(self) -> bool:
        """Whether it takes another window now."""
        return self._orders.empty()

    def put(self, order: Order) -> None:
        """Take a window; only while `is_free`."""
        self._orders.put(order)

    def _run(self) -> None:
        while True:
            self._carry_out(self._orders.get())

    def _carry_out(self, order: Order) -> None:
        descriptors: dict[FileId, int] = {}
        try:
            for file, path in order.paths.items():
                descriptor = self._open(file, path)
                if descriptor is not None:
                    descriptors[file] = descriptor
            for piece in order.pieces:
                if piece.file in descriptors and not self._ask(order, piece, descriptors[piece.file]):
                    return
        finally:
            for descriptor in descriptors.values():
                os.close(descriptor)

    def _open(self, file: FileId, path: str) -> int | None:
        """The file, if it is still the one that is meant."""
        try:
            descriptor = open_regular(path)
        except NotRegular:
            self.skips[Skip.VANISHED] += 1
            return None
        except OSError:
            self.skips[Skip.VANISHED] += not files.is_link(path)  # one that was closed has not vanished
            return None
        status = os.fstat(descriptor)
        if (status.st_dev, status.st_ino) == file:
            return descriptor
        os.close(descriptor)
        self.skips[Skip.VANISHED] += 1
        return None

    def _ask(self, order: Order, piece: Piece, descriptor: int) -> bool:
        """Ask for what is missing of a piece; False where the job is not served any more."""
        job = order.job
        missing = files.missing_bytes(descriptor, piece.offset, piece.length)
        if not missing:
            return True
        target = self._turn(job)
        if target is None:
            return False
        free_at = max(self._free_at.get(job, 0.0), time.monotonic() - BURST_SECONDS)
        self._free_at[job] = free_at + missing / target.bytes_per_second
        give_way(target)
        with suppress(OSError):
            files.ask_for(descriptor, piece.offset, piece.length)
            self._count(order, piece.file, missing)
        return True

    def _count(self, order: Order, file: FileId, size: int) -> None:
        """A file that lies on several disks (md, LVM) counts in equal parts: which holds how much is not looked up."""
        self.ahead_bytes[order.job] += size
        for device in order.devices[file]:
            self.device_bytes[order.job][device] += size // len(order.devices[file])

    def _turn(self, job: int) -> Target | None:
        """Wait until the job's rate allows more; None once nothing may be read for it."""
        while (target := self.targets.get(job)) is not None and may_read(target):
            left = self._free_at.get(job, 0.0) - time.monotonic()
            if left <= 0.0:
                return target
            time.sleep(min(left, PACE_SECONDS))
        return None


def may_read(target: Target) -> bool:
    """Whether there is a rate to speak of: with the elastic part lent out and others in need there may be none."""
    return target.bytes_per_second >= LEAST_RATE


def give_way(target: Target) -> None:
    """Wait while a disk of the job has as much in hand as others can bear, but not for ever."""
    end = time.monotonic() + GIVE_WAY_SECONDS
    while target.in_flight and time.monotonic() < end:
        if max(map(files.in_flight, target.devices), default=0) < target.in_flight:
            return
        time.sleep(POLL_SECONDS)


class Helper:
    """Serves the agent at the other end of a socket (SOCK_SEQPACKET, JSON)."""

    def __init__(self, agent: socket.socket, budget_bytes: int) -> None:
        self._agent = agent
        self._budget_bytes = budget_bytes
        self._resolver = Resolver()
        self._asker = Asker()
        self._pipes = files.PipeReader()
        self._targets: Mapping[int, Target] = {}
        self._follows: dict[int, Follow] = {}
        self._renewed = 0.0
        self._told = 0.0
        self._took = 0.0

    def run(self) -> None:
        """Return when the agent is gone. Between two looks it rests as long as one takes: a job can have much open."""
        while listen(self._agent, max(LOOK_SECONDS, self._took) if self._targets else 1.0, self._obey):
            now = time.monotonic()
            if now - self._renewed > LEASE_SECONDS:
                self._take({})
            for target in self._targets.values():
                self._serve(target, now)
            if self._targets and now - self._told >= TELL_SECONDS:
                self._told = now
                self._tell()
            self._took = min(time.monotonic() - now, LEASE_SECONDS / 2)

    def _obey(self, message: Mapping[str, Any]) -> None:
        found = (
            Target(one["job"], one["folder"], frozenset(one["devices"]), one["bytes_per_second"], one["in_flight"])
            for one in message["targets"]
        )
        self._take({target.job: target for target in found})
        self._follows = {job: follow for job, follow in self._follows.items() if job in self._targets}
        self._renewed = time.monotonic()

    def _take(self, targets: Mapping[int, Target]) -> None:
        """Serve these jobs from now on."""
        self._targets = self._asker.targets = targets

    def _serve(self, target: Target, now: float) -> None:
        """Look at one job and, where it has room, ask for its next window."""
        follow = self._follows.setdefault(target.job, Follow())
        seen, tasks, too_many = self._look(target)
        if too_many:
            follow.skip("job", Skip.TOO_MANY_FILES)
        places = JobPlaces(self._resolver, follow)
        places.root = f"/proc/{seen[0].pid}/root" if seen else ""
        places.devices = target.devices
        room = job_window_bytes(len(seen), self._budget_bytes, len(self._targets))
        wanted = follow.look(now, seen, tasks, places, room)
        if not wanted or not self._asker.is_free or not may_read(target):
            return
        window = follow.window(now, wanted, room)
        if window.pieces:
            paths = {place.file: place.path for _, _, place in wanted}
            needed = {piece.file for piece in window.pieces}
            devices = {file: self._resolver.devices_of(file[0]) & target.devices for file in needed}
            self._asker.put(Order(target.job, window.pieces, {file: paths[file] for file in needed}, devices))

    def _look(self, target: Target) -> tuple[list[Seen], dict[int, list[Task]], bool]:
        """The job's processes that have files or index pipes, and what the pipes hold."""
        seen: list[Seen] = []
        tasks: dict[int, list[Task]] = {}
        too_many = False
        for pid in files.processes_of(target.folder):
            looked = files.look_at(pid)
            too_many = too_many or looked.too_many
            here = [one for one in looked.files if self._resolver.devices_of(one.file[0]) & target.devices]
            process = Seen(pid, files.command_of(pid), here, {one.descriptor: files.name_of(one) for one in here})
            if process.is_worker:
                for inode, path in looked.pipes.items():
                    if inode not in tasks:
                        tasks[inode] = list(tasks_in(self._pipes.peek(path)))
            if here or process.is_worker:
                seen.append(process)
        return seen, tasks, too_many

    def _tell(self) -> None:
        skips = Counter(self._asker.skips)
        for follow in self._follows.values():
            skips.update(follow.skips)
        jobs = {
            job: [self._asker.ahead_bytes[job], follow.used_bytes, follow.unused_bytes, follow.outstanding_bytes,
                  dict(self._asker.device_bytes[job])]
            for job, follow in self._follows.items()
        }  # fmt: skip
        with suppress(OSError):
            self._agent.send(json.dumps({"jobs": jobs, "skips": skips}).encode(), socket.MSG_DONTWAIT)


def allow_many_files() -> None:
    """A window is asked for with all its files open."""
    with suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (OPEN_FILES, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))


def main(arguments: list[str]) -> None:
    """See `live`; SETTINGS holds budget_bytes besides."""
    live(
        arguments,
        "prefetchd-ahead",
        500,
        allow_many_files,
        lambda agent, settings: Helper(agent, settings["budget_bytes"]).run(),
    )
