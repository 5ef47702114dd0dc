"""What the trainers logged, as numbers: waits, starvation, throughput. Pure, but for reading the log."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

STARVATION_MS = 10.0
"""A wait before an empty queue counts as starvation from here on (design, section 2)."""


@dataclass(frozen=True, slots=True)
class Iteration:
    """One line of the log: begin of the wait (s of the scenario), the wait (ms), batches ready before it, the life
    (0 = before the first restart), whether a batch was taken (not: the end came first), bytes moved so far."""

    time_s: float
    wait_ms: float
    depth_before: int
    life: int
    taken: bool
    bytes_total: int

    @property
    def starved(self) -> bool:
        return self.depth_before == 0 and self.wait_ms >= STARVATION_MS


@dataclass(frozen=True, slots=True)
class Truth:
    """A whole log; `end` holds the final line's numbers, empty where the trainer did not end by itself."""

    iterations: tuple[Iteration, ...]
    end: dict[str, float]

    @property
    def waits_ms(self) -> list[float]:
        return [row.wait_ms for row in self.iterations]


def read_truth(path: Path) -> Truth:
    """Read a trainer's log."""
    return parse_truth(path.read_text())


def parse_truth(text: str) -> Truth:
    """Read the text of a trainer's log; a last line that was cut off is left out."""
    rows = []
    end: dict[str, float] = {}
    for line in text.splitlines():
        if line.startswith("# end "):
            end = {name: float(value) for name, _, value in (word.partition("=") for word in line.split()[2:])}
        elif not line.startswith("#") and len(words := line.split()) == 6:
            time_s, wait_ms, depth, life, taken, total = words
            rows.append(Iteration(float(time_s), float(wait_ms), int(depth), int(life), taken == "1", int(total)))
    return Truth(tuple(rows), end)


def starvation_events(iterations: Iterable[Iteration]) -> int:
    """Count episodes: iterations that starve one after the other are one; a new life begins a new one."""
    events = 0
    before: Iteration | None = None
    for row in iterations:
        continues = before is not None and before.starved and before.life == row.life
        events += row.starved and not continues
        before = row
    return events


def percentile(values: Sequence[float], ratio: float) -> float:
    """Return the smallest value that at least `ratio` (0..1) of the values do not exceed; 0 of no values."""
    ranked = sorted(values)
    return ranked[max(0, math.ceil(ratio * len(ranked)) - 1)] if ranked else 0.0


def wait_summary(waits_ms: Sequence[float]) -> dict[str, float]:
    """Return mean, p50, p99 and max of waits per iteration (ms)."""
    mean = sum(waits_ms) / len(waits_ms) if waits_ms else 0.0
    summary = {
        "mean": mean,
        "p50": percentile(waits_ms, 0.5),
        "p99": percentile(waits_ms, 0.99),
        "max": percentile(waits_ms, 1.0),
    }
    return {name: round(value, 3) for name, value in summary.items()}


def bytes_between(iterations: Sequence[Iteration], begin_s: float, end_s: float) -> int:
    """Return the bytes that were moved between two times, to within an iteration at either end."""
    inside = [row.bytes_total for row in iterations if begin_s <= row.time_s <= end_s]
    return inside[-1] - inside[0] if inside else 0


def utilisation(waits_ms: Sequence[float], compute_ms: float) -> float:
    """Return compute / (compute + wait), 0..1: what the loop made of its time."""
    total = len(waits_ms) * compute_ms
    return total / (total + sum(waits_ms)) if total else 0.0
