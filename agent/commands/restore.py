"""`prefetchd restore`: set every limit that an agent left behind to its prior value; needs no configuration."""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path

from agent.config import STATE_DIRECTORY
from agent.errors import CannotEnforceError, PrefetchdError, UsageError
from cgroup.errors import CgroupError, JournalBusy
from cgroup.hierarchy import detect_hierarchy
from cgroup.restore import restore

EPILOG = """\
examples:
  sudo prefetchd restore                                  # what the last agent left behind
  sudo prefetchd restore --state-directory /run/other --json

exit status:
  0  nothing is left of us (values that somebody else changed are theirs and stay)
  1  some lines could not be restored, or an agent is running: stop it first
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.description = "Put back every value in io.max and other control files that an agent left behind."
    parser.epilog = EPILOG
    parser.add_argument("--state-directory", default=STATE_DIRECTORY, metavar="DIR", help=f"default: {STATE_DIRECTORY}")
    parser.add_argument("--cgroup-root", default="", metavar="DIR", help="default: where cgroup v2 is mounted")
    parser.add_argument("--json", action="store_true", help="one JSON object on standard output")


def main(args: argparse.Namespace) -> int:
    """Restore and say what was done."""
    journal = Path(args.state_directory) / "journal"
    root = args.cgroup_root or detect_hierarchy().root
    if root is None:
        raise CannotEnforceError("No cgroup v2 is mounted here, so no limit of ours can stand; nothing to restore.")
    _check(Path(args.state_directory), root)
    if not journal.exists():
        print("nothing to restore: no journal in", args.state_directory, file=sys.stderr)
        if args.json:
            print(json.dumps({"restored": [], "foreign": [], "vanished": [], "errors": []}))
        return 0
    try:
        report = restore(str(journal), root, log=lambda line: print(line, file=sys.stderr))
    except JournalBusy as error:
        raise PrefetchdError(f"An agent is running and restores by itself when it ends: {error}") from None
    except CgroupError as error:
        raise PrefetchdError(str(error)) from None
    if args.json:
        print(json.dumps({
            "restored": [str(one) for one in report.restored],
            "foreign": [str(one) for one in report.foreign],
            "vanished": [str(line) for line in report.vanished],
            "errors": list(report.errors),
        }))  # fmt: skip
    else:
        print(report)
    return 1 if report.errors else 0


def _check(state: Path, root: str) -> None:
    """A wrong root would make every cgroup look gone, and the journal forget what it was to restore."""
    if not Path(root, "cgroup.procs").exists():
        raise UsageError(f"Cgroup root {root!r} is no cgroup v2 file system; leave --cgroup-root out to have it found.")
    if state.exists() and not state.is_dir():
        raise UsageError(f"State directory {str(state)!r} is no directory; give that of the configuration.")
    if state.exists() and not os.access(state, os.R_OK | os.W_OK | os.X_OK):
        raise PrefetchdError(f"State directory {str(state)!r} belongs to another user; run as root.")
