"""The command line of the benchmarks: `python -m tests.bench`."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from tests.bench import overhead

_DESCRIPTION = """Measure what the probes cost on this machine, as root.

examples:
  python -m tests.bench overhead
  python -m tests.bench overhead --pairs 20 --seconds 5 --json cost.json
"""


def main(argv: Sequence[str] | None = None) -> int:
    arguments = _parser().parse_args(argv)
    try:
        result = arguments.run(arguments)
    except overhead.CannotMeasureError as error:
        print(f"cannot measure: {error}", file=sys.stderr)
        return 1
    if arguments.json:
        arguments.json.write_text(json.dumps(result, indent=2) + "\n")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m tests.bench", description=_DESCRIPTION, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(metavar="overhead")
    cost = commands.add_parser("overhead", help="nanoseconds per IO, IOPS lost, CPU, memory and start-up of the probes")
    overhead.add_arguments(cost)
    cost.add_argument("--json", type=Path, help="write the figures to this file as well")
    cost.set_defaults(run=overhead.run)
    parser.set_defaults(run=overhead.run, json=None)
    overhead.set_defaults(parser)
    return parser


if __name__ == "__main__":
    sys.exit(main())
