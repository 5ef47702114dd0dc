"""From the trainers' logs to the summary of one run. Pure, but for reading the logs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from agent.simulate.scenario import Job, Neighbour, Scenario
from tests.lab import truth

Changes = Mapping[str, Sequence[tuple[float, str]]]


def summarise(scenario: Scenario, log_of: Callable[[str], Path], limits: Changes) -> dict[str, Any]:
    """Return the numbers of one run: over all training iterations, per job, per neighbour.

    `wait_ms` is per iteration; `utilisation` compute / (compute + wait); rates are over the time the user was there.
    """
    logs = {name: truth.read_truth(log_of(name)) for name in names(scenario)}
    jobs = {job.name: _job(job, scenario, logs[job.name], limits) for job in scenario.jobs}
    others = {other.name: _neighbour(other, scenario, logs[other.name], limits) for other in scenario.best_effort}
    waits = [wait for job in scenario.jobs for wait in logs[job.name].waits_ms]
    useful = {name: job["utilisation"] for name, job in jobs.items()}
    return {
        "wait_ms": truth.wait_summary(waits),
        "iterations": len(waits),
        "starvation_events": sum(job["starvation_events"] for job in jobs.values()),
        "samples_per_second": round(sum(job["samples_per_second"] for job in jobs.values()), 1),
        "utilisation": round(sum(useful.values()) / len(useful), 4) if useful else 0.0,
        "worst_job": min(useful, key=lambda name: useful[name], default=""),
        "worst_utilisation": min(useful.values(), default=0.0),
        "neighbour_bytes_per_second": sum(other["bytes_per_second"] for other in others.values()),
        "jobs": jobs,
        "best_effort": others,
    }


def names(scenario: Scenario) -> list[str]:
    """Return the names of all users of a scenario, jobs first."""
    return [job.name for job in scenario.jobs] + [other.name for other in scenario.best_effort]


def _job(job: Job, scenario: Scenario, log: truth.Truth, limits: Changes) -> dict[str, Any]:
    seconds = _present_seconds(job, scenario)
    taken = sum(row.taken for row in log.iterations)
    return {
        "iterations": taken,
        "wait_ms": truth.wait_summary(log.waits_ms),
        "starvation_events": truth.starvation_events(log.iterations),
        "samples_per_second": round(taken * job.batch_reads / seconds, 2),
        "utilisation": round(truth.utilisation(log.waits_ms, job.compute_ms), 4),
        "lives": len({row.life for row in log.iterations}),
        **_transfer(log, seconds),
        "io_max": _io_max(job.name, limits),
    }


def _neighbour(other: Neighbour, scenario: Scenario, log: truth.Truth, limits: Changes) -> dict[str, Any]:
    return {**_transfer(log, _present_seconds(other, scenario)), "io_max": _io_max(other.name, limits)}


def _transfer(log: truth.Truth, seconds: float) -> dict[str, Any]:
    total = log.end.get("bytes", log.iterations[-1].bytes_total if log.iterations else 0)
    return {
        "bytes_per_second": round(total / seconds),
        "read_ms": {"mean": log.end.get("read_ms_mean"), "max": log.end.get("read_ms_max")},
    }


def _present_seconds(user: Job | Neighbour, scenario: Scenario) -> float:
    stop = scenario.duration_seconds if user.stop_seconds is None else user.stop_seconds
    return max(1e-3, min(stop, scenario.duration_seconds) - user.start_seconds)


def _io_max(name: str, limits: Changes) -> dict[str, Any]:
    seen = limits.get(name, ())
    texts = [text for _, text in seen]
    return {"before": texts[0] if texts else "", "after": texts[-1] if texts else "", "changes": list(seen)}
