"""One storage request on its way, and the cumulative counters of a cgroup on a device that it ends in."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from bpf.samples import BlockCounters, NfsCounters


class Account:
    """What the block or NFS probe would have counted for one cgroup on one device: plain sums, seconds and bytes.

    Index 0 counts reads, 1 writes. `throttle`, `queue` and `service` split the time from submission to completion.
    """

    __slots__ = ("bytes", "cgroup", "in_flight", "latency", "queue", "requests", "service", "squares", "throttle")

    def __init__(self, cgroup: int) -> None:
        self.cgroup = cgroup
        self.requests = [0, 0]
        self.bytes = [0, 0]
        self.latency = [0.0, 0.0]
        self.squares = [0.0, 0.0]
        self.throttle = [0.0, 0.0]
        self.queue = [0.0, 0.0]
        self.service = [0.0, 0.0]
        self.in_flight = [0, 0]

    def block_counters(self, op: int) -> BlockCounters:
        """The counters as the block probe gives them; no histogram, since no decision reads it."""
        return BlockCounters(
            self.requests[op],
            self.bytes[op],
            int(self.latency[op] * 1e9),
            int(self.squares[op] * 1e12),
            self.in_flight[op],
            (),
            int(self.throttle[op] * 1e9),
            int(self.queue[op] * 1e9),
            int(self.service[op] * 1e9),
        )

    def nfs_counters(self, op: int) -> NfsCounters:
        """The counters as the NFS probe gives them: queue is the wait for an RPC slot, service the round trip."""
        return NfsCounters(
            self.requests[op],
            self.bytes[op],
            int(self.queue[op] * 1e9),
            int(self.service[op] * 1e9),
            int(self.latency[op] * 1e9),
            int(self.squares[op] * 1e12),
            (),
        )


class Request:
    """One request: `size` bytes at `offset`; `op` 0 reads, 1 writes; moments in seconds of the simulated clock.

    `queued` is when it left blk-throttle, `issued` when the device took it; `done` is called when it has completed.
    `issuer` stands for the process that sent it.
    """

    __slots__ = ("account", "done", "issued", "issuer", "offset", "op", "queued", "size", "submitted")

    def __init__(self, account: Account, op: int, size: int, offset: int, done: Callable[[Request], None]) -> None:
        self.account = account
        self.op = op
        self.size = size
        self.offset = offset
        self.done = done
        self.issuer: object = getattr(done, "__self__", None)
        self.submitted = 0.0
        self.queued = 0.0
        self.issued = 0.0

    def submit(self, now: float) -> None:
        """The request enters the block layer."""
        self.submitted = self.queued = self.issued = now
        self.account.in_flight[self.op] += 1

    def complete(self, now: float) -> None:
        """The device has finished: count, then tell whoever waits."""
        account, op = self.account, self.op
        latency = now - self.submitted
        account.in_flight[op] -= 1
        account.requests[op] += 1
        account.bytes[op] += self.size
        account.latency[op] += latency
        account.squares[op] += latency * latency
        account.throttle[op] += self.queued - self.submitted
        account.queue[op] += self.issued - self.queued
        account.service[op] += now - self.issued
        self.done(self)


class Stage(Protocol):
    """Anything that takes requests: a device, or a queue before one."""

    def accept(self, request: Request) -> Any:
        """Take a request at the current time."""
