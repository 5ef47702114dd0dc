"""In which order files are read: what was seen of it, and what follows from that. Pure.

Certain is the rest of an open file. The next file in directory order is likely where files were taken in that order
before, and where a loader sends its workers numbers (PyTorch's map-style data sets), those name the files, once it is
known which number stands for which. An order that fits none of this is told to be unpredictable: what was read in the
epoch before says nothing about a shuffled one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Mapping, Sequence
from itertools import pairwise

SEEN_FILES = 9
FEWEST_STEPS = 3
FORWARD_RATIO = 0.75
WIDEST_STEP = 8
"""A step forward of more files than this, in units of the smallest one, is no step of one order."""

SURE_AFTER = 6
REMEMBERED = 16
SURE_RATIO = 0.8


class DirectoryOrder:
    """What one process takes of one folder's sorted files, by their places (0..) there."""

    def __init__(self) -> None:
        self._places: deque[int] = deque(maxlen=SEEN_FILES)

    def see(self, place: int) -> None:
        """The process has the file at this place open."""
        if not self._places or self._places[-1] != place:
            self._places.append(place)

    @property
    def is_known(self) -> bool:
        """Whether enough was seen to judge."""
        return len(self._places) > FEWEST_STEPS

    @property
    def last(self) -> int | None:
        """The place of the file that it took last."""
        return self._places[-1] if self._places else None

    def step(self) -> int | None:
        """How many places it goes on from file to file (workers take every n-th), or None where there is no order.

        A reader that is looked at now and then is seen to skip files; the smallest step is then its own. The way back
        to the beginning, once an epoch, does not disturb.
        """
        places = list(self._places)
        steps = [after - before for before, after in pairwise(places)]
        forward = [one for one in steps if one > 0]
        if len(steps) < FEWEST_STEPS or len(forward) < FORWARD_RATIO * len(steps):
            return None
        smallest = min(forward)
        return smallest if max(forward) <= WIDEST_STEP * smallest else None

    def next_places(self, count: int, files: int) -> list[int]:
        """The places of the next `count` of `files` files; empty where nothing can be said."""
        step = self.step()
        if step is None:
            return []
        return [place for k in range(1, count + 1) if (place := self._places[-1] + k * step) < files]


class IndexMap:
    """Which file a loader's number stands for.

    Data sets number their files by a sorted list of paths (torchvision's ImageFolder, sorted(glob)). Two ways to sort
    are tried: by whole path, and folder by folder. Either is believed once the files that workers have open are those
    that the numbers in their hands name, several times over, and no longer when they are not.
    """

    def __init__(self, paths: Collection[str]) -> None:
        by_path = sorted(paths)
        by_folder = sorted(paths, key=_by_folder)
        self._orders: list[Sequence[str]] = [by_path] if by_path == by_folder else [by_path, by_folder]
        self._places: list[Mapping[str, int]] = [{path: i for i, path in enumerate(order)} for order in self._orders]
        self._fits: list[deque[bool]] = [deque(maxlen=REMEMBERED) for _ in self._orders]

    def observe(self, path: str, in_hand: Collection[int]) -> None:
        """A worker has this file open while workers work on samples with these numbers."""
        for places, fits in zip(self._places, self._fits, strict=True):
            fits.append(places.get(path, -1) in in_hand)

    @property
    def is_judged(self) -> bool:
        """Whether enough was seen to tell."""
        return any(len(fits) >= SURE_AFTER for fits in self._fits)

    def files(self, numbers: Sequence[int]) -> list[str]:
        """The paths that the numbers stand for, in their order; empty while that is not known."""
        for order, fits in zip(self._orders, self._fits, strict=True):
            if len(fits) >= SURE_AFTER and sum(fits) >= SURE_RATIO * len(fits):
                return [order[number] for number in numbers if 0 <= number < len(order)]
        return []


def _by_folder(path: str) -> tuple[str, str]:
    folder, _, name = path.rpartition("/")
    return folder, name
