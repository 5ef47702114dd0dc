"""The agent's own core on a simulated node: its limits, and the planner of its writes, as in production."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from time import process_time

from agent.config import Config
from agent.core import Core
from agent.limits import desired_limits
from agent.policies.base import make_policy
from agent.settings import core_settings, policy_settings
from agent.simulate.blk_throttle import Limits
from agent.simulate.node import SimulatedNode
from agent.types import Decision, Signals, Slot
from cgroup.io_files import IO_MAX_KEYS
from cgroup.lines import Line, Values, line_of
from cgroup.plan import LineState, PlanState, Rules, Write, plan, with_raise
from cgroup.slices import Slices

UNCAPPED: Values = dict.fromkeys(IO_MAX_KEYS)


class Agent:
    """The agent's own core, its limits and the planner of its writes, on simulated counters.

    `config` as in production; the default is the shipped one, whatever the scenario.

    What is not simulated: the time that probes and writes take, and files that others change.
    """

    def __init__(self, policy: str, config: Config | None = None) -> None:
        config = config or Config()
        self.core = Core(make_policy(policy, policy_settings(config)), core_settings(config))
        self.interval = config.loop.interval_seconds
        self.writes = 0
        self.busy_seconds = 0.0
        self.steps = 0
        self.decision: Decision | None = None
        self.loans = LoanLog()
        self._actual: dict[Line, dict[str, int | None]] = {}
        self._plan = PlanState()
        self._now = 0.0
        self._slices = Slices(lambda: self._now)
        self._enforcement = config.enforcement
        self._rules = Rules(
            small_change_ratio=config.enforcement.small_change_ratio,
            raises_per_second=config.enforcement.raises_per_second,
        )

    def step(self, node: SimulatedNode, now: float) -> None:
        """One pass of the loop."""
        samples, jobs = node.samples(), node.jobs()
        began = process_time()
        result = self.core.step(now, samples, jobs, node.views)
        self.busy_seconds += process_time() - began
        self.steps += 1
        self.decision = result.decision
        self.loans.note(result.decision, {job: report.signals for job, report in result.reports.items()})
        by_id = {job.id: job for job in jobs}
        limits = self._enforcement
        desired = desired_limits(
            result.decision,
            by_id,
            node.views,
            self._applied(),
            floor=limits.floor_ratio,
            ceiling=limits.ceiling_ratio,
        )
        wanted = {line_of(target): (limit.values(), why) for target, (limit, why) in desired.items()}
        self._write(node, wanted, now)

    def _applied(self) -> dict[Slot, tuple[int | None, int | None, int | None, int | None]]:
        """The caps in force: rbps, wbps, riops, wiops by slot."""
        return {
            (line.cgroup_id, line.device): (values["rbps"], values["wbps"], values["riops"], values["wiops"])
            for line, values in self._actual.items()
        }

    def _write(self, node: SimulatedNode, wanted: Mapping[Line, tuple[Values, str]], now: float) -> None:
        for line in wanted:
            self._actual.setdefault(line, dict(UNCAPPED))
        if not self._actual:
            return
        self._now = now
        self._carry_out(node, self._slices.ready(plan(wanted, self._actual, self._plan, now, self._rules)))
        self._wait_for_moment(node, now + self.interval)

    def _wait_for_moment(self, node: SimulatedNode, next_pass: float) -> None:
        """Have what waits for its moment in blk-throttle's slices written then, if that is before the next pass."""
        due = self._slices.due
        if due is not None and due < next_pass:
            node.events.at(due, self._write_due, (node, next_pass))

    def _write_due(self, waiting: tuple[SimulatedNode, float]) -> None:
        node, next_pass = waiting
        self._now = node.events.now
        self._carry_out(node, self._slices.take_due())
        self._wait_for_moment(node, next_pass)

    def _carry_out(self, node: SimulatedNode, writes: Sequence[Write]) -> None:
        lines, raises = dict(self._plan.lines), self._plan.raises
        throttles = node.throttles()
        for write in writes:
            if not write.after:
                continue
            values = {**self._actual[write.line], **write.after}
            self._actual[write.line] = values
            throttles[write.line.cgroup_id, write.line.device].set_limits(_from_values(values))
            self._slices.written(write.line)
            self.writes += 1
            raises = with_raise(raises, write, self._now, self._rules)
            if write.verdict == "release":
                lines.pop(write.line, None)
                self._actual.pop(write.line)
                self._slices.forget(write.line)
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
