"""A disk with moving parts, as an nbdkit plugin: every request takes the time that a 7200 rpm drive would need.

Run as `nbdkit python hdd_model.py image=FILE [bytes_per_second=N] [queue=N]`. With `queue=1` the drive serves requests
in the order they come; with more it picks, among the oldest `queue` requests, the one with the shortest positioning
time (command queueing), and never lets one wait longer than `MAX_WAIT_SECONDS`. Kept free of imports of ours:
nbdkit loads this file by itself.

The model: a seek curve a + b·sqrt(distance) (Ruemmler and Wilkes, "An introduction to disk drive modeling",
IEEE Computer 1994), a platter whose angle follows the clock, a transfer rate, and a read-ahead buffer that makes
sequential reads free of positioning.
"""

from __future__ import annotations

import math
import os
import threading
import time
from dataclasses import dataclass
from typing import ClassVar

API_VERSION = 2
REVOLUTION_SECONDS = 60.0 / 7200
SEEK_FIXED_SECONDS = 0.001
SEEK_FULL_STROKE_SECONDS = 0.007
READ_AHEAD_BYTES = 1 << 20
INTERFACE_BYTES_PER_SECOND = 500e6
MAX_WAIT_SECONDS = 0.5


@dataclass(frozen=True)
class Drive:
    """What does not change: size (bytes), media transfer rate (bytes/s), queue (requests to choose among)."""

    size_bytes: int
    bytes_per_second: float = 150e6
    queue: int = 32

    @property
    def track_bytes(self) -> float:
        return self.bytes_per_second * REVOLUTION_SECONDS


@dataclass(frozen=True)
class Head:
    """Where the head stands: behind which byte, since when (seconds of the drive's clock)."""

    position: int = 0
    free_at: float = 0.0


@dataclass(eq=False)
class Request:
    """One request: first byte, length (bytes), when it came (s), and what its caller waits for."""

    offset: int
    length: int
    arrived: float
    done: threading.Event


def seek_seconds(distance_bytes: int, size_bytes: int) -> float:
    """Return the time to move the head over that many bytes of address space, settling included."""
    if distance_bytes == 0:
        return 0.0
    return SEEK_FIXED_SECONDS + SEEK_FULL_STROKE_SECONDS * math.sqrt(min(1.0, abs(distance_bytes) / size_bytes))


def service_seconds(drive: Drive, head: Head, offset: int, length: int, start: float) -> float:
    """Return how long the drive needs for `length` bytes at `offset` when it begins at `start`.

    In sequence: what the drive read ahead since it became free costs only the interface, the rest the media rate.
    A gap of up to the read-ahead forward is passed over. Anything else seeks and waits for its sector to come round.
    """
    distance = offset - head.position
    if distance == 0:
        ahead = min(max(0.0, start - head.free_at) * drive.bytes_per_second, READ_AHEAD_BYTES)
        return max(length - ahead, 0) / drive.bytes_per_second + length / INTERFACE_BYTES_PER_SECOND
    if 0 < distance <= READ_AHEAD_BYTES:
        return (distance + length) / drive.bytes_per_second
    seek = seek_seconds(distance, drive.size_bytes)
    angle_there = ((start + seek) / REVOLUTION_SECONDS) % 1.0
    angle_wanted = (offset % drive.track_bytes) / drive.track_bytes
    rotation = ((angle_wanted - angle_there) % 1.0) * REVOLUTION_SECONDS
    return seek + rotation + length / drive.bytes_per_second


def choose(drive: Drive, head: Head, pending: list[Request], now: float) -> Request:
    """Return the request to serve next: the oldest if it has waited too long, else the quickest to reach."""
    oldest = pending[0]
    if drive.queue <= 1 or now - oldest.arrived > MAX_WAIT_SECONDS:
        return oldest
    window = pending[: drive.queue]
    return min(window, key=lambda r: service_seconds(drive, head, r.offset, r.length, max(head.free_at, r.arrived)))


class Disk:
    """The running drive: one thread serves, callers of `serve` wait. Late wake-ups do not add up."""

    def __init__(self, drive: Drive) -> None:
        self._drive = drive
        self._head = Head()
        self._pending: list[Request] = []
        self._arrival = threading.Condition()

    def start(self) -> None:
        threading.Thread(target=self._work, daemon=True).start()

    def serve(self, offset: int, length: int) -> None:
        """Return when the drive would have moved these bytes."""
        request = Request(offset, length, time.monotonic(), threading.Event())
        with self._arrival:
            self._pending.append(request)
            self._arrival.notify()
        request.done.wait()

    def _work(self) -> None:
        while True:
            with self._arrival:
                while not self._pending:
                    self._arrival.wait()
                request = choose(self._drive, self._head, self._pending, time.monotonic())
                self._pending.remove(request)
            start = max(self._head.free_at, request.arrived)
            cost = service_seconds(self._drive, self._head, request.offset, request.length, start)
            self._head = Head(request.offset + request.length, start + cost)
            time.sleep(max(0.0, self._head.free_at - time.monotonic()))
            request.done.set()


class _Plugin:
    """What nbdkit's calls share: settings first, then the image and the running disk."""

    settings: ClassVar[dict[str, str]] = {}
    image = -1
    size = 0
    disk: Disk | None = None


def config(key: str, value: str) -> None:
    if key not in {"image", "bytes_per_second", "queue"}:
        raise ValueError(f"unknown setting {key!r}: use image, bytes_per_second or queue")
    _Plugin.settings[key] = value


def thread_model() -> int:
    import nbdkit  # type: ignore[import-not-found]  # noqa: PLC0415 -- exists only inside nbdkit

    return int(nbdkit.THREAD_MODEL_PARALLEL)


def get_ready() -> None:
    _Plugin.image = os.open(_Plugin.settings["image"], os.O_RDWR)
    _Plugin.size = os.fstat(_Plugin.image).st_size


def after_fork() -> None:
    rate = float(_Plugin.settings.get("bytes_per_second", 150e6))
    _Plugin.disk = Disk(Drive(_Plugin.size, rate, int(_Plugin.settings.get("queue", 32))))
    _Plugin.disk.start()


def open(readonly: bool) -> int:  # noqa: A001 -- nbdkit calls it by this name
    return 1


def get_size(handle: int) -> int:
    return _Plugin.size


def can_multi_conn(handle: int) -> bool:
    return True


def can_flush(handle: int) -> bool:
    return True


def flush(handle: int, flags: int) -> None:
    """Written data is already in the image: nothing to do."""


def pread(handle: int, buffer: bytearray, offset: int, flags: int) -> None:
    assert _Plugin.disk is not None
    _Plugin.disk.serve(offset, len(buffer))
    os.preadv(_Plugin.image, [buffer], offset)


def pwrite(handle: int, buffer: bytearray, offset: int, flags: int) -> None:
    assert _Plugin.disk is not None
    _Plugin.disk.serve(offset, len(buffer))
    os.pwrite(_Plugin.image, buffer, offset)
