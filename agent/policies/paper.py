"""The paper's law, literally: everybody capped, each quota moved by at most ±20 % an iteration, 15 % lent.

Regular quotas start as equal (weighted) parts of 85 % over all managed cgroups of a device. At the end of each
iteration a job's controllers turn its score into a relative change, merged over its devices by access share. A rise
takes what is free of the regular part; what is missing then is asked of the pool, if the score is below 60. A job that
stands blocked acts once a second instead. Best-effort cgroups are never scored and keep their regular part.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from agent import pool as elastic
from agent.pid import PidState, pid_step
from agent.policies.base import PolicySettings, elapsed, low_iterations, rearrangements, used_share
from agent.pool import Claim, Pool, lent_by_job
from agent.smoothing import clip
from agent.tiers import merged
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
)


@dataclass(slots=True)
class SlotState:
    """One cgroup on one device, in shares: its regular quota, the cap as written, what it asks the pool for.

    `extra` is what is left of a first cap above the entitlement (the job used more than that when it was first seen).
    Mutable only in the step that makes it.
    """

    regular: float
    quota: float
    ask: float = 0.0
    extra: float = 0.0
    pid: PidState = field(default_factory=PidState)
    terms: PidTerms | None = None
    cut: bool = False
    why: str = "regular part"


Table = dict[JobId, SlotState]
"""The cgroups of one device."""


@dataclass(frozen=True, slots=True)
class PaperState:
    """Everything the law remembers, by device; `ticked` is when each job last acted."""

    now: float | None = None
    tables: Mapping[str, Mapping[JobId, SlotState]] = field(default_factory=dict)
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
        tables = self._members(state.tables, view)
        changes = {job.job.id: self._change(job, tables, view, state.ticked.get(job.job.id)) for job in acting}
        ticked = {job.job.id: state.ticked[job.job.id] for job in view.jobs if job.job.id in state.ticked}
        ticked |= dict.fromkeys(changes, view.now)
        low = low_iterations(state.low, view.jobs, self.settings)
        # cuts first, they make room; then rises, the lowest score first
        acting.sort(key=lambda job: (changes[job.job.id] > 0.0, job.health.score, job.job.id))
        jobs = {job.job.id: job for job in view.jobs}
        pools: dict[str, Pool] = {}
        lent: dict[str, dict[JobId, float]] = {}
        states: dict[str, PoolState] = {}
        for name, device in view.devices.items():
            before, table = state.pools.get(name, _NO_LOANS), tables[name]
            self._move(device, table, acting, changes, lent_by_job(before.loans))
            pools[name] = pool = self._lend(device, table, jobs, before, ticked, now=view.now)
            lent[name] = lent_by_job(pool.loans)
            self._caps(table, jobs, lent[name], changes)
            regular = sum(slot.regular for slot in table.values())
            states[name] = PoolState(self.settings.pool.elastic, sum(lent[name].values()), regular, pool.loans)
        slots = {(job, name): slot for name, table in tables.items() for job, slot in table.items()}
        decision = Decision(
            {slot: Quota(one.quota, one.why, one.cut) for slot, one in slots.items()},
            {(job, name): Entitlement(one.regular, lent[name].get(job, 0.0)) for (job, name), one in slots.items()},
            states,
            dict.fromkeys(view.devices, True),
            {slot: one.terms for slot, one in slots.items() if one.terms is not None},
            rearrangements(low, view.jobs, view.devices, self.settings),
        )
        return PaperState(view.now, tables, pools, ticked, low), decision

    def _acts(self, job: JobView, state: PaperState, now: float) -> bool:
        """At the end of an iteration; a job whose loop stands blocked acts by a timer."""
        if job.new_iteration or job.job.id not in state.ticked:
            return True
        patience = self.settings.timer_seconds
        return job.signals.blocked_seconds >= patience and now - state.ticked[job.job.id] >= patience

    def _members(self, old: Mapping[str, Mapping[JobId, SlotState]], view: NodeView) -> dict[str, Table]:
        """Who has a quota where: the gone are dropped, newcomers get an equal part as far as there is room.

        Room for them is what is free and at most one step (20 %) of what the others hold; the law does the rest.
        """
        cgroups = [(job.job, job.signals.devices) for job in view.jobs]
        cgroups += [(neighbour.job, neighbour.devices) for neighbour in view.neighbours]
        members: dict[str, list[tuple[Job, float]]] = {name: [] for name in view.devices}
        for job, devices in cgroups:
            for name, signals in devices.items():
                capacity = view.devices[name].info.capacity if name in members else None
                if capacity is not None and (signals.access_share > 0.0 or job.id in old.get(name, _NOBODY)):
                    members[name].append((job, used_share(signals, capacity)))
        return {name: self._admit(here, old.get(name, _NOBODY)) for name, here in members.items()}

    def _admit(self, members: list[tuple[Job, float]], old: Mapping[JobId, SlotState]) -> Table:
        """The quotas on one device of (job, used share): those of before, cut for newcomers by one step at most."""
        kept = {job.id: old[job.id] for job, _ in members if job.id in old}
        new = [(job, used) for job, used in members if job.id not in kept]
        part = self.settings.pool.regular
        weights = sum(job.weight for job, _ in members)
        wanted = sum(part * job.weight / weights for job, _ in new)
        held = sum(slot.regular for slot in kept.values())
        missing = max(0.0, wanted - max(0.0, part - held))
        cut = min(self.settings.step_limit, missing / held) if held > 0.0 else 0.0
        table = {
            job: SlotState(one.regular * (1.0 - cut), one.quota, one.ask, one.extra, one.pid, one.terms, why=one.why)
            for job, one in kept.items()
        }
        room = max(0.0, part - held * (1.0 - cut))
        for job, used in new:
            regular = part * job.weight / weights * min(1.0, room / wanted)
            first = max(used, regular) if job.training else regular
            table[job.id] = SlotState(regular, min(first, 1.0), extra=min(first, 1.0) - regular)
        return table

    def _change(self, job: JobView, tables: Mapping[str, Table], view: NodeView, before: float | None) -> float:
        """The merged relative change of a job's quotas; stores the controllers' new states in the tables."""
        outputs: dict[str, float] = {}
        error, dt = self.settings.target_score - job.health.score, elapsed(view.now, before)
        for name in job.signals.devices:
            slot = tables[name].get(job.job.id) if name in tables else None
            if slot is None:
                continue
            gains = self.settings.gains[view.devices[name].info.medium]
            slot.pid, terms = pid_step(gains, slot.pid, error, dt)
            slot.terms, slot.why = terms, _why(terms)
            outputs[name] = terms.output
        return merged(job.signals.devices, outputs)

    def _move(
        self,
        device: DeviceView,
        table: Table,
        acting: Sequence[JobView],
        changes: Mapping[JobId, float],
        lent: Mapping[JobId, float],
    ) -> None:
        """Apply the changes of the jobs that act, in their order, to regular quotas.

        A loan that runs out in this step still counts as held: asking for it again is its renewal.
        """
        total = sum(slot.regular for slot in table.values())
        limit = self.settings.pool.regular * clip(1.0 - device.unmanaged_share, 0.0, 1.0)
        floor = self._floor(len(table))
        for job in acting:
            slot = table.get(job.job.id)
            if slot is None:
                continue
            change, held = changes[job.job.id], lent.get(job.job.id, 0.0)
            wanted = (slot.regular + held) * (1.0 + change)
            room = clip(limit - total, 0.0, max(0.0, wanted - held - slot.regular))
            regular = slot.regular + room if change > 0.0 else wanted - held
            regular = max(regular, min(floor, slot.regular))
            total += regular - slot.regular
            tight = job.health.score < self.settings.tight_score
            slot.regular, slot.ask = regular, max(0.0, wanted - regular) if tight else 0.0

    def _floor(self, count: int) -> float:
        """The least regular quota of `count` cgroups: one with nothing could never ask for more by a percentage."""
        return min(self.settings.floor, self.settings.pool.regular / max(1, count) / 2.0)

    def _lend(
        self,
        device: DeviceView,
        table: Table,
        jobs: Mapping[JobId, JobView],
        pool: Pool,
        ticked: Mapping[JobId, float],
        *,
        now: float,
    ) -> Pool:
        """Loans after this step. A request lapses with the loan's time limit once its job stopped acting."""
        if not pool.loans and not any(slot.ask for slot in table.values()):
            return _NO_LOANS
        claims, shortfalls = [], {}
        for job, slot in table.items():
            if job not in jobs:
                continue
            claims.append(Claim(job, slot.regular + slot.ask, jobs[job].health.score, jobs[job].signals.iterations))
            shortfalls[job] = slot.ask if now - ticked[job] < self.settings.pool.limit_seconds else 0.0
        return elastic.lend(
            claims,
            shortfalls,
            pool,
            now,
            device=device.info.device,
            medium=device.info.medium,
            settings=self.settings.pool,
            available=1.0 - device.unmanaged_share,
        )

    def _caps(
        self, table: Table, jobs: Mapping[JobId, JobView], lent: Mapping[JobId, float], changes: Mapping[JobId, float]
    ) -> None:
        """Move the caps of the jobs that act to what they may use, one step of ±20 % at most.

        What a first cap left above the entitlement goes in such steps too, but not while the job asks for more.
        """
        limit = self.settings.step_limit
        for job, slot in table.items():
            share, before = slot.regular + lent.get(job, 0.0), slot.quota
            if job not in jobs:
                slot.quota = share
            elif job in changes:
                slot.extra = slot.extra if changes[job] > 0.0 else slot.extra * (1.0 - limit)
                slot.quota = clip(share + slot.extra, before * (1.0 - limit), before * (1.0 + limit))
            slot.cut = slot.quota < before


_NOBODY: Mapping[JobId, SlotState] = {}
_NO_LOANS = Pool()


def _why(terms: PidTerms) -> str:
    return f"score {75.0 - terms.error:.0f}, change {100.0 * terms.output:+.1f} %"
