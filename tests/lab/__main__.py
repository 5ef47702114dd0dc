"""The command line of the lab: `python -m tests.lab`."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from tests.lab.cache import PROJECT
from tests.lab.demo import demo
from tests.lab.errors import LabBroken
from tests.lab.machine import Lab, LabResult

BROKEN_STATUS = 125
_DESCRIPTION = """Boot a guest with Debian's stock kernel on this machine's root file system (read-only) and work in it.

examples:
  python -m tests.lab shell
  python -m tests.lab run --out /tmp/lab -- bash -c 'lsblk >$PREFETCHD_LAB_OUT/disks; uname -r'
  python -m tests.lab pytest -- tests/lab/guest -k io_max

exit status:
  0..124, 126..255  the status of the command in the guest (pytest: 1 tests failed, 5 none selected)
  125               the lab is broken: no kernel, no boot, a panic or a time-out; says nothing about the command
                    (a command's own 125 is reported as 1)
"""


class ProgressLine:
    """One line on standard error that says what the lab does; on a pipe, only what is new apart from seconds."""

    def __init__(self) -> None:
        self._last = ""
        self._live = sys.stderr.isatty()

    def __call__(self, text: str) -> None:
        stage = text.partition(",")[0]
        if self._live:
            print(f"\r\033[Klab: {text}", end="", file=sys.stderr, flush=True)
        elif stage != self._last:
            print(f"lab: {text}", file=sys.stderr, flush=True)
        self._last = stage

    def done(self) -> None:
        if self._live and self._last:
            print(file=sys.stderr, flush=True)


def exit_status(command_status: int) -> int:
    """Map a command's status to ours: 125 is kept for the broken lab."""
    return 1 if command_status == BROKEN_STATUS else command_status


def main(argv: Sequence[str] | None = None) -> int:
    arguments = _parser().parse_args(argv)
    progress = ProgressLine()
    try:
        return int(arguments.run(arguments, progress))
    except LabBroken as error:
        progress.done()
        print(f"lab broken ({type(error).__name__}): {error}", file=sys.stderr)
        return BROKEN_STATUS


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m tests.lab", description=_DESCRIPTION, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(required=True, metavar="shell | run | pytest | demo")
    shell = commands.add_parser("shell", help="open a root shell in the guest")
    shell.set_defaults(run=_shell)
    demonstration = commands.add_parser("demo", help="training jobs beside a greedy reader, without and with control")
    demonstration.set_defaults(run=_demo)
    for name, run, text in (
        ("run", _run, "run one command as root in the guest"),
        ("pytest", _pytest, "run a pytest selection in the guest; junit.xml is left in the out folder"),
    ):
        command = commands.add_parser(name, help=text)
        command.add_argument("--timeout", type=float, default=600.0, metavar="S", help="limit for the command")
        command.add_argument(
            "--out", type=Path, metavar="DIR", help="keep here what the command leaves in $PREFETCHD_LAB_OUT"
        )
        command.add_argument("--memory", type=int, default=4096, metavar="MIB")
        command.add_argument("arguments", nargs=argparse.REMAINDER, metavar="-- ...")
        command.set_defaults(run=run)
    return parser


def _shell(arguments: argparse.Namespace, progress: ProgressLine) -> int:
    entry = Path(__file__).with_name("guest_shell.sh")
    with Lab(progress=progress).interactive(entry) as argv:
        progress("boots a guest with a shell; leave it with `exit`")
        progress.done()
        return subprocess.run(argv, check=False, cwd=PROJECT).returncode


def _demo(arguments: argparse.Namespace, progress: ProgressLine) -> int:
    del arguments, progress  # it has a display of its own
    return demo()


def _run(arguments: argparse.Namespace, progress: ProgressLine) -> int:
    command = _after_dashes(arguments.arguments)
    if not command:
        print("nothing to run: give a command after `--`", file=sys.stderr)
        return 2
    return _report(_in_guest(arguments, command, progress))


def _pytest(arguments: argparse.Namespace, progress: ProgressLine) -> int:
    selection = _after_dashes(arguments.arguments)
    return _report(_in_guest(arguments, pytest_command(selection), progress))


def pytest_command(selection: Sequence[str]) -> list[str]:
    """Return what runs a pytest selection in the guest; $PREFETCHD_LAB_OUT is expanded there."""
    python = PROJECT / ".venv" / "bin" / "python"
    script = 'exec "$0" -m pytest -p no:cacheprovider --junit-xml="$PREFETCHD_LAB_OUT/junit.xml" "$@"'
    return ["bash", "-c", script, str(python), *selection]


def _in_guest(arguments: argparse.Namespace, command: Sequence[str], progress: ProgressLine) -> LabResult:
    with ExitStack() as stack:
        out = arguments.out or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="prefetchd-lab-out-")))
        lab = Lab(memory_mib=arguments.memory, timeout=arguments.timeout, out_dir=out, progress=progress)
        with lab.boot() as guest:
            progress.done()
            return guest.run(command, on_output=_to_stdout)


def _to_stdout(piece: bytes) -> None:
    os.write(1, piece)


def _report(result: LabResult) -> int:
    print(
        f"lab: status {result.status} after {result.seconds:.1f} s "
        f"({result.accelerator}, booted in {result.boot_seconds:.1f} s)",
        file=sys.stderr,
    )
    return exit_status(result.status)


def _after_dashes(arguments: Sequence[str]) -> Sequence[str]:
    return arguments[1:] if arguments[:1] == ["--"] else arguments


if __name__ == "__main__":
    sys.exit(main())
