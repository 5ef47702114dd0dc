"""What the probes read, raw: cumulative counters at one moment, nothing derived.

Every counter only grows while its slot lives; rates, means and ratios are made from two samples by
`agent.signals`. A value that this kernel cannot give is None (unknown), never 0.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Literal, NamedTuple

Op = Literal["read", "write"]

HISTOGRAM_BUCKETS = 32
"""Latency histograms: bucket i counts requests of [2**i, 2**(i+1)) µs; bucket 0 also those below 1 µs."""


class ProbeState(StrEnum):
    """How much of a probe works on this kernel."""

    ATTACHED = "attached"
    DEGRADED = "degraded"
    UNAVAILABLE = "unavailable"


NOT_LOADED = "the module is not loaded"
"""In `why` of a probe that attaches by itself once the kernel has the module: nothing is wrong with it."""


@dataclass(frozen=True, slots=True)
class ProbeStatus:
    """The state of one probe, with the reason wherever it is not plainly attached.

    `why` is one clause on what is not seen; `detail` quotes what the compiler and the kernel said of each attempt.
    `counts` is what became of the messages that reached it, where others send them, by result.
    """

    name: str
    state: ProbeState
    why: str = ""
    tier: str = ""
    lost_events: int = 0
    map_fill_ratio: float | None = None
    detail: str = ""
    counts: tuple[tuple[str, int], ...] = ()


class BlockKey(NamedTuple):
    """One accounting slot of the block layer: who, where (`maj:min` of the whole device), what."""

    cgroup_id: int
    device: str
    op: Op


@dataclass(frozen=True, slots=True)
class BlockCounters:
    """Cumulative counters of one (cgroup, device, op), each bio counted once.

    Times run from submit to completion: `latency_ns` is their sum, `latency_us_squared` the sum of the squares in
    µs² (ns² would overflow 64 bits within a day). `throttle_ns`, `queue_ns` and `device_ns` split the same time
    into the wait in blk-throttle, in the IO scheduler's queue and in the device; None where the tier cannot tell.
    """

    requests: int
    bytes: int
    latency_ns: int
    latency_us_squared: int
    in_flight: int
    histogram: tuple[int, ...]
    throttle_ns: int | None = None
    queue_ns: int | None = None
    device_ns: int | None = None


class IterationEvent(NamedTuple):
    """One batch taken by one stream: when (monotonic ns), how long the loop waited for it, batches left afterwards.

    `depth` and `takeable` as in `StreamCounters`. What the source cannot see is None.
    """

    time_ns: int
    wait_ns: int | None
    depth: int | None
    takeable: int | None = None


@dataclass(frozen=True, slots=True)
class StreamCounters:
    """One loader of one process: cumulative iterations and waiting, and the queue as it stands.

    `recent` holds the iterations since the previous read, oldest first, at most `MAX_RECENT` (older ones are only
    counted). `depth` is how many batches are produced and not taken, `takeable` how many of them the loop could take
    without waiting: a loader that delivers in order gives none while the next one is missing, whatever is ready behind
    it. None is unknown (`takeable` also in recordings of version 1). `waiting_since_ns` is set while the loop is known
    to stand before an empty queue. `grade` says how the wait was seen: `hint`, or S1, S2, U of the DataLoader probe.
    """

    cgroup_id: int
    stream: str
    source: Literal["hint", "dataloader"]
    validation: bool
    iterations: int
    depth: int | None
    capacity: int | None
    wait_ns: int | None
    waiting_since_ns: int | None
    next_batch_bytes: int | None
    last_iteration_ns: int
    recent: tuple[IterationEvent, ...] = ()
    grade: str = "hint"
    samples: int | None = None
    epoch: int = 0
    takeable: int | None = None


MAX_RECENT = 64
"""Iterations kept between two reads of one stream; at 10 reads a second that is 640 iterations a second."""


class NfsKey(NamedTuple):
    """One accounting slot of an NFS client: who, which mount (server:/export as mounted), what."""

    cgroup_id: int
    mount: str
    op: Op


@dataclass(frozen=True, slots=True)
class NfsCounters:
    """Cumulative RPC counters: time in the client's backlog, round trip, and total, in ns."""

    requests: int
    bytes: int | None
    backlog_ns: int
    round_trip_ns: int
    total_ns: int
    total_us_squared: int
    histogram: tuple[int, ...]


class ObjectKey(NamedTuple):
    """One accounting slot of an object store: who, and the endpoint `address:port`."""

    cgroup_id: int
    endpoint: str


@dataclass(frozen=True, slots=True)
class ObjectCounters:
    """Cumulative request counters of one job at one endpoint: first byte and last byte after the first send, ns."""

    requests: int
    bytes: int
    first_byte_ns: int
    last_byte_ns: int
    last_byte_us_squared: int
    open_connections: int
    histogram: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class LinkState:
    """Connections of one cgroup to one endpoint: those open now, their mean smoothed round trip, segments sent again.

    `retransmits` is cumulative, as far as they were seen while a connection was open; `round_trip_ns` is None where no
    connection is open. Both `connections` and that are None where they are unknown: a namespace could not be looked at.
    """

    connections: int | None
    round_trip_ns: int | None
    retransmits: int


FuseOp = Literal["read", "write", "other"]
FUSE_OPS: tuple[FuseOp, ...] = ("read", "write", "other")


class FuseKey(NamedTuple):
    """One accounting slot of user-space file systems: who, where it is mounted, what (`other`: look-up, open, …)."""

    cgroup_id: int
    mount: str
    op: FuseOp


@dataclass(frozen=True, slots=True)
class FuseCounters:
    """Cumulative request counters of one job at one mount: from request to answer, ns; squares in µs²."""

    requests: int
    bytes: int
    total_ns: int
    total_us_squared: int
    histogram: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class CacheCounters:
    """Cumulative page-cache counters of one job: bytes asked for, bytes that had to be added on a miss."""

    read_bytes: int
    missed_bytes: int


@dataclass(frozen=True, slots=True)
class WorkerTime:
    """Cumulative time of a job's preparation workers, ns: running, and blocked by what they waited for."""

    on_cpu_ns: int
    block_ns: int
    nfs_ns: int
    network_ns: int
    fault_ns: int
    other_ns: int
    runnable_ns: int


@dataclass(frozen=True, slots=True)
class Sample:
    """All raw counters of the managed cgroups at `time_ns` (CLOCK_MONOTONIC). A probe fills only its own part.

    `interfaces` holds the packets received and sent since boot by network interface.
    """

    time_ns: int
    blocks: Mapping[BlockKey, BlockCounters] = field(default_factory=dict)
    streams: tuple[StreamCounters, ...] = ()
    nfs: Mapping[NfsKey, NfsCounters] = field(default_factory=dict)
    objects: Mapping[ObjectKey, ObjectCounters] = field(default_factory=dict)
    cache: Mapping[int, CacheCounters] = field(default_factory=dict)
    workers: Mapping[int, WorkerTime] = field(default_factory=dict)
    fuse: Mapping[FuseKey, FuseCounters] = field(default_factory=dict)
    links: Mapping[ObjectKey, LinkState] = field(default_factory=dict)
    interfaces: Mapping[str, int] = field(default_factory=dict)


def merge_samples(time_ns: int, parts: tuple[Sample, ...]) -> Sample:
    """One sample from what each probe read; later parts win where two filled the same slot (none should)."""
    blocks: dict[BlockKey, BlockCounters] = {}
    nfs: dict[NfsKey, NfsCounters] = {}
    objects: dict[ObjectKey, ObjectCounters] = {}
    cache: dict[int, CacheCounters] = {}
    workers: dict[int, WorkerTime] = {}
    fuse: dict[FuseKey, FuseCounters] = {}
    links: dict[ObjectKey, LinkState] = {}
    interfaces: dict[str, int] = {}
    streams: list[StreamCounters] = []
    for part in parts:
        blocks.update(part.blocks)
        nfs.update(part.nfs)
        objects.update(part.objects)
        cache.update(part.cache)
        workers.update(part.workers)
        fuse.update(part.fuse)
        links.update(part.links)
        interfaces.update(part.interfaces)
        streams.extend(part.streams)
    return Sample(time_ns, blocks, tuple(streams), nfs, objects, cache, workers, fuse, links, interfaces)
