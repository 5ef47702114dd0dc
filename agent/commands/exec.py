"""`prefetchd exec`: run a training command in a cgroup of its own, and leave nothing behind."""

from __future__ import annotations

import argparse
import pwd
import shutil
import sys
from pathlib import Path

from agent.commands import options
from agent.errors import UsageError, shortened
from agent.job_cgroup import ExecError, check_name
from agent.supervise import Order, run_plain, run_scope
from cgroup.hierarchy import detect_hierarchy

EPILOG = """\
examples:
  sudo prefetchd exec --job resnet --user "$USER" -- torchrun --nproc-per-node 8 train.py
  sudo prefetchd exec --job bert --weight 200 -- python train.py --epochs 3

The cgroup is /prefetchd.slice/NAME (a scope NAME.scope where systemd is the init). The agent treats it as a training
job with the rule   [[jobs]]  cgroup = "/prefetchd.slice/*"

What the command leaves running when it ends is ended too: SIGTERM, and SIGKILL after --grace seconds. Killing `exec`
itself, even by SIGKILL, ends the command the same way.

exit status:
  that of the command; 128 + N where signal N ended it; else the command was not started:
  2    the command line or the configuration cannot be used (a bad --weight or --grace, no command)
  125  the cgroup could not be made: a name of a job that none can bear or that runs already, a user that is not
       known, no cgroup v2, no right to it
  126  the command was found and cannot be run
  127  the command was not found
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.description = "Run a training command in a cgroup of its own, so that the agent can see and serve it."
    parser.epilog = EPILOG
    parser.usage = "prefetchd exec --job NAME [options] -- COMMAND [ARGUMENT ...]"
    parser.add_argument("--job", required=True, metavar="NAME", help="name of the job in metrics, `top` and `explain`")
    parser.add_argument(
        "--weight",
        type=float,
        metavar="W",
        help="1 to 10000; more is a larger share (default: that of the [[jobs]] rule, 100)",
    )
    parser.add_argument("--user", metavar="USER", help="run the command as this user")
    parser.add_argument("--grace", type=options.seconds, default=5.0, metavar="S", help="from SIGTERM to SIGKILL (5)")
    parser.add_argument("--no-systemd", action="store_true", help="a plain cgroup even where systemd is the init")
    options.add_config(parser)
    parser.add_argument("argv", nargs=argparse.REMAINDER, metavar="COMMAND", help="the command, after `--`")


def main(args: argparse.Namespace) -> int:
    """Start, wait, clean up; returns the command's status."""
    argv = args.argv[1:] if args.argv[:1] == ["--"] else args.argv
    if not argv:
        raise UsageError("No command is given; write it after `--`: prefetchd exec --job NAME -- python train.py")
    if args.weight is not None and not 1.0 <= args.weight <= 10000.0:
        raise UsageError(f"Weight {args.weight:g} is not from 1 to 10000; 100 is the usual.")
    if args.user == "":
        raise UsageError(
            "No user is named: --user is empty ($USER may not be set); name one, or leave --user out to run the "
            "command as the present user."
        )
    name, root = check_name(args.job), _root(args)
    account = _account(args.user) if args.user else None
    if shutil.which(argv[0]) is None:
        found = "/" in argv[0] and Path(argv[0]).exists()
        why = "is not executable; name a program" if found else "was not found; check its name and PATH"
        print(shortened(f"prefetchd: command {argv[0]!r} {why}."), file=sys.stderr)
        return 126 if found else 127
    try:
        run = run_scope if _systemd_is_init() and not args.no_systemd else run_plain
        return run(root, Order(name, argv, account, args.weight, args.grace))
    except OSError as error:
        print(f"prefetchd: command {argv[0]!r} cannot be run ({error.strerror}).", file=sys.stderr)
        return 126


def _root(args: argparse.Namespace) -> str:
    """Where cgroup v2 is mounted; raises ExecError where it is not."""
    configured = options.load_config(args).cgroup_root
    hierarchy = detect_hierarchy()
    root = configured or hierarchy.root
    if root is None:
        raise ExecError(f"No cgroup can be made: {hierarchy.problem}. {hierarchy.fix}")
    return root


def _account(user: str) -> pwd.struct_passwd:
    try:
        return pwd.getpwnam(user)
    except KeyError:
        raise ExecError(f"User {user!r} is not known on this node; check --user.") from None


def _systemd_is_init() -> bool:
    """As sd_booted(3) tells it."""
    return Path("/run/systemd/system").is_dir() and shutil.which("systemd-run") is not None
