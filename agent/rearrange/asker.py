"""Asks the kernel for what a job reads next: one window after the other, piece by piece, as fast as the job may read.

Whatever here waits for the disk, or for the job's rate, does so in a thread of the job's own.
"""

from __future__ import annotations

import os
import queue
import threading
import time
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import NamedTuple

from agent.rearrange import files
from agent.rearrange.window import LEAST_RATE, FileId, Piece
from bpf.regular_file import NotRegular, open_regular

BURST_SECONDS = 0.05
GIVE_WAY_SECONDS = 0.1
"""The longest wait of one request for room in the disk's queue: where others keep it full, this still goes on."""
POLL_SECONDS = 0.002
PACE_SECONDS = 0.05
"""A window that waits for its rate is given up this soon after its job is served no more."""


class Target(NamedTuple):
    """A job to read ahead for: the folder of its cgroup, its disks (maj:min), bytes/s that may be asked for.

    `in_flight`: see `agent.rearrange.process.Target`.
    """

    job: int
    folder: str
    devices: frozenset[str]
    bytes_per_second: float
    in_flight: int


class Order(NamedTuple):
    """A window to ask for: pieces in physical order, a path to each of their files, and its disks."""

    pieces: tuple[Piece, ...]
    paths: Mapping[FileId, str]
    devices: Mapping[FileId, frozenset[str]]


@dataclass(slots=True)
class Ahead:
    """What was asked for on behalf of one job since this process started.

    Bytes, those of them from each disk (maj:min), and how many files were no longer there.
    """

    bytes: int = 0
    device_bytes: Counter[str] = field(default_factory=Counter)
    vanished: int = 0


class Asker:
    """Asks for a job's windows, one after the other, at no more than its rate; one window may wait.

    Each job has its own, with a thread, so that no job waits behind the window of one that may read little.
    """

    def __init__(self, target: Target, ahead: Ahead) -> None:
        self.target: Target | None = target
        self.ahead = ahead
        self._orders: queue.SimpleQueue[Order | None] = queue.SimpleQueue()
        self._free_at = 0.0
        threading.Thread(target=self._run, daemon=True).start()

    @property
    def is_free(self) -> bool:
        """Whether it takes another window now."""
        return self._orders.empty()

    def put(self, order: Order) -> None:
        """Take a window; only while `is_free`."""
        self._orders.put(order)

    def close(self) -> None:
        """The job is served no more: give up what is under way and what waits."""
        self.target = None
        self._orders.put(None)

    def _run(self) -> None:
        for order in iter(self._orders.get, None):
            self._carry_out(order)

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
            self.ahead.vanished += 1
            return None
        except OSError:
            self.ahead.vanished += not files.is_link(path)  # one that was closed has not vanished
            return None
        status = os.fstat(descriptor)
        if (status.st_dev, status.st_ino) == file:
            return descriptor
        os.close(descriptor)
        self.ahead.vanished += 1
        return None

    def _ask(self, order: Order, piece: Piece, descriptor: int) -> bool:
        """Ask for what is missing of a piece; False where the job is not served any more."""
        missing = files.missing_bytes(descriptor, piece.offset, piece.length)
        if not missing:
            return True
        target = self._turn()
        if target is None:
            return False
        free_at = max(self._free_at, time.monotonic() - BURST_SECONDS)
        self._free_at = free_at + missing / target.bytes_per_second
        give_way(target)
        with suppress(OSError):
            files.ask_for(descriptor, piece.offset, piece.length)
            self._count(order, piece.file, missing)
        return True

    def _count(self, order: Order, file: FileId, size: int) -> None:
        """A file that lies on several disks (md, LVM) counts in equal parts: which holds how much is not looked up."""
        self.ahead.bytes += size
        for device in order.devices[file]:
            self.ahead.device_bytes[device] += size // len(order.devices[file])

    def _turn(self) -> Target | None:
        """Wait until the job's rate allows more; None once nothing may be read for it."""
        while (target := self.target) is not None and may_read(target):
            left = self._free_at - time.monotonic()
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
