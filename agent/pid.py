"""One PID controller step (paper, section 3): pure, one state per (job, device).

The error is target minus score in points (0..100), the output a relative change of the current quota. The derivative
acts on the measurement: the target is constant, so the change of the error is minus the change of the score.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from agent.smoothing import clip, gain
from agent.types import Medium, PidTerms, make

TARGET_SCORE = 75.0
"""The score the controller steers to (paper, section 3)."""

DEAD_ZONE = 5.0
"""Errors smaller than this many points cause no output and leave the integrator as it is (paper, section 3)."""

OUTPUT_LIMIT = 0.20
"""Largest relative change of a quota in one step (paper, section 3)."""

RESTART_SECONDS = 30.0
"""After a gap this long the past says nothing: the step starts without derivative and with an empty integrator."""


SHORTEST_SECONDS = 0.001
"""Steps closer than this do not move the derivative: a difference over no time is noise."""


@dataclass(frozen=True, slots=True)
class PidGains:
    """Relative change of the quota per point of error (kp), per point and second (ki), per point per second (kd).

    `filter_seconds` is the time constant of the low-pass filter on the derivative.
    """

    kp: float
    ki: float
    kd: float
    filter_seconds: float = 0.5


GAINS_BY_MEDIUM: Mapping[Medium, PidGains] = {
    Medium.SSD: PidGains(kp=0.005, ki=0.0002, kd=0.004, filter_seconds=0.3),
    Medium.HDD: PidGains(kp=0.004, ki=0.0006, kd=0.001, filter_seconds=1.0),
    Medium.REMOTE: PidGains(kp=0.004, ki=0.0004, kd=0.002, filter_seconds=0.6),
}
"""SSD: low integral, high derivative gain, to follow bursts; HDD the reverse tendency (paper, section 4)."""


class PidState(NamedTuple):
    """`integral` in relative quota (already times ki), `error` the last one seen, `slope` its filtered points/s."""

    integral: float = 0.0
    error: float | None = None
    slope: float = 0.0


def restart(state: PidState) -> PidState:
    """Start again without a bump: what was integrated stays, the old slope does not."""
    return PidState(integral=state.integral)


def pid_step(gains: PidGains, state: PidState, error: float, dt: float) -> tuple[PidState, PidTerms]:
    """One step after `dt` seconds; output within ±`OUTPUT_LIMIT`, 0 inside the dead zone.

    Anti-windup: the integrator takes only what does not push a saturated output further, and never holds more than
    the output limit. Raises ValueError when `dt` is negative.
    """
    if dt < 0.0:
        raise ValueError(f"dt of {dt} s is negative; pass the seconds since the last step of this controller")
    if dt > RESTART_SECONDS:
        state = PidState()
    slope, seen = _slope(gains, state, error, dt)
    if abs(error) < DEAD_ZONE:
        return make(PidState, (state.integral, seen, slope)), make(PidTerms, (error, 0.0, state.integral, 0.0, 0.0))
    proportional, derivative = gains.kp * error, gains.kd * slope
    integral = clip(state.integral + gains.ki * error * dt, -OUTPUT_LIMIT, OUTPUT_LIMIT)
    raw = proportional + integral + derivative
    if not -OUTPUT_LIMIT <= raw <= OUTPUT_LIMIT:
        if raw * error > 0.0:
            integral = state.integral
            raw = proportional + integral + derivative
        raw = clip(raw, -OUTPUT_LIMIT, OUTPUT_LIMIT)
    terms = make(PidTerms, (error, proportional, integral, derivative, raw))
    return make(PidState, (integral, seen, slope)), terms


def _slope(gains: PidGains, state: PidState, error: float, dt: float) -> tuple[float, float]:
    """(filtered change of the error in points/s, the error it was seen at).

    0 on the first step; two steps closer than `SHORTEST_SECONDS` say nothing of a slope and wait for the next one.
    """
    if state.error is None:
        return 0.0, error
    if dt < SHORTEST_SECONDS:
        return state.slope, state.error
    raw = (error - state.error) / dt
    return state.slope + gain(dt, gains.filter_seconds) * (raw - state.slope), error
