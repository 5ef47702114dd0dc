"""Scores of the last minute, as polled, and their small pictures. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Any

SECONDS = 60.0
BLOCKS = "▁▂▃▄▅▆▇█"
ASCII_BLOCKS = "_.:-=+*#"
ASCII_FOR = str.maketrans({"µ": "u", "…": "~", "↑": "^", "↓": "v"})
"""What stands in for the few other characters where only ASCII can be shown."""


class Trace:
    """Per job, (time, score) of the last minute."""

    def __init__(self) -> None:
        self._points: dict[int, deque[tuple[float, float]]] = {}

    def add(self, state: Mapping[str, Any]) -> None:
        """Note one answer of the agent; jobs that are gone are forgotten."""
        now = float(state.get("time") or 0.0)
        rows = {int(row["id"]): row["score"] if row.get("confidence", 1.0) else None for row in state.get("jobs", ())}
        self._points = {job: self._points.get(job, deque()) for job in rows}
        for job, score in rows.items():
            points = self._points[job]
            if score is not None and (not points or points[-1][0] < now):
                points.append((now, float(score)))
            while points and points[0][0] <= now - SECONDS:
                points.popleft()

    def cells(self, job: int, now: float, width: int) -> list[float | None]:
        """The lowest score in each of `width` equal parts of the last minute, None where there was none."""
        lowest: list[float | None] = [None] * width
        for time, score in self._points.get(job, ()):
            cell = width - 1 - int((now - time) / SECONDS * width)
            if 0 <= cell < width:
                known = lowest[cell]
                lowest[cell] = score if known is None else min(known, score)
        return lowest


def sparkline(cells: list[float | None], *, ascii_only: bool = False) -> str:
    """Scores 0..100 as blocks.

    >>> sparkline([None, 0.0, 50.0, 100.0])
    ' ▁▅█'
    """
    blocks = ASCII_BLOCKS if ascii_only else BLOCKS
    return "".join(" " if score is None else blocks[min(7, max(0, int(score * 8 / 100)))] for score in cells)


def bar(ratio: float | None, width: int, *, ascii_only: bool = False) -> str:
    """A filled bar for a ratio 0..1; more than full stays full.

    >>> bar(0.5, 4), bar(1.7, 4), bar(None, 4)
    ('██░░', '████', '    ')
    """
    if ratio is None:
        return " " * width
    full, empty = ("#", ".") if ascii_only else ("█", "░")
    count = round(min(1.0, max(0.0, ratio)) * width)
    return full * count + empty * (width - count)
