"""Raw counters of one job -> its signals: rates, means and ratios between two samples. Pure.

The formulas stand where they are computed: `agent.stream_signals` (iterations, waits, starvation, queue),
`agent.device_signals` (rates, latency, variation), `agent.reference` (normal latency), `agent.forecast` (next batch).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from agent import device_signals, forecast, stream_signals
from agent.device_signals import Delta, DeviceState
from agent.forecast import BatchForecast
from agent.job_sample import NORMAL_LATENCY_SECONDS, IoCounts, JobSample, SignalSettings
from agent.smoothing import gain, smooth
from agent.stream_signals import LoaderSignals, LoaderState
from agent.types import DeviceSignals, Medium, Signals, make
from bpf.samples import CacheCounters, WorkerTime

__all__ = ["NORMAL_LATENCY_SECONDS", "IoCounts", "JobSample", "SignalSettings", "SignalState", "derive"]

NS = 1e-9

READING_SECONDS = 1.0
"""A job that read a byte within this time, or has a read in flight, counts as reading; one that writes does not."""

QUIET_SECONDS = 0.5
"""Workers that did nothing for this long tell nothing of what they are short of any more."""

FIRST_READS = 64.0
"""The first-IO latency is the mean of at most about this many reads after a start or resume."""


_NO_DEVICES: Mapping[str, DeviceState] = {}


class SignalState(NamedTuple):
    """What one job's signals remember between samples; smoothed ratios are 0..1, times seconds."""

    loader: LoaderState = LoaderState()
    devices: Mapping[str, DeviceState] = _NO_DEVICES
    batch: BatchForecast = BatchForecast()
    idle_seconds: float = 0.0
    hit_ratio: float | None = None
    cpu_ratio: float | None = None
    nic_packets_per_second: float | None = None
    first_reads: float = 0.0
    first_latency: float = 0.0
    quiet_seconds: float = 0.0


def derive(
    previous: JobSample | None, current: JobSample, state: SignalState | None, settings: SignalSettings
) -> tuple[SignalState, Signals]:
    """The signals of a job at `current`, and what to hand in next time.

    The first sample of a job (`previous` or `state` None) only sets the stage: rates are 0 and most signals unknown.
    Raises ValueError when `current` is older than `previous`.
    """
    if previous is None or state is None:
        previous, state = current, SignalState()
    dt = (current.time_ns - previous.time_ns) * NS
    if dt < 0.0:
        raise ValueError(
            f"sample at {current.time_ns} ns is older than the one before, at {previous.time_ns} ns; "
            "pass samples in the order they were taken"
        )
    changes = device_signals.deltas(previous, current)
    reads, flying = 0.0, False
    for change in changes.values():
        reads += change.rbytes
        flying = flying or change.reading
    idle = 0.0 if reads > 0.0 or flying else state.idle_seconds + dt
    loader, loop = stream_signals.derive_loaders(
        current.streams, state.loader, settings, current.time_ns, idle < READING_SECONDS
    )
    since_start = loader.iterations - loader.start_mark
    may_rise = loop.fed and since_start > settings.cold_iterations
    states, devices = _devices(state, changes, dt, may_rise, settings)
    weight = gain(dt, settings.smoothing_seconds)
    hits_now = _hit_ratio(previous.cache, current.cache)
    hits = smooth(state.hit_ratio, hits_now, weight)
    cpu_ratio, quiet = _worked(state, _cpu_ratio(previous.workers, current.workers), dt, weight, started=loop.started)
    batch = forecast.restarted(state.batch) if loop.started else state.batch
    batch = forecast.observe(batch, loop.new_iterations, reads, loop.queued_batches, loop.hinted_bytes)
    new = make(
        SignalState,
        (
            loader,
            states,
            batch,
            idle,
            hits,
            cpu_ratio,
            smooth(state.nic_packets_per_second, _packets(previous, current, dt), weight),
            *_first_reads(state, changes, hits_now, since_start, loop.started),
            quiet,
        ),
    )
    return new, _signals(current, dt, new, loop, devices)


def _devices(
    state: SignalState, changes: Mapping[str, Delta], dt: float, may_rise: bool, settings: SignalSettings
) -> tuple[dict[str, DeviceState], dict[str, DeviceSignals]]:
    states = dict(state.devices)
    for name, change in changes.items():
        if name not in states:
            medium = Medium.REMOTE if change.remote else settings.media.get(name, Medium.SSD)
            states[name] = DeviceState(medium)
    total, step = 0.0, device_signals.pace(dt, may_rise, settings)
    for name, old in states.items():
        new = device_signals.advance(old, changes.get(name), step, settings) if dt > 0.0 else old
        states[name] = new
        total += new.bytes
    views = {}
    for name, device in states.items():
        flying = changes[name].in_flight if name in changes else 0
        views[name] = device_signals.view(name, device, flying, total, settings.stale_seconds)
    return states, views


def _signals(
    current: JobSample, dt: float, state: SignalState, loop: LoaderSignals, devices: Mapping[str, DeviceSignals]
) -> Signals:
    loader = state.loader
    return make(
        Signals,
        (
            current.job,
            current.time_ns * NS,
            dt,
            loop.source,
            loader.iterations,
            loader.iterations - loader.start_mark,
            loop.new_iterations,
            loop.iteration_seconds,
            loop.compute_seconds,
            loop.wait_seconds,
            loader.wait_total,
            loop.blocked_seconds,
            loader.episodes,
            loop.queue_depth,
            loop.queue_capacity,
            loop.queue_takeable,
            forecast.expected_bytes(state.batch, loop.hinted_bytes),
            state.first_latency / state.first_reads if state.first_reads > 0.0 else None,
            state.hit_ratio,
            _remote_queueing(state),
            state.nic_packets_per_second,
            state.cpu_ratio,
            devices,
            loop.hinted_bytes,
            state.batch.batch_bytes,
        ),
    )


def _hit_ratio(old: CacheCounters | None, new: CacheCounters | None) -> float | None:
    """1 - missed / asked bytes of the page cache; None when nothing was asked for."""
    if old is None or new is None or new.read_bytes <= old.read_bytes:
        return None
    missed = max(0, new.missed_bytes - old.missed_bytes)
    return max(0.0, 1.0 - missed / (new.read_bytes - old.read_bytes))


def _cpu_ratio(old: WorkerTime | None, new: WorkerTime | None) -> float | None:
    """Share of the workers' busy time that was spent on a CPU or waiting for one.

    Busy means running, runnable, or blocked on storage and network; `other_ns` (waiting for work) does not count.
    """
    if old is None or new is None:
        return None
    cpu = new.on_cpu_ns + new.runnable_ns - old.on_cpu_ns - old.runnable_ns
    stalled = (new.block_ns + new.nfs_ns + new.network_ns + new.fault_ns) - (
        old.block_ns + old.nfs_ns + old.network_ns + old.fault_ns
    )
    if cpu < 0 or stalled < 0 or cpu + stalled <= 0:
        return None
    return cpu / (cpu + stalled)


def _worked(
    state: SignalState, busy: float | None, dt: float, weight: float, *, started: bool
) -> tuple[float | None, float]:
    """(smoothed CPU ratio of the workers, seconds since they did anything); a new life and silence start afresh."""
    quiet = 0.0 if busy is not None else state.quiet_seconds + dt
    known = None if started or quiet > QUIET_SECONDS else state.cpu_ratio
    return smooth(known, busy, weight), quiet


def _packets(previous: JobSample, current: JobSample, dt: float) -> float | None:
    if dt <= 0.0 or previous.nic_packets is None or current.nic_packets is None:
        return None
    return max(0, current.nic_packets - previous.nic_packets) / dt


def _remote_queueing(state: SignalState) -> float | None:
    """Share of the request time on remote storage spent queueing, over all mounts and endpoints of the job."""
    queue = total = 0.0
    for device in state.devices.values():
        if device.medium is Medium.REMOTE and device.queue is not None:
            queue += device.queue
            total += device.latency
    return min(1.0, queue / total) if total > 0.0 else None


def _first_reads(
    state: SignalState, changes: Mapping[str, Delta], hits: float | None, since_start: int, started: bool
) -> tuple[float, float]:
    """(reads, seconds) of the first reads after a start, as the reader feels them: what the cache holds costs 0.

    `hits` is the ratio of this moment: a smoothed one would remember the life before the start.
    """
    reads, latency = (0.0, 0.0) if started else (state.first_reads, state.first_latency)
    if reads >= FIRST_READS or since_start > 3:
        return reads, latency
    missing = 1.0 if hits is None else max(1.0 - hits, 0.0)
    for change in changes.values():
        reads += change.reads
        latency += max(0.0, change.latency - (change.throttle or 0.0)) * missing
    return reads, latency
