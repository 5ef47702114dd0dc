"""Where files lie and what folders hold: found out once, by threads that may wait for the disk, and told at once."""

from __future__ import annotations

import os
import queue
import threading
import time
from collections.abc import Callable, Sequence
from typing import overload

from agent.rearrange import files
from agent.rearrange.follow import Follow, Place
from agent.rearrange.window import FileId, Skip
from bpf.regular_file import NotRegular, open_regular
from cgroup.devices import Devices
from cgroup.errors import DeviceRefused

RESOLVERS = 4
MOST_PLACES = 65536
MOST_LISTED = 200_000
LISTING_SECONDS = 60.0
PLACE_SECONDS = 600.0
FORGET_SECONDS = 120.0
"""A listing that nobody has asked for in so long is dropped: it leads through a process, and processes end."""


class Resolver:
    """Finds out who a file is and where it lies, once; and what a folder holds. Answers what is known, at once."""

    def __init__(self) -> None:
        self._known: dict[str | FileId, tuple[float, Place | Skip]] = {}
        self._listings: dict[tuple[str, bool], tuple[float, Sequence[str]]] = {}
        self._asked_at: dict[tuple[str, bool], float] = {}
        self._pending: set[object] = set()
        self._work: queue.SimpleQueue[tuple[object, Callable[[], None]]] = queue.SimpleQueue()
        self._devices: dict[int, frozenset[str]] = {}
        for _ in range(RESOLVERS):
            threading.Thread(target=self._run, daemon=True).start()

    def place(self, path: str, file: FileId | None) -> Place | Skip | None:
        """Where a file lies, why it is left out, or None while that is being found out."""
        key = file or path
        at, known = self._known.get(key, (0.0, None))
        if known is None or time.monotonic() - at > PLACE_SECONDS:
            self._start(key, lambda: self._resolve(key, path, file))
        return known

    def listing(self, root: str, *, below: bool) -> Sequence[str] | None:
        """Sorted paths; an old one is given until a new one is there."""
        now = time.monotonic()
        at, known = self._listings.get((root, below), (0.0, None))
        if (root, below) not in self._asked_at:
            self._forget(now)
        self._asked_at[root, below] = now
        if now - at > LISTING_SECONDS:
            self._start((root, below), lambda: self._list(root, below=below))
        return known

    def _forget(self, now: float) -> None:
        """Drop the listings that nobody asks for any more."""
        for key in [key for key, at in self._asked_at.items() if now - at > FORGET_SECONDS]:
            del self._asked_at[key]
            self._listings.pop(key, None)

    def devices_of(self, number: int) -> frozenset[str]:
        """The whole device of a st_dev and those below it (LVM, dm-crypt, md); none for btrfs, overlay, network."""
        if number not in self._devices:
            self._devices[number] = _stack_of(f"{os.major(number)}:{os.minor(number)}")
        return self._devices[number]

    def _start(self, key: object, work: Callable[[], None]) -> None:
        if key not in self._pending:
            self._pending.add(key)
            self._work.put((key, work))

    def _run(self) -> None:
        while True:
            key, work = self._work.get()
            try:
                work()
            finally:
                self._pending.discard(key)

    def _resolve(self, key: str | FileId, path: str, file: FileId | None) -> None:
        try:
            found = _place(path, file)
        except OSError:
            found = Skip.VANISHED
        if file is not None and found is Skip.VANISHED:  # its descriptor was closed, which says nothing of the file
            return
        if len(self._known) >= MOST_PLACES:
            self._known.clear()
        self._known[key] = (time.monotonic(), found)

    def _list(self, root: str, *, below: bool) -> None:
        found = files.files_below(root, MOST_LISTED + 1, below=below)
        if (root, below) in self._asked_at:
            self._listings[root, below] = (time.monotonic(), sorted(found) if len(found) <= MOST_LISTED else ())


def _stack_of(device: str) -> frozenset[str]:
    found: set[str] = set()
    pending = [device]
    while pending:
        try:
            here = Devices().resolve(pending.pop())
        except DeviceRefused:
            continue
        if here.device not in found:
            found.add(here.device)
            pending.extend(here.members)
    return frozenset(found)


def _place(path: str, file: FileId | None) -> Place | Skip:
    """Open, look, close. Raises OSError."""
    try:
        descriptor = open_regular(path)
    except NotRegular:
        return Skip.VANISHED
    try:
        status = os.fstat(descriptor)
        found = (status.st_dev, status.st_ino)
        if file is not None and file != found:
            return Skip.VANISHED
        try:
            extents, skips = files.extents_of(descriptor, status.st_size)
        except OSError:
            return Skip.UNMAPPED
    finally:
        os.close(descriptor)
    return Place(found, status.st_size, extents, path, frozenset(skips))


class JobPlaces:
    """The resolver as one job sees it: paths below its `root`, files on its `devices`; counts why others are not."""

    def __init__(self, resolver: Resolver, follow: Follow, root: str, devices: frozenset[str]) -> None:
        self._resolver = resolver
        self._follow = follow
        self._root = root
        self._devices = devices

    def place(self, path: str, file: FileId | None = None) -> Place | None:
        """See `Places`; a path below /proc is one already."""
        found = self._resolver.place(path if file is not None else self._root + path, file)
        if found is None:
            return None
        if isinstance(found, Skip):
            self._follow.skip(file or path, found)
            return None
        if not self._resolver.devices_of(found.file[0]) & self._devices:
            self._follow.skip(found.file, Skip.OTHER_DEVICE)
            return None
        for why in found.skips:
            self._follow.skip(found.file, why)
        return found if file is None else found._replace(path=path)  # whoever had it open first may have closed it

    def listing(self, root: str, *, below: bool) -> Sequence[str] | None:
        """See `Places`."""
        found = self._resolver.listing(self._root + root, below=below)
        return None if found is None else _Stripped(found, len(self._root))


class _Stripped(Sequence[str]):
    """Paths without the part that leads into the job's file system; not copied, since a listing can be long."""

    def __init__(self, paths: Sequence[str], cut: int) -> None:
        self._paths = paths
        self._cut = cut

    def __len__(self) -> int:
        return len(self._paths)

    @overload
    def __getitem__(self, at: int) -> str: ...
    @overload
    def __getitem__(self, at: slice) -> list[str]: ...
    def __getitem__(self, at: int | slice) -> str | list[str]:
        found = self._paths[at]
        return found[self._cut :] if isinstance(found, str) else [one[self._cut :] for one in found]
