"""The last decisions about every job, with the numbers they came from: what `explain` tells.

A row stands as long as nothing changed but numbers; so ten rows reach back to the last ten events of a job, not just
one second.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping
from typing import Any

from agent.pool import borrowed
from agent.types import JobId, JobReport, Level, Slot, TickReport

ROWS = 10
BOUNDS = {
    Level.HEALTHY: (60.0, 100.0),
    Level.TIGHT: (40.0, 60.0),
    Level.DANGER: (20.0, 40.0),
    Level.CRITICAL: (0.0, 20.0),
}
MARGIN_POINTS = 3.0
"""A score this close to the level it had is no event: it would swing to and fro."""


class History:
    """A bounded ring of rows per training job. `add` is called by the loop; `rows` by other threads at any time."""

    def __init__(self, rows: int = ROWS) -> None:
        self._limit = rows
        self._rows: dict[JobId, tuple[dict[str, Any], ...]] = {}
        self._keys: dict[JobId, _Key] = {}

    def add(self, report: TickReport) -> None:
        """Note what this pass decided; jobs that are gone are forgotten."""
        present = {job: entry for job, entry in report.jobs.items() if entry.job.training}
        self._keys = {job: self._keys[job] for job in present if job in self._keys}
        held = borrowed(report.decision.pools)
        slots = _slots_by_job(report, held)
        rows = {}
        for job, entry in present.items():
            before = self._keys.get(job)
            key = _key(report, entry, slots.get(job, frozenset()), before[0] if before else None)
            row = _row(report, entry, held)
            earlier = self._rows.get(job, ())
            if earlier and before == key:
                first = earlier[-1]
                row |= {"since": first["since"], "passes": first["passes"] + 1}
                earlier = earlier[:-1]
            self._keys[job] = key
            rows[job] = (*earlier, row)[-self._limit :]
        self._rows = rows

    def rows(self, job: JobId) -> list[dict[str, Any]]:
        """The job's rows, oldest first; empty for a job that is not known."""
        return list(self._rows.get(job, ()))


_Key = tuple[Level | None, tuple[object, ...]]


_Held = frozenset[tuple[str, int | None]]
"""Devices of which a job has a loan (None), or on which it has a cap of this size (see `_size`)."""


def _slots_by_job(report: TickReport, held: Mapping[Slot, float]) -> Mapping[JobId, _Held]:
    """Told once for all jobs: with hundreds of them each would look through the loans and caps of all others."""
    found: dict[JobId, set[tuple[str, int | None]]] = defaultdict(set)
    for job, device in held:
        found[job].add((device, None))
    for (job, device), limits in report.applied.items():
        found[job].add((device, _size(limits[0])))
    return {job: frozenset(slots) for job, slots in found.items()}


def _key(report: TickReport, entry: JobReport, held: _Held, level: Level | None) -> _Key:
    """What makes a new row when it changes; `level` is that of the row before."""
    gates = report.decision.gate_open.items()
    return _steady_level(entry, level), (
        entry.diagnosis.cause if entry.diagnosis else None,
        held,
        tuple(sorted((device, is_open) for device, is_open in gates if _uses(entry, device))),
        report.mode,
    )


def _steady_level(entry: JobReport, level: Level | None) -> Level | None:
    """The level, or the one before as long as the score is still close to it."""
    if entry.health is None:
        return None
    if level is not None:
        low, high = BOUNDS[level]
        if low - MARGIN_POINTS <= entry.health.score < high + MARGIN_POINTS:
            return level
    return entry.health.level


def _size(limit: int | None) -> int:
    """A cap in steps of 20 %, one step of the controller: smaller moves are no event."""
    return round(math.log(limit) / math.log(1.2)) if limit else 0


def _uses(entry: JobReport, device: str) -> bool:
    return entry.signals is not None and device in entry.signals.devices


def _row(report: TickReport, entry: JobReport, held: Mapping[Slot, float]) -> dict[str, Any]:
    signals, health, diagnosis = entry.signals, entry.health, entry.diagnosis
    return {
        "since": report.wall_time,
        "until": report.wall_time,
        "passes": 1,
        "mode": report.mode,
        "iteration": signals.iterations if signals else None,
        "wait_seconds": signals.wait_seconds if signals else None,
        "queue_depth": signals.queue_depth if signals else None,
        "score": health.score if health and health.confidence else None,
        "level": health.level if health else None,
        "cause": diagnosis.cause if diagnosis else None,
        "devices": [_device_row(report, entry, device, held) for device in (signals.devices if signals else ())],
    }


def _device_row(report: TickReport, entry: JobReport, device: str, held: Mapping[Slot, float]) -> dict[str, Any]:
    slot = (entry.job.id, device)
    decision = report.decision
    entitlement, quota, terms = decision.entitlements.get(slot), decision.quotas.get(slot), decision.pid.get(slot)
    wanted, applied, view = entry.need.get(device), report.applied.get(slot), report.devices.get(device)
    return {
        "device": view.info.name if view else device,
        "gate_open": decision.gate_open.get(device),
        "need_bytes_per_second": wanted.bytes_per_second if wanted else None,
        "regular_ratio": entitlement.regular if entitlement else None,
        "loan_ratio": held.get(slot, 0.0 if entitlement else None),
        "quota_bytes_per_second": applied[0] if applied else None,
        "quota_ratio": quota.share if quota else None,
        "why": quota.why if quota else None,
        "error_points": terms.error if terms else None,
        "output_ratio": terms.output if terms else None,
    }
