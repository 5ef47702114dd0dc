"""The clock of the simulated node: what happens next, in order of time."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from typing import Any

Action = Callable[[Any], None]


class Events:
    """A queue of actions by simulated time (seconds since the start); equal times run in the order of their request."""

    __slots__ = ("_heap", "_sequence", "now")

    def __init__(self) -> None:
        self.now = 0.0
        self._heap: list[tuple[float, int, Action, Any]] = []
        self._sequence = 0

    def at(self, time: float, action: Action, argument: Any = None) -> None:
        """Run `action(argument)` at `time`; a time that has passed means now."""
        self._sequence += 1
        heapq.heappush(self._heap, (max(time, self.now), self._sequence, action, argument))

    def after(self, seconds: float, action: Action, argument: Any = None) -> None:
        """Run `action(argument)` when `seconds` have passed."""
        self.at(self.now + seconds, action, argument)

    def run(self, until: float) -> int:
        """Run everything due before or at `until`, then set the clock there; returns how many actions ran."""
        heap, pop, count = self._heap, heapq.heappop, 0
        while heap and heap[0][0] <= until:
            self.now, _, action, argument = pop(heap)
            action(argument)
            count += 1
        self.now = max(self.now, until)
        return count
