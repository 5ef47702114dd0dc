"""When a limit may be cut without a burst: blk-throttle's slices of time. Pure but for the clock it is given.

A limit is kept by slices of 100 ms: what a slice may pass goes at once when it begins, and the rest of it is a gap. A
change while requests wait starts a new slice and carries over, as a debt, what the old one had passed in advance
(tg_update_carryover, Linux 6.1). Where the debt is larger than the new slice's budget the sum is negative, and the
kernel compares it without its sign (a fix was posted in August 2023; Debian's 6.1.192 is without it): for about 100 ms
that dimension has no limit, then it stands still until the debt is paid. Measured there: cut from 24 to 4 MiB/s at a
random moment, a reader passed 7 to 15 MiB in the next 100 ms and then nothing for seconds, and any change in that time
let it loose again.

The debt falls evenly from a whole slice's budget to none at the slice's end. So a cut to a part p of a limit is clean
once 1 - p of the slice is over. Slices count from our last write as long as something waits; where nothing waits
nothing is carried over.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from cgroup.lines import IO_MAX, Line
from cgroup.plan import Write

SLICE_SECONDS = 0.1
"""DFL_THROTL_SLICE_HD; SSDs have the same unless the kernel has CONFIG_BLK_DEV_THROTTLING_LOW."""

MARGIN = 0.08
"""Part of a slice that the kernel's clock (jiffies, 1 to 10 ms) and the way to it may add."""

LATEST = 0.9
"""From this part of a slice on the next one may have begun before a write is through."""

DEEPEST = 0.78
"""The part at which a deep cut or a release is made: it goes down to a third at once, the rest follows."""

_ROUNDING = 1e-6
"""Of floating point: a write that is made exactly at its moment is not too early."""


def moment(write: Write) -> float:
    """Return the part of a slice (0..1) after which a write makes no burst; 0: it may be made at any time."""
    if write.verdict == "release":
        return DEEPEST if any(write.before.get(key) is not None for key in write.after) else 0.0
    parts = [_part(write.before.get(key), value) for key, value in write.after.items()]
    lowest = min(parts, default=1.0)
    return min(DEEPEST, 1.0 - lowest + MARGIN) if lowest < 1.0 else 0.0


def softened(write: Write, phase: float) -> Write:
    """Return the write with no number below what the part of the slice that is over allows."""
    least = max(0.0, 1.0 - phase + MARGIN)
    after = dict(write.after)
    for key, value in write.after.items():
        before = write.before.get(key)
        if before is not None and value is not None:
            after[key] = max(value, min(before, round(least * before)))
    return replace(write, after=after)


def _part(before: int | None, after: int | None) -> float:
    return 1.0 if before is None or after is None or after >= before else after / before


class Slices:
    """Knows when each line was last written, and keeps writes until their moment.

    `clock` in monotonic seconds; without one no write waits.
    """

    def __init__(self, clock: Callable[[], float] | None) -> None:
        self._clock = clock
        self._written: dict[Line, float] = {}
        self._kept: dict[Line, tuple[float, Write]] = {}

    @property
    def due(self) -> float | None:
        """When the next kept write may be made, or None."""
        return min((at for at, _ in self._kept.values()), default=None)

    def ready(self, writes: Sequence[Write]) -> list[Write]:
        """Return what to do now; writes that must wait come back as `rate_limited`, and later from `take_due`.

        What was kept before is forgotten: a new plan has come.
        """
        self._kept.clear()
        if self._clock is None:
            return list(writes)
        now = self._clock()
        return [self._look(write, now) for write in writes]

    def take_due(self) -> list[Write]:
        """Return the kept writes whose moment has come; each is kept no longer."""
        if self._clock is None:
            return []
        now = self._clock()
        due = [write for at, write in self._kept.values() if at <= now]
        for write in due:
            del self._kept[write.line]
        return [self._look(write, now) for write in due]

    def written(self, line: Line) -> None:
        """A line was written this moment: its slices begin anew."""
        if self._clock is not None and line.file == IO_MAX:
            self._written[line] = self._clock()

    def forget(self, line: Line) -> None:
        """A line is no longer ours."""
        self._written.pop(line, None)
        self._kept.pop(line, None)

    def _look(self, write: Write, now: float) -> Write:
        last = self._written.get(write.line)
        wanted = moment(write) if write.verdict in ("write", "release") else 0.0
        if last is None or wanted == 0.0:
            return write
        phase = max(0.0, now - last) / SLICE_SECONDS % 1.0
        if wanted - _ROUNDING <= phase <= LATEST:
            return softened(write, phase) if write.verdict == "write" else write
        wait = (wanted - phase) % 1.0 * SLICE_SECONDS
        self._kept[write.line] = (now + wait, write)
        return replace(write, after={}, verdict="rate_limited")
