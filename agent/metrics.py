"""Prometheus families made from the last `TickReport`; nothing is decided here.

Names and labels are those of the design: base units, ratios 0..1, scores 0..100; labels are job, namespace, pod,
device, medium, op and cause (plus `probe` and `result` on the agent's own families). A job's series vanish with it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace

from prometheus_client.core import (
    HistogramMetricFamily,
    InfoMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from agent.metric_families import (
    DEVICE_LABELS,
    JOB_LABELS,
    Families,
    add,
    device_labels,
    labels_of,
    new_counter,
    new_gauge,
    slot_labels,
)
from agent.pool import borrowed
from agent.rearrange.metrics import mend_families, rearrange_families
from agent.types import Cause, JobId, JobReport, Level, TickReport
from bpf.samples import LinkState, ProbeState

LEVELS = {Level.HEALTHY: 3, Level.TIGHT: 2, Level.DANGER: 1, Level.CRITICAL: 0}
PROBE_STATES = {ProbeState.ATTACHED: 2, ProbeState.DEGRADED: 1, ProbeState.UNAVAILABLE: 0}
FIRST_BUCKET, LAST_BUCKET = 4, 24
"""Exported latency buckets: 32 µs (the end of bucket 4) to about 34 s (the end of bucket 24)."""

WRITE_RESULTS = ("written", "unchanged", "dry_run", "conflict", "vanished", "error", "rate_limited")
"""All of them have a series from the start, so that `increase()` sees the first of a kind."""


class ReportCollector(Collector):
    """Turns what `latest()` returns (None before the first tick) into metric families at every scrape."""

    def __init__(self, latest: Callable[[], TickReport | None], version: str, max_jobs: int = 1000) -> None:
        self._latest = latest
        self._version = version
        self._max_jobs = max_jobs

    def collect(self) -> Iterable[Metric]:
        """All families; before the first tick only the build information."""
        info = InfoMetricFamily("prefetchd_build", "Version, policy and mode of the running agent.")
        report = self._latest()
        labels = {"version": self._version}
        if report:
            labels |= {"policy": report.policy, "mode": report.mode}
        info.add_metric([], labels)
        yield info
        if report:
            shown = replace(report, jobs=_shown(report, self._max_jobs))
            jobs = _training(shown)
            yield from _job_families(jobs)
            yield from _device_job_families(shown, jobs)
            yield from _latency_families(shown)
            yield from _remote_families(shown, jobs)
            yield from _controller_families(report)
            yield from rearrange_families(shown)
            yield from mend_families(shown)
            yield from _agent_families(report, dropped=max(0, len(_training(report)) - self._max_jobs))


def _training(report: TickReport) -> list[JobReport]:
    return [entry for entry in report.jobs.values() if entry.job.training]


def _shown(report: TickReport, max_jobs: int) -> dict[JobId, JobReport]:
    """The jobs that have series, at most so many: training jobs before best-effort cgroups."""
    ordered = sorted(report.jobs.items(), key=lambda one: not one[1].job.training)
    return dict(ordered[:max_jobs])


def _job_families(jobs: list[JobReport]) -> Families:
    for name, text, path in _JOB_GAUGES:
        family = new_gauge(name, text, JOB_LABELS)
        for entry in jobs:
            add(family, labels_of(entry), _read(entry, path))
        yield family
    for name, text, path in _JOB_COUNTERS:
        counter = new_counter(name, text, JOB_LABELS)
        for entry in jobs:
            add(counter, labels_of(entry), _read(entry, path))
        yield counter
    yield from _cause_families(jobs)


def _cause_families(jobs: list[JobReport]) -> Families:
    starved = new_counter(
        "starvation_events",
        "Episodes of waiting at an empty queue; no series where waits cannot be seen.",
        (*JOB_LABELS, "cause"),
    )
    cause = new_gauge("diagnosis", "1 for the present cause of starvation, 0 for the others.", (*JOB_LABELS, "cause"))
    for entry in jobs:
        seen = _waits_seen(entry)
        for name in Cause:
            add(starved, [*labels_of(entry), name], entry.starvation_by_cause.get(name, 0) if seen else None)
            if entry.diagnosis:
                add(cause, [*labels_of(entry), name], entry.diagnosis.cause is name)
    yield starved
    yield cause


def _waits_seen(entry: JobReport) -> bool:
    """Whether starvation could be counted; a timer that stands in for the iterations shows no waits."""
    by_timer = entry.signals is not None and entry.signals.iteration_source == "timer"
    return not by_timer or any(entry.starvation_by_cause.values())


_JOB_GAUGES = (
    ("health_score", "Prefetch health, 0 (critical) to 100 (healthy).", "health.score"),
    ("health_confidence", "Weight of the health metrics that could be measured, 0 to 1.", "health.confidence"),
    ("health_level", "Health level: 3 healthy, 2 tight, 1 danger, 0 critical.", "health.level"),
    ("queue_depth", "Batches ready in the prefetch queue, in order or not.", "signals.queue_depth"),
    ("queue_takeable", "Batches that the loop could take now, in its order.", "signals.queue_takeable"),
    ("queue_capacity", "Batches that the prefetch queue can hold.", "signals.queue_capacity"),
    ("next_batch_bytes", "Expected bytes of the next batch.", "signals.next_batch_bytes"),
    ("cache_hit_ratio", "Share of read bytes served by the page cache, 0 to 1.", "signals.cache_hit_ratio"),
    (
        "nfs_queueing_ratio",
        "Share of remote request time spent queueing, 0 to 1.",
        "signals.remote_queueing_ratio",
    ),
    ("compute_seconds", "Moving average of an iteration without its wait.", "signals.compute_seconds"),
    ("actionable", "1 where moving local bandwidth can help this job, else 0.", "diagnosis.actionable"),
)

_JOB_COUNTERS = (
    ("iterations", "Training iterations; ticks of a timer where none can be seen.", "signals.iterations"),
    ("wait_seconds", "Time that the training loop waited for its next batch.", "signals.wait_seconds_total"),
)


def _read(entry: JobReport, path: str) -> float | None:
    """The number at `part.field` of a report; None where the part or the value is unknown."""
    part, field = path.split(".")
    value = getattr(getattr(entry, part), field, None)
    return float(LEVELS[value]) if isinstance(value, Level) else value


def _device_job_families(report: TickReport, jobs: list[JobReport]) -> Families:
    need = new_gauge("need_bytes_per_second", "Bandwidth that keeps the prefetch queue filled.", DEVICE_LABELS)
    entitled = new_gauge("entitlement_ratio", "What the job may use while control is active, as share of the device.",
                      DEVICE_LABELS)  # fmt: skip
    quota = new_gauge("quota_bytes_per_second", "Read cap in force; no series while uncapped.", DEVICE_LABELS)
    for entry in jobs:
        for device, wanted in entry.need.items():
            add(need, slot_labels(report, entry, device), wanted.bytes_per_second)
    for (job, device), entitlement in report.decision.entitlements.items():
        if job in report.jobs:
            add(entitled, slot_labels(report, report.jobs[job], device), entitlement.share)
    for (job, device), limits in report.applied.items():
        if job in report.jobs:
            add(quota, slot_labels(report, report.jobs[job], device), limits[0])
    yield from (need, entitled, quota, _loan_family(report))
    for term in ("error", "proportional", "integral", "derivative", "output"):
        text = f"Last {term} of the job's controller (error in points, the others relative)."
        family = new_gauge(f"pid_{term}", text, DEVICE_LABELS)
        for (job, device), terms in report.decision.pid.items():
            if job in report.jobs:
                add(family, slot_labels(report, report.jobs[job], device), getattr(terms, term))
        yield family


def _loan_family(report: TickReport) -> Metric:
    """0 for who may borrow and has not."""
    loan = new_gauge("loan_ratio", "Elastic share that the training job has borrowed.", DEVICE_LABELS)
    held = borrowed(report.decision.pools)
    for job, device in {**report.decision.entitlements, **held}:
        if job in report.jobs and report.jobs[job].job.training:
            add(loan, slot_labels(report, report.jobs[job], device), held.get((job, device), 0.0))
    return loan


def _latency_families(report: TickReport) -> Families:
    labels = (*DEVICE_LABELS, "op")
    latency = HistogramMetricFamily(
        "prefetchd_io_latency_seconds", "Block request latency from submit to completion.", labels=labels
    )
    throttle = new_counter("io_throttle_wait_seconds", "Request time spent waiting at the job's own cap.", labels)
    total = new_counter("io_bytes", "Bytes completed at the block layer.", labels)
    flight = new_gauge("io_in_flight", "Block requests submitted and not completed.", labels)
    for key, counters in report.sample.blocks.items():
        if key.cgroup_id not in report.jobs:
            continue
        values = [*slot_labels(report, report.jobs[key.cgroup_id], key.device), key.op]
        latency.add_metric(values, _buckets(counters.histogram), counters.latency_ns / 1e9)
        add(throttle, values, None if counters.throttle_ns is None else counters.throttle_ns / 1e9)
        add(total, values, counters.bytes)
        add(flight, values, counters.in_flight)
    yield from (latency, throttle, total, flight)


def _buckets(histogram: tuple[int, ...]) -> list[tuple[str, float]]:
    """Cumulative counts per upper bound in seconds, from a log2 histogram in µs."""
    total = sum(histogram[:FIRST_BUCKET])
    buckets: list[tuple[str, float]] = []
    for index in range(FIRST_BUCKET, LAST_BUCKET + 1):
        total += histogram[index] if index < len(histogram) else 0
        buckets.append((repr(2 ** (index + 1) / 1e6), total))
    buckets.append(("+Inf", sum(histogram)))
    return buckets


def _remote_families(report: TickReport, jobs: list[JobReport]) -> Families:
    """NFS, object-store and FUSE latency per job, summed over mounts and endpoints (their names are no labels)."""
    nfs = HistogramMetricFamily("prefetchd_nfs_latency_seconds", "NFS request latency, backlog included.",
                                labels=(*JOB_LABELS, "op"))  # fmt: skip
    objects = HistogramMetricFamily(
        "prefetchd_object_latency_seconds", "Object-store request latency to the last byte.", labels=JOB_LABELS
    )
    known = {entry.job.id: entry for entry in jobs}
    rows: dict[tuple[int, str], tuple[list[int], float]] = {}
    for key, rpc in report.sample.nfs.items():
        _add(rows, (key.cgroup_id, key.op), rpc.histogram, rpc.total_ns)
    for (job, op), (histogram, nanoseconds) in rows.items():
        if job in known:
            nfs.add_metric([*labels_of(known[job]), op], _buckets(tuple(histogram)), nanoseconds / 1e9)
    rows = {}
    for endpoint, request in report.sample.objects.items():
        _add(rows, (endpoint.cgroup_id, ""), request.histogram, request.last_byte_ns)
    for (job, _), (histogram, nanoseconds) in rows.items():
        if job in known:
            objects.add_metric(labels_of(known[job]), _buckets(tuple(histogram)), nanoseconds / 1e9)
    fuse = HistogramMetricFamily("prefetchd_fuse_latency_seconds", "FUSE request latency; other: open, look-up, etc.",
                                 labels=(*JOB_LABELS, "op"))  # fmt: skip
    rows = {}
    for mount, asked in report.sample.fuse.items():
        _add(rows, (mount.cgroup_id, mount.op), asked.histogram, asked.total_ns)
    for (job, op), (histogram, nanoseconds) in rows.items():
        if job in known:
            fuse.add_metric([*labels_of(known[job]), op], _buckets(tuple(histogram)), nanoseconds / 1e9)
    yield from (nfs, objects, fuse)
    yield from _link_families(report, known)


def _link_families(report: TickReport, known: dict[int, JobReport]) -> Families:
    """The way to the object store, per job over its endpoints; packets by interface."""
    count = new_gauge("object_connections", "Open connections to object stores.", JOB_LABELS)
    trip = new_gauge("object_round_trip_seconds", "Mean smoothed round trip of these connections.", JOB_LABELS)
    resent = new_counter("object_retransmits", "TCP segments sent again to object stores.", JOB_LABELS)
    states: dict[int, list[LinkState]] = {}
    for endpoint, state in report.sample.links.items():
        states.setdefault(endpoint.cgroup_id, []).append(state)
    for job, several in states.items():
        if job in known:
            counts = [one.connections for one in several if one.connections is not None]
            open_now = sum(counts)
            weighed = sum((one.connections or 0) * (one.round_trip_ns or 0) for one in several)
            add(count, labels_of(known[job]), open_now if len(counts) == len(several) else None)
            add(trip, labels_of(known[job]), weighed / open_now / 1e9 if open_now else None)
            add(resent, labels_of(known[job]), sum(one.retransmits for one in several))
    packets = new_counter("interface_packets", "Packets received and sent, by network interface.", ("device",))
    for name, packed in report.sample.interfaces.items():
        add(packets, [name], packed)
    yield from (count, trip, resent, packets)


def _add(
    rows: dict[tuple[int, str], tuple[list[int], float]], key: tuple[int, str], histogram: tuple[int, ...], ns: float
) -> None:
    counts, total = rows.get(key, ([0] * len(histogram), 0.0))
    rows[key] = ([a + b for a, b in zip(counts, histogram, strict=True)], total + ns)


def _controller_families(report: TickReport) -> Families:
    labels = ("device", "medium")
    capacity = new_gauge("pool_capacity_ratio", "Elastic part of the device.", labels)
    lent = new_gauge(
        "pool_lent_ratio", "Elastic share on loan to training jobs; best effort may use the rest meanwhile.", labels
    )
    gate = new_gauge("gate_open", "1 while a victim keeps control active on the device, else 0.", labels)
    rate = new_gauge("device_capacity_bytes_per_second", "What the device can do, by operation.", (*labels, "op"))
    for device, pool in report.decision.pools.items():
        add(capacity, device_labels(report, device), pool.capacity)
        add(lent, device_labels(report, device), pool.lent)
    for device, is_open in report.decision.gate_open.items():
        add(gate, device_labels(report, device), is_open)
    for device, view in report.devices.items():
        if view.info.capacity:
            add(rate, [*device_labels(report, device), "read"], view.info.capacity.rbps)
            add(rate, [*device_labels(report, device), "write"], view.info.capacity.wbps)
    yield from (capacity, lent, gate, rate)


def _agent_families(report: TickReport, dropped: int) -> Families:
    writes = new_counter("control_writes", "Writes to control files by result.", ("result",))
    for result in WRITE_RESULTS:
        add(writes, [result], report.writes.get(result, 0))
    yield writes
    yield from _probe_families(report)
    for name, text, value in (
        ("ticks", "Passes of the control loop.", report.ticks),
        ("tick_seconds", "Time spent in passes of the control loop.", report.seconds_total),
        ("control_conflicts", "Limits that another writer changed and that were given up.", report.conflicts),
        ("restores", "Limits set back to their prior value.", report.restores),
        ("rule_violations", "Lines that a decision broke; such a decision is not carried out.", report.violations),
        ("job_errors", "Passes in which one job could not be evaluated.", report.job_errors),
    ):
        counter = new_counter(name, text, ())
        add(counter, [], value)
        yield counter
    for name, text, value in (
        ("tick_duration_seconds", "Time of the last pass of the control loop.", report.duration_seconds),
        ("last_tick_timestamp_seconds", "When the last pass ended (Unix time).", report.wall_time),
        ("jobs", "Training jobs under watch.", len(_training(report))),
        ("jobs_without_series", "Training jobs beyond metrics.max_jobs.", dropped),
        ("enforcing", "1 while limits may be written, else 0.", float(report.mode == "enforce")),
    ):
        gauge = new_gauge(name, text, ())
        add(gauge, [], value)
        yield gauge


def _probe_families(report: TickReport) -> Families:
    status = new_gauge("probe_status", "2 attached, 1 degraded, 0 unavailable.", ("probe",))
    lost = new_counter("lost_events", "Events or requests that a probe could not account.", ("probe",))
    fill = new_gauge("map_fill_ratio", "Used part of a probe's table, 0 to 1.", ("probe",))
    hints = new_counter("hints", "Hints of training code by what became of them.", ("result",))
    for probe in report.probes:
        for result, count in probe.counts:
            add(hints, [result], count)
        add(status, [probe.name], PROBE_STATES[probe.state])
        add(lost, [probe.name], probe.lost_events)
        add(fill, [probe.name], probe.map_fill_ratio)
    yield from (status, lost, fill, hints)
