"""In which order files are read: what was seen of it, and what follows from that. Pure.

Certain is the rest of an open file. The next file in directory order is likely where files were taken in that order
before, and where a loader sends its workers numbers (PyTorch's map-style data sets), those name the files, once it is
known which number stands for which. An order that fits none of this is told to be unpredictable: what was read in the
epoch before says nothing about a shuffled one.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Collection, Mapping, Sequence
from itertools import pairwise

SEEN_FILES = 9
FEWEST_STEPS = 3
REGULAR_RATIO = 0.75
"""Of the steps seen, what must follow one order."""
NEAR_RATIO = 1 / 16
"""A step over no more than this part of the files is near; of a shuffled order one in 16 is."""
FEWEST_NEAR = 32
"""In a folder with fewer files than this, near says nothing."""

SURE_AFTER = 6
REMEMBERED = 16
SURE_RATIO = 0.7
MOST_IN_HAND_RATIO = 0.25
"""Of all files; where more are in hand, one of them is open by chance."""


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

    def has_passed(self, place: int, files: int) -> bool:
        """Whether the file at this place lies behind the one that it took last, the shorter way around."""
        return self.last is not None and 0 < (self.last - place) % files < files / 2

    def step(self, files: int) -> int | None:
        """How many places it goes on from file to file, or None where there is no order among that many `files`.

        Steps go around: behind the last file comes the first one. Workers take every n-th file, always with the same
        step. A reader of many small files is only looked at now and then, so some are missed: then all steps are near,
        and the smallest is its own.
        """
        steps = [(after - before) % files for before, after in pairwise(self._places)]
        if len(steps) < FEWEST_STEPS or files < 2:
            return None
        usual, count = Counter(steps).most_common(1)[0]
        if count >= REGULAR_RATIO * len(steps):
            return usual
        near = [one for one in steps if one <= NEAR_RATIO * files]
        return min(near) if files >= FEWEST_NEAR and len(near) >= REGULAR_RATIO * len(steps) else None

    def next_places(self, count: int, files: int) -> list[int]:
        """The places of the next `count` of `files` files, each once; empty where nothing can be said."""
        step, last = self.step(files), self.last
        if step is None or last is None:
            return []
        following = ((last + k * step) % files for k in range(1, min(count, files - 1) + 1))
        return list(dict.fromkeys(place for place in following if place != last))


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
        if len(in_hand) > MOST_IN_HAND_RATIO * len(self._orders[0]):
            return
        for places, fits in zip(self._places, self._fits, strict=True):
            fits.append(places.get(path, -1) in in_hand)

    @property
    def is_unknown(self) -> bool:
        """Whether enough was seen to tell that no order fits."""
        return all(len(fits) == REMEMBERED for fits in self._fits) and self._order() is None

    def files(self, numbers: Sequence[int]) -> list[str]:
        """The paths that the numbers stand for, in their order; empty while that is not known."""
        order = self._order()
        return [] if order is None else [order[number] for number in numbers if 0 <= number < len(order)]

    def _order(self) -> Sequence[str] | None:
        for order, fits in zip(self._orders, self._fits, strict=True):
            if len(fits) >= SURE_AFTER and sum(fits) >= SURE_RATIO * len(fits):
                return order
        return None


def _by_folder(path: str) -> tuple[str, str]:
    folder, _, name = path.rpartition("/")
    return folder, name
