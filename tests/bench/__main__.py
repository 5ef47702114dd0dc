"""The command line of the benchmarks: `python -m tests.bench`."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from tests.bench import overhead

_DESCRIPTION = """Measure what the probes cost on this machine, as root.

examples:
  python -m tests.bench overhead
  python -m tests.bench overhead --pairs 20 --seconds 5 --json cost.json
  python -m tests.bench overhead --lab --pairs 4     # in the lab guest: all functions traceable, null_blk, bcc's tools
"""


def main(argv: Sequence[str] | None = None) -> int:
    arguments = _parser().parse_args(argv)
    if arguments.lab:
        return in_the_lab(list(sys.argv[1:] if argv is None else argv))
    try:
        result = arguments.run(arguments)
    except overhead.CannotMeasureError as error:
        print(f"cannot measure: {error}", file=sys.stderr)
        return 1
    if arguments.json:
        arguments.json.write_text(json.dumps(result, indent=2) + "\n")
    return 0


def in_the_lab(arguments: list[str]) -> int:
    """The same on Debian's stock kernel in the guest, on null_blk; emulated, only the ratios mean something."""
    inside = [word for word in arguments if word != "--lab"]
    command = [sys.executable, "-m", "tests.bench", *inside, "--null-block"]
    done = subprocess.run([sys.executable, "-m", "tests.lab", "run", "--timeout", "3000", "--", *command], check=False)
    return done.returncode


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m tests.bench", description=_DESCRIPTION, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(metavar="overhead")
    cost = commands.add_parser("overhead", help="nanoseconds per IO, IOPS lost, CPU, memory and start-up of the probes")
    overhead.add_arguments(cost)
    cost.add_argument("--json", type=Path, help="write the figures to this file as well")
    cost.add_argument("--lab", action="store_true", help="measure in the lab guest, on null_blk")
    cost.set_defaults(run=overhead.run)
    parser.set_defaults(run=overhead.run, json=None, lab=False)
    overhead.set_defaults(parser)
    return parser


if __name__ == "__main__":
    sys.exit(main())
