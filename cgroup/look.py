"""Reads lines and tells churn from change: what is lost with its cgroup, file or disk was not changed by anybody."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from cgroup.errors import CgroupError, ControllerMissing, Vanished
from cgroup.files import LineFiles
from cgroup.lines import Line, Values
from cgroup.plan import LineState

DOUBT_SECONDS = 1.0
"""How long a line without any limit is left open to doubt: the kernel takes the limits of a disk away before the disk
itself (del_gendisk), so for a moment a pulled disk looks like somebody's `max`."""


@dataclass(frozen=True, slots=True)
class Sight:
    """One look at a line. `values` None: nothing to plan with this time. `lost`: no longer under control.

    `missing`: the cgroup is there, and the controller is not passed on to it.
    """

    values: Values | None
    lost: bool = False
    trouble: Literal["vanished", "missing", "error"] | None = None
    reason: str = ""


class Observer:
    """Looks at lines, and remembers what it could not make sense of yet."""

    def __init__(self, files: LineFiles) -> None:
        self._files = files
        self._doubts: dict[Line, float] = {}
        self._missing: set[Line] = set()

    def look(self, line: Line, state: LineState | None, now: float) -> Sight:
        """Read a line that is under control (or not: None). `now` in monotonic seconds."""
        try:
            sight = self._read(line, state, now)
        except Vanished as error:
            self._doubts.pop(line, None)
            sight = Sight(None, lost=True, trouble="vanished", reason=str(error))
        except ControllerMissing as error:
            return self._without_file(line, str(error))
        except (OSError, CgroupError) as error:
            return Sight(None, trouble="error", reason=str(error))
        self._missing.discard(line)
        return sight

    def _read(self, line: Line, state: LineState | None, now: float) -> Sight:
        values = self._files.read(line)
        if state is None or values == state.wrote:
            self._doubts.pop(line, None)
            return Sight(values)
        if self._files.generation(line) != state.generation:
            self._doubts.pop(line, None)
            return Sight(values, lost=True)
        since = self._doubts.setdefault(line, now)
        if all(value is None for value in values.values()) and 0 <= now - since < DOUBT_SECONDS:
            return Sight(None)
        self._doubts.pop(line, None)
        return Sight(values)

    def _without_file(self, line: Line, reason: str) -> Sight:
        """A cgroup loses its files just before it vanishes, so only what is missing twice is an error."""
        if line not in self._missing:
            self._missing.add(line)
            return Sight(None, lost=True)
        self._missing.discard(line)
        return Sight(None, lost=True, trouble="missing", reason=reason)


def gone(files: LineFiles, lines: Iterable[Line]) -> list[Line]:
    """Return the lines whose cgroup, file or disk is no longer there."""
    lost = []
    for line in lines:
        try:
            files.read(line)
        except (Vanished, ControllerMissing):
            lost.append(line)
        except (OSError, CgroupError):
            continue
    return lost
