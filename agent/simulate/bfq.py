"""A simple model of the bfq scheduler for disks: one process at a time, within its cgroup's turn (block/bfq-iosched.c).

A process is served alone until it has used its budget or its time, or has sent nothing for a moment; so each
reads its own run of blocks and the head stays near. Cgroups and, within them, processes take turns in proportion to
weights. Not modelled: adaptive budgets, injection, merging of cooperating processes, `low_latency`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping

from agent.simulate.events import Events
from agent.simulate.requests import Request, Stage

BUDGET_BYTES = 8 << 20
"""bfq_default_max_budget is 16 * 1024 sectors."""
TIME_SECONDS = 0.125
"""bfq_timeout: HZ / 8."""
IDLE_SECONDS = 0.008
"""bfq_slice_idle: how long the disk waits for the next request of the process in service."""


class _Process:
    __slots__ = ("cgroup", "queue", "served")

    def __init__(self, cgroup: int, served: float) -> None:
        self.cgroup = cgroup
        self.queue: deque[Request] = deque()
        self.served = served


class Bfq:
    """Before one disk; `weights` by cgroup, 100 where none is set."""

    def __init__(self, events: Events, target: Stage) -> None:
        self._events = events
        self._target = target
        self._processes: dict[int, _Process] = {}
        self._served: dict[int, float] = {}
        self._active: _Process | None = None
        self._since = 0.0
        self._used = 0
        self._inside = 0
        self._turn = 0
        self.weights: Mapping[int, float] = {}

    def accept(self, request: Request) -> None:
        """Queue the request behind its process's own."""
        key = id(request.issuer) if request.issuer is not None else request.account.cgroup
        process = self._processes.get(key)
        if process is None:
            process = self._processes[key] = _Process(request.account.cgroup, self._least(request.account.cgroup))
        if not process.queue and process is not self._active:
            # whoever comes back has saved nothing up
            process.served = max(process.served, self._least(process.cgroup))
            self._served[process.cgroup] = max(self._served.get(process.cgroup, 0.0), self._least_group())
        process.queue.append(request)
        self._serve()

    def _least(self, cgroup: int) -> float:
        waiting = [one.served for one in self._processes.values() if one.cgroup == cgroup and one.queue]
        return min(waiting, default=0.0)

    def _least_group(self) -> float:
        busy = {one.cgroup for one in self._processes.values() if one.queue}
        return min((self._served.get(cgroup, 0.0) for cgroup in busy), default=0.0)

    def _serve(self) -> None:
        if self._active is None or self._over():
            self._choose()
        active = self._active
        while active is not None and active.queue and not self._over():
            self._dispatch(active, active.queue.popleft())

    def _over(self) -> bool:
        return self._used >= BUDGET_BYTES or self._events.now - self._since >= TIME_SECONDS

    def _choose(self) -> None:
        """The process in service has had its turn: the next is the least served one of the least served cgroup."""
        if self._inside:
            return  # what it has in the disk comes first
        waiting = [one for one in self._processes.values() if one.queue]
        self._turn += 1
        self._active = min(waiting, key=lambda one: (self._served.get(one.cgroup, 0.0), one.served), default=None)
        self._since, self._used = self._events.now, 0

    def _dispatch(self, process: _Process, request: Request) -> None:
        self._used += request.size
        process.served += request.size
        weight = self.weights.get(process.cgroup, 100.0)
        self._served[process.cgroup] = self._served.get(process.cgroup, 0.0) + request.size / weight
        self._inside += 1
        request.issued = self._events.now
        done = request.done

        def completed(request: Request) -> None:
            self._inside -= 1
            done(request)
            if not self._inside:
                self._idle()

        request.done = completed
        self._target.accept(request)

    def _idle(self) -> None:
        """The disk has nothing left: go on, or wait a moment for the process in service."""
        if self._over() or (self._active is not None and self._active.queue):
            self._serve()
        else:
            self._events.after(IDLE_SECONDS, self._gave_up, self._turn)

    def _gave_up(self, turn: int) -> None:
        """Nothing came for a while: the process loses the rest of its turn."""
        if turn == self._turn and not self._inside and self._active is not None and not self._active.queue:
            self._active = None
            self._serve()
