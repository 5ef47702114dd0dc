"""The managed cgroups of a program compiled with owner.h in front."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

from bpf.loader import Program

OWNER_HEADER = Path(__file__).with_name("owner.h")


class Owners:
    """Keeps the kernel's set of managed cgroup ids; descendants count for their innermost managed ancestor."""

    def __init__(self, program: Program) -> None:
        self._managed = program.map("managed")
        self._generation = program.map("owners_generation")
        self._count = 0
        self.ids: frozenset[int] = frozenset()
        self._invalidate()

    def replace(self, cgroup_ids: Collection[int]) -> frozenset[int]:
        """Manage these cgroups and no others; gives those that were dropped."""
        wanted, dropped = frozenset(cgroup_ids), self.ids - frozenset(cgroup_ids)
        if wanted == self.ids:
            return dropped
        for cgroup in dropped:
            with contextlib.suppress(KeyError):
                del self._managed[self._managed.Key(cgroup)]
        for cgroup in wanted - self.ids:
            self._managed[self._managed.Key(cgroup)] = self._managed.Leaf(1)
        self.ids = wanted
        self._invalidate()
        return dropped

    def entries(self, table: Any, cgroup_of: Callable[[Any], int]) -> list[tuple[Any, Any]]:
        """Keys and values of the managed cgroups in a map; the others are deleted.

        What a cgroup had begun when it was let go ends later, and makes its counters anew: nobody would ever ask for
        them, and with every job the map would be fuller.
        """
        found = []
        for key, value in list(table.items()):
            if cgroup_of(key) in self.ids:
                found.append((key, value))
                continue
            with contextlib.suppress(KeyError):
                del table[key]
        return found

    def _invalidate(self) -> None:
        """What the kernel remembers about owners is stale from now on."""
        self._count += 1
        self._generation[self._generation.Key(0)] = self._generation.Leaf(self._count)
