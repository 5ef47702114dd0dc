"""The prefetch health score, 0..100 (paper, section 3): four metrics, smoothed, mapped to 0..100, weighted.

| part | metric | 100 at | 0 at |
|---|---|---|---|
| queue | batches that the loop can take without waiting / capacity | `full_fraction` of the queue | empty |
| latency | mean latency / learned normal, by access share | the normal | `latency_limit` times the normal |
| variation | coefficient of variation of the latency | 0 | `variation_limit` |
| demand | bytes that can arrive during one computation / bytes of the next batch | see `_demand_ratio` | 0 |

A metric that cannot be measured is unknown, never 0: the other weights are renormalised and the confidence, the
weight of what is known, falls. Latency leaves the wait in blk-throttle out: a job does not look sick for its own cap.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from agent.smoothing import clip, gain, smooth
from agent.types import DeviceSignals, Health, Level, Signals, make

BLOCKED_SCORE = 30.0
"""A job that stands before an empty queue scores no more than this, whatever its storage looks like."""


@dataclass(frozen=True, slots=True)
class HealthSettings:
    """Weights of the parts (they sum to 1) and the ends of their scales; times in seconds.

    `floor_latency_seconds`: latency below it is good even where the learned normal is lower still.
    `margin`: a quota must exceed the need by this factor for a full demand part (policy prototype: 1.2).
    """

    queue_weight: float = 0.45
    latency_weight: float = 0.20
    variation_weight: float = 0.10
    demand_weight: float = 0.25
    smoothing_seconds: float = 0.3
    full_fraction: float = 0.75
    latency_limit: float = 5.0
    floor_latency_seconds: float = 0.0005
    variation_limit: float = 2.0
    margin: float = 1.2
    blocked_seconds: float = 0.010
    neutral_score: float = 75.0

    def __post_init__(self) -> None:
        """Raise ValueError unless the weights sum to 1."""
        total = self.queue_weight + self.latency_weight + self.variation_weight + self.demand_weight
        if abs(total - 1.0) > 1e-6:
            raise ValueError(f"health weights sum to {total:g}; make queue, latency, variation and demand sum to 1")


class HealthState(NamedTuple):
    """The smoothed metrics: fraction of the queue, and the ratio of supply to the next batch.

    `stood`: the job was seen standing before an empty queue.
    """

    queue_fraction: float | None = None
    demand_ratio: float | None = None
    stood: bool = False


def level(score: float) -> Level:
    """The level of a score: healthy >= 60 > tight >= 40 > danger >= 20 > critical (paper, section 3)."""
    if score >= 60.0:
        return Level.HEALTHY
    if score >= 40.0:
        return Level.TIGHT
    return Level.DANGER if score >= 20.0 else Level.CRITICAL


def score(
    signals: Signals,
    state: HealthState | None,
    settings: HealthSettings,
    entitlement_bytes_per_second: Mapping[str, float] | None,
) -> tuple[HealthState, Health]:
    """The health of a job after `signals.dt` seconds.

    `state` is None at the start; `entitlement_bytes_per_second` is by device, None when the job is uncapped.

    With nothing known the score is the controller's target (it then does nothing) and the confidence 0.
    """
    state = state or HealthState()
    stood = state.stood or signals.blocked_seconds > 0.0
    weight = gain(signals.dt, settings.smoothing_seconds)
    fraction = state.queue_fraction
    if fraction is not None or stood or not _not_filled_yet(signals):
        fraction = smooth(fraction, _queue_fraction(signals, settings), weight)
    ratio = smooth(state.demand_ratio, _demand_ratio(signals, settings, entitlement_bytes_per_second), weight)
    parts = {
        "queue": None if fraction is None else 100.0 * fraction,
        "latency": _latency_part(signals.devices, settings),
        "variation": _variation_part(signals.devices, settings),
        "demand": None if ratio is None else 100.0 * ratio,
    }
    weights = (settings.queue_weight, settings.latency_weight, settings.variation_weight, settings.demand_weight)
    total = known = 0.0
    for part, share in zip(parts.values(), weights, strict=True):
        if part is not None:
            total += share * part
            known += share
    value = total / known if known > 0.0 else settings.neutral_score
    if signals.blocked_seconds:
        value = min(value, _blocked_limit(signals.blocked_seconds, settings))
    value = clip(value, 0.0, 100.0)
    return make(HealthState, (fraction, ratio, stood)), make(Health, (value, level(value), parts, min(1.0, known)))


def _blocked_limit(blocked_seconds: float, settings: HealthSettings) -> float:
    """100 while not blocked, falling to `BLOCKED_SCORE` once the wait counts as starvation."""
    if settings.blocked_seconds <= 0.0:
        return BLOCKED_SCORE if blocked_seconds > 0.0 else 100.0
    return 100.0 - (100.0 - BLOCKED_SCORE) * min(1.0, blocked_seconds / settings.blocked_seconds)


def _not_filled_yet(signals: Signals) -> bool:
    """Whether the queue is empty only because the job has just begun: it says nothing before the second batch is due.

    Asked where nothing is known of the queue so far and the job was not seen standing before it, which is short.
    """
    return signals.iterations_since_start <= 1 and not signals.queue_takeable


def _queue_fraction(signals: Signals, settings: HealthSettings) -> float | None:
    """0..1: filled part of the queue, 1 from `full_fraction` on.

    Filled means for the loop: of batches that are to come in order, those behind a missing one feed nobody yet. Where
    it cannot be seen, the part of an iteration not spent waiting stands in: 1 without waits, 0 when half of the time
    is lost.
    """
    if signals.queue_takeable is not None and signals.queue_capacity:
        return clip(signals.queue_takeable / (settings.full_fraction * signals.queue_capacity), 0.0, 1.0)
    if signals.wait_seconds is not None and signals.iteration_seconds:
        return clip(1.0 - 2.0 * signals.wait_seconds / signals.iteration_seconds, 0.0, 1.0)
    return None


def _latency_part(devices: Mapping[str, DeviceSignals], settings: HealthSettings) -> float | None:
    """Mean over the job's devices by access share of 100 at the normal latency, falling linearly to 0."""
    total = weights = 0.0
    for device in devices.values():
        latency, reference, share = device.latency_seconds, device.reference_seconds, device.access_share
        if latency is None or reference is None or share <= 0.0:
            continue
        times = latency / max(reference, settings.floor_latency_seconds)
        total += share * clip(1.0 - (times - 1.0) / (settings.latency_limit - 1.0), 0.0, 1.0)
        weights += share
    return 100.0 * total / weights if weights > 0.0 else None


def _variation_part(devices: Mapping[str, DeviceSignals], settings: HealthSettings) -> float | None:
    """Mean over the job's devices by access share of 100 at a variation of 0, falling linearly to 0."""
    total = weights = 0.0
    for device in devices.values():
        variation, share = device.latency_cv, device.access_share
        if variation is None or share <= 0.0:
            continue
        if variation < settings.variation_limit:
            total += share * (1.0 - variation / settings.variation_limit)
        weights += share
    return 100.0 * total / weights if weights > 0.0 else None


def _demand_ratio(signals: Signals, settings: HealthSettings, entitlement: Mapping[str, float] | None) -> float | None:
    """0..1: how much of the next batch can be there in time.

    Under a quota: what the quota lets through during one computation over the next batch and a margin (at least a byte:
    of a data set that the cache keeps ever less is read, down to nothing), on the device that is shortest. Free:
    batches that the loop can take, plus what arrives now during one computation, over one batch; the first sample of a
    job tells no rate, so without a batch that is there the ratio is unknown.
    """
    batch, compute = signals.next_batch_bytes, signals.compute_seconds
    if not batch or compute is None:
        return None
    if entitlement:
        limits = [
            entitlement[name] * compute / max(device.access_share * batch * settings.margin, 1.0)
            for name, device in signals.devices.items()
            if name in entitlement and device.access_share > 0.01
        ]
        if limits:
            return clip(min(limits), 0.0, 1.0)
    if not signals.dt and (signals.queue_takeable or 0.0) < 1.0:
        return None
    arriving = sum([device.read_bytes_per_second for device in signals.devices.values()]) * compute
    return clip((signals.queue_takeable or 0.0) + arriving / batch, 0.0, 1.0)
