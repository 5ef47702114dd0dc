"""Labelled runs inside the guest: one agent that only observes, and one workload after the other under its eyes.

`python -m tests.lab.causes_guest --seed 2 cpu_bound:0 none:3` leaves a result per run in $PREFETCHD_LAB_OUT. What the
agent says is read from its endpoint; whether the job starves is read from the job's own log.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import time
import urllib.request
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from http.client import HTTPException
from pathlib import Path
from typing import Any

from agent.simulate.scenario import Scenario
from tests.lab import groups
from tests.lab.agent_config import write_configuration
from tests.lab.cache import PROJECT
from tests.lab.causes_results import Look, judge, starving_spans
from tests.lab.causes_runs import DRIVE, SUBJECT, Labelled, labelled
from tests.lab.disks import find_disk
from tests.lab.errors import LabBroken
from tests.lab.scenario_run import Run, machine_description, running
from tests.lab.truth import read_truth

AGENT_URL = "http://127.0.0.1:9753"
WARMING_SEED = 0
_READY_SECONDS = 400.0
_LOG = Path("/run/lab-agent.log")


def state() -> dict[str, Any] | None:
    """What the agent says now, None where it does not answer. Without `AgentClient`, whose TLS setup is slow here."""
    try:
        with urllib.request.urlopen(f"{AGENT_URL}/state", timeout=3.0) as answer:
            said: dict[str, Any] = json.load(answer)
    except (OSError, HTTPException):
        return None
    return said


@dataclass
class Observer:
    """Does what a labelled run asks for at its time, and notes what the agent says of the subject."""

    plan: Labelled
    run: Run
    looks: list[Look] = field(default_factory=list)
    rows: list[Mapping[str, Any]] = field(default_factory=list)
    _done: set[str] = field(default_factory=set)

    def at(self, elapsed: float) -> None:
        """Called some four times a second."""
        plan = self.plan
        if plan.drop_caches is not None and elapsed >= plan.drop_caches and self._once("drop"):
            Path("/proc/sys/vm/drop_caches").write_text("3")
        if (plan.own_rate or plan.own_requests) and elapsed >= plan.begin and self._once("cap"):
            rate, requests = plan.own_rate or "max", plan.own_requests or "max"
            line = f"{find_disk(DRIVE.name).number} rbps={rate} riops={requests}"
            (self.run.folders[SUBJECT] / "io.max").write_text(line)
        if elapsed >= plan.begin:
            self._look()

    def _once(self, what: str) -> bool:
        fresh = what not in self._done
        self._done.add(what)
        return fresh

    def _look(self) -> None:
        rows = (state() or {"jobs": []})["jobs"]
        row = next((row for row in rows if row["cgroup"] == f"/{groups.TRAIN.name}/{SUBJECT}"), None)
        if row is not None and row["cause"] is not None:
            self.looks.append(Look(self.run.elapsed, row["cause"], row["score"]))
            self.rows.append(row)


def make(plan: Labelled, seed: int) -> dict[str, Any]:
    """Run one labelled workload and return its result."""
    with running(plan.scenario, seed * 100 + plan.number) as run:
        if plan.shared_memory is not None:
            (groups.TRAIN / "memory.max").write_text(str(plan.shared_memory))
        observer = Observer(plan, run)
        run.wait(observer.at)
        iterations = read_truth(run.truth_file(SUBJECT)).iterations
        stuck = dict(run.stuck)
    spans = starving_spans(iterations)
    verdict, named, starving = judge(observer.looks, spans)
    inside = [row for row in iterations if row.time_s >= plan.begin]
    return {
        "label": plan.label,
        "number": plan.number,
        "seed": seed,
        "verdict": verdict,
        "looks": len(observer.looks),
        "starving_looks": starving,
        "named": named,
        "iterations": len(inside),
        "starved_iterations": sum(row.starved for row in inside),
        "parameters": dict(plan.parameters),
        "evidence": _evidence(observer.rows),
        "stuck": stuck,
        "machine": machine_description(),
    }


def _evidence(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """The mean of each number that the agent gave as evidence, and of what its signals say besides."""
    sums: Counter[str] = Counter()
    counts: Counter[str] = Counter()
    for row in rows:
        numbers = {**row["evidence"], "score": row["score"], "cache_hit_ratio": row["cache_hit_ratio"]}
        for device in row["devices"]:
            for key in ("latency_seconds", "reference_seconds", "queueing_ratio", "throttle_ratio", "latency_cv"):
                numbers[f"{device['medium']}_{key}"] = device[key]
        for name, value in numbers.items():
            if value is not None:
                sums[name] += value
                counts[name] += 1
    return {name: round(sums[name] / counts[name], 5) for name in sums}


@contextlib.contextmanager
def observing(scenario: Scenario) -> Iterator[None]:
    """The shipped agent, watching; ended with the body. Raises LabBroken where it does not get ready."""
    config = Path("/run/lab-causes.toml")
    write_configuration(config, scenario, {DRIVE.name: find_disk(DRIVE.name).number}, workers=True)
    argv = [str(PROJECT / ".venv" / "bin" / "python"), "-m", "agent", "run", "--config", str(config)]
    subprocess.run(["modprobe", "--all", "nfs", "nfsv4"], check=True)  # its probe attaches at once then
    with _LOG.open("wb") as log:
        process = subprocess.Popen(argv, stdout=log, stderr=log)
    try:
        deadline = time.monotonic() + _READY_SECONDS
        while not state():
            if process.poll() is not None or time.monotonic() > deadline:
                raise LabBroken(f"The agent did not get ready:\n{_LOG.read_text(errors='replace')[-3000:]}")
            time.sleep(0.5)
        yield
    finally:
        process.terminate()
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.lab.causes_guest", description="Make labelled runs.")
    parser.add_argument("runs", nargs="+", metavar="LABEL:NUMBER")
    parser.add_argument("--seed", type=int, required=True)
    arguments = parser.parse_args(argv)
    out = Path(os.environ["PREFETCHD_LAB_OUT"])
    with observing(labelled("remote_congestion", 0, WARMING_SEED).scenario):
        print(f"agent ready: {[(one['name'], one['state']) for one in (state() or {})['probes']]}", flush=True)
        # The first mount makes the agent import its netlink library: seconds without a pass on an emulated CPU.
        make(labelled("remote_congestion", 0, WARMING_SEED), WARMING_SEED)
        for word in arguments.runs:
            label, _, number = word.partition(":")
            began = time.monotonic()
            result = make(labelled(label, int(number), arguments.seed), arguments.seed)
            part = out / f"{label}-{number}.part"
            part.write_text(json.dumps(result))
            part.rename(part.with_suffix(".json"))
            seconds = time.monotonic() - began
            print(f"{word}: {result['verdict']} {result['named']} ({seconds:.0f} s)", flush=True)
            if not result["looks"]:
                raise LabBroken(f"The agent said nothing of the job:\n{_LOG.read_text(errors='replace')[-3000:]}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
