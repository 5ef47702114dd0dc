"""Service models of an SSD and of a remote mount over a link.

Both serve in the order of arrival, so that the completion of a request is known when it arrives: one event each.
"""

from __future__ import annotations

from collections import deque
from typing import Any

from agent.simulate.events import Events
from agent.simulate.requests import Request, Stage


class Unlimited:
    """Storage that is never short: every request takes `seconds`. The reference of what training could reach."""

    __slots__ = ("_events", "seconds")

    def __init__(self, events: Events, seconds: float = 1e-4) -> None:
        self._events = events
        self.seconds = seconds

    def accept(self, request: Request) -> None:
        """Serve it at once."""
        self._events.after(self.seconds, _finish, (request, self._events))


def _finish(done: tuple[Request, Events]) -> None:
    request, events = done
    request.complete(events.now)


class Ssd:
    """Reads and writes together pass `bytes_per_second` and `iops`, in order of arrival; each takes `latency` besides.

    `burst_seconds` of either may pass before the limits bite (0.1 is what QEMU's throttle allows, throttle_compute_wait
    of its util/throttle.c; 0 a drive by itself). `transfer` (bytes/s) is what one request alone gets. Parallelism
    inside the drive is contained in the rates. Not modelled: garbage collection, slower writes than reads.
    """

    __slots__ = ("_byte_time", "_events", "_request_time", "burst", "bytes_per_second", "iops", "latency", "transfer")

    def __init__(
        self,
        events: Events,
        bytes_per_second: float,
        iops: float,
        *,
        latency: float = 1e-4,
        transfer: float | None = None,
        burst_seconds: float = 0.0,
    ) -> None:
        self._events = events
        self.bytes_per_second = bytes_per_second
        self.iops = iops
        self.latency = latency
        self.transfer = transfer or bytes_per_second
        self.burst = burst_seconds
        self._byte_time = self._request_time = 0.0

    def accept(self, request: Request) -> None:
        """Reserve the request's turn; it completes when that is over."""
        now = self._events.now
        start = max(now, self._byte_time - self.burst, self._request_time - self.burst)
        self._byte_time = max(self._byte_time, start) + request.size / self.bytes_per_second
        self._request_time = max(self._request_time, start) + 1.0 / self.iops
        self._events.at(start + self.latency + request.size / self.transfer, _finish, (request, self._events))


class Link:
    """A remote mount: RPC slots at the client, then a link of `bytes_per_second` with `round_trip` in order of arrival.

    A request without a free slot waits in the client's backlog (its `issued` is when it got one): the wait that the
    NFS probe sees as queueing. What is ahead in the gateway lengthens the round trip. Other machines' traffic on the
    link (`foreign`, bytes/s taken off) is not ours to see. `packets` counts full-size frames and acknowledgements.
    Not modelled: loss and TCP's reaction to it, server caches.
    """

    __slots__ = ("_backlog", "_events", "_free", "_free_at", "bytes_per_second", "foreign", "packets", "round_trip")

    FRAME_BYTES = 1448
    FLOOR = 0.02

    def __init__(self, events: Events, bytes_per_second: float, round_trip: float, slots: int = 64) -> None:
        self._events = events
        self.bytes_per_second = bytes_per_second
        self.round_trip = round_trip
        self.foreign = 0.0
        self.packets = 0
        self._free = slots
        self._backlog: deque[Request] = deque()
        self._free_at = 0.0

    @property
    def rate(self) -> float:
        """What other machines leave of the link, bytes/s."""
        return max(self.bytes_per_second - self.foreign, self.FLOOR * self.bytes_per_second)

    def accept(self, request: Request) -> None:
        """Send the request, or keep it until a slot is free."""
        if self._free:
            self._send(request)
        else:
            self._backlog.append(request)

    def _send(self, request: Request) -> None:
        now = self._events.now
        self._free -= 1
        request.issued = now
        self._free_at = max(self._free_at, now + self.round_trip / 2) + request.size / self.rate
        self._events.at(self._free_at + self.round_trip / 2, self._received, request)

    def _received(self, request: Request) -> None:
        self._free += 1
        self.packets += request.size // self.FRAME_BYTES + request.size // (2 * self.FRAME_BYTES) + 3
        if self._backlog:
            self._send(self._backlog.popleft())
        request.complete(self._events.now)


class FairQueue:
    """Requests of several cgroups before one device, served in proportion to weights (start-time fair queueing).

    The simple model of both bfq and io.cost. With `depth` the device holds at most that many at a time (bfq). With
    `pace` requests pass one after the other, each taking the time of its cost and then going to the device (io.cost's
    virtual time). Cost in seconds is `seconds_per_byte` x size + `seconds_per_request`. Not modelled: bfq's budgets,
    idling and injection, io.cost's periods, donation and debt.

    Source: Goyal, Vin, Cheng, "Start-time Fair Queueing", SIGCOMM 1996.
    """

    def __init__(
        self,
        events: Events,
        target: Stage,
        *,
        depth: int = 1_000_000,
        pace: bool = False,
        seconds_per_byte: float = 1.0,
        seconds_per_request: float = 0.0,
    ) -> None:
        self._events = events
        self._target = target
        self._depth = depth
        self._pace = pace
        self._per_byte, self._per_request = seconds_per_byte, seconds_per_request
        self._queues: dict[int, deque[tuple[float, Request, Any]]] = {}
        self._finish_tags: dict[int, float] = {}
        self._virtual = 0.0
        self._inside = 0
        self._pass_at = 0.0
        self._timer = False
        self.weights: dict[int, float] = {}

    def cost(self, request: Request) -> float:
        """Seconds that the device is thought to need for this request."""
        return self._per_byte * request.size + self._per_request

    def accept(self, request: Request) -> None:
        """Queue the request behind those of its cgroup and serve what is due."""
        cgroup = request.account.cgroup
        start = max(self._virtual, self._finish_tags.get(cgroup, 0.0))
        self._finish_tags[cgroup] = start + self.cost(request) / self.weights.get(cgroup, 100.0)
        self._queues.setdefault(cgroup, deque()).append((start, request, request.done))
        self._serve()

    def _serve(self, _: object = None) -> None:
        now = self._events.now
        while self._queues and self._inside < self._depth:
            if self._pace and self._pass_at > now:
                self._wait(self._pass_at)
                return
            self._dispatch(min(self._queues, key=lambda cgroup: self._queues[cgroup][0][0]), now)

    def _dispatch(self, cgroup: int, now: float) -> None:
        queue = self._queues[cgroup]
        start, request, done = queue.popleft()
        if not queue:
            del self._queues[cgroup]
        self._virtual = start
        self._inside += 1
        if self._pace:
            self._pass_at = now + self.cost(request)
        request.issued = now

        def completed(request: Request) -> None:
            self._inside -= 1
            done(request)
            self._serve()

        request.done = completed
        self._target.accept(request)

    def _wait(self, until: float) -> None:
        if not self._timer:
            self._timer = True
            self._events.at(until, self._due)

    def _due(self, _: object) -> None:
        self._timer = False
        self._serve()
