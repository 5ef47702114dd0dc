"""Change events of the cgroup tree: notifications where the kernel sends them, else a bounded scan."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

from cgroup.inotify import IN_CREATE, IN_DELETE, IN_IGNORED, IN_MOVED, IN_ONLYDIR, IN_Q_OVERFLOW, Inotify
from cgroup.tree import CGROUP_ROOT, MAX_CGROUPS, Cgroup, children, join, walk

_WATCHED = IN_CREATE | IN_DELETE | IN_MOVED | IN_ONLYDIR


@dataclass(frozen=True, slots=True)
class Change:
    """A cgroup appeared or went away."""

    kind: Literal["created", "removed"]
    cgroup: Cgroup


class TreeWatch:
    """Keeps the set of cgroups up to date: by notifications, or by a scan now and then where they do not work."""

    def __init__(self, root: str = CGROUP_ROOT, scan_seconds: float = 10.0, limit: int = MAX_CGROUPS) -> None:
        self._root = root
        self._scan_seconds = scan_seconds
        self._limit = limit
        self._known: dict[str, Cgroup] = {}
        self._watches: dict[int, str] = {}
        self._next_scan: float | None = None
        self._inotify: Inotify | None = None
        self.degraded: str | None = None
        """Why there are no notifications, or None."""
        try:
            self._inotify = Inotify()
        except OSError as error:
            self._degrade(error)

    @property
    def known(self) -> Mapping[str, Cgroup]:
        """The cgroups seen by the last `changes`, by path."""
        return self._known

    def fileno(self) -> int:
        """Return the descriptor that becomes readable on a change, or -1 where there are only scans."""
        return self._inotify.fileno() if self._inotify else -1

    def changes(self, now: float) -> tuple[Change, ...]:
        """Return what appeared and went since the last call (the first call: everything). `now` in seconds."""
        dirty = self._dirty()
        if self._next_scan is None or dirty is None or (self.degraded and now >= self._next_scan):
            self._next_scan = now + self._scan_seconds
            return tuple(self._rescan())
        return tuple(change for path in sorted(dirty) if path in self._known for change in self._refresh(path))

    def _dirty(self) -> set[str] | None:
        """Return the folders with events, or None after an overflow: then nothing is certain."""
        dirty: set[str] = set()
        for event in self._inotify.read() if self._inotify else ():
            if event.mask & IN_Q_OVERFLOW:
                return None
            path = self._watches.get(event.watch)
            if event.mask & IN_IGNORED:
                self._watches.pop(event.watch, None)
            elif path is not None:
                dirty.add(path)
        return dirty

    def _rescan(self) -> Iterator[Change]:
        """Compare the whole tree. The root itself is known but never reported as removed: it outlives the agent."""
        alive = set()
        for current in self._walk_watched("/"):
            alive.add(current.path)
            yield from self._appear(current)
        for path in [path for path in self._known if path not in alive]:
            yield Change("removed", self._known.pop(path))

    def _refresh(self, path: str) -> Iterator[Change]:
        """Compare one folder's children, and what is below those that are new."""
        now_there = {child.path: child for child in children(self._root, path)}
        prefix = path.rstrip("/") + "/"
        below = [c for p, c in self._known.items() if p.startswith(prefix) and p != path]
        for old in [c for c in below if "/" not in c.path[len(prefix) :]]:
            if old.path not in now_there:
                yield from self._disappear(old.path)
        for child in now_there.values():
            if self._known.get(child.path) != child:
                for current in self._walk_watched(child.path):
                    yield from self._appear(current)

    def _walk_watched(self, start: str) -> Iterator[Cgroup]:
        """Walk and watch: the watch is set before the children are listed, so none can slip in between."""
        for current in walk(self._root, start, self._limit):
            self._watch(current.path)
            yield current

    def _appear(self, current: Cgroup) -> Iterator[Change]:
        old = self._known.get(current.path)
        if old == current:
            return
        if old is not None:
            yield from self._disappear(current.path)
        self._known[current.path] = current
        yield Change("created", current)

    def _disappear(self, path: str) -> Iterator[Change]:
        for gone in [p for p in self._known if p == path or p.startswith(path + "/")]:
            yield Change("removed", self._known.pop(gone))

    def _watch(self, path: str) -> None:
        if self._inotify is None:
            return
        try:
            self._watches[self._inotify.add(join(self._root, path), _WATCHED)] = path
        except (FileNotFoundError, NotADirectoryError):
            return  # it went away: its parent has an event that says so
        except OSError as error:
            self._degrade(error)

    def _degrade(self, error: OSError) -> None:
        """Without a watch on every folder there is no knowing, so scan; a limit of the kernel is the usual reason."""
        self.close()
        self.degraded = f"no notifications ({error.strerror}; see fs.inotify.max_user_watches), scanning instead"

    def close(self) -> None:
        """Stop watching."""
        if self._inotify is not None:
            self._inotify.close()
            self._inotify = None
        self._watches.clear()
