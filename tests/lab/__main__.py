"""The command line of the lab: `python -m tests.lab`."""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

from agent.errors import PrefetchdError
from agent.simulate.scenario import load_scenario
from tests.lab import bench, causes
from tests.lab.cache import PROJECT
from tests.lab.demo import demo
from tests.lab.devices import TEST_DISKS, devices_of
from tests.lab.errors import LabBroken
from tests.lab.machine import Lab
from tests.lab.nfs import ensure_nfs
from tests.lab.peers import PEERS
from tests.lab.scenario_run import split_at_dashes
from tests.lab.trainer import trainer_program

BROKEN_STATUS = 125
GUEST_PYTHON = PROJECT / ".venv" / "bin" / "python"
_DESCRIPTION = """Boot a guest with Debian's stock kernel on this machine's root file system (read-only) and work in it.

examples:
  python -m tests.lab shell
  python -m tests.lab run --out /tmp/lab -- bash -c 'lsblk >$PREFETCHD_LAB_OUT/disks; uname -r'
  python -m tests.lab pytest -- tests/lab/guest -k io_max
  python -m tests.lab scenario tests/lab/scenarios/ssd-greedy.toml --peer bfqw --out /tmp/lab
  python -m tests.lab bench --scenario ssd-greedy --policy none,bfqw,adaptive --json out/bench.json
  python -m tests.lab causes --runs 10 --json out/causes.json

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
            end = "\n" if stage.startswith("booted") else ""
            print(f"\r\033[Klab: {text}", end=end, file=sys.stderr, flush=True)
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
    own, rest = split_at_dashes(sys.argv[1:] if argv is None else argv)
    arguments = _parser().parse_args(own)
    arguments.rest = rest
    progress = ProgressLine()
    signal.signal(signal.SIGTERM, _leave)  # so that whatever was set up is undone
    try:
        return int(arguments.run(arguments, progress))
    except LabBroken as error:
        progress.done()
        print(f"lab broken ({type(error).__name__}): {error}", file=sys.stderr)
        return BROKEN_STATUS
    except PrefetchdError as error:
        print(error, file=sys.stderr)
        return error.exit_status


def _leave(number: int, frame: object) -> None:
    raise SystemExit(128 + number)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m tests.lab", description=_DESCRIPTION, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(required=True, metavar="shell | run | pytest | scenario | bench | causes | demo")
    shell = commands.add_parser("shell", help="open a root shell in the guest")
    shell.set_defaults(run=_shell)
    demonstration = commands.add_parser("demo", help="training jobs beside a greedy reader, without and with control")
    demonstration.set_defaults(run=_demo)
    for name, run, text in (
        ("run", _run, "run the command after `--` as root in the guest"),
        ("pytest", _pytest, "run the pytest arguments after `--` in the guest; leaves junit.xml in the out folder"),
    ):
        command = commands.add_parser(name, help=text)
        command.add_argument("--timeout", type=float, default=600.0, metavar="S", help="limit for the command")
        command.add_argument(
            "--devices-of", type=Path, metavar="FILE", help="give the guest a scenario's disks, not the usual ones"
        )
        command.add_argument("--nfs", action="store_true", help="have an NFS server's programs there (tests.lab.nfs)")
        command.set_defaults(run=run)
        _machine_options(command)
    command = commands.add_parser(
        "scenario", help="run a scenario file, with the agent command after `--` if any; prints its summary as JSON"
    )
    command.add_argument("file", type=Path)
    command.add_argument("--seed", type=int, default=1)
    command.add_argument("--peer", choices=sorted(PEERS), default="none")
    command.set_defaults(run=_scenario)
    _machine_options(command)
    bench.add_arguments(commands.add_parser("bench", help="compare policies on scenarios; writes JSON and a page"))
    causes.add_arguments(commands.add_parser("causes", help="ask why jobs starve that were made to; prints the matrix"))
    return parser


def _machine_options(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--out", type=Path, metavar="DIR", help="keep here what the command leaves in $PREFETCHD_LAB_OUT"
    )
    command.add_argument("--memory", type=int, default=4096, metavar="MIB")


def _shell(arguments: argparse.Namespace, progress: ProgressLine) -> int:
    ensure_nfs(progress)
    with Lab(progress=progress).interactive() as argv:
        progress("boots a guest with a shell; leave it with `exit`")
        progress.done()
        return subprocess.run(argv, check=False, cwd=PROJECT).returncode


def _demo(arguments: argparse.Namespace, progress: ProgressLine) -> int:
    del arguments, progress  # it has a display of its own
    return demo()


def _run(arguments: argparse.Namespace, progress: ProgressLine) -> int:
    if not arguments.rest:
        print("Nothing to run: give a command after `--`.", file=sys.stderr)
        return 2
    return _in_guest(arguments, _lab(arguments, progress), arguments.rest)


def _pytest(arguments: argparse.Namespace, progress: ProgressLine) -> int:
    lab = _lab(arguments, progress)
    if arguments.devices_of is None:
        lab = replace(lab, devices=TEST_DISKS)
    return _in_guest(arguments, lab, pytest_command(arguments.rest))


def _scenario(arguments: argparse.Namespace, progress: ProgressLine) -> int:
    scenario = load_scenario(arguments.file)
    arguments.timeout, arguments.devices_of = scenario.duration_seconds + 300, arguments.file
    arguments.nfs = any(device.kind == "nfs" for device in scenario.devices)
    words = [str(arguments.file.resolve()), "--seed", str(arguments.seed), "--peer", arguments.peer]
    command = scenario_command([*words, "--", *arguments.rest])
    return _in_guest(arguments, _lab(arguments, progress), command)


def pytest_command(selection: Sequence[str]) -> list[str]:
    """Return what runs a pytest selection in the guest; $PREFETCHD_LAB_OUT is expanded there."""
    script = 'exec "$0" -m pytest -p no:cacheprovider --junit-xml="$PREFETCHD_LAB_OUT/junit.xml" "$@"'
    return ["bash", "-c", script, str(GUEST_PYTHON), *selection]


def scenario_command(words: Sequence[str]) -> list[str]:
    """Return what runs `tests.lab.scenario_run` in the guest, with the out folder added."""
    trainer_program()  # built here: the guest is slower
    script = 'exec "$0" -m tests.lab.scenario_run --out "$PREFETCHD_LAB_OUT" "$@"'
    return ["bash", "-c", script, str(GUEST_PYTHON), *words]


def _lab(arguments: argparse.Namespace, progress: ProgressLine) -> Lab:
    if arguments.nfs:
        ensure_nfs(progress)
    lab = Lab(memory_mib=arguments.memory, timeout=arguments.timeout, progress=progress)
    if arguments.devices_of is None:
        return lab
    return replace(lab, devices=devices_of(load_scenario(arguments.devices_of)))


def _in_guest(arguments: argparse.Namespace, lab: Lab, command: Sequence[str]) -> int:
    with ExitStack() as stack:
        out = arguments.out or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="prefetchd-lab-out-")))
        with replace(lab, out_dir=out).boot() as guest:
            result = guest.run(command, on_output=_to_stdout)
    print(
        f"lab: status {result.status} after {result.seconds:.1f} s "
        f"({result.accelerator}, booted in {result.boot_seconds:.1f} s)",
        file=sys.stderr,
    )
    return exit_status(result.status)


def _to_stdout(piece: bytes) -> None:
    os.write(1, piece)


if __name__ == "__main__":
    sys.exit(main())
