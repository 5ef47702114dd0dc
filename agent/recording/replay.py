"""Running the control core over a recording, with any configuration, and comparing with what was decided then. Pure.

The samples do not answer to other decisions: a replay shows what would have been decided, not what would have
happened (`prefetchd simulate` shows that).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from agent.config import Config, DeviceRule, PolicyName, from_mapping
from agent.core import Core, CoreResult
from agent.policies.base import make_policy
from agent.recording.identity import Identities
from agent.recording.reader import Moment
from agent.settings import core_settings, policy_settings
from agent.types import Capacity, DeviceView, Job, JobId, JobReport, Medium, Slot

SCORE_TOLERANCE = 1.0
"""Scores closer than this (points) are the same: what is recorded is rounded, and errors of that go on."""
QUOTA_TOLERANCE = 0.02
"""Caps closer than this (relative) are the same: the recording rounds to a hundredth of a per cent of the device."""


@dataclass(frozen=True, slots=True)
class Step:
    """One pass of a replay: what was recorded, what the core decides now, and from which devices."""

    moment: Moment
    result: CoreResult
    devices: Mapping[str, DeviceView]


@dataclass(frozen=True, slots=True)
class Difference:
    """One thing that would have been decided otherwise at `wall` (Unix seconds)."""

    wall: float
    job: str
    id: JobId
    device: str
    what: str
    recorded: Any
    replayed: Any


@dataclass
class Tally:
    """Sums over the passes of one job on one side (recorded or replayed).

    `lowest_at_start`: the lowest score is one of before the first batch.
    """

    passes: int = 0
    score: float = 0.0
    lowest: float = 100.0
    lowest_at_start: bool = False
    capped: Counter[str] = field(default_factory=Counter)
    caps: Counter[str] = field(default_factory=Counter)
    lent: Counter[str] = field(default_factory=Counter)
    causes: Counter[str] = field(default_factory=Counter)

    def add(self, view: Mapping[str, Any]) -> None:
        """Count one pass."""
        self.passes += 1
        if view["score"] is not None:
            self.score += view["score"]
            if view["score"] < self.lowest:
                self.lowest, self.lowest_at_start = view["score"], not view["iterations"]
        self.causes[view["cause"] or "none"] += 1
        for device, here in view["devices"].items():
            if here["quota"] is not None:
                self.capped[device] += 1
                self.caps[device] += here["quota"]
            self.lent[device] += bool(here["loan"])

    def summary(self) -> dict[str, Any]:
        """Means and parts of the time (0..1), by device where that makes sense."""
        passes = max(self.passes, 1)
        devices = sorted({*self.capped, *self.lent})
        return {
            "score_mean": self.score / passes,
            "score_lowest": self.lowest if self.passes else None,
            "lowest_at_start": self.lowest_at_start,
            "causes": {cause: count / passes for cause, count in self.causes.most_common()},
            "capped_ratio": {device: self.capped[device] / passes for device in devices},
            "mean_cap_ratio": {
                device: self.caps[device] / self.capped[device] for device in devices if self.capped[device]
            },
            "lent_ratio": {device: self.lent[device] / passes for device in devices},
        }


@dataclass
class Comparison:
    """What a whole replay shows; `names` of jobs by id, `devices` names by number.

    A job that was restarted has several ids, each with a run of its own: `started` says when it was first seen (Unix
    seconds), `told_as` which of them are one job.

    Without a device whose capacity is known (`capacity_known`) no policy caps anything.
    """

    passes: int = 0
    seconds: float = 0.0
    names: dict[JobId, str] = field(default_factory=dict)
    started: dict[JobId, float] = field(default_factory=dict)
    told_as: dict[JobId, JobId] = field(default_factory=dict)
    devices: dict[str, str] = field(default_factory=dict)
    recorded: dict[JobId, Tally] = field(default_factory=dict)
    replayed: dict[JobId, Tally] = field(default_factory=dict)
    capacity_known: bool = False
    differing: Counter[str] = field(default_factory=Counter)
    differences: list[Difference] = field(default_factory=list)


def replay(moments: Iterable[Moment], config: Config | None = None, policy: PolicyName | None = None) -> Iterator[Step]:
    """Step the core over every pass; a new segment starts it afresh. Without a configuration: the segment's own."""
    core: Core | None = None
    segment = None
    for moment in moments:
        if core is None or moment.segment is not segment:
            segment = moment.segment
            used = config or from_mapping(dict(segment.config), "the recording's configuration")
            core = Core(make_policy(policy or used.policy, policy_settings(used)), core_settings(used))
        devices = moment.devices if config is None else with_rules(moment.devices, config.devices)
        enforced = moment.node_outputs.get(("mode",)) == "enforce"
        result = core.step(moment.time, moment.samples, moment.jobs, devices, enforced=enforced)
        yield Step(moment, result, devices)


def with_rules(devices: Mapping[str, DeviceView], rules: Iterable[DeviceRule]) -> dict[str, DeviceView]:
    """The devices with the capacities and media of another configuration, where it names them."""
    by_name = {rule.device.rsplit("/", 1)[-1]: rule for rule in rules}
    found = {}
    for device, view in devices.items():
        rule = by_name.get(view.info.name) or by_name.get(device)
        found[device] = view if rule is None else replace(view, info=replace(view.info, **_changes(rule)))
    return found


def _changes(rule: DeviceRule) -> dict[str, Any]:
    changes: dict[str, Any] = {} if rule.medium is None else {"medium": Medium(rule.medium)}
    if rule.read_bytes_per_second is None:
        return changes
    unlimited = float("inf")
    return changes | {
        "capacity": Capacity(
            rule.read_bytes_per_second,
            rule.write_bytes_per_second or unlimited,
            rule.read_requests_per_second or unlimited,
            rule.write_requests_per_second or unlimited,
        )
    }


def compare(steps: Iterable[Step], keep: int = 20) -> Comparison:
    """Count what differs, job by job, at the passes whose outputs were recorded; the first `keep` are listed."""
    told = Comparison()
    identities = Identities()
    first = None
    for step in steps:
        first = step.moment.time if first is None else first
        told.passes += 1
        told.devices |= {device: view.info.name for device, view in step.moment.devices.items()}
        told.capacity_known |= any(view.info.capacity is not None for view in step.devices.values())
        told.seconds = step.moment.time - first
        for one in step.moment.jobs:
            told.told_as[one.id] = identities.of(one, step.moment.jobs)
        for job in step.moment.fresh:
            report = step.result.reports.get(job)
            if report is None or not report.job.training:
                continue
            told.names[job] = report.job.name
            told.started.setdefault(job, step.moment.wall)
            before, after = recorded_view(step.moment.job_outputs[job]), replayed_view(report, step.result)
            told.recorded.setdefault(job, Tally()).add(before)
            told.replayed.setdefault(job, Tally()).add(after)
            for found in _differences(step.moment.wall, report.job, before, after):
                told.differing[found.what] += 1
                if len(told.differences) < keep:
                    told.differences.append(found)
    return told


def recorded_view(outputs: Mapping[tuple[str | int, ...], Any]) -> dict[str, Any]:
    """Score, cause, iterations and, by device, cap and loan (shares) as they were recorded."""
    devices = {str(path[1]) for path in outputs if path[0] == "d"}
    return {
        "score": outputs.get(("score",)),
        "cause": outputs.get(("cause",)),
        "iterations": outputs.get(("iterations",)),
        "devices": {
            device: {
                "quota": outputs.get(("d", device, "quota_ratio")),
                "loan": outputs.get(("d", device, "loan_ratio")) or 0.0,
            }
            for device in devices
        },
    }


def replayed_view(report: JobReport, result: CoreResult) -> dict[str, Any]:
    """The same of a replay."""
    decision, job = result.decision, report.job.id
    devices = report.signals.devices if report.signals else {}
    slots: dict[str, Slot] = {device: (job, device) for device in devices}
    quotas = {device: decision.quotas.get(slot) for device, slot in slots.items()}
    entitlements = {device: decision.entitlements.get(slot) for device, slot in slots.items()}
    return {
        "score": report.health.score if report.health else None,
        "cause": str(report.diagnosis.cause) if report.diagnosis else None,
        "iterations": report.signals.iterations if report.signals else None,
        "devices": {
            device: {
                "quota": quota.share if (quota := quotas[device]) else None,
                "loan": round(lent.loan, 4) if (lent := entitlements[device]) else 0.0,
            }
            for device in devices
        },
    }


def _differences(wall: float, job: Job, before: Mapping[str, Any], after: Mapping[str, Any]) -> Iterator[Difference]:
    if before["cause"] != after["cause"]:
        yield Difference(wall, job.name, job.id, "", "cause", before["cause"], after["cause"])
    if _apart(before["score"], after["score"], SCORE_TOLERANCE):
        yield Difference(wall, job.name, job.id, "", "score", before["score"], after["score"])
    for device in sorted({*before["devices"], *after["devices"]}):
        old, new = before["devices"].get(device, _NOTHING), after["devices"].get(device, _NOTHING)
        if (old["quota"] is None) != (new["quota"] is None) or _apart(
            old["quota"], new["quota"], QUOTA_TOLERANCE * (old["quota"] or 1.0) + 1e-4
        ):
            yield Difference(wall, job.name, job.id, device, "cap", old["quota"], new["quota"])
        if bool(old["loan"]) != bool(new["loan"]):
            yield Difference(wall, job.name, job.id, device, "loan", old["loan"], new["loan"])


_NOTHING: Mapping[str, Any] = {"quota": None, "loan": 0.0}


def _apart(old: float | None, new: float | None, tolerance: float) -> bool:
    if old is None or new is None:
        return old is not new
    return abs(old - new) > tolerance
