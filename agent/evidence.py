"""What speaks for each cause of starvation: the indicators, 0..1, and the numbers they go by. Pure.

| cause | indicator (0..1 from `enough` to `certain`) | source |
|---|---|---|
| cold_start | iterations since start <= 10, first-IO latency >= 3 x steady state | paper, section 2, mode 1 |
| cache_thrash | hit ratio below a floor over a window, and varying or stuck halfway | paper, mode 2; lab |
| remote_congestion | share of request time spent queueing; low queue, against the packet rate | paper, mode 3 |
| self_throttled | waits in blk-throttle and, where the cap is ours, achieves >= 90 % of it | design, section 3 |
| cpu_bound | preparation workers busy on a CPU rather than blocked on storage | design, section 3 |
| device_contention | others use the device, which is busy or slower than normal for this job | design, section 3 |
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import sqrt
from typing import NamedTuple

from agent.smoothing import clip
from agent.types import Cause, DeviceSignals, Medium, Signals

RISE = 0.03
"""A hit ratio whose later half lies this much above the earlier rises."""


@dataclass(frozen=True, slots=True)
class DiagnosisSettings:
    """Thresholds (ratios 0..1 unless named otherwise) and times in seconds.

    Below `hit_useful` the cache keeps nothing that is read again; a hit ratio that does not rise over `trend_seconds`
    is one that the cache cannot better. A job counts as starving below `starving_score`, or for `starving_seconds`
    after it last waited. A cause replaces another only after `confirm_seconds` ahead of it, and leaves
    `release_seconds` after the indicators did.
    """

    starving_score: float = 60.0
    starving_seconds: float = 1.0
    cold_iterations: int = 10
    cold_latency_times: float = 3.0
    hit_window_seconds: float = 20.0
    hit_points: int = 64
    hit_variance: float = 0.01
    hit_floor: float = 0.8
    hit_useful: float = 0.15
    trend_seconds: float = 8.0
    queueing_ratio: float = 0.3
    remote_share: float = 0.3
    remote_mostly: float = 0.5
    throttle_ratio: float = 0.2
    achieved_ratio: float = 0.9
    cpu_ratio: float = 0.7
    others_share: float = 0.15
    busy_share: float = 0.6
    latency_times: float = 1.5
    enough: float = 0.5
    fallback: float = 0.4
    confirm_seconds: float = 0.3
    release_seconds: float = 1.0


_NOTHING: Mapping[str, float] = {}


class NodeContext(NamedTuple):
    """What a diagnosis may know beyond the job itself, per device.

    `quota_share`: the caps in force for this job as shares of capacity; `used_share`: what the job itself achieves of
    the device (its busiest dimension); `others_share`: what everybody else achieves there. Only the job's own devices
    are asked for, and they may be missing.
    """

    quota_share: Mapping[str, float] = _NOTHING
    used_share: Mapping[str, float] = _NOTHING
    others_share: Mapping[str, float] = _NOTHING


class DiagnosisState(NamedTuple):
    """The cause that stands, one that is about to replace it and since when, and the histories the indicators need.

    `hits` holds (time, hit ratio), `packets` (NIC packets/s, queue fraction); `steady_seconds` is the IO latency as
    the reader feels it, outside cold starts.
    """

    cause: Cause = Cause.NONE
    rival: Cause | None = None
    rival_since: float = 0.0
    starved_at: float | None = None
    episodes: int = 0
    hits: tuple[tuple[float, float], ...] = ()
    packets: tuple[tuple[float, float], ...] = ()
    steady_seconds: float | None = None


def strengths(
    signals: Signals,
    node: NodeContext,
    state: DiagnosisState,
    settings: DiagnosisSettings,
    evidence: dict[str, float],
) -> dict[Cause, float]:
    """How much speaks for each cause, 0..1, most specific first; the numbers go into `evidence`."""
    return {
        Cause.SELF_THROTTLED: _self_throttled(signals, node, settings, evidence),
        Cause.COLD_START: _cold_start(signals, state, settings, evidence),
        Cause.CPU_BOUND: _cpu_bound(signals, node, settings, evidence),
        Cause.REMOTE_CONGESTION: _remote(signals, state, settings, evidence),
        Cause.CACHE_THRASH: _cache_thrash(signals, node, state, settings, evidence),
        Cause.DEVICE_CONTENTION: _contention(signals, node, settings, evidence),
    }


def _self_throttled(
    signals: Signals, node: NodeContext, settings: DiagnosisSettings, evidence: dict[str, float]
) -> float:
    """Waiting at its own cap; where the tier cannot tell the throttle wait, reaching the cap is weak evidence.

    On a device where this agent caps the job by no quota, the wait tells of a cap that somebody else set.
    """
    best = 0.0
    for name, device in signals.devices.items():
        quota, waited = node.quota_share.get(name, 0.0), device.throttle_ratio
        waits = None if waited is None else _grade(waited, settings.throttle_ratio, 0.5)
        achieved = node.used_share.get(name, 0.0) / quota if quota > 0.0 else None
        if achieved is None:
            strength = waits or 0.0
        else:
            strength = min(_grade(achieved, settings.achieved_ratio, 1.0), 0.5 if waits is None else waits)
        if strength > best:
            best = strength
            evidence["throttle_ratio"] = waited or 0.0
            if achieved is not None:
                evidence["quota_achieved_ratio"] = achieved
    return best


def _cpu_bound(signals: Signals, node: NodeContext, settings: DiagnosisSettings, evidence: dict[str, float]) -> float:
    """Workers busy on a CPU; a device that the job itself keeps busy limits it, whatever its workers do besides."""
    if signals.cpu_ratio is None:
        return 0.0
    evidence["cpu_ratio"] = signals.cpu_ratio
    kept_busy = 0.0
    for name in signals.devices:
        own, others = node.used_share.get(name, 0.0), node.others_share.get(name, 0.0)
        busy = clip((own + others - settings.busy_share) / (0.9 - settings.busy_share), 0.0, 1.0)
        kept_busy = max(kept_busy, busy * min(1.0, 2.0 * own))
    return _grade(signals.cpu_ratio, settings.cpu_ratio, 0.95) * (1.0 - kept_busy)


def _remote(signals: Signals, state: DiagnosisState, settings: DiagnosisSettings, evidence: dict[str, float]) -> float:
    """Queueing share of remote requests; a latency that is normal all the same speaks against it.

    A request queues in the client (what the probe calls so) and at the link, where it only lengthens the round trip:
    that part is what the latency exceeds its normal by. A job that reads mostly from remote storage keeps some
    suspicion: where the link was narrow from the first moment no normal was ever seen.
    """
    remote = [device for device in signals.devices.values() if device.medium is Medium.REMOTE]
    share = sum(device.access_share for device in remote)
    if share < settings.remote_share:
        return 0.0
    slower = _slowdown(remote)
    delayed = 1.0 - 1.0 / slower if slower is not None and slower > 1.0 else 0.0
    queueing = max(signals.remote_queueing_ratio or 0.0, delayed)
    evidence["remote_queueing_ratio"], evidence["remote_share"] = queueing, share
    strength = _grade(queueing, settings.queueing_ratio, 2.0 * settings.queueing_ratio)
    if slower is not None and slower < 1.2:
        strength *= 0.5
    if signals.queue_takeable is not None and signals.queue_takeable < 0.25 * (signals.queue_capacity or 0.0):
        strength *= 1.1
    related = _packet_correlation(state.packets)
    if related is not None:
        evidence["packet_correlation"] = related
        strength *= 1.0 - 0.2 * related
    return min(1.0, max(strength, settings.fallback if share >= settings.remote_mostly else 0.0))


def _cold_start(
    signals: Signals, state: DiagnosisState, settings: DiagnosisSettings, evidence: dict[str, float]
) -> float:
    """Young and slow at first; before a steady state is known the iteration alone is weak evidence."""
    if signals.iterations_since_start > settings.cold_iterations:
        return 0.0
    evidence["iterations_since_start"] = float(signals.iterations_since_start)
    if signals.first_io_latency_seconds is None:
        return 0.0
    evidence["first_io_latency_seconds"] = signals.first_io_latency_seconds
    if not state.steady_seconds:
        return settings.fallback
    times = signals.first_io_latency_seconds / state.steady_seconds
    evidence["first_io_times_steady"] = times
    return _grade(times, settings.cold_latency_times, 2.0 * settings.cold_latency_times)


def _cache_thrash(
    signals: Signals, node: NodeContext, state: DiagnosisState, settings: DiagnosisSettings, evidence: dict[str, float]
) -> float:
    """Mean of the hit ratio over the window (at least 8 points), and its variance or that it stays halfway.

    Jobs that read at random evict each other evenly: then the ratio does not vary, as the paper has it, but stands
    still between useless and good, while that of a cache that fills rises. A job that gets little of a device that
    others use suffers from them, whatever the cache keeps.
    """
    if len(state.hits) < 8:
        return 0.0
    values = [hit for _, hit in state.hits]
    mean = sum(values) / len(values)
    variance = sum((value - mean) ** 2 for value in values) / len(values)
    evidence["cache_hit_mean"], evidence["cache_hit_variance"] = mean, variance
    low = _grade(1.0 - mean, 1.0 - settings.hit_floor, 1.0 - settings.hit_useful)
    varies = _grade(variance, settings.hit_variance, 4.0 * settings.hit_variance)
    halfway = _grade(mean, settings.hit_useful, 2.0 * settings.hit_useful)
    rising = _rising([point for point in state.hits if point[0] >= signals.time - settings.trend_seconds])
    return min(low, max(varies, halfway)) * (1.0 - rising) * min(1.0, 4.0 * _own_part(signals, node))


def _rising(points: Sequence[tuple[float, float]]) -> float:
    """0..1: how plainly the values rise with time, 0 below 8 points or where the later half is hardly higher."""
    related = _correlation(points)
    if related is None or related <= 0.0:
        return 0.0
    half = len(points) // 2
    higher = (sum(value for _, value in points[-half:]) - sum(value for _, value in points[:half])) / half
    return related**2 * clip(higher / RISE, 0.0, 1.0)


def _own_part(signals: Signals, node: NodeContext) -> float:
    """The job's part of all that is achieved of its devices, 0..1; 1 where nothing is known."""
    own = sum(node.used_share.get(name, 0.0) for name in signals.devices)
    others = sum(node.others_share.get(name, 0.0) for name in signals.devices)
    return own / (own + others) if own + others > 0.0 else 1.0


def _contention(signals: Signals, node: NodeContext, settings: DiagnosisSettings, evidence: dict[str, float]) -> float:
    """On the worst local device: others use it, and it is busy or slower than normal for this job."""
    best = 0.0
    for name, device in signals.devices.items():
        if device.medium is Medium.REMOTE or device.access_share < 0.05:
            continue
        others = node.others_share.get(name, 0.0)
        busy = others + node.used_share.get(name, 0.0)
        slower = _slowdown((device,)) or 0.0
        crowded = max(_grade(busy, settings.busy_share, 0.95), _grade(slower, settings.latency_times, 4.0))
        strength = min(_grade(others, settings.others_share, 0.5), crowded)
        if strength >= best:
            best = strength
            evidence["latency_times_normal"] = slower
            if name in node.used_share:
                evidence["others_share"], evidence["busy_share"] = others, busy
    return best


def _slowdown(devices: Iterable[DeviceSignals]) -> float | None:
    """Latency over normal latency, the worst of these devices; None where unknown."""
    times = [
        device.latency_seconds / device.reference_seconds
        for device in devices
        if device.latency_seconds is not None and device.reference_seconds
    ]
    return max(times, default=None)


def _correlation(points: Sequence[tuple[float, float]]) -> float | None:
    """Pearson's r over the window; None below 8 points or without variation."""
    if len(points) < 8:
        return None
    n = len(points)
    mx, my = sum([x for x, _ in points]) / n, sum([y for _, y in points]) / n
    off = [(x - mx, y - my) for x, y in points]
    sxx, syy = sum([x**2 for x, _ in off]), sum([y**2 for _, y in off])
    if sxx <= 0.0 or syy <= 0.0:
        return None
    return clip(sum([x * y for x, y in off]) / sqrt(sxx * syy), -1.0, 1.0)


_packet_correlation = lru_cache(maxsize=256)(_correlation)
"""It changes with the job's iterations only, and is asked for in every pass."""


def queue_fraction(signals: Signals) -> float | None:
    """Batches in the queue over its capacity; None where either is unknown.

    Ready in whatever order, so that it says what storage delivers: the loop's own view jumps with the batch it lacks.
    """
    if signals.queue_depth is None or not signals.queue_capacity:
        return None
    return signals.queue_depth / signals.queue_capacity


def _grade(value: float, threshold: float, certain: float) -> float:
    """0 at 0, 0.5 at the threshold, 1 from `certain` on, linear between."""
    if value < threshold:
        return max(0.0, 0.5 * value / threshold)
    return min(1.0, 0.5 + 0.5 * (value - threshold) / (certain - threshold))
