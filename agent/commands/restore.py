"""`prefetchd restore`: set every limit that an agent left behind to its prior value."""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import time
from pathlib import Path

from agent.checks.state import lock_holder as instance_holder
from agent.commands import options
from agent.config import STATE_DIRECTORY, Config, ConfigError
from agent.errors import CannotEnforceError, PrefetchdError, UsageError
from cgroup.errors import CgroupError, JournalBusy
from cgroup.hierarchy import detect_hierarchy
from cgroup.journal import read_journal
from cgroup.journal_lock import lock_holder
from cgroup.restore import restore

EPILOG = """\
examples:
  sudo prefetchd restore                                  # what the last agent left behind
  sudo prefetchd restore --state-directory /run/other --json
  sudo prefetchd restore --running                        # a running agent releases all, and only plans then

exit status:
  0  nothing is left of us (values that somebody else changed are theirs and stay)
  1  some lines could not be restored, or an agent is running: stop it first, or use --running
"""
RELEASE_SECONDS = 10.0
RELEASED = "the running agent has released everything, and enforces no more until it is started again"
NOTHING_SET = "the running agent (pid {}) has set nothing, and will set nothing until it is started again"
NOT_RUNNING = "no agent is running with state directory {}"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.description = "Put back every value in io.max and other control files that an agent left behind."
    parser.epilog = EPILOG
    options.add_config(parser)
    parser.add_argument(
        "--state-directory", metavar="DIR", help=f"default: the configuration's, else {STATE_DIRECTORY}"
    )
    parser.add_argument(
        "--cgroup-root", default="", metavar="DIR", help="default: the configuration's, else where cgroup v2 is mounted"
    )
    parser.add_argument(
        "--running", action="store_true", help="have a running agent release everything and go on in mode dry-run"
    )
    parser.add_argument("--json", action="store_true", help="one JSON object on standard output")


def main(args: argparse.Namespace) -> int:
    """Restore and say what was done."""
    config = _configuration(args)
    if args.state_directory is None:
        args.state_directory = config.enforcement.state_directory
    if not args.state_directory:  # it would be the working folder
        raise UsageError("State directory '' names nothing; give that of the configuration, or leave the option out.")
    journal = Path(args.state_directory) / "journal"
    root = args.cgroup_root or config.cgroup_root or detect_hierarchy().root
    if root is None:
        raise CannotEnforceError("No cgroup v2 is mounted here, so no limit of ours can stand; nothing to restore.")
    _check(Path(args.state_directory), root)
    if args.running and _released(args, journal):
        return _nothing(args)
    if not journal.exists():
        print("nothing to restore: no journal in", args.state_directory, file=sys.stderr)
        return _nothing(args)
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


def _configuration(args: argparse.Namespace) -> Config:
    """That of --config, else the usual one; one that cannot be used is said and keeps no limit from being restored."""
    try:
        return options.load_config(args)
    except ConfigError as error:
        if args.config is not None:
            raise
        print(f"looking in the usual places, as there is no configuration to be used: {error}", file=sys.stderr)
        return Config()


def _released(args: argparse.Namespace, journal: Path) -> bool:
    """Whether a running agent has released everything; either way it is said."""
    try:
        had_set = bool(read_journal(str(journal)).entries)
        holder = disarm(str(journal))
    except CgroupError as error:
        raise PrefetchdError(str(error)) from None
    if holder:
        print(RELEASED if had_set else NOTHING_SET.format(holder), file=sys.stderr)
        return True
    _refuse_hidden(journal.parent)
    print(NOT_RUNNING.format(args.state_directory), file=sys.stderr)
    return False


def _refuse_hidden(state: Path) -> None:
    """Raise PrefetchdError where an agent holds the state directory, but no journal whose owner is seen from here."""
    instance, _ = instance_holder(state / "lock")
    if instance is not None:
        raise PrefetchdError(
            f"An agent runs with state directory {str(state)!r} (pid {instance if instance > 0 else 'unknown'}), but "
            "holds no journal that can be seen from here: it either has none and sets nothing, or runs in a container; "
            "send it SIGUSR1 there."
        )


def _nothing(args: argparse.Namespace) -> int:
    """Where we had nothing to restore."""
    if args.json:
        print(json.dumps({"restored": [], "foreign": [], "vanished": [], "errors": []}))
    return 0


def disarm(journal: str, seconds: float = RELEASE_SECONDS) -> int:
    """Have the agent that holds the journal release everything; returns its pid, 0 where none does.

    Raises PrefetchdError where it may not be told, or has not done so after `seconds`.
    """
    holder = lock_holder(journal)
    if not holder:
        return 0
    try:
        os.kill(holder, signal.SIGUSR1)
    except PermissionError:
        raise PrefetchdError(f"The agent (pid {holder}) belongs to another user; run as root.") from None
    except ProcessLookupError:
        return 0
    deadline = time.monotonic() + seconds
    while read_journal(journal).entries:
        if not lock_holder(journal):
            return 0
        if time.monotonic() > deadline:
            raise PrefetchdError(f"The agent (pid {holder}) has not released its limits after {seconds:g} s; stop it.")
        time.sleep(0.05)
    return holder


def _check(state: Path, root: str) -> None:
    """A wrong root would make every cgroup look gone, and the journal forget what it was to restore."""
    if not Path(root, "cgroup.procs").exists():
        raise UsageError(f"Cgroup root {root!r} is no cgroup v2 file system; leave --cgroup-root out to have it found.")
    if state.exists() and not state.is_dir():
        raise UsageError(f"State directory {str(state)!r} is no directory; give that of the configuration.")
    if state.exists() and not os.access(state, os.R_OK | os.W_OK | os.X_OK):
        raise PrefetchdError(f"State directory {str(state)!r} belongs to another user; run as root.")
