"""A testbed that runs for days: groups of devices and jobs, sampled by short windows.

Simulating a week of 32 jobs request by request would take many hours. So windows are cut out of the week at
random, one in each equal part of it, and simulated in full; means over windows estimate the week, and their spread
gives the confidence interval. What a window begins with (which batch each job is at, what other machines do on the
link) is drawn from the same processes that would have led there; its first seconds only let queues and
controllers settle and do not count.
"""

from __future__ import annotations

import random
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import msgspec

from agent.config import ByteRate
from agent.errors import UsageError
from agent.simulate.chance import stream
from agent.simulate.node import Foreign
from agent.simulate.scenario import Burst, ByteSize, Device, Job, Scenario
from agent.simulate.trainer import RESTART_SECONDS, Warmth

DAY_SECONDS = 86400.0
Mode = Literal["cold_start", "cache_thrash", "remote_congestion"]


class _Section(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Base of all sections: frozen, keyword only, unknown keys refused."""


class DeviceGroup(_Section, frozen=True, kw_only=True):
    """`count` equal devices; fields as in a scenario."""

    name: str
    count: int
    kind: Literal["ssd", "hdd", "nfs"]
    size: ByteSize
    bytes_per_second: ByteRate
    iops: int = 4000
    round_trip_ms: float = 0.2


class JobGroup(_Section, frozen=True, kw_only=True):
    """`count` jobs, dealt out to the devices of their groups in turn; lists are gone through in turn as well.

    A normal batch is `batch_reads` reads of `read_size` x one of `sizes`; it holds one of `samples` samples.
    The first `cold_batches` of a life, and `burst_length` of every `burst_every` batches, read `factor` times as much.
    `mode` is the failure mode that its starvation counts as after the cold start.
    """

    name: str
    count: int
    device: str
    mode: Mode
    batch_reads: int
    read_size: ByteSize
    samples: tuple[int, ...]
    sizes: tuple[float, ...]
    compute_ms: tuple[float, ...]
    workers: int
    queue_batches: int
    cold_batches: int
    factor: int
    burst_every: int = 0
    burst_length: int = 0
    slow_device: str = ""
    slow_ratio: float = 0.0


class Congestion(_Section, frozen=True, kw_only=True):
    """Other machines' traffic on each mount of a group, on and off for exponentially distributed times."""

    device: str
    mean_quiet_seconds: float
    mean_busy_seconds: float
    bytes_per_second: ByteRate


class Figures(_Section, frozen=True, kw_only=True):
    """What the paper reports of one policy; reductions against its baseline as fractions."""

    wait_ms: float
    events_per_hour: float
    samples_per_second: float
    wait_reduction: float | None = None
    event_reduction: float | None = None
    throughput_gain: float | None = None
    cold_start_reduction: float | None = None
    cache_thrash_reduction: float | None = None
    remote_congestion_reduction: float | None = None
    ssd_loan_iterations: float | None = None
    hdd_loan_iterations: float | None = None
    control_cores: float | None = None


class Testbed(_Section, frozen=True, kw_only=True):
    """The whole. `start_minutes` is the mean time between two starts of a job.

    An event begins when the share of time that a job waits, smoothed over `event_smoothing_seconds`, rises above
    `event_wait_share` (see `starved_phases`).
    """

    name: str
    days: float
    windows: int
    window_seconds: float
    settle_seconds: float
    event_smoothing_seconds: float
    event_wait_share: float
    start_minutes: float
    tuning_seeds: tuple[int, ...]
    baseline: Figures
    controlled: Figures
    devices: tuple[DeviceGroup, ...]
    jobs: tuple[JobGroup, ...]
    congestion: tuple[Congestion, ...] = ()


class Window(NamedTuple):
    """One sampled piece of the week, ready to be simulated; times in the scenario count from its own start."""

    start: float
    scenario: Scenario
    warm: dict[str, Warmth]
    foreign: tuple[Foreign, ...]


def load_testbed(path: Path) -> Testbed:
    """Read a testbed file; raises UsageError with one sentence."""
    try:
        raw = tomllib.loads(path.read_text(encoding="utf-8"))
        return msgspec.convert(raw, Testbed, dec_hook=_decode_hook)
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError, msgspec.ValidationError) as error:
        raise UsageError(f"Testbed {str(path)!r} cannot be used ({error}); correct it.") from None


def _decode_hook(kind: type, value: Any) -> Any:
    if kind in (ByteRate, ByteSize):
        return kind.parse(value)
    raise NotImplementedError(kind)


def scenario_jobs(testbed: Testbed) -> list[tuple[JobGroup, Job, int]]:
    """All jobs as (group, job, samples of a batch), without their restarts."""
    devices = {group.name: _names(group) for group in testbed.devices}
    result = []
    for group in testbed.jobs:
        for index in range(group.count):
            size = group.read_size * group.sizes[index % len(group.sizes)]
            slow = devices[group.slow_device][index % len(devices[group.slow_device])] if group.slow_device else ""
            burst = Burst(every=group.burst_every, length=group.burst_length, factor=group.factor)
            job = Job(
                name=f"{group.name}{index}",
                device=devices[group.device][index % len(devices[group.device])],
                slow_device=slow,
                slow_ratio=group.slow_ratio,
                pattern="random",
                batch_reads=group.batch_reads,
                read_size=ByteSize(int(size) // 4096 * 4096),
                workers=group.workers,
                queue_batches=group.queue_batches,
                # another step than that of `sizes`, so that large batches do not always go with long steps
                compute_ms=group.compute_ms[index // len(group.sizes) % len(group.compute_ms)],
                burst=burst if group.burst_every else None,
                cold_batches=group.cold_batches,
                cold_factor=group.factor,
                hints=False,
            )
            result.append((group, job, group.samples[index % len(group.samples)]))
    return result


def _names(group: DeviceGroup) -> list[str]:
    return [f"{group.name}{index}" for index in range(group.count)]


def scenario_devices(testbed: Testbed) -> tuple[Device, ...]:
    """All devices."""
    return tuple(
        Device(
            name=name,
            kind=group.kind,
            size=group.size,
            bytes_per_second=group.bytes_per_second,
            iops=group.iops,
            round_trip_ms=group.round_trip_ms,
        )
        for group in testbed.devices
        for name in _names(group)
    )


def windows(testbed: Testbed, seed: int, count: int | None = None) -> list[Window]:
    """Windows of the week that this seed stands for, one at a random place in each of `count` equal parts."""
    count = count or testbed.windows
    part = testbed.days * DAY_SECONDS / count
    length = testbed.settle_seconds + testbed.window_seconds
    places = stream(seed, "windows")
    return [
        _window(testbed, seed, index, index * part + places.random() * max(0.0, part - length))
        for index in range(count)
    ]


def _window(testbed: Testbed, seed: int, index: int, start: float) -> Window:
    length = testbed.settle_seconds + testbed.window_seconds
    jobs, warm = [], {}
    for group, job, _ in scenario_jobs(testbed):
        generator = stream(seed, "window", index, job.name)
        restarts = tuple(_poisson(generator, testbed.start_minutes * 60.0, length))
        jobs.append(msgspec.structs.replace(job, restarts_seconds=restarts, start_seconds=generator.random()))
        warm[job.name] = Warmth(group.cold_batches + generator.randrange(max(1, group.burst_every)))
    foreign = tuple(
        Foreign(name, begin, end, float(one.bytes_per_second))
        for one in testbed.congestion
        for name in _names(next(group for group in testbed.devices if group.name == one.device))
        for begin, end in _on_off(stream(seed, "window", index, "foreign", name), one, length)
    )
    scenario = Scenario(
        name=testbed.name,
        description=f"window at {start:.0f} s",
        duration_seconds=length,
        devices=scenario_devices(testbed),
        jobs=tuple(jobs),
    )
    return Window(start, scenario, warm, foreign)


def _poisson(generator: random.Random, mean: float, length: float) -> list[float]:
    """Moments within `length` of a process with this mean interval; one ends a life, so the next is not at once."""
    moments = []
    now = generator.expovariate(1.0 / mean)
    while now < length:
        moments.append(now)
        now += 5.0 * RESTART_SECONDS + generator.expovariate(1.0 / mean)
    return moments


def _on_off(generator: random.Random, congestion: Congestion, length: float) -> Sequence[tuple[float, float]]:
    """Busy times within `length`; the state at the start is drawn by how much of the time is busy."""
    quiet, busy = congestion.mean_quiet_seconds, congestion.mean_busy_seconds
    spans, now = [], 0.0
    if generator.random() >= busy / (busy + quiet):
        now = generator.expovariate(1.0 / quiet)
    while now < length:
        end = now + generator.expovariate(1.0 / busy)
        spans.append((now, min(end, length)))
        now = end + generator.expovariate(1.0 / quiet)
    return spans
