"""Runs one scenario inside the guest: real cgroups, real trainers, optionally an agent; writes what came of it.

`python -m tests.lab.scenario_run FILE --seed 1 --out DIR [--peer NAME] [-- AGENT COMMAND…]` prints the summary as JSON.
The agent never sees the trainers' own logs; those make the summary.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from agent.simulate.scenario import Job, Neighbour, Scenario, load_scenario
from tests.lab import groups
from tests.lab.disks import data_of
from tests.lab.errors import LabBroken
from tests.lab.peers import PEERS, peer
from tests.lab.summary import summarise
from tests.lab.trainer import TORCH, Extent, job_arguments, neighbour_arguments, trainer_program

READY_URL = "http://127.0.0.1:9753/readyz"
_READY_SECONDS = 300.0
_STUCK_SECONDS = 10.0
_LOOK_SECONDS = 0.25
_LOGS = Path("/run/lab-truth")


@dataclass
class Agent:
    """A running agent in a cgroup of its own."""

    argv: Sequence[str]
    process: subprocess.Popen[bytes]
    log: Path
    report: dict[str, Any] = field(default_factory=dict)

    def wait_ready(self, url: str) -> None:
        """Wait until it answers at `url`; raises `LabBroken` where it ends or never does."""
        deadline = time.monotonic() + _READY_SECONDS
        while not _answers(url):
            if self.process.poll() is not None or time.monotonic() > deadline:
                raise LabBroken(f"The agent `{' '.join(self.argv)}` did not get ready:\n{self.log_tail()}")
            time.sleep(0.2)
        self.report = {"argv": list(self.argv), "cpu_seconds_start": groups.cpu_seconds(groups.AGENT)}

    def end(self) -> None:
        """Ask it to end, as a service manager would, and note what it used."""
        if "status" in self.report:
            return
        if self.process.poll() is None:
            started = self.report.pop("cpu_seconds_start", 0.0)
            self.report["cpu_seconds"] = round(groups.cpu_seconds(groups.AGENT) - started, 3)
            self.report["resident_bytes"] = groups.resident_bytes(groups.AGENT)
            self.process.send_signal(signal.SIGTERM)
        try:
            self.report["status"] = self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.report["status"] = f"killed {self.process.wait()}: did not end within 20 s of SIGTERM"

    def log_tail(self) -> str:
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-15:])


@dataclass
class Run:
    """A scenario that runs. `elapsed` (s) is its own clock; `folders` are the cgroups by name."""

    scenario: Scenario
    zero: float
    folders: dict[str, Path]
    limits: groups.LimitLog
    processes: dict[str, subprocess.Popen[bytes]]
    agent: Agent | None
    control: contextlib.ExitStack
    stuck: dict[str, str] = field(default_factory=dict)

    @property
    def elapsed(self) -> float:
        return time.monotonic() - self.zero

    def wait(self, each: Callable[[float], None] | None = None) -> None:
        """Wait for all trainers; call `each` with the elapsed seconds about four times a second."""
        while any(process.poll() is None for process in self.processes.values()):
            self.limits.look(self.elapsed)
            if each:
                each(self.elapsed)
            if self.elapsed > self.scenario.duration_seconds + _STUCK_SECONDS:
                self._give_up()
                return
            time.sleep(_LOOK_SECONDS)
        self.limits.look(self.elapsed)

    def end_control(self) -> None:
        """End the agent and undo the peer, then look what is left of them."""
        self.control.close()
        self.limits.look(self.elapsed)

    def truth_file(self, name: str) -> Path:
        return _truth_file(name)

    def _give_up(self) -> None:
        """Note where processes hang (behind a cap, as a rule) and kill them."""
        for name, process in self.processes.items():
            if process.poll() is None:
                stat = (self.folders[name] / "io.stat").read_text().strip()
                self.stuck[name] = f"io.max {groups.io_max(self.folders[name])!r}, io.stat {stat!r}"
                (self.folders[name] / "cgroup.kill").write_text("1")


@contextlib.contextmanager
def running(
    scenario: Scenario,
    seed: int,
    *,
    agent_argv: Sequence[str] = (),
    peer_name: str = "none",
    ready_url: str = READY_URL,
) -> Iterator[Run]:
    """Lay out data and cgroups, set the peer up, start the agent and then every trainer; undo all of it at the end."""
    training, others = [job.name for job in scenario.jobs], [other.name for other in scenario.best_effort]
    program = trainer_program()
    with contextlib.ExitStack() as stack:
        extents = stack.enter_context(data_of(scenario))
        folders = stack.enter_context(groups.cgroups(training, others))
        _limit_memory(scenario.jobs, folders)
        limits = groups.LimitLog(dict(folders))
        limits.look(0.0)
        _LOGS.mkdir(exist_ok=True)
        slow = stack.enter_context(_slow_starters(scenario, seed, folders, extents))
        control = stack.enter_context(contextlib.ExitStack())
        control.enter_context(peer(peer_name, scenario, folders))
        agent = control.enter_context(_started(agent_argv, ready_url)) if agent_argv else None
        _await_ready(slow)
        zero_ns = time.monotonic_ns() + 500_000_000
        run = Run(scenario, zero_ns / 1e9, folders, limits, {}, agent, control)
        users: tuple[Job | Neighbour, ...] = (*scenario.jobs, *scenario.best_effort)
        for index, user in enumerate(users):
            if user.name in slow:
                run.processes[user.name] = slow[user.name]
                _tell(slow[user.name], zero_ns)
                continue
            own = extents[user.name]
            words = (
                job_arguments(user, scenario, own)
                if isinstance(user, Job)
                else neighbour_arguments(user, scenario, own)
            )
            common = [*_common(user.name, folders, seed * 100 + index), "--zero-ns", str(zero_ns)]
            run.processes[user.name] = subprocess.Popen([str(program), *common, *words])
        try:
            yield run
        finally:
            for process in run.processes.values():
                process.kill()
                process.wait()


def _truth_file(name: str) -> Path:
    return _LOGS / f"{name}.log"


def _common(name: str, folders: dict[str, Path], seed: int) -> list[str]:
    return ["--log", str(_truth_file(name)), "--cgroup", str(folders[name]), "--seed", str(seed)]


@contextlib.contextmanager
def _slow_starters(
    scenario: Scenario, seed: int, folders: dict[str, Path], extents: Mapping[str, Mapping[str, Extent]]
) -> Iterator[dict[str, subprocess.Popen[bytes]]]:
    """Start the trainers that import PyTorch: they wait for the time 0, on an emulated CPU a minute or more."""
    processes: dict[str, subprocess.Popen[bytes]] = {}
    try:
        for index, job in enumerate(scenario.jobs):
            if job.trainer == "torch":
                words = [*_common(job.name, folders, seed * 100 + index)]
                words += job_arguments(job, scenario, extents[job.name])
                processes[job.name] = subprocess.Popen(
                    [sys.executable, str(TORCH), *words], stdin=subprocess.PIPE, stdout=subprocess.PIPE
                )
        yield processes
    finally:
        for process in processes.values():
            process.kill()
            process.communicate()


def _await_ready(processes: Mapping[str, subprocess.Popen[bytes]]) -> None:
    for name, process in processes.items():
        if process.stdout is None or process.stdout.readline() != b"ready\n":
            raise LabBroken(
                f"The trainer of {name!r} ended with status {process.wait()} before it could import PyTorch."
            )


def _tell(process: subprocess.Popen[bytes], zero_ns: int) -> None:
    if process.stdin is not None:
        process.stdin.write(f"{zero_ns}\n".encode())
        process.stdin.flush()


def run_scenario(
    scenario: Scenario,
    seed: int,
    *,
    out: Path | None = None,
    agent_argv: Sequence[str] = (),
    peer_name: str = "none",
    each: Callable[[Run, float], None] | None = None,
    finish: Callable[[Run], dict[str, Any]] | None = None,
    ready_url: str = READY_URL,
) -> dict[str, Any]:
    """Run a scenario to its end and return the summary; `out` also gets it, and the trainers' and the agent's logs.

    `finish` is called when the trainers have ended and the agent still runs; what it returns joins the summary.
    """
    with running(scenario, seed, agent_argv=agent_argv, peer_name=peer_name, ready_url=ready_url) as run:
        run.wait((lambda elapsed: each(run, elapsed)) if each else None)
        added = finish(run) if finish else {}
        run.end_control()
        summary = {
            "scenario": scenario.name,
            "seed": seed,
            "policy": "agent" if agent_argv else peer_name,
            "machine": machine_description(),
            "agent": run.agent.report if run.agent else None,
            "stuck": run.stuck,
            **summarise(scenario, run.truth_file, run.limits.changes),
            **added,
        }
        if out:
            _keep(out, run, summary)
    return summary


def machine_description() -> dict[str, Any]:
    """Return what a figure depends on: kernel, accelerator, CPUs, load when the run ended."""
    return {
        "kernel": platform.release(),
        "accelerator": os.environ.get("PREFETCHD_LAB_ACCELERATOR", "unknown"),
        "cpus": os.cpu_count(),
        "load": round(os.getloadavg()[0], 2),
    }


@contextlib.contextmanager
def _started(argv: Sequence[str], ready_url: str) -> Iterator[Agent]:
    log = Path("/run/lab-agent.log")
    join = f'echo $$ >"{groups.AGENT}/cgroup.procs" && exec "$@"'
    with log.open("wb") as file:
        process = subprocess.Popen(["sh", "-c", join, "sh", *argv], stdout=file, stderr=file)
    agent = Agent(argv, process, log)
    try:
        agent.wait_ready(ready_url)
        yield agent
    finally:
        agent.end()


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=2) as response:
            return bool(response.status == 200)
    except (urllib.error.URLError, OSError):
        return False


def _limit_memory(jobs: Sequence[Job], folders: dict[str, Path]) -> None:
    for job in jobs:
        if job.memory is not None:
            (folders[job.name] / "memory.max").write_text(str(int(job.memory)))


def _keep(out: Path, run: Run, summary: dict[str, Any]) -> None:
    out.mkdir(parents=True, exist_ok=True)
    (out / "summary.json").write_text(json.dumps(summary, indent=1) + "\n")
    logs = [run.truth_file(name) for name in run.processes] + ([run.agent.log] if run.agent else [])
    for log in logs:
        if log.exists():
            (out / log.name).write_bytes(log.read_bytes())


def split_at_dashes(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return what stands before the first `--` and what follows it."""
    end = words.index("--") if "--" in words else len(words)
    return list(words[:end]), list(words[end + 1 :])


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.lab.scenario_run", description="Run one scenario inside the guest."
    )
    parser.add_argument("scenario", type=Path)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--peer", choices=sorted(PEERS), default="none")
    own, agent_argv = split_at_dashes(sys.argv[1:] if argv is None else argv)
    arguments = parser.parse_args(own)
    scenario = load_scenario(arguments.scenario)
    summary = run_scenario(scenario, arguments.seed, out=arguments.out, agent_argv=agent_argv, peer_name=arguments.peer)
    print(json.dumps(summary, indent=1))
    return 1 if summary["stuck"] else 0


if __name__ == "__main__":
    sys.exit(main())
