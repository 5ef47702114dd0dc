"""When to make a job's files contiguous, and when to stop: it must pay, and nobody else may pay for it. Pure.

Moving a file costs the disk twice its size, once; what it gains is there in every iteration from then on, in the
measure in which the job reads what was moved. So a run is judged by what was moved: at every `check_bytes`, and at the
end.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from enum import StrEnum

from agent.rearrange.defragment import Mend
from agent.rearrange.stop import Reading, StopSettings, harms, wait_between

MIB = 1 << 20


class MoveStop(StrEnum):
    """Why moving a job's files ended. After the first two it may go on as soon as it is asked for."""

    DONE = "done"
    MODE = "mode"
    NO_GAIN = "no_gain"
    HARM = "harm"
    NOTHING_TO_MOVE = "nothing_to_move"
    HELPER_LOST = "helper_lost"


NO_FAILURES = frozenset({MoveStop.DONE, MoveStop.MODE})


@dataclass(frozen=True, slots=True)
class PaySettings:
    """Times in seconds.

    `gain_ratio`: what must come true of the gain that the moved part of the fragmented bytes lets expect, looked at
    every `check_bytes`. A run ends `quiet_seconds` after the last file was moved or found while none is
    under way, and `patience_seconds` after the policy has last asked for it; before a run, `flicker_seconds` without
    being asked begin its base anew.
    """

    stop: StopSettings
    gain_ratio: float = 0.1
    check_bytes: int = 64 * MIB
    quiet_seconds: float = 20.0
    patience_seconds: float = 10.0
    flicker_seconds: float = 3.0


@dataclass(slots=True)
class _Run:
    """One run: the two readings before it, its present window, what had been moved at its start and last check."""

    before: tuple[Reading, Reading]
    window: Reading
    start_bytes: int
    checked_bytes: int
    changed_at: float
    asked_at: float
    last: Mend
    bad_windows: int = 0
    bad_checks: int = 0


class MoveJudge:
    """One job on one disk. `gain_seconds` is what it waits less per iteration than before, as of the last window."""

    def __init__(self, settings: PaySettings) -> None:
        self.settings = settings
        self.why = ""
        self.gain_seconds: float | None = None
        self._past: deque[Reading] = deque()
        self._run: _Run | None = None
        self._failures = 0
        self._until = self._asked_at = 0.0

    @property
    def is_running(self) -> bool:
        """Whether its files may be moved now."""
        return self._run is not None

    def step(self, reading: Reading, mend: Mend, *, asked: bool) -> MoveStop | None:
        """Take in a reading and what was moved so far; start or stop. Returns why it stopped, where it did just now."""
        if self._run is not None:
            return self._watch(self._run, reading, mend, asked=asked)
        if asked:
            self._asked_at = reading.time
        elif reading.time - self._asked_at >= self.settings.flicker_seconds:
            self._past.clear()  # how it was before it starved is no base
        self._past.append(reading)
        while len(self._past) > 2 and reading.time - self._past[1].time > 4.0 * self.settings.stop.window_seconds:
            self._past.popleft()
        if asked and reading.time >= self._until and self._is_window_over(self._past[0], reading):
            before = (self._past[0], reading)
            self._run = _Run(before, reading, mend.bytes, mend.bytes, reading.time, reading.time, mend)
            self.why, self.gain_seconds = "it starves", None
        return None

    def stop(self, cause: MoveStop, now: float) -> MoveStop:
        """End it, and stay away for a while where it failed."""
        self._failures = 0 if cause in NO_FAILURES else self._failures + 1
        pause = self.settings.stop.cool_down_seconds * 2.0 ** min(self._failures - 1, 30)
        self._until = now + min(pause, self.settings.stop.longest_cool_down_seconds) if self._failures else now
        self._run = None
        self._past.clear()
        self.why = str(cause)
        return cause

    def _watch(self, run: _Run, reading: Reading, mend: Mend, *, asked: bool) -> MoveStop | None:
        if asked:
            run.asked_at = reading.time
        if mend != run.last or mend.is_moving:
            run.last, run.changed_at = mend, reading.time
        if self._is_window_over(run.window, reading):
            cause = self._judge(run, reading, mend)
            if cause is not None:
                return self.stop(cause, reading.time)
        moved = mend.bytes - run.start_bytes
        if reading.time - run.changed_at >= self.settings.quiet_seconds:
            return self.stop(MoveStop.DONE if moved and not mend.left_files else MoveStop.NOTHING_TO_MOVE, reading.time)
        if reading.time - run.asked_at >= self.settings.patience_seconds:
            return self.stop(MoveStop.DONE, reading.time)
        return None

    def _is_window_over(self, first: Reading, last: Reading) -> bool:
        """Whether enough lies between two readings to judge by."""
        return (
            last.time - first.time >= self.settings.stop.window_seconds
            and last.iterations - first.iterations >= self.settings.stop.window_iterations
        )

    def _judge(self, run: _Run, reading: Reading, mend: Mend) -> MoveStop | None:
        window, run.window = run.window, reading
        before, now = wait_between(*run.before), wait_between(window, reading)
        self.gain_seconds = None if before is None or now is None else before - now
        is_bad = harms(self.settings.stop, run.before, (window, reading))
        run.bad_windows = run.bad_windows + 1 if is_bad else 0
        if run.bad_windows >= self.settings.stop.bad_windows:
            return MoveStop.HARM
        fresh = mend.bytes - run.checked_bytes
        if not fresh or (fresh < self.settings.check_bytes and mend.left_files):
            return None
        run.checked_bytes = mend.bytes
        run.bad_checks = 0 if self._pays(before, mend, run) else run.bad_checks + 1
        return MoveStop.NO_GAIN if run.bad_checks >= self.settings.stop.bad_windows else None

    def _pays(self, before: float | None, mend: Mend, run: _Run) -> bool:
        """Whether the gain is in proportion to what was moved. A wait that is not seen is no gain."""
        if before is None or self.gain_seconds is None:
            return False
        moved = mend.bytes - run.start_bytes
        return self.gain_seconds >= self.settings.gain_ratio * before * moved / max(1, moved + mend.left_bytes)
