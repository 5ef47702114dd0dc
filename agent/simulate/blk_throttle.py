"""blk-throttle, what enforces `io.max`: budgets by slices of 100 ms (block/blk-throttle.c of Linux 6.1).

At the start of a slice 100 ms worth of bytes and requests pass at once, the rest waits for the next slice: the gaps
that a cap makes. A change of limits while requests wait starts a new slice and carries over what the old one had not
used, or, as a debt, what it had passed in advance. Where the debt is larger than the new slice's budget the sum is
negative, and the kernel compares it as a number without sign: that dimension limits nothing until the slice is
trimmed, and then stops everything until the debt is paid. So a cut to less than what is left of the old slice first
lets through a burst. Not modelled: the hierarchy (one level here), the quantum of 8 requests a round, and the split of
large bios.
"""

from __future__ import annotations

import math
from collections import deque
from typing import NamedTuple

from agent.simulate.events import Events
from agent.simulate.requests import Request, Stage

SLICE_SECONDS = 0.1
"""DFL_THROTL_SLICE_HD; it holds for SSDs as well unless the kernel has CONFIG_BLK_DEV_THROTTLING_LOW."""
JIFFY_SECONDS = 0.004
"""CONFIG_HZ=250, Debian's choice."""
RELEASE_SECONDS = 0.01
"""From a changed limit to the release of what waited: 5 to 20 ms in the lab guest."""
UNLIMITED = math.inf


class Limits(NamedTuple):
    """One line of io.max: bytes and requests per second, reads and writes; infinity is `max`."""

    rbps: float = UNLIMITED
    wbps: float = UNLIMITED
    riops: float = UNLIMITED
    wiops: float = UNLIMITED


class _Direction:
    """Reads or writes of one cgroup on one device: its slice, what passed in it, what waits."""

    __slots__ = (
        "bps",
        "bytes",
        "carried_bytes",
        "carried_requests",
        "iops",
        "queue",
        "requests",
        "slice_end",
        "slice_start",
        "timer",
    )

    def __init__(self) -> None:
        self.bps = self.iops = UNLIMITED
        self.bytes = 0.0
        self.requests = 0.0
        self.carried_bytes = self.carried_requests = 0.0
        self.slice_start = self.slice_end = -SLICE_SECONDS
        self.queue: deque[Request] = deque()
        self.timer = 0

    @property
    def free(self) -> bool:
        return self.bps == UNLIMITED and self.iops == UNLIMITED

    def restart(self, now: float) -> None:
        """throtl_start_new_slice: a fresh budget from now on, apart from what is carried over."""
        self.bytes = self.requests = 0.0
        self.slice_start, self.slice_end = now, now + SLICE_SECONDS

    def carry_over(self, now: float) -> None:
        """tg_update_carryover, before the limits change: only what waits makes a difference."""
        if not self.queue:
            return
        elapsed = now - self.slice_start
        if self.bps < UNLIMITED:
            self.carried_bytes += self.bps * elapsed - self.bytes
        if self.iops < UNLIMITED:
            self.carried_requests += self.iops * elapsed - self.requests

    def wait_seconds(self, now: float, size: int) -> float:
        """tg_may_dispatch: 0 when the request may pass now, else how long it must wait."""
        if self.free:
            return 0.0
        if now > self.slice_end and not self.queue:
            self.carried_bytes = self.carried_requests = 0.0
            self.restart(now)
        elapsed = now - self.slice_start
        rounded = math.ceil((elapsed + JIFFY_SECONDS) / SLICE_SECONDS - 1e-9) * SLICE_SECONDS
        wait = _over(self.bytes + size, self.bps, rounded, elapsed, self.carried_bytes)
        return max(wait, _over(self.requests + 1.0, self.iops, rounded, elapsed, self.carried_requests))

    def charge(self, now: float, size: int) -> None:
        """throtl_charge_bio and throtl_trim_slice: count it, and forget the slices that have passed."""
        self.bytes += size
        self.requests += 1.0
        self.slice_end = now + SLICE_SECONDS
        passed = math.floor((now - self.slice_start) / SLICE_SECONDS + 1e-9) * SLICE_SECONDS
        if passed <= 0.0:
            return
        bytes_trim = self.bps * passed + self.carried_bytes
        requests_trim = self.iops * passed + self.carried_requests
        if bytes_trim <= 0.0 and requests_trim <= 0.0:
            return
        self.bytes = max(0.0, self.bytes - bytes_trim)
        self.requests = max(0.0, self.requests - requests_trim)
        self.carried_bytes = self.carried_requests = 0.0
        self.slice_start += passed


def _over(wanted: float, rate: float, rounded: float, elapsed: float, carried: float) -> float:
    """How long until `wanted` is within the budget of `rate` per second (tg_within_bps_limit, tg_within_iops_limit).

    A negative budget is a huge one: it is compared without its sign.
    """
    if rate == UNLIMITED:
        return 0.0
    allowed = rate * rounded + carried
    if allowed < 0.0 or wanted <= allowed * (1.0 + 1e-9):
        return 0.0
    return max(JIFFY_SECONDS, (wanted - allowed) / rate) + rounded - elapsed


class Throttle:
    """The io.max line of one cgroup on one device, before `target`."""

    __slots__ = ("_directions", "_events", "_target", "limits")

    def __init__(self, events: Events, target: Stage) -> None:
        self._events = events
        self._target = target
        self._directions = (_Direction(), _Direction())
        self.limits = Limits()

    def set_limits(self, limits: Limits) -> None:
        """Write io.max: both directions start a new slice, and what waits is looked at again a little later."""
        self.limits = limits
        for direction in self._directions:
            direction.carry_over(self._events.now)
        reads, writes = self._directions
        reads.bps, reads.iops, writes.bps, writes.iops = limits.rbps, limits.riops, limits.wbps, limits.wiops
        for direction in self._directions:
            direction.restart(self._events.now)
            if direction.queue:
                self._arm(direction, RELEASE_SECONDS)

    @property
    def waiting(self) -> int:
        """Requests held back now."""
        return sum(len(direction.queue) for direction in self._directions)

    def accept(self, request: Request) -> None:
        """Pass the request on, or hold it."""
        direction = self._directions[request.op]
        if direction.free and not direction.queue:
            self._target.accept(request)
            return
        now = self._events.now
        wait = direction.wait_seconds(now, request.size) if not direction.queue else 0.0
        if direction.queue or wait > 0.0:
            direction.queue.append(request)
            if len(direction.queue) == 1:
                self._arm(direction, wait)
            return
        self._pass(direction, request)

    def _pass(self, direction: _Direction, request: Request) -> None:
        now = self._events.now
        if not direction.free:
            direction.charge(now, request.size)
        request.queued = request.issued = now
        self._target.accept(request)

    def _arm(self, direction: _Direction, seconds: float) -> None:
        direction.timer += 1
        self._events.after(seconds, self._dispatch, (direction, direction.timer))

    def _dispatch(self, armed: tuple[_Direction, int]) -> None:
        direction, timer = armed
        if timer != direction.timer:
            return
        now = self._events.now
        while direction.queue:
            wait = direction.wait_seconds(now, direction.queue[0].size)
            if wait > 0.0:
                self._arm(direction, wait)
                return
            self._pass(direction, direction.queue.popleft())
