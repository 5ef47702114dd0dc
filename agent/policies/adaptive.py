"""The default policy: the paper's signals and limits, with what a real kernel demands (design, section 3, nine lines).

Training jobs run uncapped until somebody starves although it receives less than its fair need. Then, on that device,
85 % is divided by need, the pool is lent to who is still short, and caps appear on who is over its share, on healthy
jobs and on best-effort cgroups; they leave a moment after the last victim. See `agent.policies.contention` for one
device; here is what spans devices: controllers, their merge, and who may be helped at all.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import exp, inf
from typing import NamedTuple

from agent.pid import PidState, pid_step
from agent.policies.base import (
    Moment,
    PolicySettings,
    elapsed,
    need_share,
    rearrangements,
    stuck_iterations,
    used_share,
    written_share,
)
from agent.policies.best_effort import Neighbour
from agent.policies.contention import DeviceState, Member, Outcome, decide
from agent.smoothing import clip, gain
from agent.tiers import merged
from agent.types import (
    Capacity,
    Decision,
    DeviceView,
    JobId,
    JobView,
    Need,
    NodeView,
    PidTerms,
    Signals,
    Slot,
    make,
)

_FRESH = PidState()

STOPPED_SECONDS, STOPPED_ITERATIONS = 10.0, 5.0
"""A loop that took no batch, waited for none and had next to nothing read for so long (whichever takes longer) stands
still for a reason of its own: what it needed does not hold others back until it goes on."""


@dataclass(slots=True)
class SlotState:
    """One job on one device: its controller, what it adds to the need (0..limit), the share it was found to want.

    `steady` is its smoothed need without refill; `found` is used only where the need is not fed forward; `quiet` is for
    how many seconds nothing happened. Mutable only in the step that makes it.
    """

    pid: PidState = _FRESH
    terms: PidTerms | None = None
    trim: float = 0.0
    found: float | None = None
    steady: float | None = None
    quiet: float = 0.0


@dataclass(frozen=True, slots=True)
class AdaptiveState:
    """Everything the policy remembers."""

    now: float | None = None
    slots: Mapping[Slot, SlotState] = field(default_factory=dict)
    devices: Mapping[str, DeviceState] = field(default_factory=dict)
    low: Mapping[JobId, int] = field(default_factory=dict)


class _Use(NamedTuple):
    """One job on one device: its slot, and the share it uses."""

    job: JobView
    name: str
    capacity: Capacity
    slot: SlotState
    used: float


class Adaptive:
    """The policy `adaptive`."""

    name = "adaptive"

    def __init__(self, settings: PolicySettings) -> None:
        self.settings = settings

    def initial(self) -> AdaptiveState:
        """No caps, no victims."""
        return AdaptiveState()

    def step(self, state: AdaptiveState, view: NodeView) -> tuple[AdaptiveState, Decision]:
        """Run the controllers, then decide device by device."""
        dt = elapsed(view.now, state.now)
        slots: dict[Slot, SlotState] = {}
        notes: list[str] = []
        for job in view.jobs:
            self._control(job, view, state.slots, slots, dt)
            if not self._actionable(job):
                notes.append(f"{job.job.name}: {job.diagnosis.cause}, more local bandwidth cannot help")
        users = self._users(view, slots, dt)
        outcomes: dict[str, Outcome] = {}
        members: dict[str, list[Member]] = {}
        weight = gain(dt, self.settings.consumption_seconds)
        for name, device in view.devices.items():
            if device.info.capacity is None:
                continue
            members[name] = self._members(users.get(name, ()), device, weight)
            neighbours = _neighbours(name, device.info.capacity, view)
            before = state.devices.get(name, _UNSEEN)
            moment = Moment(view.now, dt, max(0.0, 1.0 - device.unmanaged_share))
            outcomes[name] = decide(before, device, members[name], neighbours, moment=moment, settings=self.settings)
        self._trim(slots, outcomes, members, dt)
        low = stuck_iterations(state.low, view.jobs, self.settings)
        decision = Decision(
            {(job, name): quota for name, outcome in outcomes.items() for job, quota in outcome.quotas.items()},
            {(job, name): share for name, outcome in outcomes.items() for job, share in outcome.entitlements.items()},
            {name: outcome.pool for name, outcome in outcomes.items()},
            {name: outcome.open for name, outcome in outcomes.items()},
            {slot: one.terms for slot, one in slots.items() if one.terms is not None},
            self._rearrange(low, view, outcomes, members),
            tuple(notes),
        )
        devices = {name: outcome.state for name, outcome in outcomes.items()}
        return AdaptiveState(view.now, slots, devices, low), decision

    def _actionable(self, job: JobView) -> bool:
        return job.diagnosis.actionable or not self.settings.switches.actionable

    def _control(
        self,
        job: JobView,
        view: NodeView,
        old: Mapping[Slot, SlotState],
        slots: dict[Slot, SlotState],
        dt: float,
    ) -> None:
        """One step of the job's controllers; frozen while local bandwidth cannot help. The merged output counts."""
        identity, devices, gains = job.job.id, job.signals.devices, self.settings.gains
        actionable = self._actionable(job)
        error = self.settings.target_score - job.health.score
        steps: list[tuple[Slot, SlotState, PidState, PidTerms]] = []
        outputs: dict[str, float] = {}
        for name, signals in devices.items():
            device = view.devices.get(name)
            if device is None or signals.access_share <= 0.0:
                continue
            key = (identity, name)
            slot = old.get(key, _NEW)
            if actionable:
                pid, terms = pid_step(gains[device.info.medium], slot.pid, error, dt)
                steps.append((key, slot, pid, terms))
                outputs[name] = terms.output
            else:
                slots[key] = SlotState(slot.pid, slot.terms, slot.trim, slot.found, slot.steady, slot.quiet)
        change = merged(devices, outputs)
        for key, slot, pid, terms in steps:
            slots[key] = SlotState(pid, _with_output(terms, change), slot.trim, slot.found, slot.steady, slot.quiet)

    def _users(self, view: NodeView, slots: Mapping[Slot, SlotState], dt: float) -> dict[str, list[_Use]]:
        """The training jobs that use each device of known capacity, in the order of the jobs."""
        jobs = {job.job.id: job for job in view.jobs}
        users: dict[str, list[_Use]] = {}
        for (job, name), slot in slots.items():
            capacity, signals = view.devices[name].info.capacity, jobs[job].signals.devices[name]
            if capacity is None:
                continue
            used = used_share(signals, capacity)
            idle = used < self.settings.floor and not (jobs[job].new_iteration or jobs[job].signals.blocked_seconds)
            slot.quiet = slot.quiet + dt if idle else 0.0
            if used >= self.settings.floor or signals.access_share >= self.settings.floor:
                users.setdefault(name, []).append(make(_Use, (jobs[job], name, capacity, slot, used)))
        return users

    def _members(self, here: Sequence[_Use], device: DeviceView, weight: float) -> list[Member]:
        """What each job wants of one device that they use; `weight` smooths what they consume."""
        room = self.settings.usable * max(0.0, 1.0 - device.unmanaged_share)
        weights = sum(use.job.job.weight for use in here)
        return [self._member(use, room * use.job.job.weight / weights, weight) for use in here]

    def _member(self, use: _Use, fair: float, weight: float) -> Member:
        """One job as the device sees it. Who cannot be helped or stands still wants a little more than it uses."""
        job = use.job
        want, steady = self._want(use, fair, weight)
        actionable = self._actionable(job)
        return make(
            Member,
            (
                job.job.id,
                min(want, 1.0) if actionable and not _stopped(use) else min(want, 1.25 * use.used),
                steady,
                use.used,
                job.health.score,
                job.signals.iterations,
                job.job.weight,
                actionable,
                job.health.confidence >= self.settings.victim_confidence,
                (job.health.parts.get("queue") or 0.0) >= self.settings.full_queue,
                _lasts(job.signals, use.used, steady),
            ),
        )

    def _want(self, use: _Use, fair: float, weight: float) -> tuple[float, float | None]:
        """(what the job wants, what of it is consumption), as shares.

        What a well job consumes is smoothed and its refill does not count, or every dip of a full queue would move
        the caps of others; what a tight one needs counts in full and at once. A cap holds writes back as well as reads,
        so who writes more than it needs to read wants that.
        """
        need, slot = use.job.need.get(use.name), use.slot
        if need is None:
            return self._guess(use.job.signals, use.used, fair), None
        if not self.settings.switches.feed_forward:
            return (max(fair, 1.25 * use.used) if slot.found is None else slot.found), None
        written = written_share(use.job.signals.devices[use.name], use.capacity)
        read = need_share(need, use.capacity)
        now = max(read * _steady_part(use.job.signals, use.name, need), written)
        steady = now if slot.steady is None else slot.steady + weight * (now - slot.steady)
        refill = max(read, written) - steady
        refill = refill * self._urgency(use.job.health.score) if refill > 0.0 else 0.0
        return (steady + refill) * (1.0 + slot.trim), steady

    def _guess(self, signals: Signals, used: float, fair: float) -> float:
        """What a job of unknown need wants: its fair part before its first iterations, else room to grow."""
        if signals.iteration_source == "timer":
            return 1.5 * used + self.settings.floor
        return max(fair, 1.25 * used)

    def _urgency(self, score: float) -> float:
        """How much of a refill counts, 1 for a tight job, 0 for a healthy one: a full queue dips all the time."""
        high, low = self.settings.healthy_score, self.settings.tight_score
        return clip((high - score) / (high - low), 0.0, 1.0)

    def _trim(
        self,
        slots: dict[Slot, SlotState],
        outcomes: Mapping[str, Outcome],
        members: Mapping[str, list[Member]],
        dt: float,
    ) -> None:
        """Move what the controllers add to the need: up for a victim whose error persists, else back to zero."""
        keep, settings = exp(-dt / self.settings.trim_release_seconds), self.settings
        for name, outcome in outcomes.items():
            for member in members[name]:
                slot = slots[member.job, name]
                output = slot.terms.output if slot.terms is not None else 0.0
                if output > 0.0 and member.job in outcome.victims:
                    slot.trim = min(settings.trim_limit, slot.trim + output * dt)
                else:
                    slot.trim *= keep
                if not settings.switches.feed_forward:
                    slot.found = clip((slot.found or member.used) * (1.0 + output * dt), settings.floor, 1.0)
                slot.steady = member.steady

    def _rearrange(
        self,
        low: Mapping[JobId, int],
        view: NodeView,
        outcomes: Mapping[str, Outcome],
        members: Mapping[str, list[Member]],
    ) -> frozenset[Slot]:
        """As the paper says, and only where the disk is busy: an idle one gains nothing from another order."""
        busy = {name for name in outcomes if sum(m.used for m in members[name]) > 0.3}
        slots = rearrangements(low, view.jobs, view.devices, self.settings)
        return frozenset(slot for slot in slots if slot[1] in busy)


_NEW = SlotState()
_UNSEEN = DeviceState()


def _stopped(use: _Use) -> bool:
    return use.slot.quiet > max(STOPPED_SECONDS, STOPPED_ITERATIONS * (use.job.signals.iteration_seconds or 0.0))


def _with_output(t: PidTerms, change: float) -> PidTerms:
    """The terms with the merged output in place of their own."""
    return t if t.output == change else make(PidTerms, (t.error, t.proportional, t.integral, t.derivative, change))


def _steady_part(signals: Signals, name: str, need: Need) -> float:
    """The part of a need that is consumption rather than refill (0..1)."""
    if signals.next_batch_bytes is None or signals.compute_seconds is None or need.bytes_per_second <= 0.0:
        return 1.0
    steady = signals.next_batch_bytes / max(signals.compute_seconds, 0.001) * signals.devices[name].access_share
    return min(1.0, steady / need.bytes_per_second)


def _lasts(signals: Signals, used: float, steady: float | None) -> float:
    """Seconds until the queue is empty when the job consumes at its pace and gets what it gets now; inf if unknown."""
    if signals.queue_takeable is None or signals.compute_seconds is None or steady is None or used >= steady:
        return inf
    return signals.queue_takeable * signals.compute_seconds / (1.0 - used / steady)


def _neighbours(name: str, capacity: Capacity, view: NodeView) -> list[Neighbour]:
    """The best-effort cgroups that use this device."""
    return [
        Neighbour(one.job.id, used_share(one.devices[name], capacity), one.job.weight)
        for one in view.neighbours
        if name in one.devices and one.devices[name].access_share > 0.0
    ]
