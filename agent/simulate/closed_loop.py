"""The agent's own core on a simulated node: its limits, and the planner of its writes, as in production."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import inf
from time import perf_counter

from agent.core import Core, CoreSettings
from agent.limits import desired_limits
from agent.policies.base import PolicySettings, make_policy
from agent.simulate.blk_throttle import Limits
from agent.simulate.node import SimulatedNode
from agent.types import Decision, Signals, Slot
from cgroup.io_files import IO_MAX_KEYS
from cgroup.lines import Line, Values, line_of
from cgroup.plan import LineState, PlanState, plan

INTERVAL_SECONDS = 0.1
FLOOR, CEILING = 0.02, 1.0
UNCAPPED: Values = dict.fromkeys(IO_MAX_KEYS)


class Agent:
    """The agent's own core, its limits and the planner of its writes, on simulated counters.

    What is not simulated: the time that probes and writes take, and files that others change.
    """

    def __init__(self, policy: str, settings: PolicySettings | None = None, interval: float = INTERVAL_SECONDS) -> None:
        self.core = Core(make_policy(policy, settings or PolicySettings()), CoreSettings())
        self.interval = interval
        self.writes = 0
        self.busy_seconds = 0.0
        self.steps = 0
        self.decision: Decision | None = None
        self.loans = LoanLog()
        self._actual: dict[Line, dict[str, int | None]] = {}
        self._plan = PlanState()

    def step(self, node: SimulatedNode, now: float) -> None:
        """One pass of the loop."""
        samples, jobs = node.samples(), node.jobs()
        began = perf_counter()
        result = self.core.step(now, samples, jobs, node.views)
        self.busy_seconds += perf_counter() - began
        self.steps += 1
        self.decision = result.decision
        self.loans.note(result.decision, {job: report.signals for job, report in result.reports.items()})
        by_id = {job.id: job for job in jobs}
        desired = desired_limits(result.decision, by_id, node.views, FLOOR, CEILING)
        wanted = {line_of(target): (limit.values(), why) for target, (limit, why) in desired.items()}
        self._write(node, wanted, now)

    def _write(self, node: SimulatedNode, wanted: Mapping[Line, tuple[Values, str]], now: float) -> None:
        for line in wanted:
            self._actual.setdefault(line, dict(UNCAPPED))
        if not self._actual:
            return
        lines, raises = dict(self._plan.lines), dict(self._plan.raises)
        throttles = node.throttles()
        for write in plan(wanted, self._actual, self._plan, now):
            if not write.after:
                continue
            values = {**self._actual[write.line], **write.after}
            self._actual[write.line] = values
            throttles[write.line.cgroup_id, write.line.device].set_limits(_from_values(values))
            self.writes += 1
            if write.raises:
                raises[write.line.cgroup_id] = (*raises.get(write.line.cgroup_id, ())[-8:], now)
            if write.verdict == "release":
                lines.pop(write.line, None)
                self._actual.pop(write.line)
            else:
                lines[write.line] = LineState(UNCAPPED, values)
        self._plan = PlanState(lines, raises)


def _from_values(values: Values) -> Limits:
    return Limits(
        *(inf if values[key] is None else float(values[key] or 0) for key in ("rbps", "wbps", "riops", "wiops"))
    )


@dataclass
class LoanLog:
    """How long loans lasted, in iterations of the borrower, by device: a loan renewed without a gap is one."""

    lengths: dict[str, list[int]] = field(default_factory=dict)
    _open: dict[Slot, tuple[int, int]] = field(default_factory=dict)

    def note(self, decision: Decision, signals: Mapping[int, Signals | None]) -> None:
        """Account the loans of one decision; `signals` by job tell its iterations."""
        running: set[Slot] = set()
        for device, pool in decision.pools.items():
            for loan in pool.loans:
                slot = (loan.job, device)
                running.add(slot)
                seen = signals.get(loan.job)
                if seen is not None:
                    first, _ = self._open.get(slot, (seen.iterations, seen.iterations))
                    self._open[slot] = (first, seen.iterations)
        for slot in [slot for slot in self._open if slot not in running]:
            first, last = self._open.pop(slot)
            self.lengths.setdefault(slot[1], []).append(last - first + 1)
