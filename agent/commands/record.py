"""`prefetchd record FILE`: measure this node, touch nothing, and record what is seen and would be decided."""

from __future__ import annotations

import argparse

from agent.commands import options, run
from agent.errors import UsageError

EPILOG = """\
examples:
  sudo prefetchd record /var/tmp/node7.rec --duration 600
  sudo prefetchd record node7.rec --config prefetchd.toml --listen 127.0.0.1:0

The same as `prefetchd run --mode observe --record FILE`; `run --record` records in every mode. A file that exists is
continued. `prefetchd replay` and `prefetchd report` read it.

exit status: as `prefetchd run`, and 1 where the recording broke off (a full disk)
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options: those of `run` that make sense here."""
    run.add_arguments(parser, recording=True)
    parser.description = "Measure this node in observe mode and record samples, signals and decisions."
    parser.epilog = EPILOG
    parser.add_argument("record", type=options.file_to_write, metavar="FILE", help="the recording")


def main(args: argparse.Namespace) -> int:
    """Run in observe mode, whatever the configuration says; raises UsageError where another mode is asked for."""
    if args.mode not in (None, "observe"):
        raise UsageError(f"--mode {args.mode} is not for recording alone; use prefetchd run --record {args.record}")
    args.mode = "observe"
    return run.main(args)
