"""The paper's table: its testbed under several policies, figures beside the paper's, with confidence intervals."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import sqrt
from pathlib import Path
from statistics import fmean, stdev

from agent.simulate.machine import NODE
from agent.simulate.run import RunOutcome, simulate, starvation_events, starved_phases, starves
from agent.simulate.testbed import Testbed, Window, load_testbed, scenario_jobs, windows
from agent.simulate.trainer import Iteration
from agent.types import Medium

DATA = Path(__file__).parent.parent / "data" / "paper.toml"
MODES = ("cold_start", "cache_thrash", "remote_congestion")
BOUNDS = ("local", "unlimited")
"""What no control can surpass: disks that are never short beside the same gateway, and storage that never is."""
Progress = Callable[[float], None]

STUDENT_95 = (12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26, 2.23, 2.20, 2.18, 2.16, 2.14, 2.13, 2.12, 2.11)
"""Two-sided 95 % quantiles of Student's t for 1, 2, ... degrees of freedom; beyond, the last is a little too wide."""


@dataclass(frozen=True, slots=True)
class Estimate:
    """A mean over windows and the half width of its 95 % confidence interval (0 of a single window)."""

    mean: float
    half_width: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Estimate:
        """From one value per window; windows are independent."""
        if len(values) < 2:
            return cls(fmean(values) if values else 0.0, 0.0)
        freedom = len(values) - 1
        quantile = STUDENT_95[min(freedom, len(STUDENT_95)) - 1]
        return cls(fmean(values), quantile * stdev(values) / sqrt(len(values)))


def reduction(values: Sequence[float], references: Sequence[float]) -> Estimate:
    """1 - mean(values) / mean(references) of pairs, one per window; its interval follows from the pairs."""
    reference = fmean(references)
    if reference <= 0.0:
        return Estimate(0.0, 0.0)
    ratio = fmean(values) / reference
    rest = Estimate.of([value - ratio * other for value, other in zip(values, references, strict=True)])
    return Estimate(1.0 - ratio, rest.half_width / reference)


@dataclass(slots=True)
class WindowFigures:
    """What one window gave, settling time left out; sums, so that means can be weighted right."""

    iterations: int = 0
    wait_seconds: float = 0.0
    samples: float = 0.0
    seconds: float = 0.0
    events: int = 0
    episodes: int = 0
    starving_jobs: int = 0
    jobs: int = 0
    mode_iterations: dict[str, int] = field(default_factory=lambda: dict.fromkeys(MODES, 0))
    mode_failures: dict[str, int] = field(default_factory=lambda: dict.fromkeys(MODES, 0))
    mode_wait: dict[str, float] = field(default_factory=lambda: dict.fromkeys(MODES, 0.0))
    loans: dict[str, list[int]] = field(default_factory=lambda: {"ssd": [], "hdd": []})
    control_seconds: float = 0.0
    control_steps: int = 0
    writes: int = 0

    @property
    def wait_ms(self) -> float:
        """Wait per iteration."""
        return 1e3 * self.wait_seconds / max(1, self.iterations)

    @property
    def local_wait_ms(self) -> float:
        """The same without remote congestion, which no cap on a local device can move."""
        iterations = self.iterations - self.mode_iterations["remote_congestion"]
        return 1e3 * (self.wait_seconds - self.mode_wait["remote_congestion"]) / max(1, iterations)

    @property
    def events_per_hour(self) -> float:
        """Events per job and hour."""
        return 3600.0 * self.events / (self.jobs * self.seconds)


def window_figures(testbed: Testbed, window: Window, outcome: RunOutcome) -> WindowFigures:
    """The figures of one simulated window."""
    figures = WindowFigures(seconds=testbed.window_seconds)
    known = {job.name: (group, samples) for group, job, samples in scenario_jobs(testbed)}
    for job in outcome.jobs:
        group, samples = known[job.name]
        counted = [one for one in job.iterations if one.time >= testbed.settle_seconds]
        figures.iterations += len(counted)
        figures.wait_seconds += sum(one.wait for one in counted)
        figures.samples += samples * sum(one.taken for one in counted)
        figures.episodes += starvation_events(job.iterations, testbed.settle_seconds)
        figures.events += starved_phases(
            job.iterations, testbed.event_smoothing_seconds, testbed.event_wait_share, testbed.settle_seconds
        )
        figures.jobs += 1
        figures.starving_jobs += sum(map(starves, counted)) >= 0.3 * len(counted)
        _add_modes(figures, counted, group.cold_batches, group.mode)
    kinds = {device.name: device.kind for device in window.scenario.devices}
    for device, lengths in outcome.loan_iterations.items():
        figures.loans[kinds[device]] += lengths
    figures.control_seconds, figures.control_steps = outcome.control_seconds, outcome.control_steps
    figures.writes = outcome.writes
    return figures


def _add_modes(figures: WindowFigures, counted: Sequence[Iteration], cold: int, mode: str) -> None:
    """Each iteration to the mode that is at work in it: cold start first, then that of the job's group."""
    for one in counted:
        # `warm` jobs count from where the window begins, so only a later life has a cold start here
        name = "cold_start" if one.life > 0 and one.number <= cold else mode
        figures.mode_iterations[name] += 1
        figures.mode_failures[name] += starves(one)
        figures.mode_wait[name] += one.wait


@dataclass(frozen=True, slots=True)
class PolicyFigures:
    """One policy over all windows."""

    windows: tuple[WindowFigures, ...]

    def over(self, figure: Callable[[WindowFigures], float]) -> Estimate:
        """A figure's estimate over windows."""
        return Estimate.of([figure(one) for one in self.windows])

    @property
    def wait_ms(self) -> Estimate:
        """Wait per iteration."""
        return self.over(lambda one: one.wait_ms)

    @property
    def events_per_hour(self) -> Estimate:
        """Events per job and hour."""
        return self.over(lambda one: one.events_per_hour)

    @property
    def samples_per_second(self) -> Estimate:
        """Throughput of the node."""
        return self.over(lambda one: one.samples / one.seconds)

    def reduction(self, reference: PolicyFigures, figure: Callable[[WindowFigures], float]) -> Estimate:
        """How much lower a figure is than under another policy in the same windows (0..1)."""
        return reduction([figure(one) for one in self.windows], [figure(one) for one in reference.windows])

    def failure_rate(self, mode: str) -> float:
        """Share of a mode's iterations that starve, over all windows."""
        iterations = sum(one.mode_iterations[mode] for one in self.windows)
        return sum(one.mode_failures[mode] for one in self.windows) / max(1, iterations)

    def mode_wait_ms(self, mode: str) -> float:
        """Wait per iteration of a mode, over all windows."""
        iterations = sum(one.mode_iterations[mode] for one in self.windows)
        return 1e3 * sum(one.mode_wait[mode] for one in self.windows) / max(1, iterations)

    def loan_iterations(self, medium: Medium) -> float | None:
        """Mean length of a loan, renewals included; None without one."""
        lengths = [length for one in self.windows for length in one.loans[medium]]
        return fmean(lengths) if lengths else None

    @property
    def control_cores(self) -> float:
        """CPU seconds of the core per second of the node's time."""
        simulated = sum(one.seconds for one in self.windows)
        return sum(one.control_seconds for one in self.windows) / simulated if simulated else 0.0


def run_testbed(
    testbed: Testbed,
    policies: Sequence[str],
    seeds: Sequence[int],
    *,
    count: int | None = None,
    progress: Progress | None = None,
) -> Mapping[str, PolicyFigures]:
    """Simulate the same windows under every policy; `progress` is called with simulated seconds since the last call."""
    found: dict[str, list[WindowFigures]] = {policy: [] for policy in policies}
    for seed in seeds:
        for index, window in enumerate(windows(testbed, seed, count)):
            for policy in policies:
                outcome = simulate(
                    window.scenario,
                    policy,
                    seed * 10_000 + index,
                    machine=NODE,
                    warm=window.warm,
                    shift_bursts=True,
                    foreign=window.foreign,
                )
                found[policy].append(window_figures(testbed, window, outcome))
                if progress:
                    progress(window.scenario.duration_seconds)
    return {policy: PolicyFigures(tuple(figures)) for policy, figures in found.items()}


def paper_testbed() -> Testbed:
    """The packaged testbed."""
    return load_testbed(DATA)
