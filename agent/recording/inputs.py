"""A job's raw counters as a flat mapping of paths to plain values, and back. Pure; exact."""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Mapping
from typing import Any, NamedTuple

from agent.job_sample import IoCounts, JobSample
from agent.types import JobId
from bpf.samples import (
    BlockCounters,
    BlockKey,
    CacheCounters,
    FuseCounters,
    FuseKey,
    IterationEvent,
    NfsCounters,
    NfsKey,
    ObjectCounters,
    ObjectKey,
    StreamCounters,
    WorkerTime,
)

Path = tuple[str | int, ...]
Flat = dict[Path, Any]

BLOCK = ("requests", "bytes", "latency_ns", "latency_us_squared", "in_flight", "throttle_ns", "queue_ns", "device_ns")
STREAM = ("source", "validation", "iterations", "depth", "capacity", "wait_ns", "waiting_since_ns", "next_batch_bytes",
          "last_iteration_ns", "grade", "samples", "epoch", "takeable")  # fmt: skip
NFS = ("requests", "bytes", "backlog_ns", "round_trip_ns", "total_ns", "total_us_squared")
OBJECT = ("requests", "bytes", "first_byte_ns", "last_byte_ns", "last_byte_us_squared", "open_connections")
FUSE = ("requests", "bytes", "total_ns", "total_us_squared")
CACHE = ("read_bytes", "missed_bytes")
WORKERS = ("on_cpu_ns", "block_ns", "nfs_ns", "network_ns", "fault_ns", "other_ns", "runnable_ns")
BUCKETS, PLACE = "buckets", "place"


class Events(NamedTuple):
    """Iterations of one stream since the pass before: (time_ns less the sample's, wait_ns, depth, takeable) each.

    In version 1 without the last.
    """

    stream: str
    iterations: tuple[tuple[int, *tuple[int | None, ...]], ...]


def flatten(sample: JobSample) -> tuple[Flat, list[Events]]:
    """The sample's values by path, without its time and its iterations, which are returned apart."""
    flat: Flat = {}
    for block_key, counters in sample.blocks.items():
        _put(flat, ("b", block_key.device, block_key.op), counters, BLOCK)
        _put_histogram(flat, ("b", block_key.device, block_key.op), counters.histogram)
    for place, stream in enumerate(sample.streams):
        _put(flat, ("s", stream.stream), stream, STREAM)
        flat["s", stream.stream, PLACE] = place
    for nfs_key, rpc in sample.nfs.items():
        _put(flat, ("f", nfs_key.mount, nfs_key.op), rpc, NFS)
        _put_histogram(flat, ("f", nfs_key.mount, nfs_key.op), rpc.histogram)
    for object_key, request in sample.objects.items():
        _put(flat, ("o", object_key.endpoint), request, OBJECT)
        _put_histogram(flat, ("o", object_key.endpoint), request.histogram)
    for fuse_key, asked in sample.fuse.items():
        _put(flat, ("u", fuse_key.mount, fuse_key.op), asked, FUSE)
        _put_histogram(flat, ("u", fuse_key.mount, fuse_key.op), asked.histogram)
    if sample.cache is not None:
        _put(flat, ("c",), sample.cache, CACHE)
    if sample.workers is not None:
        _put(flat, ("w",), sample.workers, WORKERS)
    for device, counts in sample.io_stat.items():
        _put(flat, ("i", device), counts, IoCounts._fields)
    _put(flat, ("x",), sample, ("pressure_some_seconds", "nic_packets"))
    events = [
        Events(one.stream, tuple((event.time_ns - sample.time_ns, *event[1:]) for event in one.recent))
        for one in sample.streams
        if one.recent
    ]
    return flat, events


def _put(flat: Flat, path: Path, values: object, names: tuple[str, ...]) -> None:
    for name in names:
        value = getattr(values, name)
        if value is not None:
            flat[(*path, name)] = value


def _put_histogram(flat: Flat, path: Path, histogram: tuple[int, ...]) -> None:
    """Empty buckets are left out; their number is kept."""
    flat[(*path, BUCKETS)] = len(histogram)
    for bucket, count in enumerate(histogram):
        if count:
            flat[(*path, bucket)] = count


def unflatten(job: JobId, time_ns: int, flat: Mapping[Path, Any], events: list[Events]) -> JobSample:
    """The sample again."""
    groups: dict[Path, dict[str | int, Any]] = defaultdict(dict)
    for path, value in flat.items():
        groups[path[:-1]][path[-1]] = value
    recent = {one.stream: one.iterations for one in events}
    parts: dict[str, dict[Any, Any]] = defaultdict(dict)
    for path, values in groups.items():
        kind, rest = path[0], _texts(path[1:])
        if kind == "b":
            parts["b"][BlockKey(job, *rest)] = BlockCounters(
                **_named(values, BLOCK, BlockCounters), histogram=_histogram(values)
            )
        elif kind == "s":
            parts["s"][values[PLACE]] = _stream(job, rest[0], values, recent.get(rest[0], ()), time_ns)
        elif kind == "f":
            parts["f"][NfsKey(job, *rest)] = NfsCounters(
                **_named(values, NFS, NfsCounters), histogram=_histogram(values)
            )
        elif kind == "o":
            parts["o"][ObjectKey(job, *rest)] = ObjectCounters(
                **_named(values, OBJECT, ObjectCounters), histogram=_histogram(values)
            )
        elif kind == "u":
            parts["u"][FuseKey(job, *rest)] = FuseCounters(
                **_named(values, FUSE, FuseCounters), histogram=_histogram(values)
            )
        elif kind == "i":
            parts["i"][rest[0]] = IoCounts(**_named(values, IoCounts._fields, IoCounts))
    cache, workers, other = groups.get(("c",)), groups.get(("w",)), groups.get(("x",), {})
    return JobSample(
        job=job,
        time_ns=time_ns,
        blocks=parts["b"],
        streams=tuple(stream for _, stream in sorted(parts["s"].items())),
        nfs=parts["f"],
        objects=parts["o"],
        cache=CacheCounters(**_named(cache, CACHE, CacheCounters)) if cache else None,
        workers=WorkerTime(**_named(workers, WORKERS, WorkerTime)) if workers else None,
        io_stat=parts["i"],
        pressure_some_seconds=other.get("pressure_some_seconds"),
        nic_packets=other.get("nic_packets"),
        fuse=parts["u"],
    )


def _texts(path: Path) -> list[Any]:
    """Keys of counters are made of texts; the type of `op` is narrower than a file can promise."""
    return [str(part) for part in path]


def _named(values: Mapping[str | int, Any], names: tuple[str, ...], kind: type) -> dict[str, Any]:
    """The fields of `kind` by name; ValueError where one is missing that is never unknown."""
    missing = _required(kind, names) - values.keys()
    if missing:
        raise ValueError(f"no {min(missing)} in {kind.__name__}")
    return {name: values.get(name) for name in names}


@functools.cache
def _required(kind: type, names: tuple[str, ...]) -> frozenset[str]:
    return frozenset(name for name in names if "None" not in str(kind.__annotations__[name]))


def _histogram(values: Mapping[str | int, Any]) -> tuple[int, ...]:
    return tuple(values.get(bucket, 0) for bucket in range(values.get(BUCKETS, 0)))


def _stream(
    job: JobId,
    name: str,
    values: Mapping[str | int, Any],
    recent: tuple[tuple[int, *tuple[int | None, ...]], ...],
    time_ns: int,
) -> StreamCounters:
    events = tuple(IterationEvent(time_ns + since, *rest) for since, *rest in recent)
    return StreamCounters(cgroup_id=job, stream=name, recent=events, **_named(values, STREAM, StreamCounters))
