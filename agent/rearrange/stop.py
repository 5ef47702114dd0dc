"""When to read ahead for a job, and when to stop: it must pay, and nobody else may pay for it. Pure.

One `Judge` follows one job on one disk. It starts where the policy asks for it and the gate is open, compares window by
window what the job waits with what it waited before, and stops where that does not fall, where what was read ahead is
not used, or where another job on the disk waits longer than before. After a stop it stays away, longer each time.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from agent.types import JobId


class State(StrEnum):
    """What a judge has decided."""

    IDLE = "idle"
    RUNNING = "running"
    COOLING = "cooling"


class Stop(StrEnum):
    """Why reading ahead ended. The last three are no failures: the next start comes as soon as it is asked for."""

    NO_GAIN = "no_gain"
    UNUSED = "unused"
    HARM = "harm"
    NOTHING_TO_READ = "nothing_to_read"
    HELPER_LOST = "helper_lost"
    LOOP_IDLE = "loop_idle"
    CHECKED = "checked"
    MODE = "mode"


NO_FAILURES = frozenset({Stop.LOOP_IDLE, Stop.CHECKED, Stop.MODE})


@dataclass(frozen=True, slots=True)
class StopSettings:
    """Times in seconds. A window ends after `window_seconds` and `window_iterations`, whichever is later.

    `gain_ratio`: the wait must fall below this part of what it was, unless it is below `small_wait_seconds`.
    `hit_ratio`: of the bytes read ahead, what must be used; asked from `hit_bytes` on. Other jobs may wait up to
    `harm_ratio` times as long, plus `harm_seconds`. `bad_windows` in a row end it. A run ends after
    `longest_run_seconds` in any case, since only without it can be seen whether it is still needed.
    """

    window_seconds: float = 2.0
    window_iterations: int = 5
    bad_windows: int = 2
    gain_ratio: float = 0.8
    small_wait_seconds: float = 0.001
    hit_ratio: float = 0.7
    hit_bytes: int = 8 << 20
    harm_ratio: float = 1.1
    harm_seconds: float = 0.0005
    nothing_seconds: float = 4.0
    idle_seconds: float = 15.0
    longest_run_seconds: float = 600.0
    cool_down_seconds: float = 30.0
    longest_cool_down_seconds: float = 1800.0


@dataclass(frozen=True, slots=True)
class Disk:
    """The disk over the last passes: part of the time with work (0..1), mean requests waiting, mean request (bytes)."""

    busy: float
    queue: float
    request_bytes: float


@dataclass(frozen=True, slots=True)
class Reading:
    """Cumulative counts at one moment (monotonic seconds).

    `wait_seconds` is the loop's total, None where it cannot be seen; `read_bytes` and `missed_bytes` are the job's
    reads through the page cache, None without that probe; `ahead_bytes` what the helper brought into the cache for it,
    `used_bytes` and `unused_bytes` what it believes became of that. `others` maps each other job on the disk to
    (iterations, wait seconds).
    """

    time: float
    iterations: int
    wait_seconds: float | None
    ahead_bytes: int = 0
    used_bytes: int = 0
    unused_bytes: int = 0
    read_bytes: int | None = None
    missed_bytes: int | None = None
    others: Mapping[JobId, tuple[int, float]] = field(default_factory=dict)


def gate(disk: Disk | None) -> str:
    """Why reading ahead cannot help on this disk now, or "": with a full queue of large requests nothing is to gain."""
    if disk is None:
        return "the disk was not watched for long enough"
    if disk.busy <= 0.9:
        return f"the disk has work for {disk.busy:.0%} of the time only"
    if disk.queue >= 8.0 and disk.request_bytes >= 512 * 1024:
        return f"its queue is full ({disk.queue:.0f} requests of {disk.request_bytes / 1024:.0f} KiB)"
    return ""


@dataclass(slots=True)
class _Run:
    """One run: what was before it, where it and its present window began, when bytes and iterations last came."""

    before: Reading
    start: Reading
    window: Reading
    moved_at: float
    stepped_at: float
    bad: dict[Stop, int] = field(default_factory=dict)


class Judge:
    """One job on one disk. `hit_ratio` (0..1) and `gain_seconds` (per iteration) are of the last window."""

    def __init__(self, settings: StopSettings) -> None:
        self.settings = settings
        self.state = State.IDLE
        self.why = ""
        self.hit_ratio: float | None = None
        self.gain_seconds: float | None = None
        self._past: deque[Reading] = deque()
        self._run: _Run | None = None
        self._failures = 0
        self._until = 0.0

    def step(self, reading: Reading, *, asked: bool, gate_says: str) -> Stop | None:
        """Take in a reading; start or stop. Returns why it stopped, where it did just now."""
        last = self._past[-1] if self._past else reading
        self._past.append(reading)
        kept_seconds = self.settings.window_seconds * (4.0 if asked else 1.0)  # how it was before it starved is no base
        while len(self._past) > 2 and reading.time - self._past[1].time > kept_seconds:
            self._past.popleft()
        if self._run is not None:
            return self._watch(self._run, last, reading)
        if self.state is State.COOLING and reading.time >= self._until:
            self.state, self.why = State.IDLE, ""
        if self.state is State.IDLE:
            self.why = gate_says if asked else ""
            if asked and not gate_says and self._has_base(reading):
                self._begin(reading)
        return None

    def _has_base(self, reading: Reading) -> bool:
        """Whether enough was seen without reading ahead to compare with."""
        return reading.iterations - self._past[0].iterations >= self.settings.window_iterations

    def stop(self, cause: Stop, now: float) -> Stop:
        """End it, and stay away for a while where it failed."""
        self._failures = 0 if cause in NO_FAILURES else self._failures + 1
        pause = self.settings.cool_down_seconds * 2.0 ** min(self._failures - 1, 30)
        self._until = now + min(pause, self.settings.longest_cool_down_seconds) if self._failures else now
        self._run = None
        self._past.clear()
        self.state, self.why = State.COOLING, str(cause)
        return cause

    def _begin(self, reading: Reading) -> None:
        self._run = _Run(self._past[0], reading, reading, reading.time, reading.time)
        self.hit_ratio = self.gain_seconds = None
        self.state, self.why = State.RUNNING, "it starves and the disk's queue has room"

    def _watch(self, run: _Run, last: Reading, reading: Reading) -> Stop | None:
        if reading.ahead_bytes > last.ahead_bytes:
            run.moved_at = reading.time
        if reading.iterations > last.iterations:
            run.stepped_at = reading.time
        for cause, since, limit in (
            (Stop.LOOP_IDLE, run.stepped_at, self.settings.idle_seconds),
            (Stop.NOTHING_TO_READ, run.moved_at, self.settings.nothing_seconds),
            (Stop.CHECKED, run.start.time, self.settings.longest_run_seconds),
        ):
            if reading.time - since >= limit:
                return self.stop(cause, reading.time)
        window = run.window
        if (
            reading.time - window.time < self.settings.window_seconds
            or reading.iterations - window.iterations < self.settings.window_iterations
        ):
            return None
        run.window = reading
        return self._judge(run, window, reading)

    def _judge(self, run: _Run, window: Reading, reading: Reading) -> Stop | None:
        """Look at one window; a cause that shows in enough of them in a row ends it."""
        before, now = wait_between(run.before, run.start), wait_between(window, reading)
        self.gain_seconds = None if before is None or now is None else before - now
        hits = hit_ratio(window, reading, _own_hits(run.before, run.start))
        moved = reading.ahead_bytes - window.ahead_bytes
        self.hit_ratio = self.hit_ratio if hits is None else hits
        found = {
            Stop.NO_GAIN: self._pays_not(before, now),
            Stop.UNUSED: hits is not None and moved >= self.settings.hit_bytes and hits < self.settings.hit_ratio,
            Stop.HARM: harms(self.settings, (run.before, run.start), (window, reading)),
        }
        for cause, is_bad in found.items():
            run.bad[cause] = run.bad.get(cause, 0) + 1 if is_bad else 0
            if run.bad[cause] >= self.settings.bad_windows:
                return self.stop(cause, reading.time)
        return None

    def _pays_not(self, before: float | None, now: float | None) -> bool:
        """A wait that is not seen is no gain."""
        if before is None or now is None:
            return True
        return now > max(self.settings.gain_ratio * before, self.settings.small_wait_seconds)


def harms(settings: StopSettings, before: tuple[Reading, Reading], now: tuple[Reading, Reading]) -> bool:
    """Whether any other job waits longer per iteration between the later two readings than between the first two."""
    for job in now[1].others:
        was, waits = _wait_of(job, *before), _wait_of(job, *now)
        if was is None or waits is None:
            continue
        if waits > settings.harm_ratio * was + settings.harm_seconds:
            return True
    return False


def wait_between(first: Reading, last: Reading) -> float | None:
    """Wait per iteration between two readings, seconds."""
    if first.wait_seconds is None or last.wait_seconds is None or last.iterations <= first.iterations:
        return None
    return (last.wait_seconds - first.wait_seconds) / (last.iterations - first.iterations)


def _wait_of(job: JobId, first: Reading, last: Reading) -> float | None:
    if job not in first.others or job not in last.others:
        return None
    (iterations, waited), (later, waited_later) = first.others[job], last.others[job]
    return (waited_later - waited) / (later - iterations) if later > iterations else None


def _own_hits(first: Reading, last: Reading) -> float:
    """What part of its reads the job found in the cache without help (0..1); 0 where unknown."""
    if first.read_bytes is None or last.read_bytes is None or first.missed_bytes is None or last.missed_bytes is None:
        return 0.0
    read = last.read_bytes - first.read_bytes
    return min(1.0, max(0.0, 1.0 - (last.missed_bytes - first.missed_bytes) / read)) if read > 0 else 0.0


def hit_ratio(first: Reading, last: Reading, own_hits: float) -> float | None:
    """Of the bytes read ahead between two readings, what the job used (0..1); None where nothing was.

    With the page-cache probe: what the job found in the cache beyond its own hits. Without it, what the helper saw.
    """
    ahead = last.ahead_bytes - first.ahead_bytes
    if ahead <= 0:
        return None
    if first.read_bytes is None or last.read_bytes is None or first.missed_bytes is None or last.missed_bytes is None:
        used, unused = last.used_bytes - first.used_bytes, last.unused_bytes - first.unused_bytes
        return used / (used + unused) if used + unused > 0 else None
    read = last.read_bytes - first.read_bytes
    missed = min(read, last.missed_bytes - first.missed_bytes)
    return min(1.0, max(0.0, (read * (1.0 - own_hits) - missed) / ahead))
