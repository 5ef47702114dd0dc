"""Finds the caps of ours behind which requests stay queued for good; what it is and how it shows: `cgroup.stall`."""

from __future__ import annotations

from collections.abc import Mapping
from math import inf
from pathlib import Path

from bpf.samples import BlockCounters, BlockKey
from cgroup.errors import CgroupError
from cgroup.io_files import parse_io_pressure, parse_io_stat
from cgroup.lines import IO_MAX, Limit, Line, Target
from cgroup.plan import LineState
from cgroup.stall import Progress, StallState, patience_seconds, watch_stall
from cgroup.tree import join

LOOK_SECONDS = 1.0
"""Between two looks: patience is 5 s and more, and reading io.stat makes the kernel sum it up over all CPUs."""


class StuckQueues:
    """Watches the lines under control below a cgroup `root`."""

    def __init__(self, root: str) -> None:
        self._root = root
        self._states: dict[Line, StallState] = {}
        self._looked_at = -inf

    def look(
        self, now: float, managed: Mapping[Line, LineState], blocks: Mapping[BlockKey, BlockCounters]
    ) -> list[Target]:
        """The targets that are stuck at `now` (monotonic seconds) and shall be released once.

        `blocks` is what the block probe counts: a cgroup with nothing under way on a disk is not stuck there, whatever
        its tasks wait for elsewhere. In the probe's lowest tier what waits in blk-throttle is not seen to be under way.
        """
        if 0.0 <= now - self._looked_at < LOOK_SECONDS:
            return []
        self._looked_at = now
        found, states = [], {}
        busy = {
            (key.cgroup_id, key.device) for key, one in blocks.items() if one.in_flight > 0 or one.throttle_ns is None
        }
        for line, state in managed.items():
            if line.file != IO_MAX or (line.cgroup_id, line.device) not in busy:
                continue
            progress = self._progress(line)
            if progress is None:
                continue
            patience = patience_seconds(Limit(**state.wrote))
            states[line], stuck = watch_stall(self._states.get(line), progress, now, patience)
            if stuck:
                found.append(Target(line.cgroup_id, line.path, line.device))
        self._states = states
        return found

    def _progress(self, line: Line) -> Progress | None:
        """What the cgroup has done on the disk and waited in all; None where that cannot be read (it may be gone)."""
        folder = Path(join(self._root, line.path))
        try:
            counts = parse_io_stat((folder / "io.stat").read_text(encoding="ascii", errors="replace")).get(line.device)
            some = parse_io_pressure((folder / "io.pressure").read_text(encoding="ascii", errors="replace")).some
        except (OSError, CgroupError):
            return None
        if some is None:
            return None
        return Progress(counts.rios + counts.wios + counts.dios if counts else 0, some.total_us)
