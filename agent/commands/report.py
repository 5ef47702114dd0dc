"""`prefetchd report FILE`: one self-contained page of what happened in a recording."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from agent.commands import options
from agent.commands.progress import complaints, progress_of
from agent.errors import PrefetchdError, UsageError
from agent.recording import read
from agent.report.gather import gather
from agent.report.page import MAX_JOBS, render
from agent.units import printable
from agent.whole_file import replacing

EPILOG = """\
examples:
  prefetchd report node7.rec -o report.html
  prefetchd report node7.rec -o - --title "node7, Monday" > report.html

The page asks the network for nothing and is complete without scripts; with them it zooms and tells values. Names of
jobs, namespaces and devices are in it. Where a recording holds several modes or policies, they are told apart: record
with and without enforcing into one file for a before and after.

exit status:
  0  done    1  no recording, or the page cannot be written    2  the command line cannot be used
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.description = "Make one HTML page of a recording: waits, scores, causes, limits, loans, latency, devices."
    parser.epilog = EPILOG
    parser.add_argument("file", type=Path, metavar="FILE", help="a recording")
    parser.add_argument(
        "-o", "--output", type=options.file_to_write, default="report.html", metavar="PAGE",
        help="the page; - is standard output",
    )  # fmt: skip
    parser.add_argument("--title", metavar="TEXT", help="heading of the page (default: the file's name)")
    parser.add_argument("--jobs", type=int, default=MAX_JOBS, metavar="N", help=f"jobs with pictures ({MAX_JOBS})")


def main(args: argparse.Namespace) -> int:
    """Read, draw, write."""
    if args.jobs < 0:
        raise UsageError(f"--jobs {args.jobs} is negative; give how many jobs are to have pictures.")
    options.refuse_same_file(args.output, args.file, "the recording")
    with complaints() as damage, progress_of(args.file) as progress:
        story = gather(read(args.file, progress, damage.append))
    if not story.passes and damage:
        raise PrefetchdError(f"Recording {str(args.file)!r} holds no pass that can be read.")
    if not story.passes:
        raise PrefetchdError(f"Recording {str(args.file)!r} holds no pass yet; let the agent run a moment longer.")
    page = render(story, printable(args.title or args.file.name), args.jobs)
    if str(args.output) == "-":
        sys.stdout.buffer.write(page.encode())  # which the page says that it is, whatever the terminal's encoding
        return 0
    target: Path = args.output
    with replacing(target, "Page") as file:
        file.write(page.encode())
    jobs = sum(told.training for told in story.jobs.values())
    print(f"{target}: {len(page) / 1e6:.1f} MB, {jobs} training job(s), {story.passes:,} passes")
    return 0
