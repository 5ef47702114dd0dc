"""The control core: samples of all jobs -> reports and one decision. Pure: the loop, the simulator and replay share it.

It keeps explicit state per job and for the policy, and reads no clock and no file.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from agent.diagnosis import diagnose
from agent.evidence import DiagnosisSettings, DiagnosisState, NodeContext
from agent.forecast import ForecastSettings, needs
from agent.health import HealthSettings, HealthState, score
from agent.policies.base import Policy
from agent.signals import JobSample, SignalSettings, SignalState, derive
from agent.types import (
    Decision,
    DeviceView,
    Job,
    JobId,
    JobReport,
    JobView,
    NeighbourView,
    NodeView,
    Signals,
    make,
)

log = logging.getLogger(__name__)

REGULAR_SHARE = 0.85
ELASTIC_SHARE = 0.15
"""The paper's split of every device (section 3): regular shares, and what is only ever lent."""
ROUNDING = 1e-9


@dataclass(frozen=True, slots=True)
class CoreSettings:
    """The settings of every stage."""

    signals: SignalSettings = field(default_factory=SignalSettings)
    health: HealthSettings = field(default_factory=HealthSettings)
    diagnosis: DiagnosisSettings = field(default_factory=DiagnosisSettings)
    forecast: ForecastSettings = field(default_factory=ForecastSettings)


@dataclass(slots=True)
class _Memory:
    """What is remembered of one job between two steps."""

    sample: JobSample | None = None
    signals: SignalState | None = None
    health: HealthState | None = None
    diagnosis: DiagnosisState | None = None
    seen_starvation: int = 0
    starvation: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class CoreResult:
    """One step: a report per job, the policy's decision, and what failed: jobs not evaluated, a policy that broke."""

    reports: Mapping[JobId, JobReport]
    decision: Decision
    errors: int
    violations: tuple[str, ...] = ()


class Core:
    """All per-job state and the policy's; one `step` per pass of the loop."""

    def __init__(self, policy: Policy, settings: CoreSettings) -> None:
        self.policy = policy
        self.settings = settings
        self._state: Any = policy.initial()
        self._memory: dict[JobId, _Memory] = {}
        self._decision = Decision({}, {}, {}, {})

    def step(
        self,
        now: float,
        samples: Mapping[JobId, JobSample],
        jobs: Iterable[Job],
        devices: Mapping[str, DeviceView],
        *,
        enforced: bool = True,
    ) -> CoreResult:
        """Evaluate every job that has a sample and let the policy decide; jobs that are gone are forgotten at once.

        `enforced` tells whether the caps of the decision before stand: what was only planned holds nobody back.
        One job whose sample cannot be evaluated is counted and reported without signals; it never stops the others, nor
        does a policy that fails.
        """
        present = {job.id: job for job in jobs}
        self._learn_media(devices)
        if self._memory.keys() != present.keys():
            self._memory = {job: self._memory.get(job) or _Memory() for job in present}
        signals, errors = self._signals(samples, present)
        used = {job: _used_shares(one, devices) for job, one in signals.items()}
        totals = _totals(used, devices)
        caps = _by_job(self._decision) if enforced else {}
        reports: dict[JobId, JobReport] = {}
        for job in present.values():
            try:
                reports[job.id] = self._report(
                    job, signals.get(job.id), used.get(job.id, {}), totals, caps.get(job.id, {}), devices
                )
            except Exception:  # whatever it is, the other jobs matter more
                log.exception("job %s cannot be evaluated in this pass", job.name)
                reports[job.id] = JobReport(job, None, None, None, {}, self._memory[job.id].starvation)
                errors += 1
        try:
            self._decide(now, reports, devices)
        except Exception:  # fail open: what a pass cannot decide is not capped, and the next one starts from nothing
            log.exception("the policy failed, nothing is capped in this pass")
            self._state, self._decision = self.policy.initial(), Decision({}, {}, {}, {})
            errors += 1
        broken = violations(self._decision)
        if broken:
            log.error("the policy broke its own rules, nothing is capped in this pass: %s", "; ".join(broken))
            self._decision = Decision({}, {}, {}, {})
        return CoreResult(reports, self._decision, errors, broken)

    def _learn_media(self, devices: Mapping[str, DeviceView]) -> None:
        media = {device: view.info.medium for device, view in devices.items()}
        if media != self.settings.signals.media:
            self.settings = replace(self.settings, signals=replace(self.settings.signals, media=media))

    def _signals(
        self, samples: Mapping[JobId, JobSample], present: Mapping[JobId, Job]
    ) -> tuple[dict[JobId, Signals], int]:
        result: dict[JobId, Signals] = {}
        errors = 0
        for job, sample in samples.items():
            memory = self._memory.get(job)
            if memory is None:
                continue
            try:
                memory.signals, result[job] = derive(memory.sample, sample, memory.signals, self.settings.signals)
                memory.sample = sample
            except Exception:  # as above
                log.exception("sample of job %s cannot be used; starting afresh with the next", present[job].name)
                memory.sample = memory.signals = None
                errors += 1
        return result, errors

    def _report(
        self,
        job: Job,
        signals: Signals | None,
        used: Mapping[str, float],
        totals: Mapping[str, float],
        shares: Mapping[str, float],
        devices: Mapping[str, DeviceView],
    ) -> JobReport:
        """`shares` are the job's caps in force by device; `used` and `totals` what it and everybody achieve there."""
        memory, settings = self._memory[job.id], self.settings
        if signals is None or not job.training:
            return JobReport(job, signals, None, None, {}, memory.starvation)
        entitled = _rates(shares, devices) if shares else None
        memory.health, health = score(signals, memory.health, settings.health, entitled)
        others = {
            device: (rest if (rest := totals[device] - used.get(device, 0.0)) > 0.0 else 0.0)
            for device in signals.devices
            if device in totals
        }
        context = make(NodeContext, (shares, used, others))
        memory.diagnosis, diagnosis = diagnose(signals, health, context, memory.diagnosis, settings.diagnosis)
        fresh = signals.starvation_events - memory.seen_starvation
        if fresh > 0:
            known = memory.starvation.get(diagnosis.cause, 0)
            memory.starvation = {**memory.starvation, diagnosis.cause: known + fresh}
        memory.seen_starvation = signals.starvation_events
        need = needs(signals, self.settings.forecast)
        return make(JobReport, (job, signals, health, diagnosis, need, memory.starvation))

    def _decide(self, now: float, reports: Mapping[JobId, JobReport], devices: Mapping[str, DeviceView]) -> None:
        usable = {device: view for device, view in devices.items() if view.info.capacity is not None}
        jobs = tuple(
            make(JobView, (r.job, r.signals, r.health, r.diagnosis, r.need, r.signals.new_iterations > 0))
            for r in reports.values()
            if r.signals is not None and r.health is not None and r.diagnosis is not None
        )
        neighbours = tuple(
            NeighbourView(r.job, r.signals.devices)
            for r in reports.values()
            if not r.job.training and r.signals is not None
        )
        self._state, self._decision = self.policy.step(self._state, NodeView(now, jobs, neighbours, usable))


def violations(decision: Decision) -> tuple[str, ...]:
    """What a decision breaks of the lines that always hold.

    Per device regular shares sum to at most 0.85 and loans to at most 0.15; no share is negative or not a number.
    """
    broken: list[str] = []
    regular: dict[str, float] = {}
    lent: dict[str, float] = {}
    for (job, device), (part, loan) in decision.entitlements.items():
        regular[device] = regular.get(device, 0.0) + part
        lent[device] = lent.get(device, 0.0) + loan
        if not (part >= 0.0 and loan >= 0.0):
            broken.append(f"entitlement of cgroup {job} on {device} is {part} + {loan}")
    for (job, device), quota in decision.quotas.items():
        if not quota.share >= 0.0:
            broken.append(f"quota of cgroup {job} on {device} is {quota.share}")
    for name, sums, limit in (("regular shares", regular, REGULAR_SHARE), ("loans", lent, ELASTIC_SHARE)):
        for device, total in sums.items():
            if not total <= limit + ROUNDING:
                broken.append(f"{name} on {device} sum to {total}, more than {limit}")
    return tuple(broken)


def _by_job(decision: Decision) -> dict[JobId, dict[str, float]]:
    """The caps in force as shares, by job and device."""
    caps: dict[JobId, dict[str, float]] = {}
    for (job, device), quota in decision.quotas.items():
        caps.setdefault(job, {})[device] = quota.share
    return caps


def _rates(shares: Mapping[str, float], devices: Mapping[str, DeviceView]) -> dict[str, float] | None:
    """Caps as bytes/s by device; None where there is none."""
    rates = {}
    for device, share in shares.items():
        capacity = devices[device].info.capacity if device in devices else None
        if capacity is not None:
            rates[device] = share * capacity.rbps
    return rates or None


def _used_shares(signals: Signals, devices: Mapping[str, DeviceView]) -> dict[str, float]:
    """What a job achieves of each device with known capacity: its busiest dimension (0..1 and above)."""
    shares: dict[str, float] = {}
    for device, here in signals.devices.items():
        capacity = devices[device].info.capacity if device in devices else None
        if capacity is not None:
            size = here.read_bytes_per_second / capacity.rbps + here.write_bytes_per_second / capacity.wbps
            requests = here.read_requests_per_second / capacity.riops + here.write_requests_per_second / capacity.wiops
            shares[device] = max(size, requests)
    return shares


def _totals(used: Mapping[JobId, Mapping[str, float]], devices: Mapping[str, DeviceView]) -> dict[str, float]:
    """What everybody, unmanaged traffic included, achieves of each device."""
    totals = {device: view.unmanaged_share for device, view in devices.items()}
    for shares in used.values():
        for device, share in shares.items():
            totals[device] = totals.get(device, 0.0) + share
    return totals
