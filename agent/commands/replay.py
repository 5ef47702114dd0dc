"""`prefetchd replay FILE`: what the control core would have decided over a recording."""

from __future__ import annotations

import argparse
import json
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from agent import config
from agent.commands.progress import complaints, progress_of
from agent.errors import UsageError
from agent.recording import read
from agent.recording.replay import (
    QUOTA_TOLERANCE,
    SCORE_TOLERANCE,
    Comparison,
    Difference,
    compare,
    replay,
)
from agent.types import JobId
from agent.units import duration, percent

EPILOG = """\
examples:
  prefetchd replay node7.rec                      the recording's own configuration: nothing should differ
  prefetchd replay node7.rec --policy paper
  prefetchd replay node7.rec --config new.toml --json | jq .jobs

The samples do not answer to other decisions: this shows what would have been decided, not what would have happened
(`prefetchd simulate` does). Jobs and their weights are as recorded; of a --config the policy, weights, gains, pool and
[[devices]] count.

exit status:
  0  done (with --check: nothing differs)    1  no recording    2  the command line cannot be used
  4  with --check: something differs
"""
DIFFERS = 4
NOTHING_DIFFERS = (
    f"nothing differs (scores within {SCORE_TOLERANCE:g} point, caps within {percent(QUOTA_TOLERANCE)}, "
    "the same causes and loans)"
)
NO_CAPACITY = (
    "No policy could have capped anything: the capacity of no device was known, or the node could not limit it. "
    "Replay with --config FILE that declares it in [[devices]] (prefetchd calibrate measures it)."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.description = "Run the control core over a recording and show what would have been decided otherwise."
    parser.epilog = EPILOG
    parser.add_argument("file", type=Path, metavar="FILE", help="a recording")
    parser.add_argument("--config", type=Path, metavar="FILE", help="configuration (default: the recording's own)")
    parser.add_argument("--policy", choices=("adaptive", "paper"), help="another policy")
    parser.add_argument("--list", type=int, default=10, metavar="N", help="list the first N differences (10)")
    parser.add_argument("--check", action="store_true", help=f"exit with {DIFFERS} if anything differs")
    parser.add_argument("--json", action="store_true", help="one JSON object on standard output")


def main(args: argparse.Namespace) -> int:
    """Replay and compare."""
    if args.list < 0:
        raise UsageError(f"--list {args.list} is negative; give the number of differences to show.")
    chosen = config.load(args.config) if args.config else None
    with complaints() as damage, progress_of(args.file) as progress:
        told = compare(replay(read(args.file, progress, damage.append), chosen, args.policy), keep=args.list)
    if args.json:
        print(json.dumps(_document(told), indent=1))
    else:
        _show(told)
    return DIFFERS if args.check and told.differing else 0


def _document(told: Comparison) -> dict[str, Any]:
    return {
        "passes": told.passes,
        "seconds": told.seconds,
        "capacity_known": told.capacity_known,
        "tolerances": {"score_points": SCORE_TOLERANCE, "cap_ratio": QUOTA_TOLERANCE},
        "differing": dict(told.differing),
        "jobs": {
            label: {
                "job": told.names[job],
                "id": job,
                "started": told.started[job],
                "recorded": told.recorded[job].summary(),
                "replayed": told.replayed[job].summary(),
            }
            for job, label in _labels(told).items()
        },
        "differences": [asdict(one) for one in told.differences],
    }


def _show(told: Comparison) -> None:
    labels = _labels(told)
    jobs, runs = len({told.told_as[job] for job in told.names}), len(told.names)
    print(f"{told.passes} passes over {duration(told.seconds)}, {jobs} training job(s)"
          + (f" in {runs} runs" if runs > jobs else ""))  # fmt: skip
    wide = max((len(name) for name in labels.values()), default=0)
    for job, name in sorted(labels.items(), key=lambda one: (told.names[one[0]], told.started[one[0]])):
        for side, tally in (("recorded", told.recorded[job]), ("replayed", told.replayed[job])):
            print(f"  {name if side == 'recorded' else '':{wide}}  {side}  {_line(tally.summary(), told.devices)}")
    if not told.capacity_known:
        print(NO_CAPACITY)
    if not told.differing:
        print(NOTHING_DIFFERS)
        return
    counts = ", ".join(f"{what} {count} times" for what, count in told.differing.most_common())
    print(f"differs: {counts}")
    for one in told.differences:
        print(f"  {_difference(one, told.devices, labels[one.id])}")
    if sum(told.differing.values()) > len(told.differences):
        print(f"  … and {sum(told.differing.values()) - len(told.differences)} more (--list N)")


def _labels(told: Comparison) -> dict[JobId, str]:
    """How to call each run: by its job's name, where several share that also by when it began, if need be by its id."""
    shared = Counter(told.names.values())
    labels = {job: name if shared[name] == 1 else f"{name} from {_clock(told.started[job])}"
              for job, name in told.names.items()}  # fmt: skip
    same = Counter(labels.values())
    return {job: label if same[label] == 1 else f"{label} (cgroup {job})" for job, label in labels.items()}


def _clock(wall: float) -> str:
    return time.strftime("%H:%M:%S", time.localtime(wall))


def _line(summary: dict[str, Any], devices: Mapping[str, str]) -> str:
    lowest = "?" if summary["score_lowest"] is None else f"{summary['score_lowest']:.0f}"
    lowest += ", before its first batch" if summary["lowest_at_start"] else ""
    parts = [f"score {summary['score_mean']:.0f} (lowest {lowest})"]
    for device, ratio in summary["capped_ratio"].items():
        capped = f"capped {percent(ratio)} of the time"
        if ratio:
            capped += f" at {percent(summary['mean_cap_ratio'][device])} on average"
        parts.append(f"{devices.get(device, device)} {capped}, with a loan {percent(summary['lent_ratio'][device])}")
    causes = [f"{cause} {percent(ratio)}" for cause, ratio in summary["causes"].items() if cause != "none"]
    return "; ".join([*parts, ", ".join(causes)] if causes else parts)


def _difference(one: Difference, devices: Mapping[str, str], label: str) -> str:
    clock = f"{_clock(one.wall)}.{int(one.wall % 1 * 10)}"
    where = f" on {devices.get(one.device, one.device)}" if one.device else ""
    return f"{clock} {label}{where}: {one.what} {_value(one.what, one.recorded)} -> {_value(one.what, one.replayed)}"


def _value(what: str, value: Any) -> str:
    if value is None:
        return "none"
    if what == "score":
        return f"{value:.0f}"
    return str(value) if isinstance(value, str) else percent(value)
