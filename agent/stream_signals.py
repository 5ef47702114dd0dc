"""What the loaders of one job did between two samples: iterations, waits, starvation episodes, queue depth.

A starvation episode begins when the loop finds the queue empty and waits at least the threshold; starving iterations
that follow one another belong to the same episode (design, section 2). The job's tick is that of its slowest training
stream: it advances when every live training stream has. Validation loaders never start the clock.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from agent.job_sample import SignalSettings
from agent.smoothing import gain
from agent.types import make
from bpf.samples import IterationEvent, StreamCounters

NS = 1e-9

IDLE_ITERATIONS = 20.0
"""A stream silent for this many of its usual iterations (and the resume time) has paused: it stops no clock."""

OUTLIER = 3.0
"""An interval counts for at most this many usual ones: a checkpoint or a validation run is no new pace."""

MAX_PENDING = 1_000
"""Iterations that a fast stream may be ahead of the slowest one before the difference is forgotten."""


class StreamState(NamedTuple):
    """One stream so far. Times in seconds (smoothed over iterations), moments in ns; None is unknown.

    `pending` counts iterations that the job's clock has not taken yet; `starving` says whether the last iteration (or
    the wait in progress) starved; `left` is what the loop could take without waiting after the last iteration.
    """

    iterations: int
    last_ns: int
    left: int | None
    largest: int
    interval: float | None
    compute: float | None
    wait: float | None
    starving: bool
    pending: int


class Step(NamedTuple):
    """What one stream added since the last sample; `resumed` after a long pause outside the loader."""

    state: StreamState
    wait_seconds: float | None
    episodes: int
    resumed: bool


_NO_STREAMS: Mapping[str, StreamState] = {}


class LoaderState(NamedTuple):
    """All training streams of a job, and its cumulative counts."""

    streams: Mapping[str, StreamState] = _NO_STREAMS
    iterations: int = 0
    start_mark: int = 0
    wait_total: float | None = None
    episodes: int = 0
    timer_ns: int | None = None
    source: str = "timer"


class LoaderSignals(NamedTuple):
    """One job's loaders between two samples; fields as in `agent.types.Signals`. `fed` is False while starving."""

    source: str
    new_iterations: int
    iteration_seconds: float | None
    compute_seconds: float | None
    wait_seconds: float | None
    blocked_seconds: float
    queue_depth: float | None
    queue_capacity: float | None
    queue_takeable: float | None
    hinted_bytes: float | None
    queued_batches: float | None
    fed: bool
    started: bool


def training_streams(streams: Sequence[StreamCounters]) -> list[StreamCounters]:
    """The loaders that start the clock; where a job gives hints, they count instead of what was inferred."""
    training = [stream for stream in streams if not stream.validation]
    if len(training) < 2:
        return training
    hints = [stream for stream in training if stream.source == "hint"]
    return hints or training


def _takeable(counted: StreamCounters | IterationEvent) -> int | None:
    """Batches that the loop could take without waiting; where only the depth was written down, that is the best guess.

    Whether the queue is empty for the loop is asked of this: a loader that delivers in order makes it wait for the next
    batch with any number of later ones ready.
    """
    return counted.depth if counted.takeable is None else counted.takeable


def _starves(event: IterationEvent, grade: str, left: int | None, threshold_ns: float) -> bool:
    """Whether this iteration found the queue empty and waited.

    Grades other than S1 time all of next(), so a queue that held the next batch after the previous iteration (what the
    loop can take has only grown since) proves that nothing was missing.
    """
    if event.wait_ns is None or event.wait_ns < threshold_ns:
        return False
    return grade == "S1" or left is None or left <= 0


def _interval_limited(interval: float, usual: float | None) -> float:
    return interval if usual is None else min(interval, OUTLIER * usual)


def _take_event(
    state: StreamState, event: IterationEvent, grade: str, settings: SignalSettings
) -> tuple[StreamState, bool]:
    """One iteration: the new state, and whether it began an episode.

    Each iteration counts alike in the averages, however long it took, as in a mean per iteration: weighed by their own
    length, the longest would make most of it.
    """
    interval, compute, wait = state.interval, state.compute, state.wait
    waited = None if event.wait_ns is None else event.wait_ns * NS
    if event.time_ns > state.last_ns > 0:
        took = (event.time_ns - state.last_ns) * NS
        counted = _interval_limited(took, interval)
        weight = gain(counted if interval is None else interval, settings.iteration_smoothing_seconds)
        interval = counted if interval is None else interval + weight * (counted - interval)
        if waited is not None:
            busy = _interval_limited(max(took - waited, 0.0), compute)
            compute = busy if compute is None else compute + weight * (busy - compute)
            wait = waited if wait is None else wait + weight * (waited - wait)
    starving = _starves(event, grade, state.left, settings.starvation_seconds / NS)
    moved = make(
        StreamState,
        (
            state.iterations,
            event.time_ns,
            _takeable(event),
            max(state.largest, event.depth or 0),
            interval,
            compute,
            wait,
            starving,
            state.pending,
        ),
    )
    return moved, starving and not state.starving


def _first_sight(stream: StreamCounters) -> StreamState:
    """Before the events that this sample brings along."""
    return StreamState(
        stream.iterations - min(stream.iterations, len(stream.recent)),
        last_ns=0,
        left=None,
        largest=0,
        interval=None,
        compute=None,
        wait=None,
        starving=False,
        pending=0,
    )


def _events(stream: StreamCounters, old: StreamState, missed: int) -> Sequence[IterationEvent]:
    """The iterations since the last sample; one that stands for all where the source counts without events."""
    if stream.recent or missed <= 0:
        return [event for event in stream.recent if event.time_ns > old.last_ns]
    return [IterationEvent(stream.last_iteration_ns, None, stream.depth, stream.takeable)]


def advance(stream: StreamCounters, old: StreamState | None, settings: SignalSettings, now_ns: int) -> Step:
    """One stream from its last state to this sample."""
    if old is None or stream.iterations < old.iterations:
        old = _first_sight(stream)
    new = stream.iterations - old.iterations
    if _unchanged(stream, old):
        return make(Step, (old, None, 0, False))
    state, episodes, waited, resumed = old, 0, None, False
    for event in _events(stream, old, new):
        resumed = resumed or _paused(state, event.time_ns, event.wait_ns or 0, settings)
        state, began = _take_event(state, event, stream.grade, settings)
        episodes += began
        if event.wait_ns is not None:
            waited = (waited or 0.0) + event.wait_ns * NS
    starving = state.starving
    if stream.waiting_since_ns is not None and not starving:
        starving = (now_ns - stream.waiting_since_ns) * NS >= settings.starvation_seconds
        episodes += starving
    pending = min(old.pending + new, MAX_PENDING)
    moved = make(
        StreamState,
        (
            stream.iterations,
            max(state.last_ns, stream.last_iteration_ns),
            state.left,
            max(state.largest, stream.depth or 0),
            state.interval,
            state.compute,
            state.wait,
            starving,
            pending,
        ),
    )
    return Step(moved, waited, episodes, resumed)


def _unchanged(stream: StreamCounters, old: StreamState) -> bool:
    """Whether the loop has done nothing since: most passes come amid an iteration."""
    return (
        stream.iterations == old.iterations
        and stream.waiting_since_ns is None
        and not stream.recent
        and stream.last_iteration_ns <= old.last_ns
        and (stream.depth or 0) <= old.largest
    )


def _paused(state: StreamState, time_ns: int, wait_ns: int, settings: SignalSettings) -> bool:
    """Whether the loop was away (not waiting) for so long before this moment that it resumes rather than goes on."""
    if state.last_ns <= 0 or state.interval is None:
        return False
    away = (time_ns - state.last_ns - wait_ns) * NS
    return away > max(settings.resume_seconds, IDLE_ITERATIONS * state.interval)


def _blocked(stream: StreamCounters, state: StreamState, now_ns: int, reading: bool) -> float:
    """Seconds that the loop has stood before an empty queue; for hints inferred from an overdue iteration.

    A hint only speaks at each iteration, so silence past half an interval more than usual, after an iteration that
    left the queue empty, while the job reads, is a wait. Without reads it is something else (a checkpoint).
    """
    if stream.waiting_since_ns is not None:
        return max(0.0, (now_ns - stream.waiting_since_ns) * NS)
    if stream.source != "hint" or _takeable(stream) != 0 or state.interval is None or not reading:
        return 0.0
    silent = (now_ns - state.last_ns) * NS
    if silent <= 1.5 * state.interval:
        return 0.0
    return silent - min(state.interval if state.compute is None else state.compute, state.interval)


def derive_loaders(
    streams: Sequence[StreamCounters], old: LoaderState, settings: SignalSettings, now_ns: int, reading: bool
) -> tuple[LoaderState, LoaderSignals]:
    """The job's clock and queue at `now_ns`; a timer stands in while no training stream is visible."""
    training = training_streams(streams)
    if not training:
        return _by_timer(old, settings, now_ns)
    if old.source != training[0].source:  # both call a loop alike, and each has a count of its own
        old = old._replace(streams=_NO_STREAMS)
    steps: dict[str, Step] = {}
    fresh, live = True, []
    for stream in training:
        before = old.streams.get(stream.stream)
        step = steps[stream.stream] = advance(stream, before, settings, now_ns)
        fresh = fresh and (before is None or stream.iterations < before.iterations)
        if not _idle(stream, step.state, settings, now_ns):
            live.append(stream)
    live = live or training
    started, new = fresh, MAX_PENDING
    for stream in live:
        step = steps[stream.stream]
        started = started or step.resumed
        new = min(new, step.state.pending)
    state = _account(old, steps, new, now_ns, training[0].source)
    if started:
        seen = min(stream.iterations for stream in training) if fresh else 0
        state = state._replace(start_mark=state.iterations - seen)
    return state, _summary(live, state.streams, now_ns, new, reading=reading, started=started)


def _account(old: LoaderState, steps: Mapping[str, Step], new: int, now_ns: int, source: str) -> LoaderState:
    """The cumulative counts after these steps: the job waits as long as the stream that waits longest."""
    waited: float | None = None
    episodes, states = old.episodes, {}
    for name, step in steps.items():
        episodes += step.episodes
        if step.wait_seconds is not None:
            waited = step.wait_seconds if waited is None else max(waited, step.wait_seconds)
        state = step.state
        if new:
            *same, pending = state
            state = make(StreamState, (*same, max(0, pending - new)))
        states[name] = state
    total = old.wait_total if waited is None else (old.wait_total or 0.0) + waited
    return make(LoaderState, (states, old.iterations + new, old.start_mark, total, episodes, now_ns, source))


def _idle(stream: StreamCounters, state: StreamState, settings: SignalSettings, now_ns: int) -> bool:
    if stream.waiting_since_ns is not None or state.interval is None:
        return False
    return _paused(state, now_ns, 0, settings)


def _summary(
    live: Sequence[StreamCounters],
    states: Mapping[str, StreamState],
    now_ns: int,
    new: int,
    *,
    reading: bool,
    started: bool,
) -> LoaderSignals:
    """The job as its slowest stream: the one that waits most, then the one with the longest interval."""
    own = [states[stream.stream] for stream in live]
    slowest = own[0] if len(own) == 1 else max(own, key=lambda s: (s.wait or 0.0, s.interval or 0.0))
    depth, capacity, takeable = _scarcest(live, states)
    blocked, starving = 0.0, False
    hints: list[int] = []
    depths: list[int] = []  # produced, in order or not: bytes are read
    for stream, state in zip(live, own, strict=True):
        stood = _blocked(stream, state, now_ns, reading)
        blocked = max(blocked, stood)
        starving = starving or state.starving
        if stream.next_batch_bytes is not None:
            hints.append(stream.next_batch_bytes)
        if stream.depth is not None:
            depths.append(stream.depth)
    return make(
        LoaderSignals,
        (
            live[0].source,
            new,
            slowest.interval,
            slowest.compute,
            slowest.wait,
            blocked,
            depth,
            capacity,
            takeable,
            float(sum(hints)) if hints else None,
            sum(depths) / len(depths) if len(depths) == len(live) else None,
            not starving,
            started,
        ),
    )


def _scarcest(
    live: Sequence[StreamCounters], states: Mapping[str, StreamState]
) -> tuple[float | None, float | None, float | None]:
    """(depth, capacity) of the stream with the smallest fraction of its queue; what can be taken of such a queue.

    The last goes by the stream whose loop can take the smallest fraction: where batches come in order, the rank that
    waits need not be the one with the fewest ready. Capacity unknown: the largest depth seen.
    """
    best: tuple[float, float, float] | None = None
    unsized: float | None = None
    takeable = 1.0
    for stream in live:
        if stream.depth is None:
            continue
        size = stream.capacity or states[stream.stream].largest
        depth = float(stream.depth)
        if size <= 0:
            unsized = depth
            continue
        takeable = min(takeable, float(_takeable(stream) or 0) / size)
        if best is None or depth / size < best[0]:
            best = (depth / size, depth, float(size))
    if best is None:
        return unsized, None, unsized
    return best[1], best[2], takeable * best[2]


def _by_timer(old: LoaderState, settings: SignalSettings, now_ns: int) -> tuple[LoaderState, LoaderSignals]:
    """One iteration each `timer_seconds`; nothing is known of waits and queue."""
    period_ns = int(settings.timer_seconds / NS)
    since = now_ns if old.timer_ns is None or old.source != "timer" else old.timer_ns
    new = (now_ns - since) // period_ns
    state = LoaderState(
        {}, old.iterations + new, old.start_mark, old.wait_total, old.episodes, since + new * period_ns, "timer"
    )
    signals = LoaderSignals(
        "timer",
        new,
        settings.timer_seconds,
        compute_seconds=None,
        wait_seconds=None,
        blocked_seconds=0.0,
        queue_depth=None,
        queue_capacity=None,
        queue_takeable=None,
        hinted_bytes=None,
        queued_batches=None,
        fed=True,
        started=old.timer_ns is None,
    )
    return state, signals
