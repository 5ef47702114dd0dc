"""One pass of the agent, `Loop.tick(now)`, and the life around it, `run()`: clock, wake-ups, signals, fail open.

A pass reads every probe once, lets the core decide, and brings the control files in line. It is made every
`interval_seconds`, so a job's tick comes at most that much after the end of its iteration: waking for every event
would cost 5-14 µs each and decide nothing earlier than a limit can act (blk-throttle's slice is 100 ms).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

from agent.core import Core, CoreResult
from agent.jobs import by_id
from agent.limits import Desired, desired_limits
from agent.rearrange.read_ahead import Pass
from agent.signals import JobSample
from agent.stopping import SignalFlags
from agent.stuck import StuckQueues
from agent.types import Decision, DeviceView, Job, JobId, RearrangeReport, Slot, TickReport
from bpf.samples import ProbeState, ProbeStatus, Sample
from cgroup.enforce import Enforcer
from cgroup.lines import IO_MAX
from cgroup.results import Mode, WriteResult
from cgroup.slices import SLICE_SECONDS

log = logging.getLogger(__name__)

SHORTEST_INTERVAL_SECONDS = 0.05
"""Between the beginnings of two passes, however often the cgroup tree changes."""


class Node(Protocol):
    """What the loop reads: the real node, or a made-up one in tests."""

    def jobs(self, now: float) -> tuple[Job, ...]:
        """The jobs and best-effort cgroups as they stand."""

    def sample(self, now_ns: int) -> Sample:
        """What every probe reads at this moment."""

    def job_samples(self, sample: Sample, jobs: Mapping[JobId, Job]) -> Mapping[JobId, JobSample]:
        """The same by job, with what the cgroup files add."""

    def devices(self, sample: Sample, jobs: Mapping[JobId, Job]) -> Mapping[str, DeviceView]:
        """Devices with their capacity and what unmanaged cgroups use of them."""

    def probes(self) -> tuple[ProbeStatus, ...]:
        """The state of every probe."""

    def filenos(self) -> Sequence[int]:
        """Descriptors that become readable when the set of jobs may have changed."""


class Rearranging(Protocol):
    """What reads ahead where the policy asks for it."""

    def step(self, now: float, here: Pass) -> RearrangeReport:
        """Take in a pass; returns how it stands."""


@dataclass(frozen=True, slots=True)
class LoopSettings:
    """Bounds of caps (shares), the kill switch, and the age (seconds) beyond which nothing seen is trusted.

    `notes`: what the operator should know for as long as the agent runs.
    """

    floor: float = 0.02
    ceiling: float = 1.0
    interval_seconds: float = 0.1
    stale_seconds: float = 3.0
    kill_switch: Path | None = None
    notes: tuple[str, ...] = ()


class Loop:
    """Sample, decide, write, report. `latest` is read by other threads; it is replaced as a whole."""

    def __init__(
        self,
        node: Node,
        core: Core,
        enforcer: Enforcer,
        settings: LoopSettings,
        rearranger: Rearranging | None = None,
        stuck: StuckQueues | None = None,
    ) -> None:
        self.node = node
        self.rearranger = rearranger
        self.stuck = stuck
        self.core = core
        self.enforcer = enforcer
        self.settings = settings
        self.latest: TickReport | None = None
        self.samples: Mapping[JobId, JobSample] = {}
        self._ticks = 0
        self._seconds = 0.0
        self._job_errors = 0
        self._violations = 0
        self._wanted_mode: Mode = enforcer.mode
        self.restores = 0
        self._last: float | None = None

    def tick(self, now: float, wall: float = 0.0) -> TickReport:
        """One pass at `now` (monotonic seconds); `wall` is Unix time, for the report alone."""
        notes = self.settings.notes + self._obey_kill_switch()
        if self._last is not None and now - self._last > self.settings.stale_seconds:
            log.error("no pass for %.1f s: everything seen is stale, releasing all limits", now - self._last)
            self._count_restores(self.enforcer.release_all("samples were stale"))
        self._last = now
        jobs = by_id(self.node.jobs(now))
        sample = self.node.sample(int(now * 1e9))
        devices = self.node.devices(sample, jobs)
        self.samples = self.node.job_samples(sample, jobs)
        enforced = self.enforcer.mode == "enforce"
        result = self.core.step(now, self.samples, jobs.values(), devices, enforced=enforced)
        self._job_errors += result.errors
        self._violations += len(result.violations)
        probes = self.node.probes()
        notes += self._enforce(result.decision, jobs, devices, probes, now)
        self._free_stuck(now, sample)
        self._ticks += 1
        self.latest = TickReport(
            time=now,
            wall_time=wall,
            mode=self.enforcer.mode,
            policy=self.core.policy.name,
            jobs=result.reports,
            devices=devices,
            decision=result.decision,
            applied=self._applied(),
            writes={str(result): count for result, count in self.enforcer.counters.items()},
            conflicts=len(self.enforcer.conflicts),
            restores=self.restores,
            sample=sample,
            probes=probes,
            ticks=self._ticks,
            duration_seconds=0.0,
            seconds_total=self._seconds,
            job_errors=self._job_errors,
            violations=self._violations,
            notes=notes,
            rearrange=self._rearrange(now, result, devices, sample),
        )
        return self.latest

    def _rearrange(
        self, now: float, result: CoreResult, devices: Mapping[str, DeviceView], sample: Sample
    ) -> RearrangeReport:
        if self.rearranger is None:
            return RearrangeReport()
        here = Pass(self.enforcer.mode, result.reports, result.decision, devices, sample.cache)
        try:
            return self.rearranger.step(now, here)
        except Exception:  # limits matter more than what may be gained by reading ahead
            log.exception("reading ahead failed in this pass; the loop goes on")
            before = self.latest.rearrange if self.latest is not None else RearrangeReport()
            return replace(before, problem="it failed in the last pass; the log says where")  # counters never fall

    def _enforce(
        self,
        decision: Decision,
        jobs: Mapping[JobId, Job],
        devices: Mapping[str, DeviceView],
        probes: tuple[ProbeStatus, ...],
        now: float,
    ) -> tuple[str, ...]:
        """Bring the control files in line with a decision; returns what the operator should know."""
        desired: Desired = {}
        notes: tuple[str, ...] = ()
        if _blind(probes):
            notes += ("the block probe is unavailable: nothing is enforced",)
        else:
            bounds = self.settings
            desired = desired_limits(
                decision, jobs, devices, self._applied(), floor=bounds.floor, ceiling=bounds.ceiling
            )
        self.enforcer.reconcile(desired, now)
        if self.enforcer.suspended:
            notes += (f"enforcement is suspended: {self.enforcer.suspended}",)
        return notes

    def _free_stuck(self, now: float, sample: Sample) -> None:
        """Give caps back behind which requests stay queued; the next pass caps anew what it still wants capped."""
        if self.stuck is None or self.enforcer.mode != "enforce":
            return
        for target in self.stuck.look(now, self.enforcer.managed, sample.blocks):
            log.warning("%s on %s: requests stay queued behind the cap, releasing it once", target.path, target.device)
            self._count_restores(self.enforcer.release(target, "requests stay queued behind it"))

    def took(self, seconds: float) -> None:
        """Account the time of the last pass."""
        self._seconds += seconds
        if self.latest is not None:
            self.latest = replace(self.latest, duration_seconds=seconds, seconds_total=self._seconds)

    def disarm(self, why: str) -> None:
        """Turn enforce into dry-run at once and for good, and restore."""
        if self.enforcer.mode != "enforce":
            log.info("mode %s: nothing is set, so there is nothing to release (%s)", self.enforcer.mode, why)
        self._wanted_mode = "dry-run" if self._wanted_mode == "enforce" else self._wanted_mode
        self._set_mode(self._wanted_mode, why)

    def _obey_kill_switch(self) -> tuple[str, ...]:
        switch = self.settings.kill_switch
        if switch is not None and switch.exists():
            if self._wanted_mode == "enforce":
                self._set_mode("dry-run", f"{switch} exists")
                return (f"kill switch: {switch} exists; remove it to enforce again",)
            return ()
        self._set_mode(self._wanted_mode, "the kill switch is gone")
        return ()

    def _set_mode(self, mode: Mode, why: str) -> None:
        if self.enforcer.mode != mode:
            log.warning("mode %s -> %s: %s", self.enforcer.mode, mode, why)
            self._count_restores(self.enforcer.set_mode(mode))

    def release(self, why: str) -> None:
        """Put everything back; the last thing before the end."""
        self._count_restores(self.enforcer.release_all(why))

    def _count_restores(self, results: Sequence[WriteResult]) -> None:
        self.restores += sum(1 for one in results if one.result == "written")

    def _applied(self) -> dict[Slot, tuple[int | None, int | None, int | None, int | None]]:
        """The caps in force (in a dry run: that would be), by job and device."""
        return {
            (line.cgroup_id, line.device): (
                state.wrote["rbps"],
                state.wrote["wbps"],
                state.wrote["riops"],
                state.wrote["wiops"],
            )
            for line, state in self.enforcer.managed.items()
            if line.file == IO_MAX
        }


def _blind(probes: tuple[ProbeStatus, ...]) -> bool:
    """Without the block probe nobody knows what a cap does to a job, so none is set (fail open)."""
    return not any(probe.name == "block" and probe.state is not ProbeState.UNAVAILABLE for probe in probes)


def run(
    loop: Loop,
    flags: SignalFlags,
    *,
    duration: float | None,
    after_tick: Sequence[Callable[[TickReport], object]] = (),
) -> str:
    """Pass after pass until a signal or `duration` seconds; returns why it ended. The caller releases and closes."""
    flags.started()
    started = time.monotonic()
    while not flags.stop:
        now = time.monotonic()
        if duration is not None and now - started >= duration:
            return f"--duration {duration:g} s is over"
        if flags.disarm:
            flags.disarm = False
            loop.disarm("SIGUSR1")
        report = loop.tick(now, time.time())
        loop.took(time.monotonic() - now)
        for hook in after_tick:
            _call(hook, report)
        _pause(loop, now, time.monotonic(), flags)
    return flags.stop


def _call(hook: Callable[[TickReport], object], report: TickReport) -> None:
    """What looks on (history, recording, watchdogs) never ends the agent."""
    try:
        hook(report)
    except Exception:  # whatever it is, the next pass matters more
        log.exception("a follower of the loop failed in this pass; the loop goes on")


def _pause(loop: Loop, began: float, ended: float, flags: SignalFlags) -> None:
    """Wait for the next pass, which comes one interval after this one `began`, at once where that is over.

    A change of the cgroup tree brings it forward, so that a new job is seen at once; but not at will, since a node that
    makes cgroups all the time would keep the agent busy with nothing else. Writes that wait for their moment in the
    kernel's slices of time are made in between, and hold the next pass up by at most a slice: it would plan them anew,
    and where passes are as long as slices, or come as often, they would wait again, and for ever.
    """
    interval = loop.settings.interval_seconds
    latest = max(began + interval, ended + SLICE_SECONDS)
    while (due := loop.enforcer.due) is not None and due < latest:
        flags.wait(due)
        if flags.stop or flags.disarm:
            return
        loop.enforcer.reconcile_due(time.monotonic())
    flags.wait(began + min(interval, SHORTEST_INTERVAL_SECONDS))
    flags.wait(began + interval, loop.node.filenos())
