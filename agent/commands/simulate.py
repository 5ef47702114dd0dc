"""`prefetchd simulate`: what a policy would do for a node, on models of its devices and jobs."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec

from agent import garbage
from agent.commands import options
from agent.errors import UsageError
from agent.simulate import ideal, paper, tables
from agent.simulate.control import POLICIES
from agent.simulate.machine import LAB, NODE
from agent.simulate.run import simulate, summarise
from agent.simulate.scenario import MAX_SECONDS, Scenario, load_scenario
from agent.simulate.testbed import Testbed, load_testbed
from agent.whole_file import replacing

EPILOG = f"""\
policies:
{chr(10).join(f"  {name:10} {kind.about}" for name, kind in POLICIES.items())}

examples:
  prefetchd simulate --scenario paper --policy static,paper,adaptive --seed 1,2,3 --json paper.json
  prefetchd simulate --scenario mynode.toml --policy none,adaptive --seed 1,2,3
  prefetchd simulate --scenario ssd-greedy            one of the source tree's, by name

A scenario file declares devices, training jobs and neighbours. tests/lab/scenarios in the source tree has twenty to
start from; its README.md explains every key.

exit status:
  0  done    2  the command line or the scenario cannot be used
"""
MACHINES = {"lab": LAB, "node": NODE}
PAPER = "paper"
SOURCE_SCENARIOS = Path(__file__).parents[2] / "tests" / "lab" / "scenarios"
Advance = Callable[[float], None]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.description = "Run scenarios on models of devices, jobs and kernel, under the agent's own control core."
    parser.epilog = EPILOG
    parser.add_argument(
        "--scenario",
        required=True,
        metavar="FILE|NAME",
        help=f"scenario file, or {PAPER!r}: the paper's testbed, 7 days",
    )
    parser.add_argument("--policy", default="none,static,paper,adaptive", metavar="A,B", help="(default: %(default)s)")
    parser.add_argument("--seed", default="1", metavar="N,M", help="(default: %(default)s)")
    parser.add_argument(
        "--duration",
        type=options.seconds,
        metavar="SECONDS",
        help="end the scenario earlier or later; of the paper's testbed: how much to sample for each seed",
    )
    parser.add_argument(
        "--machine", choices=sorted(MACHINES), default="lab", help="costs outside the devices (default: %(default)s)"
    )
    parser.add_argument(
        "--json", type=options.file_to_write, metavar="FILE", help="write every figure there (- is standard output)"
    )


def main(args: argparse.Namespace) -> int:
    """Simulate, print the table, write the JSON."""
    policies, seeds = _policies(args.policy), _seeds(args.seed)
    if args.duration is not None and args.duration > MAX_SECONDS:
        raise UsageError(f"Duration {args.duration:g} is more than {MAX_SECONDS} s, seven days; give less.")
    path = _find(args.scenario)
    options.refuse_same_file(args.json, path, "the scenario")
    garbage.settle()
    if path == paper.DATA:
        document = _paper(load_testbed(path), policies, seeds, args.duration)
        lines = tables.paper_lines(document)
    else:
        document = _scenario(load_scenario(path), policies, seeds, args)
        lines = tables.scenario_lines(document)
    quiet = args.json is not None and str(args.json) == "-"
    if not quiet:
        print("\n".join(lines))
    if args.json is not None:
        _write_json(document, args.json)
    return 0


def _policies(text: str) -> list[str]:
    names = [name.strip() for name in text.split(",") if name.strip()]
    unknown = [name for name in names if name not in POLICIES]
    if unknown or not names:
        raise UsageError(f"Policy {', '.join(unknown) or text!r} is unknown; use some of {', '.join(POLICIES)}.")
    return list(dict.fromkeys(names))


def _seeds(text: str) -> list[int]:
    try:
        seeds = [int(word) for word in text.split(",")]
    except ValueError:
        seeds = []
    if not seeds or min(seeds) < 0:
        raise UsageError(f"Seed {text!r} is no list of whole numbers; write for example 1,2,3.")
    return list(dict.fromkeys(seeds))


def _find(name: str) -> Path:
    """The file of a scenario: a path, the packaged testbed, or one of the source tree's by name."""
    if name == PAPER:
        return paper.DATA
    path = Path(name)
    named = SOURCE_SCENARIOS / f"{name}.toml"
    try:
        if path.suffix != ".toml" and named.is_file():
            return named
        found, is_folder = path.is_file(), path.is_dir()
    except OSError:  # such as a name that is too long
        found = is_folder = False
    if is_folder:
        raise UsageError(f"Scenario {name!r} is a folder; give the path of a scenario file.")
    if not found:
        known = ", ".join([PAPER, *sorted(file.stem for file in SOURCE_SCENARIOS.glob("*.toml"))])
        raise UsageError(f"Scenario {name!r} is no file and none of those known by name ({known}).")
    return path


def _scenario(
    scenario: Scenario, policies: Sequence[str], seeds: Sequence[int], args: argparse.Namespace
) -> dict[str, Any]:
    if args.duration is not None:
        scenario = msgspec.structs.replace(scenario, duration_seconds=args.duration)
    machine = MACHINES[args.machine]
    runs: dict[str, list[dict[str, float | str]]] = {policy: [] for policy in policies}
    with _progress(scenario.name, scenario.duration_seconds * len(policies) * len(seeds)) as advance:
        for policy in policies:
            for seed in seeds:
                runs[policy].append(summarise(simulate(scenario, policy, seed, machine=machine)))
                advance(scenario.duration_seconds)
    return tables.scenario_document(scenario, machine, runs, seeds)


def _paper(testbed: Testbed, policies: Sequence[str], seeds: Sequence[int], duration: float | None) -> dict[str, Any]:
    """The table needs the static baseline and both bounds, so these are always run."""
    needed = list(dict.fromkeys([*policies, "static", *paper.BOUNDS]))
    count = testbed.windows if duration is None else max(1, round(duration / testbed.window_seconds))
    length = testbed.settle_seconds + testbed.window_seconds
    began = time.monotonic()
    with _progress(testbed.name, length * count * len(seeds) * len(needed)) as advance:
        found = paper.run_testbed(testbed, needed, seeds, count=count, progress=advance)
    wall = time.monotonic() - began
    best = ideal.ideals(testbed, seeds, count, found["local"].windows)
    return tables.paper_document(testbed, found, seeds, wall, best)


def _ignore(seconds: float) -> None:
    del seconds


@contextmanager
def _progress(title: str, total: float) -> Iterator[Advance]:
    """A progress bar on standard error, where that is a terminal; counts simulated seconds."""
    if not sys.stderr.isatty():
        yield _ignore
        return
    from rich.console import Console  # noqa: PLC0415 - 40 ms that only a terminal needs
    from rich.progress import Progress  # noqa: PLC0415

    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(title, total=total)
        yield lambda seconds: bar.advance(task, seconds)


def _write_json(document: dict[str, Any], path: Path) -> None:
    text = json.dumps(document, indent=1) + "\n"
    if str(path) == "-":
        sys.stdout.write(text)
        return
    with replacing(path, "Result") as file:
        file.write(text.encode())
