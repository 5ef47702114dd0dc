"""`prefetchd explain JOB`: why this score, this cause, this quota, in words and with the numbers."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from typing import Any

from agent.client import for_terminal
from agent.commands import options
from agent.commands.terminal import colours_wanted, hanging, paint, text_columns
from agent.errors import UsageError
from agent.explanation import explain

EPILOG = """\
examples:
  prefetchd explain resnet50
  prefetchd explain ml/resnet50-0 --address node7:9753
  prefetchd explain resnet50 --json | jq '.decisions[-1]'

JOB is the job's name in `top` and in metrics, a pod's name, or NAMESPACE/NAME.

exit status:
  0  done    1  no agent answers    2  no such job, or the command line cannot be used
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.description = (
        "Tell in words why a job scores as it does, why it starves, and why its bandwidth is what it is."
    )
    parser.epilog = EPILOG
    parser.add_argument("job", metavar="JOB", help="name of the job")
    parser.add_argument("--json", action="store_true", help="print the numbers behind the words")
    options.add_config(parser)
    options.add_address(parser)


def main(args: argparse.Namespace) -> int:
    """Ask the agent and tell."""
    client = options.client(args)
    state = client.state()
    with client.understood():
        row = find(state["jobs"], args.job)
    if args.json:
        print(json.dumps(row, indent=1))
        return 0
    colours, columns = colours_wanted(), text_columns()
    with client.understood():
        lines = list(explain(for_terminal(row), for_terminal(state)))
    for line in lines:
        indent = len(line) - len(line.lstrip())
        text = hanging(" " * indent, [line.strip()], columns, indent)
        print(paint(text, "bold", colours=colours and not indent and bool(line)))
    return 0


def find(rows: Sequence[Mapping[str, Any]], name: str) -> Mapping[str, Any]:
    """The job of that name; raises UsageError that lists what is near."""
    found = [row for row in rows if name in (row["job"], row["pod"], f"{row['namespace']}/{row['job']}")]
    if len(found) == 1:
        return found[0]
    if found:
        options_ = ", ".join(f"{row['namespace']}/{row['job']}" for row in found)
        raise UsageError(f"Job {name!r} is ambiguous; say which: {options_}.")
    names = [row["job"] for row in rows]
    near = get_close_matches(name, names, n=3) or names[:10]
    raise UsageError(f"No job {name!r} is seen by the agent; it sees {', '.join(near) if near else 'none'}.")
