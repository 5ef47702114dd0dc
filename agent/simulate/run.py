"""One run of a scenario under one policy, and what came of it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import ceil, exp

from agent.simulate.closed_loop import Agent
from agent.simulate.control import POLICIES, Controller
from agent.simulate.machine import LAB, Machine
from agent.simulate.node import Foreign, SimulatedNode
from agent.simulate.scenario import Scenario
from agent.simulate.trainer import Iteration, Warmth

STARVATION_SECONDS = 0.010
EVENT_DEFINITION = (
    "a starvation event is an episode: the loop finds the queue empty and waits at least 10 ms; "
    "starving iterations that follow one another are one event"
)
Progress = Callable[[float], None]


@dataclass(frozen=True, slots=True)
class JobOutcome:
    """One job of a run: its iterations, nominal compute (s), samples of a batch, and how long it was there (s)."""

    name: str
    iterations: Sequence[Iteration]
    compute_seconds: float
    batch_samples: int
    present_seconds: float
    moved_bytes: int


@dataclass(frozen=True, slots=True)
class RunOutcome:
    """One run: jobs, what neighbours moved (bytes by name) and for how long they were there (s), and the controller."""

    jobs: tuple[JobOutcome, ...]
    neighbours: Mapping[str, tuple[int, float]]
    duration_seconds: float
    writes: int
    control_steps: int
    control_seconds: float
    loan_iterations: Mapping[str, Sequence[int]]


def simulate(
    scenario: Scenario,
    policy: str,
    seed: int,
    *,
    machine: Machine = LAB,
    warm: Mapping[str, Warmth] | None = None,
    shift_bursts: bool = False,
    foreign: Sequence[Foreign] = (),
    progress: Progress | None = None,
    controller: Controller | None = None,
) -> RunOutcome:
    """Run the scenario to its end; the same arguments give the same outcome, but for `control_seconds`.

    `warm`, `shift_bursts` and `foreign` see `SimulatedNode`. `progress` is called with simulated seconds. `controller`
    replaces the policy's own. KeyError for an unknown policy.
    """
    kind = POLICIES[policy]
    node = SimulatedNode(
        scenario,
        machine,
        seed,
        scheduling=kind.scheduling(scenario) if kind.scheduling else None,
        unlimited=kind.unlimited,
        warm=warm,
        shift_bursts=shift_bursts,
        foreign=foreign,
    )
    controller = controller or kind.controller()
    duration = scenario.duration_seconds
    steps = ceil(duration / controller.interval) if controller.interval < duration else 0
    controller.step(node, 0.0)
    for number in range(1, steps):
        node.events.run(number * controller.interval)
        controller.step(node, number * controller.interval)
        if progress and number % 10 == 0:
            progress(number * controller.interval)
    node.events.run(duration)
    if progress:
        progress(duration)
    return _outcome(node, controller)


def _outcome(node: SimulatedNode, controller: Controller) -> RunOutcome:
    duration = node.scenario.duration_seconds
    jobs = tuple(
        JobOutcome(
            trainer.spec.name,
            trainer.iterations,
            trainer.spec.compute_ms / 1e3,
            trainer.spec.batch_reads,
            _present(trainer.spec.start_seconds, trainer.spec.stop_seconds, duration),
            node.moved_bytes(cgroup),
        )
        for cgroup, trainer in node.trainers.items()
    )
    neighbours = {
        scanner.spec.name: (
            node.moved_bytes(cgroup),
            _present(scanner.spec.start_seconds, scanner.spec.stop_seconds, duration),
        )
        for cgroup, scanner in node.scanners.items()
    }
    agent = controller if isinstance(controller, Agent) else None
    return RunOutcome(
        jobs,
        neighbours,
        duration,
        controller.writes,
        agent.steps if agent else 0,
        controller.busy_seconds,
        agent.loans.lengths if agent else {},
    )


def _present(start: float, stop: float | None, duration: float) -> float:
    return max(1e-3, (duration if stop is None else min(stop, duration)) - start)


def starves(iteration: Iteration) -> bool:
    """Whether this iteration is (part of) a starvation event."""
    return iteration.depth == 0 and iteration.wait >= STARVATION_SECONDS


def starvation_events(iterations: Iterable[Iteration], since: float = 0.0) -> int:
    """Episodes that begin at `since` (s) or later: starving iterations in a row of one life are one."""
    events = 0
    previous: Iteration | None = None
    for one in iterations:
        if starves(one):
            joined = previous is not None and starves(previous) and previous.life == one.life
            events += not joined and one.time >= since
        previous = one
    return events


def starved_phases(iterations: Iterable[Iteration], smoothing_seconds: float, enter: float, since: float) -> int:
    """How often the share of time that a loop waits rises above `enter`, at `since` (s) or later.

    The share is smoothed exponentially over `smoothing_seconds`; a phase is over when it has fallen to half of `enter`.
    """
    share, end, phases = 0.0, 0.0, 0
    inside = False
    for one in iterations:
        share *= exp(-max(0.0, one.time - end) / smoothing_seconds)
        inside = inside and share > enter / 2
        share = 1.0 - (1.0 - share) * exp(-one.wait / smoothing_seconds)
        end = one.time + one.wait
        phases += share > enter and not inside and end >= since
        inside = inside or share > enter
    return phases


def percentile(values: Sequence[float], ratio: float) -> float:
    """The smallest value that at least `ratio` (0..1) of the values do not exceed; 0 of none."""
    ranked = sorted(values)
    return ranked[max(0, ceil(ratio * len(ranked)) - 1)] if ranked else 0.0


def summarise(outcome: RunOutcome) -> dict[str, float | str]:
    """The figures of one run over all training iterations; names carry units.

    `utilisation` is the jobs' mean of compute / (compute + wait); `samples_per_second` counts one sample per read of
    a batch of normal size.
    """
    waits = [one.wait * 1e3 for job in outcome.jobs for one in job.iterations]
    useful = {job.name: _utilisation(job) for job in outcome.jobs}
    worst = min(useful, key=lambda name: useful[name], default="")
    taken = {job.name: sum(one.taken for one in job.iterations) for job in outcome.jobs}
    events = sum(starvation_events(job.iterations) for job in outcome.jobs)
    present = sum(job.present_seconds for job in outcome.jobs)
    return {
        "wait_ms": sum(waits) / len(waits) if waits else 0.0,
        "wait_p50_ms": percentile(waits, 0.5),
        "wait_p99_ms": percentile(waits, 0.99),
        "iterations": float(len(waits)),
        "starvation_events": float(events),
        "events_per_job_hour": events / present * 3600.0 if present else 0.0,
        "samples_per_second": sum(taken[job.name] * job.batch_samples / job.present_seconds for job in outcome.jobs),
        "utilisation": sum(useful.values()) / len(useful) if useful else 0.0,
        "worst_job": worst,
        "worst_utilisation": useful.get(worst, 0.0),
        "neighbour_bytes_per_second": sum(moved / seconds for moved, seconds in outcome.neighbours.values()),
        "writes": float(outcome.writes),
    }


def _utilisation(job: JobOutcome) -> float:
    compute = len(job.iterations) * job.compute_seconds
    total = compute + sum(one.wait for one in job.iterations)
    return compute / total if total > 0.0 else 0.0
