"""Finds cgroups whose requests stay queued behind a cap. Pure.

blk-throttle has been seen to leave the requests of a capped cgroup queued for more than 8 s after its work had ended.
The sign: tasks wait for IO all the time while not one request is passed on. Raising the limit passes on what is queued
within 5 to 20 ms, so the cure is to give the line back once; the next reconcile caps it anew.
"""

from __future__ import annotations

from dataclasses import dataclass

from cgroup.lines import Limit

GREATEST_BIO_BYTES = 1 << 20
"""The kernel splits requests to at most this size before it throttles them (BIO_MAX_VECS pages)."""


@dataclass(frozen=True, slots=True)
class Progress:
    """What a capped cgroup has done: requests passed on (io.stat) and microseconds that tasks waited (io.pressure)."""

    requests: int
    waited_us: int


@dataclass(frozen=True, slots=True)
class StallState:
    """Since when (monotonic seconds) no request was passed on, and what stood there then."""

    progress: Progress
    since: float


def patience_seconds(limit: Limit, least: float = 5.0) -> float:
    """Return how long the slowest request may rightly take under a limit, twice over, but at least `least`."""
    slowest = [GREATEST_BIO_BYTES / rate for rate in (limit.rbps, limit.wbps) if rate]
    slowest += [1 / rate for rate in (limit.riops, limit.wiops) if rate]
    return max([least, *(2 * seconds for seconds in slowest)])


def watch_stall(state: StallState | None, now_is: Progress, now: float, patience: float) -> tuple[StallState, bool]:
    """Return the next state and whether the cgroup is stuck; after a finding the watch starts anew.

    Stuck: no request was passed on for `patience` seconds, in which tasks waited for more than half of the time.
    """
    if state is None or now_is.requests != state.progress.requests or now < state.since:
        return StallState(now_is, now), False
    if now - state.since < patience:
        return state, False
    waited_seconds = (now_is.waited_us - state.progress.waited_us) / 1e6
    return StallState(now_is, now), waited_seconds > (now - state.since) / 2
