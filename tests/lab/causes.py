"""The confusion matrix of the diagnosis: `python -m tests.lab causes --runs 10 --json FILE`.

Each cause gets labelled runs in the guest (`causes_runs`), watched by the shipped agent in the mode observe, which is
started once per boot. Results are written after each run; the same command again makes only what is missing.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from agent.errors import UsageError
from tests.lab.cache import PROJECT
from tests.lab.causes_results import lines
from tests.lab.causes_runs import DRIVE, LABELS
from tests.lab.devices import Ssd
from tests.lab.errors import LabBroken, LabUnavailable
from tests.lab.machine import Guest, Lab
from tests.lab.nfs import ensure_nfs
from tests.lab.trainer import trainer_program

TUNING_SEED, REPORTING_SEED = 1, 2
"""What the thresholds were tuned on, and what the published table was made with."""

BOOTS = 5
"""Guests that may end before their time until the lab counts as broken."""
_READY_SECONDS, _RUN_SECONDS, _SILENCE_SECONDS = 400.0, 60.0, 240.0

Progress = Callable[[str], None]
Key = tuple[str, int]


class _Complete(Exception):  # noqa: N818 -- says what is so
    """Every result is there: nobody needs to see the guest put its things away."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.description = (
        "Ask the agent why a job starves, for workloads made to starve for one cause; print the confusion matrix."
    )
    parser.add_argument("--runs", type=int, default=10, metavar="N", help="of each cause (default: %(default)s)")
    parser.add_argument("--cause", default=",".join(LABELS), metavar="A,B", help="(default: all)")
    parser.add_argument(
        "--seed",
        type=int,
        default=REPORTING_SEED,
        metavar="N",
        help=f"of the parameters (default: %(default)s; {TUNING_SEED} is for tuning)",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="the results; what it holds is not run again")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace, progress: Progress) -> int:
    """Do what the command line says; returns the exit status: 1 where runs are missing in the end."""
    causes = [name.strip() for name in arguments.cause.split(",") if name.strip()]
    unknown = [name for name in causes if name not in LABELS]
    if unknown or not causes:
        raise UsageError(
            f"Cause {', '.join(unknown) or arguments.cause!r} is unknown; use some of {', '.join(LABELS)}."
        )
    if arguments.json is None:
        raise UsageError("No --json is given; name the file for the results.")
    document = _load(arguments.json, arguments.seed)
    wanted = [(label, number) for number in range(arguments.runs) for label in causes]
    make_missing(document, arguments.json, wanted, progress)
    print("\n".join(lines(document["runs"])))
    return 1 if _missing(document, wanted) else 0


def make_missing(document: dict[str, Any], path: Path, wanted: Sequence[Key], progress: Progress) -> None:
    """Make the runs that a document lacks, in as many guests as it takes; a run that is spoiled is made once more."""
    boots = 0
    while left := _missing(document, wanted):
        boots += 1
        if boots > BOOTS:
            raise LabBroken(f"{BOOTS} guests did not get through {len(wanted)} runs; see `spoiled` in {path}.")
        try:
            _boot_and_make(document, path, left, progress)
        except LabUnavailable:
            raise
        except LabBroken as error:
            _note(document, path, left, str(error))


def _boot_and_make(document: dict[str, Any], path: Path, left: Sequence[Key], progress: Progress) -> None:
    ensure_nfs(progress)
    trainer_program()  # built here: the guest is slower
    drive = Ssd(DRIVE.name, int(DRIVE.size), int(DRIVE.bytes_per_second), DRIVE.iops)
    with tempfile.TemporaryDirectory(prefix="prefetchd-causes-") as folder:
        out = Path(folder)
        with Lab(devices=(drive,), out_dir=out, progress=progress).boot() as guest:
            _make(guest, document, path, left)


def _make(guest: Guest, document: dict[str, Any], path: Path, left: Sequence[Key]) -> None:
    words = [f"{label}:{number}" for label, number in left]
    python = str(PROJECT / ".venv" / "bin" / "python")
    command = [python, "-m", "tests.lab.causes_guest", "--seed", str(document["seed"]), *words]

    def collect(piece: bytes) -> None:
        sys.stderr.write(piece.decode(errors="replace"))
        take_in(document, path, guest.out_dir)
        if not _missing(document, left):
            raise _Complete

    try:
        most = _READY_SECONDS + _RUN_SECONDS * len(words)
        result = guest.run(command, on_output=collect, timeout=most, silence=_SILENCE_SECONDS)
    except _Complete:
        return
    finally:
        take_in(document, path, guest.out_dir)
    if result.status:
        raise LabBroken(f"the runs ended with status {result.status}: {result.output.read_text()[-2000:]}")


def take_in(document: dict[str, Any], path: Path, folder: Path) -> None:
    """Add the results that stand in a folder to the document; those of runs that hung are only noted."""
    found = sorted(folder.glob("*.json"))
    for file in found:
        result = json.loads(file.read_text())
        place = "spoiled" if result["stuck"] or not result["looks"] else "runs"
        document[place].append(result)
        file.unlink()
    if found:
        _save(document, path)


def _missing(document: dict[str, Any], wanted: Sequence[Key]) -> list[Key]:
    known = {(one["label"], one["number"]) for one in document["runs"]}
    return [key for key in wanted if key not in known]


def _note(document: dict[str, Any], path: Path, left: Sequence[Key], why: str) -> None:
    """Say which run a guest ended in: the first that has no result."""
    rest = _missing(document, left)
    document["spoiled"].append({"label": rest[0][0] if rest else "", "number": rest[0][1] if rest else 0, "why": why})
    _save(document, path)
    print(f"causes: a guest ended early ({why.splitlines()[0] if why else 'no reason'})", file=sys.stderr)


def _load(path: Path, seed: int) -> dict[str, Any]:
    if not path.exists():
        return {"seed": seed, "runs": [], "spoiled": []}
    document: dict[str, Any] = json.loads(path.read_text())
    if document.get("seed") != seed:
        raise UsageError(f"{path} holds runs of seed {document.get('seed')}, not {seed}; name another file.")
    return document


def _save(document: dict[str, Any], path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(".part")
    part.write_text(json.dumps(document, indent=1) + "\n")
    part.rename(path)
