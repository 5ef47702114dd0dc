"""One job as the helper follows it: what it reads, what it will read next, and what became of what was asked for.

No input or output of its own: what a look found comes in, ranges to ask for go out; `Places` says where files lie.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from os.path import commonpath
from typing import NamedTuple, Protocol

from agent.rearrange.files import OpenFile, refusal
from agent.rearrange.index import Task
from agent.rearrange.order import DirectoryOrder, IndexMap
from agent.rearrange.window import (
    SHUFFLED_WINDOW_BYTES,
    WORKER_WINDOW_BYTES,
    Extent,
    FileId,
    Range,
    Skip,
    Window,
    plan_window,
    rest_of_file,
)

WORKER_COMMAND = "pt_data_worker"
"""The main thread's name of a PyTorch DataLoader's worker."""
STALE_SECONDS = 10.0
"""What was asked for and not read by then counts as unused, and its room is free again."""
HELD_TASKS = 4
"""A worker that finds its files in the cache takes several tasks between two looks."""
MOST_NEXT = 64
"""Files of a folder that are looked for behind the present one."""
MOST_COUNTED = 1 << 16
"""Files and reasons of one job that are counted."""
MOST_ROOTS = 8
"""The root of the numbered files is looked for again at most this often: it may grow as more files are seen."""


class Place(NamedTuple):
    """A file that may be read ahead: who it is, its size, where its parts lie, a path that opens it.

    `skips` says why parts of it are left out.
    """

    file: FileId
    size: int
    extents: Sequence[Extent]
    path: str
    skips: frozenset[Skip] = frozenset()

    def holds(self, part: Range) -> bool:
        """Whether any of that part lies on the disk; if not, it would take room in the window and bring nothing."""
        at = bisect_left(self.extents, part.end, key=lambda extent: extent.logical)
        return part.start < part.end and at > 0 and self.extents[at - 1].end > part.start


class Places(Protocol):
    """Where files lie. Both answer at once: None means that it is not known yet, or that the file is left out."""

    def place(self, path: str, file: FileId | None = None) -> Place | None:
        """The file behind a path; `file` names it where it is known, so that it is asked once however it is reached."""

    def listing(self, root: str, *, below: bool) -> Sequence[str] | None:
        """The sorted paths of the files in a folder, with all folders below it where `below`."""


class Seen(NamedTuple):
    """One process of the job at one moment: its name, its files, and their paths by descriptor."""

    pid: int
    command: str
    files: Sequence[OpenFile]
    names: Mapping[int, str]

    @property
    def is_worker(self) -> bool:
        """Whether it is a worker of a DataLoader."""
        return self.command.startswith(WORKER_COMMAND)


class OpenKey(NamedTuple):
    """Asked for as the rest of a file that a process has open."""

    pid: int
    file: FileId


class TaskKey(NamedTuple):
    """Asked for as a sample of a task that waits in a pipe: the pipe's inode, the task, the sample's place in it."""

    pipe: int
    task: int
    place: int


class NextKey(NamedTuple):
    """Asked for as what a process opens next in a folder: its place in the sorted listing."""

    pid: int
    folder: str
    at: int


Key = OpenKey | TaskKey | NextKey


@dataclass(slots=True)
class Asked:
    """A range that was asked for, up to where it has been read, and when that last moved (monotonic seconds).

    `given_up`: its reader stands still, so nothing more of the file is asked for until it moves.
    """

    range: Range
    read_to: int
    moved_at: float
    given_up: bool = False

    @property
    def left(self) -> int:
        """Bytes that are not read yet."""
        return 0 if self.given_up else max(0, self.range.end - max(self.range.start, self.read_to))


@dataclass(slots=True)
class Follow:
    """One job. `used_bytes` and `unused_bytes` are cumulative; `skips` counts each file and reason once.

    Samples have numbers where index messages were seen: `_tasks` is what waits in each index pipe (by inode),
    `_in_hand` the numbers of the last tasks that were taken out of each, `_numbered` the pipes that have held any.
    `_root` is the folder above all files that workers opened for them, `_roots` how often that changed, `_index` which
    file a number means. `_has_backlog`: none of these pipes was empty at the last two looks, so no task went through
    unseen.
    """

    used_bytes: int = 0
    unused_bytes: int = 0
    skips: Counter[Skip] = field(default_factory=Counter)
    _asked: dict[Key, Asked] = field(default_factory=dict)
    _counted: set[tuple[object, Skip]] = field(default_factory=set)
    _orders: dict[tuple[int, str], DirectoryOrder] = field(default_factory=dict)
    _in_hand: dict[int, tuple[tuple[int, ...], ...]] = field(default_factory=dict)
    _tasks: dict[int, tuple[Task, ...]] = field(default_factory=dict)
    _open: set[tuple[int, FileId]] = field(default_factory=set)
    _root: str = ""
    _roots: int = 0
    _index: IndexMap | None = None
    _numbered: set[int] = field(default_factory=set)
    _has_backlog: bool = False

    def skip(self, what: object, why: Skip) -> None:
        """Count that something is not read ahead; once, however often it is looked at."""
        if (what, why) not in self._counted and len(self._counted) < MOST_COUNTED:
            self._counted.add((what, why))
            self.skips[why] += 1

    @property
    def outstanding_bytes(self) -> int:
        """What was asked for and is not read yet."""
        return sum(asked.left for asked in self._asked.values())

    def look(
        self,
        now: float,
        processes: Sequence[Seen],
        tasks: Mapping[int, Sequence[Task]],
        places: Places,
        room_bytes: int,
    ) -> list[tuple[Key, Range, Place]]:
        """Take in what a look found; returns what to ask for, in the order in which the job needs it.

        `room_bytes` is the job's whole window; its readers have equal parts of that.
        """
        eligible = {(one.pid, one.file): one for seen in processes for one in self._eligible(seen.files)}
        self._take_tasks(tasks)
        self._observe(processes, eligible, places)
        self._account(now, eligible, places)
        readers = len({pid for pid, _ in eligible})
        ahead = min(WORKER_WINDOW_BYTES, room_bytes // max(1, readers))
        wanted = list(self._wanted_open(eligible.values(), ahead, places))
        wanted += self._wanted_tasks(places)
        wanted += self._wanted_next(processes, eligible, ahead, places)
        alive = {seen.pid for seen in processes}
        self._orders = {key: order for key, order in self._orders.items() if key[0] in alive}
        return wanted

    def window(self, now: float, wanted: Sequence[tuple[Key, Range, Place]], room_bytes: int) -> Window:
        """The next window of at most that many bytes; what it takes is noted as asked for."""
        extents = {place.file: place.extents for _, _, place in wanted}
        window = plan_window([one for _, one, _ in wanted], extents, room_bytes - self.outstanding_bytes)
        for (key, _, _), taken in zip(wanted, window.taken, strict=False):
            if key in self._asked and self._asked[key].range.end == taken.start:
                before = self._asked[key]
                self._asked[key] = Asked(Range(taken.file, before.range.start, taken.end), before.read_to, now)
            else:
                self._asked[key] = Asked(taken, taken.start, now)
        for key, one, _ in wanted[len(window.taken) :]:
            self.skip((key, one.start), Skip.OVER_BUDGET)
        return window

    def _eligible(self, files: Iterable[OpenFile]) -> Iterator[OpenFile]:
        for one in files:
            why = refusal(one.flags)
            if why is not None:
                self.skip(one.file, why)
            elif one.size > 0:
                yield one

    # ---- what the loader has told its workers

    def _take_tasks(self, tasks: Mapping[int, Sequence[Task]]) -> None:
        """A task that is in its pipe no more is in its worker's hands; those just before may still be."""
        for pipe, before in self._tasks.items():
            now = {one.task for one in tasks.get(pipe, ())}
            gone = [one for one in before if one.task not in now]
            if gone and pipe in tasks:
                self._in_hand[pipe] = (*self._in_hand.get(pipe, ()), *(one.numbers for one in gone))[-HELD_TASKS:]
        self._in_hand = {pipe: numbers for pipe, numbers in self._in_hand.items() if pipe in tasks}
        had_backlog = all(self._tasks.get(pipe) for pipe in self._numbered)
        self._tasks = {pipe: tuple(found) for pipe, found in tasks.items()}
        self._numbered |= {pipe for pipe, found in self._tasks.items() if found}
        self._numbered &= tasks.keys()
        self._has_backlog = had_backlog and all(self._tasks[pipe] for pipe in self._numbered)

    def _observe(
        self, processes: Sequence[Seen], eligible: Mapping[tuple[int, FileId], OpenFile], places: Places
    ) -> None:
        """Learn orders from the files that came since the last look."""
        fresh = {key: one for key, one in eligible.items() if key not in self._open}
        self._open = set(eligible)
        names = {seen.pid: seen.names for seen in processes}
        workers = {seen.pid for seen in processes if seen.is_worker}
        numbers = {number for tasks in self._in_hand.values() for task in tasks for number in task}
        for (pid, _), one in fresh.items():
            path = names.get(pid, {}).get(one.descriptor, "")
            if not path:
                continue
            if pid in workers and self._numbered:
                self._see_number(path, numbers, places)
            else:
                self._see_in_folder(pid, path, places)

    def _see_in_folder(self, pid: int, path: str, places: Places) -> None:
        folder = path.rpartition("/")[0]
        listing = places.listing(folder, below=False)
        at = bisect_left(listing or (), path)
        if listing is None or at == len(listing) or listing[at] != path:
            return
        order = self._orders.setdefault((pid, folder), DirectoryOrder())
        order.see(at)
        if order.is_known and order.step(len(listing)) is None:
            self.skip((pid, folder), Skip.UNPREDICTABLE)

    def _see_number(self, path: str, numbers: Collection[int], places: Places) -> None:
        """Grow the folder that holds all numbered files until no file lies outside, then test what a number means."""
        folder = path.rpartition("/")[0]
        root = commonpath([self._root, folder]) if self._root else folder
        if root != self._root and self._roots < MOST_ROOTS:
            self._root, self._index = root, None
            self._roots += 1
        if self._index is None:
            listing = places.listing(self._root, below=True)
            if listing is None:
                return
            self._index = IndexMap(listing)
        if self._has_backlog and self._numbered <= self._in_hand.keys():  # else its task may not have been seen
            self._index.observe(path, numbers)
        if self._index.is_unknown:
            self.skip(self._root, Skip.UNPREDICTABLE)

    # ---- what became of what was asked for

    def _account(self, now: float, eligible: Mapping[tuple[int, FileId], OpenFile], places: Places) -> None:
        waiting = {(pipe, one.task) for pipe, tasks in self._tasks.items() for one in tasks}
        for key, asked in list(self._asked.items()):
            match key:
                case OpenKey():
                    self._account_open(key, asked, eligible.get((key.pid, key.file)), now)
                case TaskKey():
                    if (key.pipe, key.task) not in waiting:
                        self._settle(key, used=True)
                case NextKey():
                    files = len(places.listing(key.folder, below=False) or ())
                    self._account_next(key, asked, eligible, now, files)

    def _account_next(
        self, key: NextKey, asked: Asked, eligible: Mapping[tuple[int, FileId], OpenFile], now: float, files: int
    ) -> None:
        order = self._orders.get((key.pid, key.folder))
        if (key.pid, asked.range.file) in eligible:
            self._asked[OpenKey(key.pid, asked.range.file)] = self._asked.pop(key)
        elif order is not None and files and order.has_passed(key.at, files):
            self._settle(key, used=True)
        elif now - asked.moved_at > STALE_SECONDS:
            self._settle(key, used=False)

    def _account_open(self, key: OpenKey, asked: Asked, there: OpenFile | None, now: float) -> None:
        if there is None:  # closed: as a rule because it was read
            self._settle(key, used=True)
            return
        moved = there.position != asked.read_to
        if moved and (asked.given_up or there.position < asked.read_to):  # what lies there is asked for anew
            self._settle(key, used=True)
        elif moved:
            read = min(there.position, asked.range.end) - min(asked.read_to, asked.range.end)
            self.used_bytes += max(0, read)
            asked.read_to, asked.moved_at = there.position, now
        elif asked.left and now - asked.moved_at > STALE_SECONDS:
            self.skip(there.file, Skip.UNUSED)
            self.unused_bytes += asked.left
            asked.given_up = True

    def _settle(self, key: Key, *, used: bool) -> None:
        left = self._asked.pop(key).left
        if used:
            self.used_bytes += left
        else:
            self.unused_bytes += left
            self.skip(key, Skip.UNUSED)

    # ---- what comes next

    def _wanted_open(self, files: Iterable[OpenFile], ahead: int, places: Places) -> Iterator[tuple[Key, Range, Place]]:
        """The rest of every open file, as far as a worker's window goes."""
        for one in files:
            key = OpenKey(one.pid, one.file)
            place = places.place(one.link, one.file)
            asked = self._asked.get(key)
            if place is None or (asked is not None and asked.given_up):
                continue
            asked_to = asked.range.end if asked else 0
            wanted = rest_of_file(one.file, one.position, one.size, asked_to, ahead)
            if wanted is not None and place.holds(wanted):
                yield key, wanted, place

    def _wanted_tasks(self, places: Places) -> Iterator[tuple[Key, Range, Place]]:
        """The files of what the loader has sent and no worker has taken, by task, each in the order of its numbers."""
        if self._index is None:
            return
        left = SHUFFLED_WINDOW_BYTES - sum(one.left for key, one in self._asked.items() if isinstance(key, TaskKey))
        waiting = sorted((one.task, pipe, one.numbers) for pipe, tasks in self._tasks.items() for one in tasks)
        for task, pipe, numbers in waiting:
            for i, path in enumerate(self._index.files(numbers)):
                key = TaskKey(pipe, task, i)
                place = places.place(path) if key not in self._asked else None
                if place is None or left <= 0:
                    continue
                part = Range(place.file, 0, min(place.size, WORKER_WINDOW_BYTES))
                if place.holds(part):
                    left -= part.end
                    yield key, part, place

    def _wanted_next(
        self,
        processes: Sequence[Seen],
        eligible: Mapping[tuple[int, FileId], OpenFile],
        ahead: int,
        places: Places,
    ) -> Iterator[tuple[Key, Range, Place]]:
        """The files that follow in the folder's order, once the rest of the present one is less than what is ahead."""
        if self._numbered:
            return
        names = {seen.pid: seen.names for seen in processes}
        for (pid, folder), order in self._orders.items():
            here = [one for (owner, _), one in eligible.items() if owner == pid and _folder(names, one) == folder]
            room = ahead - sum(one.size - one.position for one in here)
            listing = places.listing(folder, below=False) or ()
            for at in order.next_places(MOST_NEXT, len(listing)):
                key = NextKey(pid, folder, at)
                place = places.place(listing[at]) if room > 0 else None
                if place is None:
                    break
                start, end = self._asked[key].range.end if key in self._asked else 0, min(place.size, room)
                if not place.holds(Range(place.file, 0, end)):
                    continue
                room -= end
                is_worth = end == place.size or end - start >= ahead // 2
                if start < end and is_worth and (pid, place.file) not in eligible:
                    yield key, Range(place.file, start, end), place


def _folder(names: Mapping[int, Mapping[int, str]], one: OpenFile) -> str:
    return names.get(one.pid, {}).get(one.descriptor, "").rpartition("/")[0]
