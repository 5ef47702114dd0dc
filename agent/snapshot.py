"""The last report as plain JSON values: what `/state` answers and `top`, `explain` and the demo show."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from agent.forecast import told_too_little
from agent.history import History
from agent.pool import borrowed
from agent.types import (
    DeviceSignals,
    DeviceView,
    JobId,
    JobReport,
    Loan,
    Mended,
    PidTerms,
    Rearranged,
    Signals,
    Slot,
    TickReport,
)
from agent.units import amount
from bpf.samples import LinkState, ProbeStatus


def snapshot(report: TickReport, history: History | None = None) -> dict[str, Any]:
    """The whole report as a JSON-ready mapping; rates in bytes/s, times in seconds, unknown values None.

    With a history each job row carries its last decisions under `decisions`.
    """
    jobs = job_rows(report)
    if history is not None:
        for row in jobs:
            row["decisions"] = history.rows(row["id"])
    return {
        "time": report.wall_time,
        "mode": report.mode,
        "policy": report.policy,
        "ticks": report.ticks,
        "tick_seconds": report.duration_seconds,
        "writes": dict(report.writes),
        "conflicts": report.conflicts,
        "restores": report.restores,
        "job_errors": report.job_errors,
        "jobs": jobs,
        "neighbours": _neighbour_rows(report),
        "devices": [_pool_row(report, view) for view in report.devices.values()],
        "probes": [probe_row(probe) for probe in report.probes],
        "violations": report.violations,
        "notes": [*report.notes, *report.decision.notes],
        "rearrange": {
            "problem": report.rearrange.problem,
            "skips": dict(report.rearrange.skips),
            "stops": dict(report.rearrange.stops),
            "defragment": {
                "problem": report.rearrange.mend_problem,
                "skips": dict(report.rearrange.mend_skips),
                "stops": dict(report.rearrange.mend_stops),
            },
        },
    }


def probe_row(status: ProbeStatus) -> dict[str, Any]:
    """How a probe stands; `detail` quotes compiler and kernel where they refused something."""
    return {
        "name": status.name,
        "state": status.state,
        "why": status.why,
        "detail": status.detail,
        "tier": status.tier,
        "lost": status.lost_events,
        "counts": dict(status.counts),
    }


def _neighbour_rows(report: TickReport) -> list[dict[str, Any]]:
    caps: dict[JobId, dict[str, int | None]] = {}
    for (job, device), limits in report.applied.items():
        caps.setdefault(job, {})[_device_name(report, device)] = limits[0]
    neighbours = (entry for entry in report.jobs.values() if not entry.job.training)
    return [_neighbour_row(report, entry, caps.get(entry.job.id, {})) for entry in neighbours]


def _neighbour_row(report: TickReport, entry: JobReport, caps: dict[str, int | None]) -> dict[str, Any]:
    here = entry.signals.devices.values() if entry.signals else ()
    return {
        "name": entry.job.name,
        "quota_bytes_per_second": caps,
        "read_bytes_per_second": {_device_name(report, one.device): one.read_bytes_per_second for one in here},
        "write_bytes_per_second": {_device_name(report, one.device): one.write_bytes_per_second for one in here},
    }


def _pool_row(report: TickReport, view: DeviceView) -> dict[str, Any]:
    """`read_bytes_per_second` is the capacity; `used_…` what all managed cgroups move, unmanaged ones left out."""
    device = view.info.device
    pool = report.decision.pools.get(device)
    capacity = view.info.capacity
    here = [
        entry.signals.devices[device]
        for entry in report.jobs.values()
        if entry.signals and device in entry.signals.devices
    ]
    return {
        "device": view.info.name,
        "medium": view.info.medium,
        "read_bytes_per_second": _finite(capacity.rbps) if capacity else None,
        "write_bytes_per_second": _finite(capacity.wbps) if capacity else None,
        "used_read_bytes_per_second": sum(one.read_bytes_per_second for one in here),
        "used_write_bytes_per_second": sum(one.write_bytes_per_second for one in here),
        "unmanaged_ratio": view.unmanaged_share,
        "pool_capacity_ratio": pool.capacity if pool else None,
        "pool_lent_ratio": pool.lent if pool else None,
        "regular_ratio": pool.regular if pool else None,
        "gate_open": report.decision.gate_open.get(device),
    }


def _finite(rate: float) -> float | None:
    """JSON has no infinity: a dimension without a limit is None."""
    return float(rate) if rate < float("inf") else None


def _device_name(report: TickReport, device: str) -> str:
    view = report.devices.get(device)
    return view.info.name if view else device


def job_rows(report: TickReport) -> list[dict[str, Any]]:
    """One mapping per training job, as `top`, `explain` and the demo's table show it; unknown values are None."""
    by_job = _by_job(report)
    return [_row(report, entry, by_job) for entry in report.jobs.values() if entry.job.training]


class _ByJob(NamedTuple):
    """Found once for all rows: with hundreds of jobs each would look through what belongs to all others."""

    held: Mapping[Slot, float]
    loans: Mapping[Slot, Loan]
    links: Mapping[JobId, Sequence[tuple[str, LinkState]]]


def _by_job(report: TickReport) -> _ByJob:
    links: dict[JobId, list[tuple[str, LinkState]]] = {}
    for key, state in report.sample.links.items():
        links.setdefault(key.cgroup_id, []).append((key.endpoint, state))
    pools = report.decision.pools
    loans = {(loan.job, device): loan for device, pool in pools.items() for loan in reversed(pool.loans)}
    return _ByJob(borrowed(pools), loans, links)


def _row(report: TickReport, entry: JobReport, by_job: _ByJob) -> dict[str, Any]:
    signals, health, diagnosis = entry.signals, entry.health, entry.diagnosis
    return {
        "id": entry.job.id,
        "job": entry.job.name,
        "cgroup": entry.job.path,
        "weight": entry.job.weight,
        "namespace": entry.job.namespace,
        "pod": entry.job.pod,
        "iterations": signals.iterations if signals else None,
        "iteration_source": signals.iteration_source if signals else None,
        "iteration_seconds": signals.iteration_seconds if signals else None,
        "wait_seconds": signals.wait_seconds if signals else None,
        "wait_seconds_total": signals.wait_seconds_total if signals else None,
        "blocked_seconds": signals.blocked_seconds if signals else None,
        "compute_seconds": signals.compute_seconds if signals else None,
        "queue_depth": signals.queue_depth if signals else None,
        "queue_takeable": signals.queue_takeable if signals else None,
        "queue_capacity": signals.queue_capacity if signals else None,
        "next_batch_bytes": signals.next_batch_bytes if signals else None,
        "hinted_batch_bytes": signals.hinted_batch_bytes if signals else None,
        "read_batch_bytes": signals.read_batch_bytes if signals else None,
        "batch_note": _batch_note(signals) if signals else "",
        "cache_hit_ratio": signals.cache_hit_ratio if signals else None,
        "remote_queueing_ratio": signals.remote_queueing_ratio if signals else None,
        "cpu_ratio": signals.cpu_ratio if signals else None,
        "starvation_events": sum(entry.starvation_by_cause.values()),
        "starvation_by_cause": dict(entry.starvation_by_cause),
        "score": health.score if health else None,
        "level": health.level if health else None,
        "confidence": health.confidence if health else None,
        "parts": dict(health.parts) if health else {},
        "cause": diagnosis.cause if diagnosis else None,
        "cause_confidence": diagnosis.confidence if diagnosis else None,
        "actionable": diagnosis.actionable if diagnosis else None,
        "advice": diagnosis.advice if diagnosis else "",
        "evidence": dict(diagnosis.evidence) if diagnosis else {},
        "devices": [_device_row(report, entry, here, by_job) for here in signals.devices.values()] if signals else [],
        "links": _link_rows(by_job.links.get(entry.job.id, ())),
    }


def _batch_note(signals: Signals) -> str:
    """A sentence where the need is made from less than batches take, since their hint tells too little; else empty."""
    if not told_too_little(signals):
        return ""
    told, read, taken = (
        amount(value, "B") for value in (signals.hinted_batch_bytes, signals.read_batch_bytes, signals.next_batch_bytes)
    )
    return f"tells {told} a batch, reads {read}; taken for {taken}, so its need is too low"


def _link_rows(links: Sequence[tuple[str, LinkState]]) -> list[dict[str, Any]]:
    """The job's endpoints to which connections are open; `retransmits` since the first of them."""
    return [
        {
            "endpoint": endpoint,
            "connections": state.connections,
            "round_trip_seconds": None if state.round_trip_ns is None else state.round_trip_ns / 1e9,
            "retransmits": state.retransmits,
        }
        for endpoint, state in links
        if state.connections
    ]


def _device_row(report: TickReport, entry: JobReport, here: DeviceSignals, by_job: _ByJob) -> dict[str, Any]:
    device = here.device
    slot = (entry.job.id, device)
    entitlement = report.decision.entitlements.get(slot)
    quota = report.decision.quotas.get(slot)
    loan = by_job.loans.get(slot)
    wanted = entry.need.get(device)
    return {
        "device": _device_name(report, device),
        "medium": here.medium,
        "access_ratio": here.access_share,
        "latency_seconds": here.latency_seconds,
        "latency_cv": here.latency_cv,
        "reference_seconds": here.reference_seconds,
        "queueing_ratio": here.queueing_ratio,
        "throttle_ratio": here.throttle_ratio,
        "throttle_wait_seconds": here.throttle_wait_seconds,
        "read_bytes_per_second": here.read_bytes_per_second,
        "write_bytes_per_second": here.write_bytes_per_second,
        "need_bytes_per_second": wanted.bytes_per_second if wanted else None,
        "entitlement_ratio": entitlement.share if entitlement else None,
        "regular_ratio": entitlement.regular if entitlement else None,
        "loan_ratio": by_job.held.get(slot, 0.0 if entitlement else None),
        "loan_iterations_left": _iterations_left(loan, entry),
        "loan_seconds_left": max(0.0, loan.expires_at - report.time) if loan else None,
        "quota_bytes_per_second": report.applied[slot][0] if slot in report.applied else None,
        "quota_ratio": quota.share if quota else None,
        "quota_why": quota.why if quota else None,
        "gate_open": report.decision.gate_open.get(device),
        "pid": _pid_row(report.decision.pid.get(slot)),
        "rearrange": _rearrange_row(report.rearrange.slots.get(slot)),
        "defragment": _mended_row(report.rearrange.mended.get(slot)),
    }


def _rearrange_row(one: Rearranged | None) -> dict[str, Any] | None:
    """How reading ahead for the job on this device stands; None where it never was asked for."""
    if one is None:
        return None
    return {
        "state": one.state,
        "why": one.why,
        "ahead_bytes": one.ahead_bytes,
        "hit_ratio": one.hit_ratio,
        "gain_seconds": one.gain_seconds,
    }


def _mended_row(one: Mended | None) -> dict[str, Any] | None:
    """How making the job's files contiguous stands; None where it never was asked for."""
    if one is None:
        return None
    return {
        "running": one.running,
        "why": one.why,
        "moved_files": one.files,
        "moved_bytes": one.bytes,
        "left_files": one.left_files,
        "gain_seconds": one.gain_seconds,
    }


def _iterations_left(loan: Loan | None, entry: JobReport) -> int | None:
    return max(0, loan.expires_iteration - entry.signals.iterations) if loan and entry.signals else None


def _pid_row(terms: PidTerms | None) -> dict[str, float] | None:
    """The controller's last step: error in points, the rest as relative changes."""
    if terms is None:
        return None
    return {
        "error_points": terms.error,
        "proportional": terms.proportional,
        "integral": terms.integral,
        "derivative": terms.derivative,
        "output": terms.output,
    }
