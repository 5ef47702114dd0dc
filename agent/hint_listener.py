"""Receives what training code tells through `agent.hint`, and counts it for the cgroup the sender runs in.

Nothing in a datagram says whose it is: the kernel attaches the sender's credentials (SO_PASSCRED, unix(7)), already
translated into this pid namespace, and the cgroup follows from the pid. A sender that is dead by then, unmanaged or
outside this pid namespace, malformed or too fast costs a counter and nothing else.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import socket
import stat
import struct
import time
from collections import Counter
from collections.abc import Collection, Iterator
from pathlib import Path

from agent import hint
from agent.errors import reason
from agent.hint_senders import SenderTable
from agent.hint_wire import Hint, Stream, parse_hint
from bpf.samples import ProbeState, ProbeStatus, Sample

log = logging.getLogger(__name__)

MAX_DATAGRAMS_PER_READ = 2048
"""About 10 ms of work; what is left waits in the socket for the next read."""

LONGEST_READ_NS = 20_000_000
"""Then a read ends too: to find out who a stranger is takes far longer than to count a known sender's datagram."""

MAX_DATAGRAMS_PER_SECOND = 1000
"""Per sender, far above any training loop; what exceeds it is dropped and counted."""

MAX_STREAMS_PER_SENDER = 16

LOOK_AGAIN_NS = 5_000_000_000
"""How often the listener makes sure that its socket can still be found."""

RESULTS = (
    "received", "missed", "malformed", "flooded", "too_many_streams", "unmanaged", "unknown_sender", "evicted",
)  # fmt: skip
"""What becomes of datagrams: all that came, those for which senders found no room, and why some do not count. `evicted`
are senders that had to make room for others."""

QUEUED_DATAGRAMS = 8192
"""Room between two reads; the kernel's own default of 10 is less than what a node of training jobs sends in 100 ms. A
socket that floods has no more than 280 on their way, which its own send buffer holds: two dozen of them leave room for
the hints of jobs. What is on its way takes 768 bytes of its sender's memory."""

_QUEUE_SYSCTL = Path("/proc/sys/net/unix/max_dgram_qlen")
_SO_TIMESTAMPNS = 35
"""asm-generic/socket.h, SO_TIMESTAMPNS_OLD: the kernel stamps each datagram when it is sent, CLOCK_REALTIME."""

_MAX_AGE_NS = 60_000_000_000
_UCRED = struct.Struct("@iII")
_TIMESPEC = struct.Struct("@qq")
_ANCILLARY_BYTES = socket.CMSG_SPACE(_TIMESPEC.size) + socket.CMSG_SPACE(_UCRED.size)
"""Exactly these two: file descriptors that a sender attaches find no room and are discarded by the kernel."""

_Ancillary = list[tuple[int, int, bytes]]


def open_hint_socket(path: Path) -> socket.socket:
    """A bound, non-blocking socket that anybody on the node may write to.

    It is made under another name and renamed, so nobody meets it half prepared. A stale socket is replaced. Raises
    OSError (with the path) if something else stands there or another agent is listening.
    """
    path.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
    _refuse_taken(path)
    with _longer_queue(_QUEUE_SYSCTL):
        receiver = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
    fresh = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        receiver.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
        receiver.setsockopt(socket.SOL_SOCKET, _SO_TIMESTAMPNS, 1)
        fresh.unlink(missing_ok=True)
        receiver.bind(str(fresh))
        fresh.chmod(0o666)
        fresh.rename(path)
    except OSError as error:
        receiver.close()
        fresh.unlink(missing_ok=True)
        raise OSError(error.errno or errno.EINVAL, error.strerror or str(error), str(path)) from error
    return receiver


@contextlib.contextmanager
def _longer_queue(sysctl: Path) -> Iterator[None]:
    """Sockets made meanwhile take QUEUED_DATAGRAMS; a socket keeps the limit that it was made with.

    Where the limit may not be written (a container without rights) it stays, and senders count what finds no room.
    """
    before = ""
    with contextlib.suppress(OSError, ValueError):
        text = sysctl.read_text()
        if int(text) < QUEUED_DATAGRAMS:
            sysctl.write_text(f"{QUEUED_DATAGRAMS}\n")
            before = text
    try:
        yield
    finally:
        if before:
            sysctl.write_text(before)


def _refuse_taken(path: Path) -> None:
    try:
        mode = path.lstat().st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(mode):
        raise OSError(errno.EEXIST, "not a socket; remove it or choose another path", str(path))
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as visitor, contextlib.suppress(ConnectionRefusedError):
        visitor.connect(str(path))
        raise OSError(errno.EADDRINUSE, "another agent listens here; stop it or choose another path", str(path))


class HintListener:
    """The hint channel as a probe. `fileno` is readable when datagrams wait; -1 while unavailable."""

    name = "hint"

    def __init__(self, path: Path, cgroup_root: Path, proc_root: Path = Path("/proc")) -> None:
        self._path = path
        self._counts: Counter[str] = Counter()
        self._senders = SenderTable(cgroup_root, proc_root)
        self._socket: socket.socket | None = None
        self._inode = 0
        self._looked_ns = 0
        self._why = ""
        self._open()

    def _open(self) -> None:
        """Listen at the path; where that fails, a socket that was open before stays, for those who are connected."""
        try:
            fresh = open_hint_socket(self._path)
            self._inode = self._path.lstat().st_ino
        except OSError as error:
            why = f"the socket {str(self._path)!r} cannot be made ({reason(error)})"
            if why != self._why:
                log.warning("no hint channel: %s", why)
            self._why = why
            return
        if self._socket is not None:
            log.warning("the hint socket %s was removed; it is there again", self._path)
            self._socket.close()
        self._socket, self._why = fresh, ""

    def _look_after(self, now_ns: int) -> None:
        """A socket whose name is gone (a cleaner of /run, a state directory made anew) is found by nobody."""
        if now_ns - self._looked_ns < LOOK_AGAIN_NS:
            return
        self._looked_ns = now_ns
        try:
            if self._path.lstat().st_ino == self._inode:
                return
        except OSError:
            pass  # gone, or out of reach: opening it says which
        self._open()

    def status(self) -> ProbeStatus:
        """Attached; degraded where the socket's name is gone; or unavailable; with the reason."""
        open_state = ProbeState.DEGRADED if self._why else ProbeState.ATTACHED
        state = ProbeState.UNAVAILABLE if self._socket is None else open_state
        lost = self._counts["flooded"] + self._counts["missed"] + self._senders.refusals["evicted"]
        counts = self._counts + self._senders.refusals
        return ProbeStatus(self.name, state, self._why, lost_events=lost, counts=tuple((r, counts[r]) for r in RESULTS))

    def fileno(self) -> int:
        """The socket's descriptor for the loop's select."""
        return -1 if self._socket is None else self._socket.fileno()

    def manage(self, cgroup_ids: Collection[int]) -> None:
        """Count senders of these cgroups and of their descendants."""
        self._senders.manage(cgroup_ids)

    def read(self, now_ns: int) -> Sample:
        """Drain the socket, MAX_DATAGRAMS_PER_READ or LONGEST_READ_NS at most, and return all live streams."""
        if self._socket is None:
            return Sample(now_ns)
        self._senders.note_ended()
        self._drain(self._socket, now_ns)
        self._look_after(now_ns)
        streams = tuple(
            stream.take(sender.managed, f"{sender.pid}/{key}")
            for sender in self._senders
            for key, stream in sender.streams.items()
        )
        self._senders.drop_ended()
        return Sample(now_ns, streams=streams)

    def close(self) -> None:
        """Close and remove the socket, unless somebody else's stands there by now; harmless when repeated."""
        self._senders.close()
        if self._socket is None:
            return
        self._socket.close()
        self._socket, self._why = None, "closed"
        with contextlib.suppress(OSError):
            if self._path.lstat().st_ino == self._inode:
                self._path.unlink()

    def _drain(self, receiver: socket.socket, now_ns: int) -> None:
        realtime_ns = time.clock_gettime_ns(time.CLOCK_REALTIME)
        until_ns = time.monotonic_ns() + LONGEST_READ_NS
        for _ in range(MAX_DATAGRAMS_PER_READ):
            if time.monotonic_ns() > until_ns:
                return
            try:
                datagram, ancillary, _, _ = receiver.recvmsg(hint.WIRE.size + 1, _ANCILLARY_BYTES)
            except BlockingIOError:
                return
            self._counts["received"] += 1
            told = parse_hint(datagram)
            if told is None:
                self._counts["malformed"] += 1
                continue
            pid, sent_ns = _sender_and_time(ancillary)
            age_ns = realtime_ns - sent_ns
            self._count(told, pid, now_ns, age_ns if 0 <= age_ns <= _MAX_AGE_NS else 0)

    def _count(self, told: Hint, pid: int, now_ns: int, age_ns: int) -> None:
        sender = self._senders.find(pid, now_ns, age_ns)
        if sender is None:
            return
        if not sender.allow(now_ns - age_ns, MAX_DATAGRAMS_PER_SECOND):
            self._counts["flooded"] += 1
            return
        if told.stream not in sender.streams and len(sender.streams) >= MAX_STREAMS_PER_SENDER:
            self._counts["too_many_streams"] += 1
            return
        self._counts["missed"] += told.missed
        sender.streams.setdefault(told.stream, Stream()).apply(told, now_ns - age_ns)


def _sender_and_time(ancillary: _Ancillary) -> tuple[int, int]:
    """The sender's pid (0: outside this pid namespace) and the time of sending, CLOCK_REALTIME ns."""
    pid = sent_ns = 0
    for level, kind, data in ancillary:
        if level != socket.SOL_SOCKET:
            continue
        if kind == socket.SCM_CREDENTIALS:
            pid = _UCRED.unpack(data)[0]
        elif kind == _SO_TIMESTAMPNS:
            seconds, nanoseconds = _TIMESPEC.unpack(data)
            sent_ns = seconds * 1_000_000_000 + nanoseconds
    return pid, sent_ns
