"""Why a job starves: the paper's three causes, ours, or none; with the numbers, a confidence, and hysteresis.

What speaks for each cause is found in agent.evidence; here is which of them stands.
"""

from __future__ import annotations

from collections.abc import Mapping

from agent.evidence import DiagnosisSettings, DiagnosisState, NodeContext, queue_fraction, strengths
from agent.smoothing import gain
from agent.types import Cause, Diagnosis, Health, Signals, make

ADVICE: Mapping[Cause, str] = {
    Cause.NONE: "",
    Cause.COLD_START: "warm the cache before the first iteration, or start with a deeper prefetch queue",
    Cause.CACHE_THRASH: "give the jobs more page cache, or let fewer data sets be read at a time",
    Cause.REMOTE_CONGESTION: "the link or gateway is congested: local bandwidth cannot help; stage the data locally",
    Cause.DEVICE_CONTENTION: "others use the device: their share is cut while this job starves",
    Cause.SELF_THROTTLED: "the job waits at its own cap: raise it",
    Cause.CPU_BOUND: "preparation is short of CPU: add loader workers or CPUs, or simplify the transforms",
}

INACTIONABLE = frozenset({Cause.CPU_BOUND, Cause.REMOTE_CONGESTION})
"""Causes that no share of a local device can cure."""

FALLBACKS = (Cause.COLD_START, Cause.REMOTE_CONGESTION)
"""What is left when nothing else has enough evidence: a start known by its iteration alone, then a job that reads from
remote storage and has no other reason to wait."""


def diagnose(
    signals: Signals, health: Health, node: NodeContext, state: DiagnosisState | None, settings: DiagnosisSettings
) -> tuple[DiagnosisState, Diagnosis]:
    """The most likely cause at `signals.time`, with evidence; `none` while the job does not starve.

    Causes are asked in the order of how specific their indicators are; contention, which every busy node shows, last.
    """
    state = _remember(signals, health, state or DiagnosisState(), settings)
    starving = state.starved_at is not None and signals.time - state.starved_at <= settings.starving_seconds
    evidence: dict[str, float] = {}
    speaking = strengths(signals, node, state, settings, evidence) if starving else {}
    best = _first(speaking, settings) if speaking else Cause.NONE
    state = _settle(state, best, signals.time, settings)
    strength = speaking.get(state.cause, 0.0)
    if state.cause is Cause.NONE:
        strength = 1.0 - max(speaking.values(), default=0.0)
    actionable = state.cause not in INACTIONABLE
    return state, make(
        Diagnosis, (state.cause, evidence, strength * health.confidence, actionable, ADVICE[state.cause])
    )


def _first(speaking: Mapping[Cause, float], settings: DiagnosisSettings) -> Cause:
    """The most specific cause with enough evidence; else one by elimination (`FALLBACKS`); else none."""
    for cause, strength in speaking.items():
        if strength >= settings.enough:
            return cause
    return next((cause for cause in FALLBACKS if speaking.get(cause, 0.0) >= settings.fallback), Cause.NONE)


def _settle(state: DiagnosisState, best: Cause, now: float, settings: DiagnosisSettings) -> DiagnosisState:
    """Hysteresis: `best` must stay ahead of what stands for a while; the first cause of an episode stands at once."""
    if best is state.cause:
        return state if state.rival is None else state._replace(rival=None)
    if state.cause is Cause.NONE:
        return state._replace(cause=best, rival=None)
    if best is not state.rival:
        return state._replace(rival=best, rival_since=now)
    patience = settings.release_seconds if best is Cause.NONE else settings.confirm_seconds
    if now - state.rival_since >= patience:
        return state._replace(cause=best, rival=None)
    return state


def _remember(signals: Signals, health: Health, state: DiagnosisState, settings: DiagnosisSettings) -> DiagnosisState:
    """The histories after this sample. A start or resume empties that of the cache: its first misses are no thrash."""
    now, hits = signals.time, state.hits
    starving = (
        health.score < settings.starving_score
        or signals.blocked_seconds > 0.01
        or signals.starvation_events > state.episodes
    )
    if signals.iterations_since_start <= settings.cold_iterations:
        hits = ()
    elif signals.cache_hit_ratio is not None:
        hits = _appended(hits, (now, signals.cache_hit_ratio), settings.hit_window_seconds, settings.hit_points)
    packets = state.packets
    fraction = queue_fraction(signals)
    if signals.nic_packets_per_second is not None and fraction is not None and signals.new_iterations > 0:
        packets = (*packets[-(settings.hit_points - 1) :], (signals.nic_packets_per_second, fraction))
    return make(
        DiagnosisState,
        (
            state.cause,
            state.rival,
            state.rival_since,
            now if starving else state.starved_at,
            signals.starvation_events,
            hits,
            packets,
            _steady(signals, state.steady_seconds, settings),
        ),
    )


def _appended(
    points: tuple[tuple[float, float], ...], point: tuple[float, float], window: float, most: int
) -> tuple[tuple[float, float], ...]:
    """The window with one more point, at most `most` of them: points closer than window / most are left out."""
    if points and point[0] - points[-1][0] < window / most:
        return points
    first = 0
    while first < len(points) and points[first][0] < point[0] - window:
        first += 1
    return (*points[first:], point)


def _steady(signals: Signals, old: float | None, settings: DiagnosisSettings) -> float | None:
    """IO latency as the reader feels it (what the cache holds costs nothing), learned outside cold starts, slowly."""
    if signals.iterations_since_start <= settings.cold_iterations:
        return old
    felt = _felt_latency(signals)
    if felt is None or old is None:
        return old if felt is None else felt
    return old + gain(signals.dt, 30.0 if felt > old else 2.0) * (felt - old)


def _felt_latency(signals: Signals) -> float | None:
    total = weights = 0.0
    for device in signals.devices.values():
        latency = device.latency_seconds
        if latency is not None:
            share = device.access_share
            total += share * latency
            weights += share
    if weights <= 0.0:
        return None
    missing = 1.0 if signals.cache_hit_ratio is None else 1.0 - signals.cache_hit_ratio
    return total / weights * missing
