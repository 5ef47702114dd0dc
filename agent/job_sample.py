"""What the probes and the cgroup files said about one job at one moment, and how signals are made from it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from agent.types import JobId, Medium
from bpf.samples import (
    BlockCounters,
    BlockKey,
    CacheCounters,
    FuseCounters,
    FuseKey,
    NfsCounters,
    NfsKey,
    ObjectCounters,
    ObjectKey,
    StreamCounters,
    WorkerTime,
)


class IoCounts(NamedTuple):
    """Cumulative counters of one line of io.stat: bytes and requests, reads and writes."""

    rbytes: int
    wbytes: int
    rios: int
    wios: int


@dataclass(frozen=True, slots=True)
class JobSample:
    """All raw counters of one cgroup at `time_ns` (CLOCK_MONOTONIC); what this kernel cannot give is None or absent.

    `pressure_some_seconds` is the cumulative `some` time of io.pressure, `nic_packets` the cumulative packets of the
    interface that reaches remote storage (received and sent).
    """

    job: JobId
    time_ns: int
    blocks: Mapping[BlockKey, BlockCounters] = field(default_factory=dict)
    streams: tuple[StreamCounters, ...] = ()
    nfs: Mapping[NfsKey, NfsCounters] = field(default_factory=dict)
    objects: Mapping[ObjectKey, ObjectCounters] = field(default_factory=dict)
    cache: CacheCounters | None = None
    workers: WorkerTime | None = None
    io_stat: Mapping[str, IoCounts] = field(default_factory=dict)
    pressure_some_seconds: float | None = None
    nic_packets: int | None = None
    fuse: Mapping[FuseKey, FuseCounters] = field(default_factory=dict)


NORMAL_LATENCY_SECONDS: Mapping[Medium, float] = {Medium.SSD: 0.002, Medium.HDD: 0.015, Medium.REMOTE: 0.020}
"""Where the learned normal latency starts at most: a slow start can lower the reference, never set it higher."""


@dataclass(frozen=True, slots=True)
class SignalSettings:
    """How raw counters become signals; every time in seconds.

    `media` maps each block device to its medium. `starvation_seconds` is the shortest wait before an empty queue that
    counts as starvation. Rates are smoothed over `smoothing_seconds`; latency over the last `latency_requests`
    requests or `smoothing_seconds`, whichever is longer; the split of bytes over devices over `access_seconds`.
    A job without a visible loader ticks every `timer_seconds`. Latency without a request for `stale_seconds` is
    unknown. The first `cold_iterations` never teach the reference latency to rise. A pause of `resume_seconds` (and
    20 iterations) outside the loader counts as a resume.
    """

    media: Mapping[str, Medium] = field(default_factory=dict)
    starvation_seconds: float = 0.010
    smoothing_seconds: float = 0.3
    iteration_smoothing_seconds: float = 1.0
    latency_requests: int = 64
    access_seconds: float = 10.0
    timer_seconds: float = 1.0
    stale_seconds: float = 10.0
    cold_iterations: int = 10
    resume_seconds: float = 10.0
    normal_latency_seconds: Mapping[Medium, float] = field(default_factory=lambda: dict(NORMAL_LATENCY_SECONDS))
