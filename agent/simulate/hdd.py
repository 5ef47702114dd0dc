"""A disk with moving parts: seek curve, rotation, sequential runs, and the gain of a queue to choose from.

The seek curve is a + b·sqrt(distance) (Ruemmler and Wilkes, "An introduction to disk drive modeling", IEEE Computer
1994). Not modelled: zones of different speed, bad sectors, the write cache.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from agent.simulate.events import Events
from agent.simulate.requests import Request


class Geometry(NamedTuple):
    """What does not change. Seconds for the shortest seek and what a full stroke adds; bytes; rates in bytes/s."""

    size_bytes: int
    bytes_per_second: float
    queue: int = 32
    revolution_seconds: float = 60.0 / 7200
    settle_seconds: float = 0.001
    stroke_seconds: float = 0.007
    read_ahead_bytes: int = 1 << 20
    interface_bytes_per_second: float = 500e6
    overhead_seconds: float = 0.0002
    oldest_seconds: float = 0.5

    @property
    def track_bytes(self) -> float:
        """What passes the head in one revolution."""
        return self.bytes_per_second * self.revolution_seconds

    @property
    def mean_positioning_seconds(self) -> float:
        """Seek and half a turn between two random places: the mean root of their distance is 8/15 of the whole."""
        return self.settle_seconds + self.stroke_seconds * 8 / 15 + self.revolution_seconds / 2


class Hdd:
    """One drive: serves, of the oldest `queue` requests, the one that its head reaches first.

    A request that waited `oldest_seconds` goes first, whatever it costs. A read that continues where the head stopped
    needs no positioning, and what passed under the head meanwhile is in the drive's buffer.
    """

    __slots__ = ("_busy", "_events", "_free_at", "_pending", "_position", "busy_seconds", "geometry")

    def __init__(self, events: Events, geometry: Geometry) -> None:
        self._events = events
        self.geometry = geometry
        self._pending: list[Request] = []
        self._busy = False
        self._position = 0
        self._free_at = 0.0
        self.busy_seconds = 0.0

    def accept(self, request: Request) -> None:
        """Queue the request; an idle drive begins at once."""
        self._pending.append(request)
        if not self._busy:
            self._begin()

    def positioning_seconds(self, offset: int, start: float) -> float:
        """Seek and rotation until the head stands before `offset`, when it sets out at `start`."""
        geometry = self.geometry
        distance = offset - self._position
        if distance == 0:
            return 0.0
        if 0 < distance <= geometry.read_ahead_bytes:
            return distance / geometry.bytes_per_second
        stroke = math.sqrt(min(1.0, abs(distance) / geometry.size_bytes))
        seek = geometry.settle_seconds + geometry.stroke_seconds * stroke
        turn = geometry.revolution_seconds
        behind = (offset % geometry.track_bytes) / geometry.track_bytes - (start + seek) / turn
        return seek + (behind % 1.0) * turn

    def service_seconds(self, request: Request, start: float) -> float:
        """Positioning and transfer of one request that is begun at `start`."""
        geometry = self.geometry
        positioning = self.positioning_seconds(request.offset, start)
        if request.offset == self._position:
            ahead = min(max(0.0, start - self._free_at) * geometry.bytes_per_second, geometry.read_ahead_bytes)
            rest = max(request.size - ahead, 0.0) / geometry.bytes_per_second
            return rest + request.size / geometry.interface_bytes_per_second
        return positioning + request.size / geometry.bytes_per_second

    def _choose(self, now: float) -> int:
        """Index of the request to serve next."""
        pending = self._pending
        if len(pending) == 1 or self.geometry.queue <= 1:
            return 0
        if now - pending[0].queued > self.geometry.oldest_seconds:
            return 0
        window = range(min(len(pending), self.geometry.queue))
        return min(window, key=lambda index: self.positioning_seconds(pending[index].offset, now))

    def _begin(self) -> None:
        now = self._events.now
        request = self._pending.pop(self._choose(now))
        request.issued = max(now, request.issued)
        seconds = self.service_seconds(request, now) + self.geometry.overhead_seconds
        self._busy = True
        self._position = request.offset + request.size
        self._free_at = now + seconds
        self.busy_seconds += seconds
        self._events.at(self._free_at, self._end, request)

    def _end(self, request: Request) -> None:
        self._busy = False
        request.complete(self._events.now)
        if self._pending and not self._busy:
            self._begin()
