"""The paper's law, literally: everybody capped, each quota moved by at most ±20 % an iteration, 15 % lent.

Regular quotas start as equal (weighted) parts of 85 % over all managed cgroups of a device. At the end of each
iteration a job's controllers turn its score into a relative change, merged over its devices by access share. A rise
takes what is free of the regular part; what is missing then is asked of the pool, if the score is below 60. A job that
stands blocked acts once a second instead. Best-effort cgroups are never scored and keep their regular part.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from agent import pool as elastic
from agent.pid import PidState, pid_step
from agent.policies.base import PolicySettings, elapsed, low_iterations, rearrangements, used_share
from agent.pool import Claim, Pool
from agent.smoothing import clip
from agent.tiers import access_weights, merge
from agent.types import (
    Decision,
    DeviceView,
    Entitlement,
    Job,
    JobId,
    JobView,
    NodeView,
    PidTerms,
    PoolState,
    Quota,
    Slot,
)


@dataclass(frozen=True, slots=True)
class SlotState:
    """One cgroup on one device, in shares: its regular quota, the cap as written, what it asks the pool for.

    `extra` is what is left of a first cap above the entitlement (the job used more than that when it was first seen).
    """

    regular: float
    quota: float
    ask: float = 0.0
    extra: float = 0.0
    pid: PidState = field(default_factory=PidState)
    terms: PidTerms | None = None
    cut: bool = False


@dataclass(frozen=True, slots=True)
class PaperState:
    """Everything the law remembers; `ticked` is when each job last acted."""

    now: float | None = None
    slots: Mapping[Slot, SlotState] = field(default_factory=dict)
    pools: Mapping[str, Pool] = field(default_factory=dict)
    ticked: Mapping[JobId, float] = field(default_factory=dict)
    low: Mapping[JobId, int] = field(default_factory=dict)


class Paper:
    """The policy `paper`. Loans last exactly the configured iterations: the wall-clock minimum is not the paper's."""

    name = "paper"

    def __init__(self, settings: PolicySettings) -> None:
        self.settings = replace(settings, pool=replace(settings.pool, loan_seconds=0.0))

    def initial(self) -> PaperState:
        """Nobody admitted yet."""
        return PaperState()

    def step(self, state: PaperState, view: NodeView) -> tuple[PaperState, Decision]:
        """Admit and drop cgroups, let every job act that finished an iteration, lend, and move the caps."""
        elapsed(view.now, state.now)
        acting = [job for job in view.jobs if self._acts(job, state, view.now)]
        slots = self._members(state.slots, view)
        changes = {job.job.id: self._change(job, slots, view, state.ticked.get(job.job.id)) for job in acting}
        ticked = {job.job.id: state.ticked[job.job.id] for job in view.jobs if job.job.id in state.ticked}
        ticked |= dict.fromkeys(changes, view.now)
        low = low_iterations(state.low, view.jobs, self.settings)
        pools: dict[str, Pool] = {}
        states: dict[str, PoolState] = {}
        for name, device in view.devices.items():
            before = state.pools.get(name, Pool())
            self._move(device, slots, acting, changes, _lent(before))
            pools[name] = self._lend(device, slots, view, before, ticked)
            states[name] = self._caps(name, slots, pools[name], changes, view)
        decision = Decision(
            {slot: Quota(one.quota, _why(one), one.cut) for slot, one in slots.items()},
            _entitlements(slots, pools),
            states,
            dict.fromkeys(view.devices, True),
            {slot: one.terms for slot, one in slots.items() if one.terms is not None},
            rearrangements(low, view.jobs, view.devices, self.settings),
        )
        return PaperState(view.now, slots, pools, ticked, low), decision

    def _acts(self, job: JobView, state: PaperState, now: float) -> bool:
        """At the end of an iteration; a job whose loop stands blocked acts by a timer."""
        if job.new_iteration or job.job.id not in state.ticked:
            return True
        patience = self.settings.timer_seconds
        return job.signals.blocked_seconds >= patience and now - state.ticked[job.job.id] >= patience

    def _members(self, old: Mapping[Slot, SlotState], view: NodeView) -> dict[Slot, SlotState]:
        """Who has a quota where: the gone are dropped, newcomers get an equal part as far as there is room.

        Room for them is what is free and at most one step (20 %) of what the others hold; the law does the rest.
        """
        devices = [(job.job, job.signals.devices) for job in view.jobs]
        devices += [(neighbour.job, neighbour.devices) for neighbour in view.neighbours]
        slots: dict[Slot, SlotState] = {}
        for name, device in view.devices.items():
            capacity = device.info.capacity
            if capacity is None:
                continue
            members = [
                (job, used_share(signals[name], capacity))
                for job, signals in devices
                if name in signals and ((job.id, name) in old or signals[name].access_share > 0.0)
            ]
            kept = {job.id: old[job.id, name] for job, _ in members if (job.id, name) in old}
            slots |= {(job, name): slot for job, slot in self._admit(members, kept).items()}
        return slots

    def _admit(self, members: list[tuple[Job, float]], kept: Mapping[JobId, SlotState]) -> dict[JobId, SlotState]:
        """The quotas on one device of (job, used share): those kept, cut for newcomers by one step at most."""
        new = [(job, used) for job, used in members if job.id not in kept]
        part = self.settings.pool.regular
        weights = sum(job.weight for job, _ in members)
        wanted = sum(part * job.weight / weights for job, _ in new)
        held = sum(slot.regular for slot in kept.values())
        missing = max(0.0, wanted - max(0.0, part - held))
        cut = min(self.settings.step_limit, missing / held) if held > 0.0 else 0.0
        slots = {job: replace(slot, regular=slot.regular * (1.0 - cut), cut=False) for job, slot in kept.items()}
        room = max(0.0, part - held * (1.0 - cut))
        for job, used in new:
            regular = part * job.weight / weights * min(1.0, room / wanted)
            first = max(used, regular) if job.training else regular
            slots[job.id] = SlotState(regular, min(first, 1.0), extra=min(first, 1.0) - regular)
        return slots

    def _change(self, job: JobView, slots: dict[Slot, SlotState], view: NodeView, before: float | None) -> float:
        """The merged relative change of a job's quotas; stores the controllers' new states in `slots`."""
        outputs: dict[str, float] = {}
        error = self.settings.target_score - job.health.score
        for name in job.signals.devices:
            slot = slots.get((job.job.id, name))
            if slot is None:
                continue
            gains = self.settings.gains[view.devices[name].info.medium]
            pid, terms = pid_step(gains, slot.pid, error, elapsed(view.now, before))
            slots[job.job.id, name] = replace(slot, pid=pid, terms=terms)
            outputs[name] = terms.output
        return merge(outputs, access_weights(job.signals.devices, outputs))

    def _move(
        self,
        device: DeviceView,
        slots: dict[Slot, SlotState],
        acting: list[JobView],
        changes: Mapping[JobId, float],
        lent: Mapping[JobId, float],
    ) -> None:
        """Apply the changes to regular quotas: cuts first, they make room; then rises, the lowest score first.

        A loan that runs out in this step still counts as held: asking for it again is its renewal.
        """
        name = device.info.device
        total = sum(slot.regular for (_, where), slot in slots.items() if where == name)
        limit = self.settings.pool.regular * clip(1.0 - device.unmanaged_share, 0.0, 1.0)
        floor = self._floor(name, slots)
        ordered = sorted(acting, key=lambda job: (changes[job.job.id] > 0.0, job.health.score, job.job.id))
        for job in ordered:
            slot = slots.get((job.job.id, name))
            if slot is None:
                continue
            held = lent.get(job.job.id, 0.0)
            wanted = (slot.regular + held) * (1.0 + changes[job.job.id])
            room = clip(limit - total, 0.0, max(0.0, wanted - held - slot.regular))
            regular = slot.regular + room if changes[job.job.id] > 0.0 else wanted - held
            regular = max(regular, min(floor, slot.regular))
            total += regular - slot.regular
            tight = job.health.score < self.settings.tight_score
            slots[job.job.id, name] = replace(slot, regular=regular, ask=max(0.0, wanted - regular) if tight else 0.0)

    def _floor(self, name: str, slots: Mapping[Slot, SlotState]) -> float:
        """The least regular quota: a job with nothing could never ask for more by a percentage."""
        count = sum(where == name for _, where in slots)
        return min(self.settings.floor, self.settings.pool.regular / max(1, count) / 2.0)

    def _lend(
        self,
        device: DeviceView,
        slots: Mapping[Slot, SlotState],
        view: NodeView,
        pool: Pool,
        ticked: Mapping[JobId, float],
    ) -> Pool:
        """Loans after this step. A request lapses with the loan's time limit once its job stopped acting."""
        name = device.info.device
        claims, shortfalls = [], {}
        for job in view.jobs:
            slot = slots.get((job.job.id, name))
            if slot is None:
                continue
            claims.append(Claim(job.job.id, slot.regular + slot.ask, job.health.score, job.signals.iterations))
            fresh = view.now - ticked[job.job.id] < self.settings.pool.limit_seconds
            shortfalls[job.job.id] = slot.ask if fresh else 0.0
        return elastic.lend(
            claims,
            shortfalls,
            pool,
            view.now,
            device=name,
            medium=device.info.medium,
            settings=self.settings.pool,
            available=1.0 - device.unmanaged_share,
        )

    def _caps(
        self, name: str, slots: dict[Slot, SlotState], pool: Pool, changes: Mapping[JobId, float], view: NodeView
    ) -> PoolState:
        """Move the caps of the jobs that act to what they may use, one step of ±20 % at most.

        What a first cap left above the entitlement goes in such steps too, but not while the job asks for more.
        """
        lent = _lent(pool)
        training = {job.job.id for job in view.jobs}
        limit = self.settings.step_limit
        for (job, where), slot in list(slots.items()):
            if where != name:
                continue
            share = slot.regular + lent.get(job, 0.0)
            quota, extra = slot.quota, slot.extra
            if job not in training:
                quota = share
            elif job in changes:
                extra = extra if changes[job] > 0.0 else extra * (1.0 - limit)
                quota = clip(share + extra, slot.quota * (1.0 - limit), slot.quota * (1.0 + limit))
            slots[job, where] = replace(slot, quota=quota, extra=extra, cut=quota < slot.quota)
        regular = sum(slot.regular for (_, where), slot in slots.items() if where == name)
        return PoolState(self.settings.pool.elastic, sum(lent.values()), regular, pool.loans)


def _lent(pool: Pool) -> dict[JobId, float]:
    lent: dict[JobId, float] = {}
    for loan in pool.loans:
        lent[loan.job] = lent.get(loan.job, 0.0) + loan.share
    return lent


def _entitlements(slots: Mapping[Slot, SlotState], pools: Mapping[str, Pool]) -> dict[Slot, Entitlement]:
    lent = {name: _lent(pool) for name, pool in pools.items()}
    return {(job, name): Entitlement(slot.regular, lent[name].get(job, 0.0)) for (job, name), slot in slots.items()}


def _why(slot: SlotState) -> str:
    if slot.terms is None:
        return "regular part"
    return f"score {75.0 - slot.terms.error:.0f}, change {100.0 * slot.terms.output:+.1f} %"
