"""Exponential smoothing by time constant, so that a changed tick does not change what a value means."""

from __future__ import annotations

from functools import lru_cache
from math import exp


@lru_cache(maxsize=256)
def gain(dt: float, time_constant: float) -> float:
    """Weight of a new value that stands for `dt` seconds: 1 - exp(-dt / time_constant); 1 when nothing is smoothed.

    All jobs of a pass ask for the same few, so they are remembered.
    """
    if time_constant <= 0.0:
        return 1.0
    return 1.0 - exp(-dt / time_constant)


def smooth(old: float | None, new: float | None, weight: float) -> float | None:
    """`old` moved towards `new` by `weight` (0..1); the first known value is taken as it is, an unknown one keeps."""
    if new is None:
        return old
    if old is None:
        return new
    return old + weight * (new - old)


def clip(value: float, low: float, high: float) -> float:
    """`value` held between `low` and `high`."""
    if value < low:
        return low
    if value > high:
        return high
    return value
