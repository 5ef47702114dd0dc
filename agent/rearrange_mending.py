"""Makes the badly fragmented files of jobs that starve contiguous, where the configuration asks for it.

The policy says for whom, as with reading ahead (`agent.rearranger`); a `MoveJudge` per job and disk says whether it
pays and whether anybody else pays for it. One mover serves them all, in a cgroup with low limits.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from agent.rearrange_defragment import Mend
from agent.rearrange_pay import MoveJudge, MoveStop, PaySettings
from agent.rearrange_process import Served, Target
from agent.rearrange_stop import Reading
from agent.types import Capacity, JobId, Mended, Slot

log = logging.getLogger(__name__)

LINGER_SECONDS = 60.0
"""The mover stays this long after its last job: it knows which files it has looked at."""
SHARE_ALONE = 4.0
"""Times the share that may be used where no other training job reads from the disk."""


@dataclass(frozen=True, slots=True)
class Place:
    """One job on one disk at one moment: its cgroup's path, the disk's capacity, the last reading of its counts."""

    path: str
    capacity: Capacity | None
    reading: Reading | None


@dataclass(slots=True)
class _Slot:
    """One job on one disk: its judge, what was moved by movers before this one, whether a dry run has spoken of it."""

    judge: MoveJudge
    path: str
    would: bool = False
    earlier: Mend = field(default_factory=Mend)
    last: Mend = field(default_factory=Mend)


class Mending:
    """All jobs and disks of this node. `step` once a pass; `close` ends the mover."""

    def __init__(self, mover: Served[Mend], settings: PaySettings, share: float) -> None:
        self._mover = mover
        self._settings = settings
        self._share = share
        self._slots: dict[Slot, _Slot] = {}
        self._used_at = 0.0
        self._last_skips: Mapping[str, int] = {}
        self.stops: Counter[str] = Counter()
        self.leaves: Counter[str] = Counter()

    @property
    def problem(self) -> str:
        """Why the mover cannot run, or ""."""
        return self._mover.problem

    def step(self, now: float, asked: frozenset[Slot], places: Mapping[Slot, Place], *, may: bool) -> None:
        """Take in a pass: who is asked for, and every job on every disk. `may` is the mode enforce."""
        self._slots = {slot: one for slot, one in self._slots.items() if slot in places}
        for slot in asked & places.keys():
            self._slots.setdefault(slot, _Slot(MoveJudge(self._settings), places[slot].path))
        for slot, one in self._slots.items():
            self._follow(now, slot, one, places[slot].reading, asked=slot in asked, may=may)
        running = {slot: places[slot] for slot, one in self._slots.items() if one.judge.is_running}
        self._serve(now, running)

    def close(self) -> None:
        """End the mover; the tool ends with it."""
        self._mover.close()

    def mended(self) -> dict[Slot, Mended]:
        """How it stands."""
        return {
            slot: Mended(one.judge.is_running, one.judge.why, total.files, total.bytes, total.left_files,
                         one.judge.gain_seconds)
            for slot, one in self._slots.items() for total in (_sum(one.earlier, one.last),)
        }  # fmt: skip

    def _follow(self, now: float, slot: Slot, one: _Slot, reading: Reading | None, *, asked: bool, may: bool) -> None:
        told = self._mover.told.get(slot[0], Mend())
        if told.files < one.last.files:
            one.earlier = _sum(one.earlier, one.last)
        one.last = told
        if not may:
            if one.judge.is_running:
                self._stopped(slot, one.judge.stop(MoveStop.MODE, now))
            if asked and not one.would:
                log.info("would make fragmented files of %s on %s contiguous", one.path, slot[1])
            one.would = asked
            return
        one.would = False
        if reading is None:
            return
        was_running = one.judge.is_running
        stop = one.judge.step(reading, _sum(one.earlier, told), asked=asked)
        if stop is not None:
            self._stopped(slot, stop)
        elif one.judge.is_running and not was_running:
            log.info("fragmented files of %s on %s are made contiguous: %s", one.path, slot[1], one.judge.why)

    def _stopped(self, slot: Slot, cause: MoveStop) -> None:
        self.stops[cause] += 1
        log.info("files of %s on %s are made contiguous no longer: %s", self._slots[slot].path, slot[1], cause)

    def _serve(self, now: float, running: Mapping[Slot, Place]) -> None:
        if running:
            self._used_at = now
        elif not self._mover.pid or now - self._used_at > LINGER_SECONDS:
            if self._mover.pid or self._mover.is_lost:
                self._mover.close()
            return
        fresh = not self._mover.pid and not self._mover.is_lost and self._mover.start()
        if fresh:
            self._last_skips = {}
        if self._mover.serve(self._targets(running), now) or fresh:
            self._count_leaves()
            return
        for slot in running:
            self._stopped(slot, self._slots[slot].judge.stop(MoveStop.HELPER_LOST, now))

    def _targets(self, running: Mapping[Slot, Place]) -> list[Target]:
        """One target per job. The share is divided among jobs, and larger where nobody else reads from the disk."""
        found: dict[JobId, Target] = {}
        for (job, device), place in running.items():
            if place.capacity is None:
                continue
            others = place.reading.others if place.reading is not None else ()
            share = min(0.5, self._share * (1.0 if others else SHARE_ALONE)) / len(running)
            before = found.get(job, Target(job, place.path, {}))
            rates = {**before.rates, device: share * min(place.capacity.rbps, place.capacity.wbps)}
            found[job] = Target(job, place.path, rates, {**before.requests, device: share * place.capacity.riops})
        return list(found.values())

    def _count_leaves(self) -> None:
        """Counts of one mover start at zero, and a file that is moved in the end is left no more; these only grow."""
        for reason, count in self._mover.skips.items():
            self.leaves[reason] += max(0, count - self._last_skips.get(reason, 0))
        self._last_skips = dict(self._mover.skips)


def _sum(one: Mend, other: Mend) -> Mend:
    """What both have moved, and what the second says is left."""
    return other._replace(files=one.files + other.files, bytes=one.bytes + other.bytes)
