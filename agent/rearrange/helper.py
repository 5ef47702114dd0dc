"""The process that reads ahead: looks at what jobs have open, asks the kernel for what they read next, tells the agent.

Started by `agent.rearrange.process` with nothing but the standard library and this package. It moves to a cgroup of
the agent's own, so that what it reads is charged there and bounded, and serves the jobs that the agent names. The
agent names them again at least once in `LEASE_SECONDS`; where it stands still, nothing more is read ahead. When the
agent's end of the socket closes, however the agent died, this process goes back to the cgroup that it came from,
removes its own, and ends. Files are opened for reading alone and only while a window of theirs is asked for.

Looking must not wait for the disk, so other threads do what may block: those of the `Resolver` find out where files
lie, and each job has an `Asker` that asks for its windows.
"""

from __future__ import annotations

import json
import resource
import socket
import time
from collections import Counter, defaultdict
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from agent.rearrange import files
from agent.rearrange.asker import Ahead, Asker, Order, Target, may_read
from agent.rearrange.child import listen, live
from agent.rearrange.follow import Follow, Seen
from agent.rearrange.index import Task, tasks_in
from agent.rearrange.places import JobPlaces, Resolver
from agent.rearrange.window import Skip, job_window_bytes

LOOK_SECONDS = 0.03
TELL_SECONDS = 0.1
LEASE_SECONDS = 3.0


class Helper:
    """Serves the agent at the other end of a socket (SOCK_SEQPACKET, JSON)."""

    def __init__(self, agent: socket.socket, budget_bytes: int) -> None:
        self._agent = agent
        self._budget_bytes = budget_bytes
        self._resolver = Resolver()
        self._pipes = files.PipeReader()
        self._targets: Mapping[int, Target] = {}
        self._follows: dict[int, Follow] = {}
        self._askers: dict[int, Asker] = {}
        self._ahead: defaultdict[int, Ahead] = defaultdict(Ahead)
        self._renewed_at = self._told_at = self._look_seconds = 0.0

    def run(self) -> None:
        """Return when the agent is gone. Between two looks it rests as long as one takes: a job can have much open."""
        while listen(self._agent, max(LOOK_SECONDS, self._look_seconds) if self._targets else 1.0, self._obey):
            now = time.monotonic()
            if now - self._renewed_at > LEASE_SECONDS:
                self._take({})
            for target in self._targets.values():
                self._serve(target, now)
            if self._targets and now - self._told_at >= TELL_SECONDS:
                self._told_at = now
                self._tell()
            self._look_seconds = min(time.monotonic() - now, LEASE_SECONDS / 2)

    def _obey(self, message: Mapping[str, Any]) -> None:
        found = (
            Target(one["job"], one["folder"], frozenset(one["devices"]), one["bytes_per_second"], one["in_flight"])
            for one in message["targets"]
        )
        self._take({target.job: target for target in found})
        self._follows = {job: follow for job, follow in self._follows.items() if job in self._targets}
        self._renewed_at = time.monotonic()

    def _take(self, targets: Mapping[int, Target]) -> None:
        """Serve these jobs from now on."""
        self._targets = targets
        for job in self._askers.keys() - targets.keys():
            self._askers.pop(job).close()
        for job, target in targets.items():
            if job in self._askers:
                self._askers[job].target = target
            else:
                self._askers[job] = Asker(target, self._ahead[job])

    def _serve(self, target: Target, now: float) -> None:
        """Look at one job and, where it has room, ask for its next window."""
        follow = self._follows.setdefault(target.job, Follow())
        seen, tasks = self._look(target, follow)
        root = f"/proc/{seen[0].pid}/root" if seen else ""
        places = JobPlaces(self._resolver, follow, root, target.devices)
        room = job_window_bytes(len(seen), self._budget_bytes, len(self._targets))
        wanted = follow.look(now, seen, tasks, places, room)
        if not wanted or not may_read(target) or not self._askers[target.job].is_free:
            return
        window = follow.window(now, wanted, room)
        if window.pieces:
            paths = {place.file: place.path for _, _, place in wanted}
            needed = {piece.file for piece in window.pieces}
            devices = {file: self._resolver.devices_of(file[0]) & target.devices for file in needed}
            self._askers[target.job].put(Order(window.pieces, {file: paths[file] for file in needed}, devices))

    def _look(self, target: Target, follow: Follow) -> tuple[list[Seen], dict[int, list[Task]]]:
        """The job's processes that have files or index pipes, and what the pipes hold."""
        seen: list[Seen] = []
        tasks: dict[int, list[Task]] = {}
        processes = files.processes_of(target.folder)
        if processes.too_many:
            follow.skip("job", Skip.TOO_MANY_PROCESSES)
        for pid in processes.pids:
            looked = files.look_at(pid)
            if looked.too_many:
                follow.skip("job", Skip.TOO_MANY_FILES)
            here = [one for one in looked.files if self._resolver.devices_of(one.file[0]) & target.devices]
            process = Seen(pid, files.command_of(pid), here, {one.descriptor: files.name_of(one) for one in here})
            if process.is_worker:
                for inode, path in looked.pipes.items():
                    if inode not in tasks:
                        tasks[inode] = list(tasks_in(self._pipes.peek(path)))
            if here or process.is_worker:
                seen.append(process)
        return seen, tasks

    def _tell(self) -> None:
        skips = Counter({Skip.VANISHED: sum(one.vanished for one in self._ahead.values())})
        for follow in self._follows.values():
            skips.update(follow.skips)
        jobs = {
            job: [self._ahead[job].bytes, follow.used_bytes, follow.unused_bytes, follow.outstanding_bytes,
                  dict(self._ahead[job].device_bytes)]
            for job, follow in self._follows.items()
        }  # fmt: skip
        with suppress(OSError):
            self._agent.send(json.dumps({"jobs": jobs, "skips": +skips}).encode(), socket.MSG_DONTWAIT)


def allow_many_files() -> None:
    """Every job's window is asked for with all its files open: as many as the hard limit allows."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    with suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def main(arguments: list[str]) -> None:
    """See `live`; SETTINGS holds budget_bytes besides."""
    live(
        arguments,
        "prefetchd-ahead",
        500,
        allow_many_files,
        lambda agent, settings: Helper(agent, settings["budget_bytes"]).run(),
    )
