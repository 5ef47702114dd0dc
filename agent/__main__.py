"""The command line `prefetchd`; each command lives in a module of its own and is imported only when it is asked for."""

from __future__ import annotations

try:
    import argparse
    import errno
    import importlib
    import io
    import os
    import sys
    from collections.abc import Sequence
    from typing import NoReturn, Protocol, cast

    from agent.errors import PrefetchdError, shortened
except KeyboardInterrupt:  # Ctrl-C before `main` can catch it; earlier yet Python itself shows its traceback
    raise SystemExit(130) from None

COMMANDS = {
    "run": "measure this node and, when told to, move bandwidth to the jobs about to starve",
    "doctor": "check every precondition and name the fix",
    "exec": "run a training command in a cgroup of its own",
    "top": "watch the jobs of the running agent",
    "explain": "tell in words why a job scores, starves and gets what it does",
    "calibrate": "measure what a device can do",
    "record": "measure this node, touch nothing, and record it",
    "replay": "show what would have been decided over a recording",
    "report": "make one page of what happened in a recording",
    "simulate": "try policies on models of devices and jobs",
    "restore": "set every limit that an agent left behind to its prior value",
    "completion": "print the completion script of a shell, or the manual page",
}
EPILOG = """\
exit status:
  0  done
  1  failed; the message says why
  2  the command line or the configuration cannot be used
  3  this node cannot do what was asked (`prefetchd doctor` says what to change)
"""

_OUTPUT_FULL = (errno.ENOSPC, errno.EIO, errno.EDQUOT, errno.EFBIG)
_NO_PATH = (errno.ENAMETOOLONG, errno.EACCES)


class Command(Protocol):
    """What a module in `agent.commands` offers."""

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Declare the command's options; sets the parser's description and example."""

    def main(self, args: argparse.Namespace) -> int:
        """Run the command; returns the exit status."""


class Parser(argparse.ArgumentParser):
    """A parser whose errors do not repeat an endless value."""

    def error(self, message: str) -> NoReturn:
        """Print the usage and the error; exits."""
        super().error(shortened(message))


def version() -> str:
    """The installed version."""
    from importlib import metadata  # noqa: PLC0415 - 20 ms, and Ctrl-C before `main` would end in a traceback

    try:
        return metadata.version("prefetchd")
    except metadata.PackageNotFoundError:
        return "unknown"


def load(name: str) -> Command:
    """The module of a command."""
    return cast("Command", importlib.import_module(f"agent.commands.{name}"))


def build_parser(*chosen: str) -> argparse.ArgumentParser:
    """The parser with the options of the chosen commands; the others have their names alone, which is quick."""
    parser = Parser(
        prog="prefetchd",
        description="Node agent that sees which training jobs starve for data and moves storage bandwidth to them.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"prefetchd {version()}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, text in COMMANDS.items():
        command = commands.add_parser(name, help=text, formatter_class=argparse.RawDescriptionHelpFormatter)
        if name in chosen:
            load(name).add_arguments(command)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; errors that the operator can mend end in one sentence and an exit status, never in a traceback."""
    try:
        _open_standard_streams()
        status = _run(list(sys.argv[1:] if argv is None else argv))
        sys.stdout.flush()
    except PrefetchdError as error:
        print(f"prefetchd: {shortened(str(error))}", file=sys.stderr)
        return error.exit_status
    except BrokenPipeError:
        _forget_output()
        return 0
    except OSError as error:
        told = _sentence(error)
        if told is None:
            raise
        print(f"prefetchd: {shortened(told)}", file=sys.stderr)
        return 1
    except MemoryError:
        print("prefetchd: There is not enough memory; free some, or raise its limit (ulimit -v).", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    return status


def _run(arguments: Sequence[str]) -> int:
    chosen = next((word for word in arguments if not word.startswith("-")), None)
    parser = build_parser(chosen) if chosen else build_parser()
    try:
        args = parser.parse_args(arguments)
    except SystemExit:
        sys.stdout.flush()  # --help and --version end here: a full disk behind them would show only at the very end
        raise
    return load(args.command).main(args)


def _sentence(error: OSError) -> str | None:
    """What to say of an error that no command foresaw but whose reason is outside; None for a defect of ours."""
    if error.filename is None and error.errno in _OUTPUT_FULL:
        _forget_output()
        return f"Standard output cannot be written ({error.strerror})."
    if error.filename is not None and error.errno in _NO_PATH:
        return f"Path {os.fsdecode(error.filename)!r} cannot be used ({error.strerror}); check it and its rights."
    return None


def _open_standard_streams() -> None:
    """Put /dev/null in place of standard streams that the caller has closed.

    Otherwise the next files that are opened take their numbers, and what C libraries write to standard error ends up in
    the lock or the journal.
    """
    while True:
        descriptor = os.open(os.devnull, os.O_RDWR)
        if descriptor > 2:
            os.close(descriptor)
            break
        os.set_inheritable(descriptor, True)  # noqa: FBT003 - the name of the call says what is true
    sys.stdout = sys.stdout or open(1, "w", closefd=False)  # noqa: SIM115 - a descriptor, open for good
    sys.stderr = sys.stderr or open(2, "w", closefd=False)  # noqa: SIM115
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "strict":
        sys.stdout.reconfigure(errors="replace")  # a terminal of another encoding has no sign for µ or …


def _forget_output() -> None:
    """What is still to be written would fail again when the interpreter ends."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


if __name__ == "__main__":
    sys.exit(main())
