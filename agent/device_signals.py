"""What one job's storage did between two samples, per block device and per remote mount or endpoint."""

from __future__ import annotations

from dataclasses import dataclass
from math import exp, sqrt
from typing import NamedTuple

from agent.job_sample import IoCounts, JobSample, SignalSettings
from agent.reference import Reference, learn
from agent.smoothing import gain
from agent.types import DeviceSignals, Medium, make
from bpf.samples import BlockCounters, FuseCounters, NfsCounters, ObjectCounters

NS = 1e-9

THROTTLED_RATIO = 0.05
"""Above this share of time in blk-throttle an interval does not count for the variation: its squares include it."""

VARIATION_READS = 8.0
"""The variation is taken over at least this many reads at a time, then smoothed: it must not remember a change of
the mean (a burst of contention) as spread for seconds."""

VARIATION_SECONDS = 2.0
"""Where reads are rare, two and more of this long make do."""


@dataclass(slots=True)
class Delta:
    """What one device did for the job since the last sample (bytes, requests, seconds); mutable only while summed.

    `latency` and `squares` (s, s²) are those of reads, throttle wait included; `throttle`, `queue` (None: this tier
    cannot tell) of reads; `total` and `total_throttle` of reads and writes. `reading`: some read is in flight now.
    """

    rbytes: float = 0.0
    wbytes: float = 0.0
    reads: float = 0.0
    writes: float = 0.0
    latency: float = 0.0
    squares: float = 0.0
    throttle: float | None = None
    queue: float | None = None
    total: float = 0.0
    total_throttle: float | None = None
    in_flight: int = 0
    reading: bool = False
    remote: bool = False


class Spread(NamedTuple):
    """The smoothed coefficient of variation, and the reads that wait to be counted: their number, s, s², and for s."""

    variation: float | None = None
    reads: float = 0.0
    latency: float = 0.0
    squares: float = 0.0
    seconds: float = 0.0


class DeviceState(NamedTuple):
    """One device so far: smoothed rates (per second), decayed sums over the last requests (seconds), reference."""

    medium: Medium
    rates: tuple[float, float, float, float] | None = None
    reads: float = 0.0
    latency: float = 0.0
    spread: Spread = Spread()
    requests: float = 0.0
    total: float = 0.0
    throttle: float | None = None
    queue: float | None = None
    silent_seconds: float = 0.0
    bytes: float = 0.0
    reference: Reference | None = None


def _grown(new: int, old: int) -> int:
    """Growth of a counter; one that fell was reset and counts from zero."""
    return new - old if new >= old else new


def _added(total: float | None, new: int | None, old: int | None) -> float | None:
    """A sum in seconds with the growth of an optional counter in ns added; unknown stays unknown."""
    if new is None:
        return total
    return (total or 0.0) + _grown(new, old or 0) * NS


_NO_BLOCK = BlockCounters(0, 0, 0, 0, 0, ())
_NO_NFS = NfsCounters(0, 0, 0, 0, 0, 0, ())
_NO_OBJECT = ObjectCounters(0, 0, 0, 0, 0, 0, ())
_NO_FUSE = FuseCounters(0, 0, 0, 0, ())
_NO_IO = IoCounts(0, 0, 0, 0)


def deltas(previous: JobSample, current: JobSample) -> dict[str, Delta]:
    """What each device did between two samples; io.stat counts only where the block probe has nothing of a device."""
    result: dict[str, Delta] = {}
    before = previous.blocks
    for key, counters in current.blocks.items():
        device = key.device
        delta = result.get(device)
        if delta is None:
            delta = result[device] = Delta()
        _add_block(delta, key.op == "read", counters, before.get(key, _NO_BLOCK))
    if current.io_stat or current.nfs or current.objects or current.fuse:
        _add_others(result, previous, current)
    return result


def _add_others(result: dict[str, Delta], previous: JobSample, current: JobSample) -> None:
    """All that is not the block probe's."""
    for device, counts in current.io_stat.items():
        if device not in result:
            old = previous.io_stat.get(device, _NO_IO)
            rbytes, wbytes, reads, writes = (float(_grown(*pair)) for pair in zip(counts, old, strict=True))
            result[device] = Delta(rbytes, wbytes, reads, writes)
    for nfs_key, nfs in current.nfs.items():
        remote = result.setdefault(nfs_key.mount, Delta(remote=True))
        _add_nfs(remote, nfs_key.op == "read", nfs, previous.nfs.get(nfs_key, _NO_NFS))
    for object_key, objects in current.objects.items():
        remote = result.setdefault(object_key.endpoint, Delta(remote=True))
        _add_object(remote, objects, previous.objects.get(object_key, _NO_OBJECT))
    for fuse_key, fuse in current.fuse.items():
        if fuse_key.op != "other":
            remote = result.setdefault(fuse_key.mount, Delta(remote=True))
            _add_calls(remote, fuse_key.op == "read", fuse, previous.fuse.get(fuse_key, _NO_FUSE))


def _add_block(delta: Delta, read: bool, new: BlockCounters, old: BlockCounters) -> None:
    if new.requests < old.requests:
        old = _NO_BLOCK
    delta.in_flight += new.in_flight
    delta.reading = delta.reading or (read and new.in_flight > 0)
    if new.throttle_ns is not None:
        throttled = _grown(new.throttle_ns, old.throttle_ns or 0) * NS
        delta.total_throttle = (delta.total_throttle or 0.0) + throttled
        if read:
            delta.throttle = (delta.throttle or 0.0) + throttled
    if read and new.queue_ns is not None:
        delta.queue = (delta.queue or 0.0) + _grown(new.queue_ns, old.queue_ns or 0) * NS
    size, latency = new.bytes - old.bytes, new.latency_ns - old.latency_ns
    squares = new.latency_us_squared - old.latency_us_squared
    if size < 0 or latency < 0 or squares < 0:
        size, latency = _grown(new.bytes, old.bytes), _grown(new.latency_ns, old.latency_ns)
        squares = _grown(new.latency_us_squared, old.latency_us_squared)
    _add(delta, new.requests - old.requests, size, latency, squares, read=read)


def _add_nfs(delta: Delta, read: bool, new: NfsCounters, old: NfsCounters) -> None:
    _add_calls(delta, read, new, old)
    if read:
        delta.queue = _added(delta.queue, new.backlog_ns, old.backlog_ns)


def _add_calls(delta: Delta, read: bool, new: NfsCounters | FuseCounters, old: NfsCounters | FuseCounters) -> None:
    requests, size = _grown(new.requests, old.requests), _grown(new.bytes or 0, old.bytes or 0)
    latency, squares = _grown(new.total_ns, old.total_ns), _grown(new.total_us_squared, old.total_us_squared)
    _add(delta, requests, size, latency, squares, read=read)


def _add_object(delta: Delta, new: ObjectCounters, old: ObjectCounters) -> None:
    requests, size = _grown(new.requests, old.requests), _grown(new.bytes, old.bytes)
    latency = _grown(new.last_byte_ns, old.last_byte_ns)
    _add(delta, requests, size, latency, _grown(new.last_byte_us_squared, old.last_byte_us_squared), read=True)
    delta.queue = _added(delta.queue, new.first_byte_ns, old.first_byte_ns)
    delta.in_flight += new.open_connections


def _add(delta: Delta, requests: int, size: int, latency_ns: int, us_squared: int, *, read: bool) -> None:
    """What every source of counters tells."""
    latency = latency_ns * NS
    delta.total += latency
    if not read:
        delta.wbytes += size
        delta.writes += requests
        return
    delta.rbytes += size
    delta.reads += requests
    delta.latency += latency
    delta.squares += us_squared * 1e-12


class Pace(NamedTuple):
    """What is common to all devices of a job in one step."""

    dt: float
    rate_gain: float
    access_decay: float
    may_rise: bool


def pace(dt: float, may_rise: bool, settings: SignalSettings) -> Pace:
    """The smoothing weights of a step of `dt` seconds."""
    rate, access = gain(dt, settings.smoothing_seconds), gain(dt, settings.access_seconds)
    return make(Pace, (dt, rate, 1.0 - access, may_rise))


_NOTHING = Delta()


def advance(old: DeviceState, delta: Delta | None, step: Pace, settings: SignalSettings) -> DeviceState:
    """One device after `step.dt` > 0 seconds in which `delta` happened (None: nothing).

    Sums decay with exp(-n / latency_requests) for n new requests, but not faster than with the smoothing time: the
    mean is that of the last N requests (paper, section 3) or of the last moments where requests come in thousands.
    """
    change, dt = delta or _NOTHING, step.dt
    medium, rates, reads, latency, spread, done, total, throttle, queue, silent, moved, reference = old
    rates = _smoothed(rates, change, step)
    moved = moved * step.access_decay + change.rbytes + change.wbytes
    requests = change.reads + change.writes
    if requests <= 0.0:
        since = silent + dt
        same = (medium, rates, reads, latency, spread, done, total, throttle, queue, since, moved, reference)
        return make(DeviceState, same)
    keep = exp(-min(requests / settings.latency_requests, dt / settings.smoothing_seconds))
    throttled = change.throttle or 0.0
    reads, latency = reads * keep + change.reads, latency * keep + max(0.0, change.latency - throttled)
    if throttled <= THROTTLED_RATIO * change.latency:
        spread = _widened(spread, change, dt, settings)
    if change.reads > 0.0 and change.latency > 0.0:
        reference = learn(reference, latency / reads, settings.normal_latency_seconds[medium], dt, step.may_rise)
    done, total = done * keep + requests, total * keep + change.total
    throttle, queue = _decayed(throttle, keep, change.total_throttle), _decayed(queue, keep, change.queue)
    new = (medium, rates, reads, latency, spread, done, total, throttle, queue, 0.0, moved, reference)
    return make(DeviceState, new)


def _smoothed(
    old: tuple[float, float, float, float] | None, change: Delta, step: Pace
) -> tuple[float, float, float, float]:
    """The rates (per second) after this step: bytes read and written, requests read and written."""
    a, b, c, d = change.rbytes / step.dt, change.wbytes / step.dt, change.reads / step.dt, change.writes / step.dt
    if old is None:
        return a, b, c, d
    g, (w, x, y, z) = step.rate_gain, old
    return w + g * (a - w), x + g * (b - x), y + g * (c - y), z + g * (d - z)


def _widened(old: Spread, change: Delta, dt: float, settings: SignalSettings) -> Spread:
    """The variation with these reads: standard deviation over mean of each handful, smoothed like the latency."""
    reads, seconds = old.reads + change.reads, old.seconds + dt
    latency, squares = old.latency + change.latency, old.squares + change.squares
    if latency <= 0.0 or reads < (2.0 if seconds >= VARIATION_SECONDS else VARIATION_READS):
        return make(Spread, (old.variation, reads, latency, squares, seconds))
    mean = latency / reads
    seen = sqrt(max(0.0, squares / reads - mean * mean)) / mean
    if old.variation is None:
        return Spread(seen)
    keep = exp(-min(reads / settings.latency_requests, seconds / settings.smoothing_seconds))
    return Spread(seen + keep * (old.variation - seen))


def _decayed(old: float | None, keep: float, added: float | None) -> float | None:
    if added is None:
        return None if old is None else old * keep
    return (old or 0.0) * keep + added


def view(device: str, state: DeviceState, in_flight: int, all_bytes: float, stale_seconds: float) -> DeviceSignals:
    """The state as the rest of the agent reads it; latency after a long silence is unknown."""
    medium, rates, reads, total_latency, spread, requests, total, throttle, queue, silent, moved, reference = state
    read_bytes, write_bytes, read_requests, write_requests = rates or (0.0, 0.0, 0.0, 0.0)
    fresh = silent < stale_seconds
    known = fresh and reads > 0.0 and total_latency > 0.0
    if not fresh:
        throttle = None
    return make(
        DeviceSignals,
        (
            device,
            medium,
            read_bytes,
            write_bytes,
            read_requests,
            write_requests,
            total_latency / reads if known else None,
            spread.variation if known else None,
            None if reference is None else reference.seconds,
            None if throttle is None or total <= 0.0 else min(1.0, throttle / total),
            None if throttle is None or requests <= 0.0 else throttle / requests,
            None if queue is None or not known else min(1.0, queue / max(total_latency, 1e-12)),
            in_flight,
            moved / all_bytes if all_bytes > 0.0 else 0.0,
        ),
    )
