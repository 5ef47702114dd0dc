"""What was made of the counters (signals, scores, decisions), rounded for a recording. Pure.

Every number has a scale: it is kept as the integer `round(value * scale)`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from agent.recording.inputs import Flat, Path
from agent.types import DeviceSignals, JobReport, Signals, TickReport

SCALES: Mapping[str, float] = {
    "score": 10,
    "part": 1,
    "confidence": 100,
    "cause_confidence": 100,
    "evidence": 1000,
    "wait_seconds": 1e5,
    "wait_seconds_total": 1e4,
    "compute_seconds": 1e4,
    "blocked_seconds": 1e3,
    "queue_depth": 10,
    "queue_capacity": 10,
    "queue_takeable": 10,
    "next_batch_bytes": 1e-3,
    "cache_hit_ratio": 1000,
    "remote_queueing_ratio": 1000,
    "cpu_ratio": 1000,
    "latency_seconds": 1e6,
    "reference_seconds": 1e6,
    "latency_cv": 100,
    "throttle_ratio": 1000,
    "queueing_ratio": 1000,
    "read_bytes_per_second": 1e-3,
    "write_bytes_per_second": 1e-3,
    "need_bytes_per_second": 1e-3,
    "regular_ratio": 1e4,
    "loan_ratio": 1e4,
    "quota_ratio": 1e4,
    "error_points": 10,
    "output_ratio": 1000,
    "pool_capacity_ratio": 1e4,
    "pool_lent_ratio": 1e4,
    "pool_regular_ratio": 1e4,
    "unmanaged_ratio": 1e6,
    "tick_seconds": 1e6,
}
SIGNALS = ("wait_seconds", "wait_seconds_total", "compute_seconds", "blocked_seconds", "queue_depth", "queue_capacity",
           "queue_takeable", "next_batch_bytes", "cache_hit_ratio", "remote_queueing_ratio", "cpu_ratio")  # fmt: skip
DEVICE_SIGNALS = ("latency_seconds", "reference_seconds", "latency_cv", "throttle_ratio", "queueing_ratio",
                  "read_bytes_per_second", "write_bytes_per_second")  # fmt: skip
CAPS = ("rbps", "wbps", "riops", "wiops")


def _scaled(name: str, value: float) -> int:
    return round(value * SCALES[name])


def restored(path: Path, value: Any) -> Any:
    """The number that an integer stands for; everything else as it is."""
    scale = SCALES.get(str(path[0])) or SCALES.get(str(path[-1]))
    return value / scale if scale and type(value) is int else value


def job_outputs(report: TickReport, entry: JobReport) -> Flat:
    """What was made of one job: paths (name,), (`part` | `evidence` | `starved`, name), (`d`, device, name)."""
    flat: Flat = {}
    if entry.signals is not None:
        _signals(flat, entry.signals)
    if entry.health is not None:
        flat["score",] = _scaled("score", entry.health.score)
        flat["confidence",] = _scaled("confidence", entry.health.confidence)
        for name, part in entry.health.parts.items():
            if part is not None:
                flat["part", name] = round(part)
    if entry.diagnosis is not None:
        flat["cause",] = str(entry.diagnosis.cause)
        flat["cause_confidence",] = _scaled("cause_confidence", entry.diagnosis.confidence)
        flat["actionable",] = entry.diagnosis.actionable
        for name, value in entry.diagnosis.evidence.items():
            flat["evidence", name] = _scaled("evidence", value)
    for cause, count in entry.starvation_by_cause.items():
        flat["starved", str(cause)] = count
    devices = dict(entry.signals.devices) if entry.signals is not None else {}
    for device in {*devices, *(device for job, device in report.applied if job == entry.job.id)}:
        _device(flat, report, entry, device, devices.get(device))
    return flat


def _signals(flat: Flat, signals: Signals) -> None:
    flat["iterations",] = signals.iterations
    flat["iteration_source",] = signals.iteration_source
    flat["starvation_events",] = signals.starvation_events
    for name in SIGNALS:
        value = getattr(signals, name)
        if value is not None:
            flat[name,] = _scaled(name, value)


def _device(flat: Flat, report: TickReport, entry: JobReport, device: str, here: DeviceSignals | None) -> None:
    slot = (entry.job.id, device)
    decision = report.decision
    numbers: dict[str, float | None] = {name: getattr(here, name) for name in DEVICE_SIGNALS} if here else {}
    if wanted := entry.need.get(device):
        numbers["need_bytes_per_second"] = wanted.bytes_per_second
    if entitlement := decision.entitlements.get(slot):
        numbers |= {"regular_ratio": entitlement.regular, "loan_ratio": entitlement.loan}
    if quota := decision.quotas.get(slot):
        numbers["quota_ratio"] = quota.share
        flat["d", device, "why"] = quota.why
    if terms := decision.pid.get(slot):
        numbers |= {"error_points": terms.error, "output_ratio": terms.output}
    for name, value in numbers.items():
        if value is not None:
            flat["d", device, name] = _scaled(name, value)
    for name, cap in zip(CAPS, report.applied.get(slot, ()), strict=False):
        if cap is not None:
            flat["d", device, name] = cap


def node_outputs(report: TickReport) -> Flat:
    """What concerns the node: paths (name,), (`writes`, result), (`d`, device, name), (`note`, place)."""
    flat: Flat = {("mode",): report.mode, ("policy",): report.policy, ("conflicts",): report.conflicts}
    flat |= {("restores",): report.restores, ("job_errors",): report.job_errors}
    flat["tick_seconds",] = _scaled("tick_seconds", report.duration_seconds)
    flat |= {("writes", str(result)): count for result, count in report.writes.items()}
    flat |= {("note", place): text for place, text in enumerate((*report.notes, *report.decision.notes))}
    for device, view in report.devices.items():
        flat["d", device, "unmanaged_ratio"] = _scaled("unmanaged_ratio", view.unmanaged_share)
        if device in report.decision.gate_open:
            flat["d", device, "gate_open"] = report.decision.gate_open[device]
        if pool := report.decision.pools.get(device):
            flat["d", device, "pool_capacity_ratio"] = _scaled("pool_capacity_ratio", pool.capacity)
            flat["d", device, "pool_lent_ratio"] = _scaled("pool_lent_ratio", pool.lent)
            flat["d", device, "pool_regular_ratio"] = _scaled("pool_regular_ratio", pool.regular)
    return flat
