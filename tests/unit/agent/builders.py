"""Values of the control core with sensible defaults, for tests that care about one field at a time."""

from agent.health import level
from agent.types import (
    Capacity,
    Cause,
    DeviceInfo,
    DeviceSignals,
    DeviceView,
    Diagnosis,
    Health,
    Job,
    JobView,
    Medium,
    Need,
    NeighbourView,
    NodeView,
    Signals,
)
from bpf.samples import BlockCounters, BlockKey, IterationEvent, StreamCounters

MIB = 1 << 20
SSD = "259:0"
HDD = "8:0"
CAPACITY = Capacity(100 * MIB, 100 * MIB, 4000, 4000)
MS = 1_000_000
SECOND = 1_000_000_000


def stream(name="a", iterations=0, **changes):
    values = {
        "cgroup_id": 1,
        "stream": name,
        "source": "dataloader",
        "validation": False,
        "iterations": iterations,
        "depth": None,
        "capacity": 8,
        "wait_ns": 0,
        "waiting_since_ns": None,
        "next_batch_bytes": None,
        "last_iteration_ns": 0,
        "recent": (),
        "grade": "S1",
    }
    return StreamCounters(**(values | changes))


def event(time_ms, wait_ms=0.0, depth=None, takeable=None):
    wait = None if wait_ms is None else int(wait_ms * MS)
    return IterationEvent(int(time_ms * MS), wait, depth, takeable)


def block(requests, size=MIB, latency_ms=1.0, *, throttle_ms=None, queue_ms=None, in_flight=0):
    """Counters after `requests` requests of one size and latency each."""
    return BlockCounters(
        requests,
        requests * size,
        int(requests * latency_ms * MS),
        int(requests * (latency_ms * 1000) ** 2),
        in_flight,
        (),
        None if throttle_ms is None else int(requests * throttle_ms * MS),
        None if queue_ms is None else int(requests * queue_ms * MS),
        None,
    )


def reads(job=1, device=SSD):
    return BlockKey(job, device, "read")


def writes(job=1, device=SSD):
    return BlockKey(job, device, "write")


def device_signals(device=SSD, share_used=0.0, **changes):
    """One job on one device; `share_used` is what it reads as a part of `CAPACITY`."""
    values = {
        "device": device,
        "medium": Medium.HDD if device == HDD else Medium.SSD,
        "read_bytes_per_second": share_used * CAPACITY.rbps,
        "write_bytes_per_second": 0.0,
        "read_requests_per_second": 0.0,
        "write_requests_per_second": 0.0,
        "latency_seconds": 0.001,
        "latency_cv": 0.5,
        "reference_seconds": 0.001,
        "throttle_ratio": 0.0,
        "throttle_wait_seconds": 0.0,
        "queueing_ratio": None,
        "in_flight": 0,
        "access_share": 1.0,
    }
    return DeviceSignals(**(values | changes))


def signals(job=1, devices=None, **changes):
    values = {
        "job": job,
        "time": 100.0,
        "dt": 0.1,
        "iteration_source": "dataloader",
        "iterations": 100,
        "iterations_since_start": 100,
        "new_iterations": 1,
        "iteration_seconds": 0.1,
        "compute_seconds": 0.1,
        "wait_seconds": 0.0,
        "wait_seconds_total": 0.0,
        "blocked_seconds": 0.0,
        "starvation_events": 0,
        "queue_depth": 8.0,
        "queue_capacity": 8.0,
        "queue_takeable": changes.get("queue_depth", 8.0),
        "next_batch_bytes": 1.0 * MIB,
        "devices": {SSD: device_signals()} if devices is None else devices,
    }
    return Signals(**(values | changes))


def health(score=90.0, confidence=1.0, queue=None):
    return Health(score, level(score), {"queue": queue}, confidence)


def job(number=1, training=True, weight=100.0):
    return Job(number, f"job{number}", f"/job{number}", training, weight)


def diagnosis(cause=Cause.NONE, actionable=True):
    return Diagnosis(cause, {}, 1.0, actionable)


def job_view(number=1, score=90.0, used=0.2, need=0.2, device=SSD, **changes):
    """A training job on one device; `used` and `need` are shares of `CAPACITY` (need None: unknown)."""
    confidence = changes.pop("confidence", 1.0)
    queue = changes.pop("queue", None)
    cause = changes.pop("cause", Cause.NONE)
    actionable = changes.pop("actionable", True)
    new = changes.pop("new_iteration", True)
    weight = changes.pop("weight", 100.0)
    batch = 0.1 * (need or 0.2) * CAPACITY.rbps
    here = {device: device_signals(device, used)}
    values = {"devices": here, "next_batch_bytes": batch} | changes
    needs = {} if need is None else {device: Need(need * CAPACITY.rbps, 0.0)}
    return JobView(
        job(number, weight=weight),
        signals(number, **values),
        health(score, confidence, queue),
        diagnosis(cause, actionable),
        needs,
        new,
    )


def neighbour_view(number=9, used=0.5, device=SSD):
    return NeighbourView(job(number, training=False), {device: device_signals(device, used)})


def node_view(now, jobs=(), neighbours=(), unmanaged=0.0, media=None):
    media = media or {SSD: Medium.SSD}
    devices = {name: DeviceView(DeviceInfo(name, name, medium, CAPACITY), unmanaged) for name, medium in media.items()}
    return NodeView(now, tuple(jobs), tuple(neighbours), devices)
