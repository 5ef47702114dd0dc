"""Values over time in a bounded number of equal bins; when time runs on, bins are joined in pairs. Pure."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

MAX_BINS = 512
FIRST_SECONDS = 0.1


@dataclass(slots=True)
class Bin:
    """Count, sum, least and largest of the values in one bin; `kinds` counts texts, None where there were none.

    A page of hundreds of jobs is made of millions.
    """

    count: int = 0
    total: float = 0.0
    low: float = float("inf")
    high: float = float("-inf")
    kinds: Counter[str] | None = None

    def add(self, value: float) -> None:
        """Count one number."""
        self.count += 1
        self.total += value
        self.low = min(self.low, value)
        self.high = max(self.high, value)

    def join(self, other: Bin) -> None:
        """Take in the bin that follows."""
        self.count += other.count
        self.total += other.total
        self.low = min(self.low, other.low)
        self.high = max(self.high, other.high)
        if other.kinds:
            self.kinds = (self.kinds or Counter()) + other.kinds


class Bins:
    """One value over time; times are seconds since the start of the recording."""

    def __init__(self, limit: int = MAX_BINS, seconds: float = FIRST_SECONDS) -> None:
        self.seconds = seconds
        self._limit = limit
        self._bins: list[Bin] = []

    def add(self, time: float, value: float | None) -> None:
        """Count a number; None is nothing seen."""
        if value is not None:
            self._at(time).add(value)

    def note(self, time: float, kind: str) -> None:
        """Count a text."""
        here = self._at(time)
        if here.kinds is None:
            here.kinds = Counter()
        here.kinds[kind] += 1

    def _at(self, time: float) -> Bin:
        place = int(max(time, 0.0) / self.seconds)
        while place >= self._limit:
            self._halve()
            place = int(max(time, 0.0) / self.seconds)
        while len(self._bins) <= place:
            self._bins.append(Bin())
        return self._bins[place]

    def _halve(self) -> None:
        for first, second in zip(self._bins[::2], self._bins[1::2], strict=False):
            first.join(second)
        self._bins = self._bins[::2]
        self.seconds *= 2

    def coarsened(self, seconds: float, count: int) -> list[Bin]:
        """`count` bins of `seconds`, which is the own width times a power of two."""
        while self.seconds < seconds:
            self._halve()
        return self._bins[:count] + [Bin() for _ in range(count - len(self._bins))]


def means(bins: list[Bin]) -> list[float | None]:
    """The mean of each bin, None where nothing was seen."""
    return [one.total / one.count if one.count else None for one in bins]


def highs(bins: list[Bin]) -> list[float | None]:
    """The largest of each bin."""
    return [one.high if one.count else None for one in bins]


def lows(bins: list[Bin]) -> list[float | None]:
    """The least of each bin."""
    return [one.low if one.count else None for one in bins]


def commonest(bins: list[Bin]) -> list[str | None]:
    """The text seen most in each bin."""
    return [one.kinds.most_common(1)[0][0] if one.kinds else None for one in bins]
