"""The policy benchmark on the host: boots guests, makes the runs that a result lacks, writes the result after each.

A run that the guest spoils (no boot, a lock-up, a process that hangs, an agent that fails) is noted under `spoiled`
with the reason and made once more in a new guest; it never enters a figure.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

from agent.commands.options import file_to_write
from agent.errors import UsageError, reason
from agent.simulate.scenario import MAX_SECONDS
from agent.units import printable
from tests.lab import bench_results as results
from tests.lab.bench_plan import ALONE, POLICIES, SHIPPED, Cell, load_plan, machines, matrix
from tests.lab.bench_report import render
from tests.lab.bench_table import lines
from tests.lab.cache import PROJECT
from tests.lab.errors import LabBroken, LabUnavailable
from tests.lab.machine import Guest, Lab
from tests.lab.nfs import ensure_nfs
from tests.lab.trainer import trainer_program

ATTEMPTS = 2
BOOTS = 2
"""Boots that may fail one after the other before the lab itself counts as broken."""
AROUND_SECONDS = 300.0
"""What a run may take beside its own length: data to lay out, an agent that compiles on an emulated CPU."""
_GUESS_SECONDS = 12.0
_EXAMPLES = """examples:
  python -m tests.lab bench --scenario ssd-greedy --policy none,bfqw,adaptive --seed 1,2,3 --json out/b.json
  python -m tests.lab bench --plan tests/lab/bench.toml --json out/bench.json --report out/bench.html
  python -m tests.lab bench --table out/bench.json

The same command again makes only the runs that the result lacks.
"""


class Spoiled(Exception):  # noqa: N818 -- a state of the run, not an error of the caller
    """The guest or the agent failed during a run; its figures say nothing."""


@dataclass
class Bench:
    """Makes runs in guests, one guest for as many of them as it survives."""

    document: results.Document
    path: Path
    cells: Sequence[Cell]
    progress: Callable[[str], None]
    revision: str = ""
    failed: list[Cell] = field(default_factory=list)
    _stack: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)
    _guest: Guest | None = None
    _booted: Any = None
    _walls: list[float] = field(default_factory=list)

    def run(self) -> list[Cell]:
        """Make every missing run; return those that were spoiled twice."""
        left = results.missing(self.document, self.cells)
        disks = machines({cell.subject.name: cell.subject for cell in self.cells}.values())
        self._say(f"{len(left)} runs to make, {len(self.cells) - len(left)} there; about {_minutes(_guess(left))}")
        with self._stack:
            for place, cell in enumerate(left, 1):
                told = self._made(cell, disks[cell.subject.name])
                rest = fmean(self._walls) * (len(left) - place) if self._walls else _guess(left[place:])
                self._say(f"[{place}/{len(left)}] {' '.join(map(str, cell.key))}: {told}; {_minutes(rest)} left")
        return self.failed

    def _made(self, cell: Cell, disks: Sequence[Any]) -> str:
        for attempt in range(1, ATTEMPTS + 1):
            guest = self._guest_with(disks)
            began = time.monotonic()
            try:
                summary = _attempt(guest, cell)
            except (Spoiled, LabBroken) as error:
                self._end_guest()
                self._note(cell, attempt, str(error))
                continue
            about = {"attempt": attempt, "revision": self.revision, "host_load": round(os.getloadavg()[0], 2)}
            self._walls.append(time.monotonic() - began)
            about["wall_seconds"] = round(self._walls[-1], 1)
            record = results.run_record(cell, summary, **about)
            self.document["runs"].append(record)
            results.save(self.document, self.path)
            return told(record)
        self.failed.append(cell)
        return "spoiled twice, left out"

    def _guest_with(self, disks: Sequence[Any]) -> Guest:
        if self._guest is not None and self._booted == tuple(disks):
            return self._guest
        self._end_guest()
        for boot in range(1, BOOTS + 1):
            try:
                out = self._stack.enter_context(tempfile.TemporaryDirectory(prefix="prefetchd-bench-"))
                lab = Lab(devices=tuple(disks), out_dir=Path(out), progress=self.progress)
                self._guest = self._stack.enter_context(lab.boot())
            except LabUnavailable:
                raise
            except LabBroken:
                if boot == BOOTS:
                    raise
            else:
                self._booted = tuple(disks)
                return self._guest
        raise AssertionError

    def _end_guest(self) -> None:
        self._guest = None
        self._stack.close()

    def _note(self, cell: Cell, attempt: int, why: str) -> None:
        scenario, policy, seed = cell.key
        note = {"scenario": scenario, "policy": policy, "seed": seed, "attempt": attempt, "why": why}
        self.document["spoiled"].append(note)
        results.save(self.document, self.path)
        self._say(f"{scenario} {policy} {seed}: spoiled: {why.splitlines()[-1] if why else 'no reason'}")

    def _say(self, text: str) -> None:
        print(f"bench: {text}", file=sys.stderr, flush=True)


def _attempt(guest: Guest, cell: Cell) -> dict[str, Any]:
    """Make one run in a guest and return its summary; raises `Spoiled` or `LabBroken`."""
    out = guest.out_dir / "run.json"
    out.unlink(missing_ok=True)
    words = [str(cell.subject.path), "--policy", cell.policy, "--seed", str(cell.seed), "--out", str(out)]
    seconds = cell.subject.scenario.duration_seconds
    python = str(PROJECT / ".venv" / "bin" / "python")
    command = [python, "-m", "tests.lab.bench_guest", *words, "--seconds", f"{seconds:g}"]
    result = guest.run(command, timeout=seconds + AROUND_SECONDS)
    if result.status:
        raise Spoiled(f"the run ended with status {result.status}: {result.output.read_text()[-1500:]}")
    summary: dict[str, Any] = json.loads(out.read_text())
    if why := spoiled_by(summary):
        raise Spoiled(why)
    return summary


def spoiled_by(summary: dict[str, Any]) -> str:
    """Return why a summary's figures say nothing, empty where they do."""
    if summary["stuck"]:
        return "; ".join(f"{name} hung: {why}" for name, why in summary["stuck"].items())
    if not summary["iterations"]:
        return "no training job got through an iteration"
    agent = summary["agent"]
    if agent is not None and agent.get("status") != 0:
        return f"the agent ended with status {agent.get('status')}"
    return ""


def told(run: results.Run) -> str:
    """One run in a line."""
    waits = run["wait_ms"]
    text = f"wait {waits['mean']:.2f} ms, p99 {waits['p99']:.1f}, {run['starvation_events']} events"
    return f"{text}, others {run['neighbour_bytes_per_second'] / (1 << 20):.1f} MiB/s ({run['wall_seconds']:.0f} s)"


def _guess(cells: Sequence[Cell]) -> float:
    return sum(cell.subject.scenario.duration_seconds + _GUESS_SECONDS for cell in cells)


def _minutes(seconds: float) -> str:
    return f"{seconds / 60:.0f} min"


def machine() -> dict[str, Any]:
    """Return what the figures depend on of the host."""
    info = Path("/proc/cpuinfo").read_text()
    model = next((line.partition(":")[2].strip() for line in info.splitlines() if line.startswith("model name")), "?")
    return {
        "cpu": model,
        "cpus": os.cpu_count(),
        "memory_bytes": os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
        "kernel": platform.release(),
    }


def revision() -> str:
    """Return the source's commit, with `+` where files differ from it; empty where nothing tells."""
    git = ["git", "-C", str(PROJECT)]
    done = subprocess.run([*git, "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    if done.returncode:
        return ""
    changed = subprocess.run(
        [*git, "status", "--porcelain", "--", "agent", "bpf", "cgroup"], capture_output=True, text=True, check=False
    )
    return done.stdout.strip() + ("+" if changed.stdout.strip() else "")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.description = "Compare policies on scenarios in the lab guest, seed by seed."
    parser.epilog = _EXAMPLES
    parser.add_argument("--scenario", metavar="NAME|FILE,…", help="shipped scenarios by name, or files")
    parser.add_argument("--policy", default=",".join(POLICIES), metavar="A,B", help="(default: %(default)s)")
    parser.add_argument("--seed", metavar="N,M", help="(default: 1,2,3, of a plan its own)")
    parser.add_argument("--plan", type=Path, metavar="FILE", help=f"a list of pairs to run, like {SHIPPED.name}")
    parser.add_argument("--seconds", type=float, metavar="S", help="end every scenario after this time")
    parser.add_argument("--json", type=Path, metavar="FILE", help="the result; what it holds is not run again")
    parser.add_argument("--report", type=Path, metavar="FILE", help="write a page with plots there")
    parser.add_argument("--table", type=Path, metavar="FILE", help="only print the table of this result")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace, progress: Callable[[str], None]) -> int:
    """Do what the command line says; returns the exit status: 1 where a run was spoiled twice."""
    if arguments.table:
        print("\n".join(map(printable, lines(results.load(arguments.table)))))
        return 0
    if arguments.json is None:
        raise UsageError("No --json is given; name the file for the result.")
    if arguments.seconds is not None and not 0 < arguments.seconds <= MAX_SECONDS:
        raise UsageError(f"Length {arguments.seconds:g} is not above zero and at most {MAX_SECONDS}; give seconds.")
    cells = _cells(arguments)
    if not cells:
        raise UsageError(f"Nothing is left to run: {ALONE!r} is for scenarios with neighbours; name another policy.")
    if arguments.report:
        check_writable(arguments.report, "Page")
    document = _document(arguments.json, arguments.seconds)
    failed = _measured(document, arguments.json, cells, progress)
    print("\n".join(lines(document)))
    if arguments.report:
        arguments.report.write_text(render(document), encoding="utf-8")
    for cell in failed:
        print(f"bench: {' '.join(map(str, cell.key))} was spoiled {ATTEMPTS} times and has no figure", file=sys.stderr)
    return 1 if failed else 0


def _cells(arguments: argparse.Namespace) -> list[Cell]:
    seeds = None if arguments.seed is None else numbers(arguments.seed)
    if arguments.plan:
        return load_plan(arguments.plan, arguments.seconds, seeds)
    if not arguments.scenario:
        raise UsageError("Neither --scenario nor --plan is given; name what to run.")
    policies = [word for word in arguments.policy.split(",") if word]
    return matrix(arguments.scenario.split(","), policies, seeds or (1, 2, 3), arguments.seconds)


def numbers(text: str) -> list[int]:
    """Read a list of seeds like `1,2,3`."""
    try:
        seeds = [int(word) for word in text.split(",")]
    except ValueError:
        seeds = []
    if not seeds or min(seeds) < 0:
        raise UsageError(f"Seed {text!r} is no list of whole numbers; write for example 1,2,3.")
    return seeds


def check_writable(path: Path, what: str) -> None:
    """Make the file's folder; refuse before the runs, which take hours, a file that could not be written after them."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        part = file_to_write(str(path)).with_name(f"{path.name}.part")
        part.touch()
        part.unlink()
    except OSError as error:
        raise UsageError(f"{what} {str(path)!r} cannot be written ({reason(error)}); choose another path.") from None


def _document(path: Path, seconds: float | None) -> results.Document:
    if os.path.lexists(path):
        return results.load(path)
    return results.new_document(machine(), seconds)


def _measured(
    document: results.Document, path: Path, cells: Sequence[Cell], progress: Callable[[str], None]
) -> list[Cell]:
    if not results.missing(document, cells):
        return []
    check_writable(path, "Result")
    if any(device.kind == "nfs" for cell in cells for device in cell.subject.scenario.devices):
        ensure_nfs(progress)
    trainer_program()  # built here: the guest is slower
    return Bench(document, path, cells, progress, revision()).run()
