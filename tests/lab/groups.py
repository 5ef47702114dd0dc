"""The cgroups of a scenario in the guest: made before, removed after, their io.max watched in between."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path("/sys/fs/cgroup")
TRAIN = ROOT / "train.slice"
BATCH = ROOT / "batch.slice"
AGENT = ROOT / "system.slice" / "prefetchd.service"

_CONTROLLERS = "+cpu +io +memory"
_REMOVE_SECONDS = 30.0


@contextlib.contextmanager
def cgroups(training: list[str], best_effort: list[str]) -> Iterator[dict[str, Path]]:
    """Make one cgroup per name below train.slice and batch.slice, and the agent's; give them by name."""
    folders = {name: TRAIN / name for name in training} | {name: BATCH / name for name in best_effort}
    try:
        for folder in (*folders.values(), AGENT):
            folder.mkdir(parents=True, exist_ok=True)
            (folder.parent / "cgroup.subtree_control").write_text(_CONTROLLERS)
        yield folders
    finally:
        for folder in (*folders.values(), AGENT, TRAIN, BATCH, AGENT.parent):
            remove(folder)


def remove(folder: Path) -> bool:
    """Kill what is left in a cgroup and remove it with those below; whether it is gone, or a process in it is stuck."""
    deadline = time.monotonic() + _REMOVE_SECONDS
    with contextlib.suppress(FileNotFoundError):
        (folder / "cgroup.kill").write_text("1")
        while not _removed(folder) and time.monotonic() < deadline:
            time.sleep(0.05)
    return not folder.exists()


def _removed(folder: Path) -> bool:
    try:
        for one in (*sorted(folder.rglob("*/"), reverse=True), folder):
            one.rmdir()
    except OSError:  # a process that was killed is about to be gone
        return not folder.exists()
    return True


def io_max(folder: Path) -> str:
    """Return the text of io.max, empty where nothing is limited or the cgroup is gone."""
    try:
        return (folder / "io.max").read_text().strip()
    except OSError:
        return ""


def cpu_seconds(folder: Path) -> float:
    """Return the CPU time that all processes of a cgroup have used so far."""
    fields = dict(line.split() for line in (folder / "cpu.stat").read_text().splitlines())
    return int(fields["usage_usec"]) / 1e6


def resident_bytes(folder: Path) -> int:
    """Return the resident memory of the processes in a cgroup, shared pages counted for each of them."""
    pages = 0
    for pid in (folder / "cgroup.procs").read_text().split():
        with contextlib.suppress(OSError):
            pages += int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGESIZE")


@dataclass
class LimitLog:
    """What io.max of each cgroup was, at each change that a look found: [seconds, text]."""

    folders: dict[str, Path]
    changes: dict[str, list[tuple[float, str]]] = field(default_factory=dict)

    def look(self, seconds: float) -> None:
        for name, folder in self.folders.items():
            seen = self.changes.setdefault(name, [])
            text = io_max(folder)
            if not seen or seen[-1][1] != text:
                seen.append((round(seconds, 2), text))
