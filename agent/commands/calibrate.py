"""`prefetchd calibrate`: measure what a device can do and print the lines for the configuration."""

from __future__ import annotations

import argparse
import json
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import NoReturn

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from agent.calibration import measure
from agent.calibration.place import (
    BUSY_RATIO,
    MIB,
    SMALLEST_BYTES,
    Place,
    busy_ratio,
    file_size,
    find_place,
    nameless_file,
    raw_device,
)
from agent.calibration.readers import choose_reader
from agent.config import ByteRate
from agent.errors import CannotEnforceError, UsageError

EPILOG = """\
examples:
  sudo prefetchd calibrate /dev/nvme0n1          on a file that it makes on the device's largest mount, and removes
  prefetchd calibrate /data                      on a file that it makes in that folder, and removes
  sudo prefetchd calibrate /dev/sdb --raw        reads alone, from the device itself
  sudo prefetchd calibrate /dev/sdb --json | jq .figures

The file has no name while it is used, so nothing is left behind however this ends. Nothing is ever written to a raw
device. It takes about a minute; calibrate while no job runs.

exit status:
  0  done
  1  failed; the message says why
  2  the command line cannot be used
  3  the device is busy, or of a kind that cannot be limited
  130  interrupted
"""
WATCH_SECONDS = 1.5


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.description = "Measure a device's capacity (bytes and requests per second) and print configuration lines."
    parser.epilog = EPILOG
    parser.add_argument("target", metavar="DEVICE|FOLDER|FILE", help="a device, or a folder or file on it")
    parser.add_argument(
        "--size", metavar="SIZE", help='size of the test file, such as "2 GiB" (4 GiB, or a quarter of the free space)'
    )
    parser.add_argument("--seconds", type=float, default=5.0, metavar="S", help="time for each of the five figures (5)")
    parser.add_argument(
        "--reader", choices=("auto", "fio", "own"), default="auto", help="what does the IO (fio if there)"
    )
    parser.add_argument("--raw", action="store_true", help="read the device itself; writes are not measured then")
    parser.add_argument("--busy-ok", action="store_true", help="measure although the device is in use")
    parser.add_argument("--json", action="store_true", help="one JSON object on standard output")


def main(args: argparse.Namespace) -> int:
    """Check the place, measure, print."""
    if not 0.3 <= args.seconds <= 600:
        raise UsageError(f"Time {args.seconds:g} s is not from 0.3 to 600; 5 s a figure is the usual.")
    if not args.target:  # it would be the working folder
        raise UsageError("Target '' names nothing; give a device, or a folder or file on it.")
    wanted = _size(args.size)
    place = find_place(args.target, raw=args.raw)
    reader = choose_reader(args.reader)
    _refuse_busy(place, allowed=args.busy_ok)
    with _interruptible(), _progress() as progress:
        begun = time.monotonic()
        if place.folder is None:
            with raw_device(place) as descriptor:
                size = place.device.size_bytes
                figures = measure.measure(descriptor, size, reader, args.seconds, progress, writes=False)
            where = f"{place.node} itself (reads alone)"
        else:
            size = file_size(place.folder, wanted)
            with nameless_file(place.folder) as descriptor:
                measure.fill(descriptor, size, progress)
                figures = measure.measure(descriptor, size, reader, args.seconds, progress, writes=True)
            where = f"a file of {size / 2**20:,.0f} MiB in {place.folder}"
    remarks = [f"measured {time.strftime('%Y-%m-%d')} by {reader.name} on {where}, {time.monotonic() - begun:.0f} s"]
    print(json.dumps(measure.document(place, figures, remarks), indent=1) if args.json
          else measure.lines(place, figures, remarks))  # fmt: skip
    return 0


def _refuse_busy(place: Place, *, allowed: bool) -> None:
    busy = busy_ratio(place.device, WATCH_SECONDS)
    if busy > BUSY_RATIO and not allowed:
        raise CannotEnforceError(
            f"Device {place.device.name!r} was busy for {busy:.0%} of the last {WATCH_SECONDS:g} s; stop what uses it "
            "(iotop shows who), or measure all the same with --busy-ok."
        )


def _size(text: str | None) -> int | None:
    if text is None:
        return None
    try:
        size = int(ByteRate.parse(text))
    except ValueError:
        raise UsageError(f'Size {text!r} is no size; write for example "2 GiB".') from None
    if size < SMALLEST_BYTES:
        raise UsageError(f"Size {text!r} is too small; give at least {SMALLEST_BYTES // MIB} MiB.")
    return size


@contextmanager
def _interruptible() -> Iterator[None]:
    """SIGTERM ends it as Ctrl-C does."""

    def stop(_number: int, _frame: FrameType | None) -> NoReturn:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@contextmanager
def _progress() -> Iterator[measure.Progress]:
    """A bar with the time that is left, on standard error; lines where that is no terminal."""
    console = Console(file=sys.stderr)
    if not console.is_terminal:
        yield _lines()
        return
    columns = (TextColumn("{task.description:32}"), BarColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("", total=1.0)
        stage = ""

        def show(what: str, done: float) -> None:
            nonlocal stage
            if (what == "writing the test file") != (stage == "writing the test file"):
                bar.reset(task, total=1.0)
            stage = what
            bar.update(task, description=what, completed=done)

        yield show


def _lines() -> measure.Progress:
    last = ""

    def show(what: str, done: float) -> None:
        nonlocal last
        if what != last:
            print(f"{what} ({done:.0%})", file=sys.stderr, flush=True)
        last = what

    return show
