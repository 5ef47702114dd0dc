"""The normal latency of a job on a device, learned so that a slow start does not become the norm."""

from __future__ import annotations

from typing import NamedTuple

from agent.smoothing import clip, gain
from agent.types import make

DOWN_SECONDS = 2.0
"""Time constant towards lower latency: what was seen once is possible."""

UP_SECONDS = (3.0, 60.0)
"""Time constants towards higher latency, young and old: quick while little is known, then slow."""

SPIKE = 3.0
"""A rise counts for at most this many times the reference, so that one bad second teaches little."""


class Reference(NamedTuple):
    """The learned latency in seconds and for how many seconds it has been learned while the job was fed."""

    seconds: float
    fed_seconds: float = 0.0


def learn(old: Reference | None, latency: float, normal: float, dt: float, may_rise: bool) -> Reference:
    """The reference after `dt` seconds at `latency`; it begins no higher than `normal` (what the medium does).

    It falls fast and at any time; it rises only while `may_rise` (the job is fed and past its cold start).
    """
    if old is None:
        return Reference(min(latency, normal))
    if latency <= old.seconds:
        return make(Reference, (old.seconds + gain(dt, DOWN_SECONDS) * (latency - old.seconds), old.fed_seconds))
    if not may_rise:
        return old
    pace = clip(old.fed_seconds, *UP_SECONDS)
    rise = min(latency, SPIKE * old.seconds) - old.seconds
    return make(Reference, (old.seconds + gain(dt, pace) * rise, old.fed_seconds + dt))
