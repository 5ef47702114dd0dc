"""Tell the node agent how the prefetch queue of this training process does: one call per iteration.

For loaders that the agent cannot see by itself (tf.data, DALI, a queue of your own). The module needs nothing but
the standard library of Python 3.8 or newer and may be copied into a training project as this single file. Its calls
never block and never raise: without an agent, or with a full socket, a datagram is dropped.

    from agent import hint

    for batch in hint.watch(loader):          # measures the wait and tells it
        train(batch)

    batch = queue.get()                       # or by hand, right after a batch was taken
    hint.iteration(depth=queue.qsize(), capacity=8, next_batch_bytes=64 << 20, wait_seconds=0.012)

The agent counts a datagram for the control group that the sender runs in, so there is no name to give. Wire format,
40 bytes, little endian: magic `PFH1`, u32 flags, u32 stream, u32 depth (batches ready after one was taken), u32
capacity (batches), u32 iterations of this stream that could not be sent since the last datagram, u64 bytes of the
next batch, u64 wait in ns.
"""

from __future__ import annotations

import atexit
import errno
import os
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

SOCKET_VARIABLE = "PREFETCHD_HINT_SOCKET"
DEFAULT_SOCKET = "/run/prefetchd/hint.sock"

WIRE = struct.Struct("<4sIIIIIQQ")
MAGIC = b"PFH1"
VALIDATION = 1 << 0
CAPACITY_KNOWN = 1 << 1
BYTES_KNOWN = 1 << 2
WAIT_KNOWN = 1 << 3
WAITING = 1 << 4
DEPTH_UNKNOWN = 1 << 5
DONE = 1 << 6

RECONNECT_SECONDS = 3.0
"""A missing agent is looked for at most this often."""

_MAX_MISSED_STREAMS = 64

__all__ = ["done", "iteration", "waiting", "watch"]


def iteration(
    depth: int | None,
    capacity: int | None = None,
    *,
    next_batch_bytes: int | None = None,
    wait_seconds: float | None = None,
    stream: int = 0,
    validation: bool = False,
) -> None:
    """Say that one batch was just taken.

    `depth` is how many batches stay ready in the queue, which holds `capacity` of them; `wait_seconds` how long the
    loop waited for the batch. What is not known is None. `stream` tells several loaders of one process apart, and
    `validation` marks those that do not drive training.
    """
    flags = VALIDATION if validation else 0
    flags |= DEPTH_UNKNOWN if depth is None else 0
    flags |= 0 if capacity is None else CAPACITY_KNOWN
    flags |= 0 if next_batch_bytes is None else BYTES_KNOWN
    flags |= 0 if wait_seconds is None else WAIT_KNOWN
    queue = (
        0 if depth is None else depth,
        0 if capacity is None else capacity,
        0 if next_batch_bytes is None else next_batch_bytes,
    )
    _send(flags, stream, 0.0 if wait_seconds is None else wait_seconds, queue)


def waiting(stream: int = 0, wait_seconds: float = 0.0, validation: bool = False) -> None:
    """Say that the loop stands before an empty queue, for `wait_seconds` so far; the next `iteration` ends it."""
    _send(WAITING | WAIT_KNOWN | (VALIDATION if validation else 0), stream, wait_seconds)


def done(stream: int = 0, validation: bool = False) -> None:
    """Say that the loop waits no longer although it took no batch: the epoch is over."""
    _send(DONE | (VALIDATION if validation else 0), stream)


class watch:  # noqa: N801 - used like a function
    """Iterate `loader`, epoch after epoch, telling each batch and how long the loop waited for it.

    `depth`, where given, is called after each batch and returns how many stay ready; `batch_bytes` is the size of
    the next batch or is called with the batch just taken. Errors of the loader pass through unchanged.
    """

    def __init__(
        self,
        loader: Iterable[Any],
        stream: int = 0,
        *,
        validation: bool = False,
        depth: Callable[[], int] | None = None,
        capacity: int | None = None,
        batch_bytes: int | Callable[[Any], int] | None = None,
    ) -> None:
        self._loader = loader
        self._stream = stream
        self._validation = validation
        self._depth = depth
        self._capacity = capacity
        self._batch_bytes = batch_bytes

    def __len__(self) -> int:
        return len(self._loader)  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[Any]:
        batches = iter(self._loader)
        try:
            while True:
                started = self._before()
                try:
                    batch = next(batches)
                except StopIteration:
                    return
                self._after(batch, time.monotonic() - started)
                yield batch
                del batch  # while the next one is awaited this one's memory is free
        finally:
            done(self._stream, self._validation)

    def _before(self) -> float:
        if not self._ask(self._depth):
            waiting(self._stream, 0.0, self._validation)
        return time.monotonic()

    def _after(self, batch: Any, wait_seconds: float) -> None:
        size = self._batch_bytes
        iteration(
            self._ask(self._depth),
            self._capacity,
            next_batch_bytes=self._ask(size, batch) if callable(size) else size,
            wait_seconds=wait_seconds,
            stream=self._stream,
            validation=self._validation,
        )

    @staticmethod
    def _ask(question: Callable[..., int] | None, *arguments: Any) -> int | None:
        if question is None:
            return None
        try:
            return int(question(*arguments))
        except Exception:  # noqa: BLE001 - a hint must never break the training loop
            return None


class _Channel:
    """The socket of one process; a forked child makes its own."""

    def __init__(self) -> None:
        self.pid = os.getpid()
        self._connecting = threading.Lock()
        self._socket: socket.socket | None = None
        self._next_attempt = 0.0
        self._missed: dict[int, int] = {}

    def send(self, flags: int, stream: int, wait_ns: int, queue: tuple[int, int, int]) -> None:
        """Send one datagram if the agent is there and has room; `queue` is (depth, capacity, next bytes)."""
        connected = self._socket or self._connect()
        if connected is None:
            return
        missed = self._missed.get(stream, 0)
        depth, capacity, next_bytes = queue
        datagram = WIRE.pack(MAGIC, flags, stream, depth, capacity, missed, next_bytes, wait_ns)
        try:
            connected.send(datagram, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
        except OSError as error:
            self._failed(error, stream, missed, is_iteration=not flags & (WAITING | DONE))
        else:
            if missed:
                self._missed.pop(stream, None)

    def close(self) -> None:
        """Close the socket; the next datagram would open another."""
        gone, self._socket = self._socket, None
        if gone is not None:
            gone.close()

    def abandon(self) -> None:
        """Forget the socket in a forked child without closing it: its number may serve another file by now."""
        if self._socket is not None:
            self._socket.detach()

    def _failed(self, error: OSError, stream: int, missed: int, is_iteration: bool) -> None:
        if error.errno in (errno.EAGAIN, errno.ENOBUFS, errno.EINTR):
            if is_iteration and (stream in self._missed or len(self._missed) < _MAX_MISSED_STREAMS):
                self._missed[stream] = min(missed + 1, 0xFFFFFFFF)
            return
        self.close()  # the agent went away or was restarted

    def _connect(self) -> socket.socket | None:
        if time.monotonic() < self._next_attempt or not self._connecting.acquire(blocking=False):
            return None
        try:
            self._next_attempt = time.monotonic() + RECONNECT_SECONDS
            candidate = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK)
            try:
                candidate.connect(os.environ.get(SOCKET_VARIABLE) or DEFAULT_SOCKET)
            except OSError:
                candidate.close()
                return None
            self._missed.clear()
            self._socket = candidate
            return candidate
        finally:
            self._connecting.release()


_channel = _Channel()


def _send(flags: int, stream: int, wait_seconds: float = 0.0, queue: tuple[int, int, int] = (0, 0, 0)) -> None:
    global _channel  # noqa: PLW0603 - one socket per process, replaced after a fork
    try:
        if _channel.pid != os.getpid():
            _channel.abandon()
            _channel = _Channel()
        _channel.send(flags, stream, max(0, int(wait_seconds * 1e9)), queue)
    except Exception:  # noqa: BLE001, S110 - a hint must never break the training loop
        pass


@atexit.register
def _close() -> None:
    if _channel.pid == os.getpid():
        _channel.close()
