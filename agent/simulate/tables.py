"""What a simulation prints and writes as JSON. Pure: results -> documents and lines of text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from agent.simulate.control import POLICIES
from agent.simulate.machine import Machine
from agent.simulate.paper import BOUNDS, MODES, PolicyFigures
from agent.simulate.run import EVENT_DEFINITION
from agent.simulate.scenario import Scenario
from agent.simulate.testbed import DAY_SECONDS, Testbed
from agent.types import Medium

MIB = 1 << 20
APPROXIMATIONS = (
    "devices are service models: no file system metadata, no writeback, no CPU cost of the block layer",
    "reads are counted whole: requests are neither split nor merged",
    "bfq and io.cost are fair queues without budgets, idling, donation or debt",
    "the page cache evicts strictly by last use",
    "probes and control files cost no time; passes of the loop are exactly 100 ms apart",
    "rearrangement of HDD reads is not simulated",
)
PAPER_APPROXIMATIONS = (
    *APPROXIMATIONS,
    "the week is sampled by windows; at the start of a window every batch of a job's cycle is equally likely",
    "a thrash phase is given (the share of reads that miss), not made by a simulated cache",
    "remote congestion is other machines' traffic on the gateway, which no local cap can move",
)


def scenario_document(
    scenario: Scenario, machine: Machine, runs: Mapping[str, Sequence[Mapping[str, float | str]]], seeds: Sequence[int]
) -> dict[str, Any]:
    """The JSON of a scenario: per policy the median over seeds of every figure, `spread` (min, max), and the runs."""
    return {
        "scenario": scenario.name,
        "seeds": list(seeds),
        "duration_seconds": scenario.duration_seconds,
        "machine": machine.name,
        "event_definition": EVENT_DEFINITION,
        "approximations": list(APPROXIMATIONS),
        "policies": {policy: _medians(figures) for policy, figures in runs.items()},
    }


def _medians(runs: Sequence[Mapping[str, float | str]]) -> dict[str, Any]:
    numbers = {name: [float(run[name]) for run in runs] for name, value in runs[0].items() if name != "worst_job"}
    worst = min(runs, key=lambda run: float(run["worst_utilisation"]))
    middle: dict[str, Any] = {name: round(median(values), 4) for name, values in numbers.items()}
    spread = {name: [round(min(values), 4), round(max(values), 4)] for name, values in numbers.items()}
    return {**middle, "worst_job": worst["worst_job"], "spread": spread, "runs": [dict(run) for run in runs]}


SCENARIO_COLUMNS = (
    ("policy", 9),
    ("wait ms", 9),
    ("p50", 7),
    ("p99", 8),
    ("events", 7),
    ("comp/(comp+wait)", 17),
    ("worst job", 16),
    ("samples/s", 10),
    ("others MiB/s", 13),
    ("writes", 7),
)


def scenario_lines(document: Mapping[str, Any]) -> list[str]:
    """The table of a scenario."""
    lines = [_row([name for name, _ in SCENARIO_COLUMNS])]
    for policy, one in document["policies"].items():
        lines.append(
            _row(
                [
                    policy,
                    f"{one['wait_ms']:.2f}",
                    f"{one['wait_p50_ms']:.1f}",
                    f"{one['wait_p99_ms']:.1f}",
                    f"{one['starvation_events']:.0f}",
                    f"{one['utilisation']:.3f}",
                    f"{one['worst_utilisation']:.2f} {one['worst_job']}",
                    f"{one['samples_per_second']:.1f}",
                    f"{one['neighbour_bytes_per_second'] / MIB:.1f}",
                    f"{one['writes']:.0f}",
                ]
            )
        )
    seeds = ", ".join(map(str, document["seeds"]))
    lines.append(f"medians of seeds {seeds}; modelled machine: {document['machine']}; {EVENT_DEFINITION}")
    lines += [f"  {policy}: {POLICIES[policy].about}" for policy in document["policies"]]
    return lines


def _row(cells: Sequence[str]) -> str:
    widths = [width for _, width in SCENARIO_COLUMNS]
    return "  ".join(
        f"{cell:{width}}" if index == 0 else f"{cell:>{width}}"
        for index, (cell, width) in enumerate(zip(cells, widths, strict=True))
    ).rstrip()


def paper_document(
    testbed: Testbed,
    found: Mapping[str, PolicyFigures],
    seeds: Sequence[int],
    wall_seconds: float,
    ideals: Mapping[str, Mapping[str, float]],
) -> dict[str, Any]:
    """The JSON of the paper's table; reductions are against `static`, shares against the bounds.

    `ideals`: what perfect drives could do under each rule of an oracle (agent.simulate.ideal).
    """
    static = found["static"]
    bounds = {name: found[name] for name in BOUNDS}
    policies = {policy: _policy(figures, static, bounds) for policy, figures in found.items()}
    sampled = sum(one.seconds for one in static.windows)
    return {
        "scenario": testbed.name,
        "seeds": list(seeds),
        "tuning_seeds": list(testbed.tuning_seeds),
        "days": testbed.days,
        "windows": len(static.windows),
        "sampled_hours": sampled / 3600.0,
        "wall_seconds": round(wall_seconds, 1),
        "wall_seconds_per_policy": round(wall_seconds / len(found), 1),
        "times_real_time_sampled": round(sampled * len(found) / wall_seconds, 1) if wall_seconds else 0.0,
        "times_real_time_week": round(testbed.days * DAY_SECONDS * len(found) / wall_seconds) if wall_seconds else 0,
        "event_definition": event_definition(testbed),
        "approximations": list(PAPER_APPROXIMATIONS),
        "paper": {"static": _known(testbed.baseline), "reserved": _known(testbed.controlled)},
        "policies": policies,
        "ideal": {rule: _against(one, static) for rule, one in ideals.items()},
    }


def _against(one: Mapping[str, float], static: PolicyFigures) -> dict[str, float]:
    wait, events = static.wait_ms.mean, static.events_per_hour.mean
    return {
        **one,
        "wait_reduction": round(1.0 - one["wait_ms"] / wait, 4) if wait else 0.0,
        "event_reduction": round(1.0 - one["events_per_hour"] / events, 4) if events else 0.0,
    }


def event_definition(testbed: Testbed) -> str:
    """What `events_per_hour` counts, and why."""
    paper = testbed.baseline
    compute = 246.0
    hours = 3600.0 / ((compute + paper.wait_ms) / 1e3) * paper.wait_ms / 1e3
    per_event = hours / paper.events_per_hour
    smoothing, share = testbed.event_smoothing_seconds, testbed.event_wait_share
    return (
        f"events: {paper.wait_ms:g} ms an iteration at {paper.events_per_hour:g} events an hour are {per_event:.0f} s "
        "of waiting per event and job, so the paper's event cannot be one empty queue. Here events_per_hour counts "
        f"phases, per job and hour: the share of time that the job waits, smoothed over {smoothing:g} s, rises above "
        f"{share:.0%} (over when it falls to half of that). episodes_per_hour counts every run of iterations that find "
        "the queue empty and wait >= 10 ms"
    )


def _known(figures: Any) -> dict[str, float]:
    values = {name: getattr(figures, name) for name in figures.__struct_fields__}
    return {name: value for name, value in values.items() if value is not None}


def _policy(figures: PolicyFigures, static: PolicyFigures, bounds: Mapping[str, PolicyFigures]) -> dict[str, Any]:
    wait, events, samples = figures.wait_ms, figures.events_per_hour, figures.samples_per_second
    less_wait = figures.reduction(static, lambda one: one.wait_ms)
    less_local = figures.reduction(static, lambda one: one.local_wait_ms)
    fewer = figures.reduction(static, lambda one: one.events_per_hour)
    steps = sum(one.control_steps for one in figures.windows)
    seconds = sum(one.control_seconds for one in figures.windows)
    jobs = figures.windows[0].jobs
    total = sum(one.seconds for one in figures.windows)
    starving = sum(one.starving_jobs for one in figures.windows)
    raw = figures.over(lambda one: 3600.0 * one.episodes / (one.jobs * one.seconds))
    return {
        "wait_ms": round(wait.mean, 2),
        "events_per_hour": round(events.mean, 2),
        "samples_per_second": round(samples.mean, 1),
        "confidence_95": {
            "wait_ms": round(wait.half_width, 2),
            "events_per_hour": round(events.half_width, 2),
            "samples_per_second": round(samples.half_width, 1),
            "wait_reduction": round(less_wait.half_width, 4),
            "local_wait_reduction": round(less_local.half_width, 4),
            "event_reduction": round(fewer.half_width, 4),
        },
        "episodes_per_hour": round(raw.mean, 1),
        "seconds_waited_per_event": _per_event(figures),
        "wait_reduction": round(less_wait.mean, 4),
        "local_wait_reduction": round(less_local.mean, 4),
        "event_reduction": round(fewer.mean, 4),
        "throughput_gain": round(samples.mean / static.samples_per_second.mean - 1.0, 4),
        "share_of_unlimited": round(samples.mean / bounds["unlimited"].samples_per_second.mean, 4),
        "share_of_local": round(samples.mean / bounds["local"].samples_per_second.mean, 4),
        "share_of_reachable_reduction": _of_reachable(wait.mean, static.wait_ms.mean, bounds["local"].wait_ms.mean),
        "jobs_starving_in_30_percent": round(starving / (len(figures.windows) * jobs), 3),
        "modes": {mode: _mode(figures, static, mode) for mode in MODES},
        "ssd_loan_iterations": _rounded(figures.loan_iterations(Medium.SSD)),
        "hdd_loan_iterations": _rounded(figures.loan_iterations(Medium.HDD)),
        "loans_per_hour": {
            medium: round(3600.0 * sum(len(one.loans[medium]) for one in figures.windows) / total, 1)
            for medium in ("ssd", "hdd")
        },
        "control_cores": round(figures.control_cores, 4),
        "control_microseconds_per_job_and_tick": round(1e6 * seconds / (steps * jobs), 1) if steps else 0.0,
        "writes_per_second": round(sum(one.writes for one in figures.windows) / total, 2),
    }


def _of_reachable(wait_ms: float, static_ms: float, bound_ms: float) -> float:
    """What part of the wait that local control can take away it takes."""
    return round((static_ms - wait_ms) / (static_ms - bound_ms), 4) if static_ms > bound_ms else 0.0


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 2)


def _per_event(figures: PolicyFigures) -> float | None:
    events = sum(one.events for one in figures.windows)
    return round(sum(one.wait_seconds for one in figures.windows) / events, 2) if events else None


def _mode(figures: PolicyFigures, static: PolicyFigures, mode: str) -> dict[str, float]:
    rate, before = figures.failure_rate(mode), static.failure_rate(mode)
    wait, waited = figures.mode_wait_ms(mode), static.mode_wait_ms(mode)
    return {
        "failure_rate": round(rate, 4),
        "failure_reduction": round(1.0 - rate / before, 4) if before else 0.0,
        "wait_ms": round(wait, 2),
        "wait_reduction": round(1.0 - wait / waited, 4) if waited else 0.0,
    }


BOUND_NAMES = {"local": "bound", "unlimited": "bound without gateway"}
"""What the table calls `BOUNDS`: what disks that are never short would give beside the same gateway, and without it."""


def paper_lines(document: Mapping[str, Any]) -> list[str]:
    """The paper's table with ours beside it; figures of ours carry their 95 % confidence interval."""
    names = [name for name in document["policies"] if name not in BOUNDS]
    before, after = document["paper"]["static"], document["paper"]["reserved"]
    ours = document["policies"]
    none = [""] * len(BOUNDS)
    rows = [["", "paper: static", "paper: reserved", *names, *BOUND_NAMES.values()]]
    for label, key, digits in (
        ("wait per iteration, ms", "wait_ms", 1),
        ("events per job and hour", "events_per_hour", 1),
        ("samples per second", "samples_per_second", 0),
    ):
        cells = [_with_interval(ours[name], key, digits, document["windows"]) for name in (*names, *BOUNDS)]
        rows.append([label, f"{before[key]:.{digits}f}", f"{after[key]:.{digits}f}", *cells])
    for label, key in (
        ("less wait than static", "wait_reduction"),
        ("fewer events than static", "event_reduction"),
        ("more samples than static", "throughput_gain"),
    ):
        rows.append([label, "", f"{after[key]:.0%}", *[f"{ours[name][key]:.0%}" for name in (*names, *BOUNDS)]])
    cells = [f"{ours[name]['share_of_reachable_reduction']:.0%}" for name in (*names, *BOUNDS)]
    rows.append(["of the wait that local control can take away", "", "", *cells])
    cells = [f"{ours[name]['local_wait_reduction']:.0%}" for name in (*names, *BOUNDS)]
    rows.append(["less wait, remote congestion apart", "", "", *cells])
    for mode in MODES:
        cells = [f"{ours[name]['modes'][mode]['failure_reduction']:.0%}" for name in names]
        rows.append(
            [f"fewer failures: {mode.replace('_', ' ')}", "", f"{after[f'{mode}_reduction']:.0%}", *cells, *none]
        )
    for mode in MODES:
        cells = [f"{ours[name]['modes'][mode]['wait_reduction']:.0%}" for name in names]
        rows.append([f"less wait: {mode.replace('_', ' ')}", "", "", *cells, *none])
    rows.append(
        ["episodes per job and hour", "", "", *[f"{ours[name]['episodes_per_hour']:.0f}" for name in names], *none]
    )
    for bound in BOUNDS:
        cells = [f"{ours[name][f'share_of_{bound}']:.1%}" for name in (*names, *BOUNDS)]
        rows.append([f"samples/s, of the {BOUND_NAMES[bound]}'s", "", "", *cells])
    for medium in ("ssd", "hdd"):
        key = f"{medium}_loan_iterations"
        cells = ["-" if ours[name][key] is None else f"{ours[name][key]:.1f}" for name in names]
        rows.append([f"mean loan on {medium.upper()}s, iterations", "", f"{after[key]:.1f}", *cells, *none])
    cells = [f"{ours[name]['control_cores']:.3f}" for name in names]
    rows.append(["control, CPU cores", "", f"{after['control_cores']:.1f}", *cells, *none])
    return [*_aligned(rows), *_notes(document)]


def _with_interval(policy: Mapping[str, Any], key: str, digits: int, windows: int) -> str:
    """A single window has a mean and no interval."""
    mean = f"{policy[key]:.{digits}f}"
    return mean if windows < 2 else f"{mean} ± {policy['confidence_95'][key]:.{digits}f}"


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return [
        "  ".join(
            f"{cell:{width}}" if column == 0 else f"{cell:>{width}}"
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


def _notes(document: Mapping[str, Any]) -> list[str]:
    seeds, tuned = (", ".join(map(str, document[name])) for name in ("seeds", "tuning_seeds"))
    several = document["windows"] > 1
    interval = "± is the 95 % confidence interval of the mean over windows" if several else "too few for an interval"
    sampled = (
        f"{document['windows']} window{'s' if several else ''}, {document['sampled_hours']:.1f} h sampled from "
        f"{document['days']:g} days, seeds {seeds} (tuned on {tuned}); {interval}"
    )
    speed = (
        f"{document['wall_seconds_per_policy']:.0f} s a policy: {document['times_real_time_sampled']:.0f} x real time "
        f"in the windows, {document['times_real_time_week']} x for the days they stand for"
    )
    steered = [name for name, one in document["policies"].items() if one["control_microseconds_per_job_and_tick"]]
    costs = [f"{name} {document['policies'][name]['control_microseconds_per_job_and_tick']:.0f} µs" for name in steered]
    cost = [f"control core per job and tick: {', '.join(costs)}"] if costs else []
    ideals = [
        f"{rule} {one['wait_ms']:.1f} ms ({one['wait_reduction']:.0%} less), {one['events_per_hour']:.1f} events "
        f"({one['event_reduction']:.0%} fewer)"
        for rule, one in document["ideal"].items()
    ]
    best = f"perfect drives divided by an oracle, beside the same gateway: {'; '.join(ideals)}"
    return [sampled, speed, *cost, best, document["event_definition"]]
