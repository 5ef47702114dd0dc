"""Who sends hints: from the pid in a datagram's credentials to the managed cgroup that the process runs in.

A pid alone is no identity, since pids are reused: each known sender is held by a pidfd, which tells its end, and
compared by its start time. The table is bounded; one cgroup cannot push out the senders of another.
"""

from __future__ import annotations

import os
import select
import time
from collections import Counter
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from agent.hint_wire import Stream

MAX_SENDERS = 512
MAX_SENDERS_PER_CGROUP = 128
"""One file descriptor each; the least recently heard goes first."""

RESOLVE_AGAIN_NS = 5_000_000_000
"""A process may be moved to another cgroup after its first hint (a job launcher does that)."""

REFUSE_NS = 1_000_000_000
"""How long a sender that is not ours is turned away without looking at it again."""

_MAX_REFUSED = 4096
_TICK_NS = 1_000_000_000 // os.sysconf("SC_CLK_TCK")
_ZOMBIE_FIELDS_BEFORE_START = 19


@dataclass(slots=True, eq=False)
class Sender:
    """One live process that sends hints; `cgroups` are the ids of its cgroup and its ancestors, leaf first."""

    pid: int
    pidfd: int
    start_ticks: int
    cgroups: tuple[int, ...]
    managed: int
    resolved_ns: int
    streams: dict[int, Stream] = field(default_factory=dict)
    window_start_ns: int = 0
    window_datagrams: int = 0

    def allow(self, time_ns: int, per_second: int) -> bool:
        """Whether one more datagram at `time_ns` stays within `per_second`."""
        if time_ns - self.window_start_ns >= 1_000_000_000:
            self.window_start_ns, self.window_datagrams = time_ns, 0
        self.window_datagrams += 1
        return self.window_datagrams <= per_second


def start_ticks(proc_root: Path, pid: int) -> int:
    """When the process started, in clock ticks since boot (proc(5), field 22 of stat). Raises OSError."""
    text = (proc_root / str(pid) / "stat").read_text(encoding="utf-8", errors="replace")
    return int(text[text.rindex(")") + 2 :].split()[_ZOMBIE_FIELDS_BEFORE_START])


def cgroup_ids(proc_root: Path, cgroup_root: Path, pid: int) -> tuple[int, ...]:
    """The cgroup v2 ids (inodes) of a process's cgroup and its ancestors below the root, leaf first.

    Empty where the process has none under `cgroup_root` (outside this cgroup namespace, or removed meanwhile).
    Raises OSError when the process is gone.
    """
    lines = (proc_root / str(pid) / "cgroup").read_bytes().split(b"\n")  # of what ends a line, names lack this alone
    path = next((os.fsdecode(line[3:]) for line in lines if line.startswith(b"0::/")), "/")
    parts = path.strip("/").split("/")
    if ".." in parts or parts == [""]:
        return ()
    try:
        return tuple(cgroup_root.joinpath(*parts[:n]).stat().st_ino for n in range(len(parts), 0, -1))
    except OSError:
        return ()


class SenderTable:
    """The senders of managed cgroups by pid; every refusal is counted in `refusals` by its reason."""

    def __init__(self, cgroup_root: Path, proc_root: Path = Path("/proc")) -> None:
        self.refusals: Counter[str] = Counter()
        self._cgroup_root = cgroup_root
        self._proc_root = proc_root
        self._managed: frozenset[int] = frozenset()
        self._senders: dict[int, Sender] = {}
        self._refused: dict[int, int] = {}
        self._ended = select.epoll()
        self._ended_pids: set[int] = set()

    def __iter__(self) -> Iterator[Sender]:
        return iter(self._senders.values())

    def __len__(self) -> int:
        return len(self._senders)

    def manage(self, cgroup_ids: Collection[int]) -> None:
        """Accept senders of these cgroups and their descendants only; the others are dropped."""
        self._managed = frozenset(cgroup_ids)
        self._refused.clear()
        for sender in list(self._senders.values()):
            self._assign(sender)

    def note_ended(self) -> None:
        """Ask the kernel which senders have ended; they stay until `drop_ended`, so that their last words count."""
        by_fd = {sender.pidfd: sender.pid for sender in self._senders.values()}
        self._ended_pids.update(by_fd[fd] for fd, _ in self._ended.poll(0) if fd in by_fd)

    def drop_ended(self) -> None:
        """Forget the senders that `note_ended` found."""
        for pid in self._ended_pids:
            self._drop(pid)
        self._ended_pids.clear()

    def find(self, pid: int, now_ns: int, age_ns: int) -> Sender | None:
        """The sender of a datagram that was sent `age_ns` before `now_ns`, or None (counted) if it is not ours."""
        sender = self._senders.pop(pid, None)
        if sender is None or (pid in self._ended_pids and self._reused(sender)):
            if sender is not None:
                self._senders[pid] = sender
                self._drop(pid)
                self._ended_pids.discard(pid)
            return self._admit(pid, now_ns, age_ns)
        self._senders[pid] = sender  # most recently heard: last
        if now_ns - sender.resolved_ns >= RESOLVE_AGAIN_NS:
            sender.resolved_ns = now_ns
            self._resolve(sender)
        return self._senders.get(pid)

    def close(self) -> None:
        """Close every descriptor; harmless when repeated."""
        for pid in list(self._senders):
            self._drop(pid)
        self._ended.close()

    def _admit(self, pid: int, now_ns: int, age_ns: int) -> Sender | None:
        if now_ns < self._refused.get(pid, now_ns):
            self.refusals["unmanaged"] += 1
            return None
        try:
            sender = self._identify(pid, now_ns, age_ns)
        except (OSError, ValueError):
            self.refusals["unknown_sender"] += 1
            return None
        if sender is None:
            self._refuse(pid, now_ns)
            return None
        self._make_room(sender.managed)
        self._ended.register(sender.pidfd, select.EPOLLIN)
        self._senders[pid] = sender
        return sender

    def _identify(self, pid: int, now_ns: int, age_ns: int) -> Sender | None:
        """Raises OSError for a process that ended or that is not the one which sent, None if it is not managed."""
        pidfd = os.pidfd_open(pid)
        try:
            ticks = start_ticks(self._proc_root, pid)
            alive_ns = time.clock_gettime_ns(time.CLOCK_BOOTTIME) - ticks * _TICK_NS
            if alive_ns + 2 * _TICK_NS < age_ns:
                raise ProcessLookupError(f"process {pid} is younger than its datagram")
            ids = cgroup_ids(self._proc_root, self._cgroup_root, pid)
            managed = self._nearest_managed(ids)
            if managed is not None:
                kept, pidfd = pidfd, -1
                return Sender(pid, kept, ticks, ids, managed, now_ns)
            return None
        finally:
            if pidfd >= 0:
                os.close(pidfd)

    def _refuse(self, pid: int, now_ns: int) -> None:
        self.refusals["unmanaged"] += 1
        if len(self._refused) >= _MAX_REFUSED:
            self._refused.clear()
        self._refused[pid] = now_ns + REFUSE_NS

    def _make_room(self, managed: int) -> None:
        siblings = [sender.pid for sender in self._senders.values() if sender.managed == managed]
        if len(siblings) >= MAX_SENDERS_PER_CGROUP:
            self._evict(siblings[0])
        elif len(self._senders) >= MAX_SENDERS:
            self._evict(siblings[0] if siblings else next(iter(self._senders)))

    def _evict(self, pid: int) -> None:
        self.refusals["evicted"] += 1
        self._drop(pid)

    def _reused(self, sender: Sender) -> bool:
        try:
            return start_ticks(self._proc_root, sender.pid) != sender.start_ticks
        except (OSError, ValueError):
            return False

    def _resolve(self, sender: Sender) -> None:
        try:
            sender.cgroups = cgroup_ids(self._proc_root, self._cgroup_root, sender.pid)
        except OSError:
            return  # it just ended: the pidfd will tell
        self._assign(sender)

    def _assign(self, sender: Sender) -> None:
        managed = self._nearest_managed(sender.cgroups)
        if managed is None:
            self._drop(sender.pid)
        elif managed != sender.managed:
            sender.managed = managed
            sender.streams.clear()  # what it did elsewhere is not this job's

    def _nearest_managed(self, ids: tuple[int, ...]) -> int | None:
        return next((cgroup_id for cgroup_id in ids if cgroup_id in self._managed), None)

    def _drop(self, pid: int) -> None:
        sender = self._senders.pop(pid, None)
        if sender is not None:
            self._ended.unregister(sender.pidfd)  # closing alone would not do it if a forked child holds a copy
            os.close(sender.pidfd)
