"""Reads ahead for jobs that starve on a disk with moving parts, as the policy asks: watches the disk, starts and stops.

The policy says where (`agent.policies.base`; paper, section 4), the gate whether it can help now, a `Judge` per job and
disk whether it pays. In enforce mode the helper does it; a dry run says what it would do.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from operator import add
from pathlib import Path
from typing import NamedTuple, Protocol

from agent.policies.base import used_share
from agent.rearrange.mending import Mending, Place
from agent.rearrange.process import Served, Target, Told
from agent.rearrange.stop import Disk, Judge, Reading, State, Stop, StopSettings, gate
from agent.rearrange.window import IN_FLIGHT_BESIDE, helper_share
from agent.types import (
    Capacity,
    Decision,
    DeviceView,
    JobId,
    JobReport,
    Rearranged,
    RearrangeReport,
    Slot,
)
from bpf.samples import CacheCounters
from cgroup.diskstats import DiskCounters, parse_diskstats
from cgroup.results import WriteResult

log = logging.getLogger(__name__)

ELASTIC_SHARE = 0.15
TIGHT_SCORE = 60.0
WATCH_SECONDS = 1.0
"""A disk is judged over at least this long."""
LINGER_SECONDS = 60.0
"""The helper stays this long after its last job: it knows where files lie."""
RETRY_SECONDS = 5.0
"""A disk's read-ahead that could not be put back is tried again after this."""


class ReadAhead(Protocol):
    """The part of the enforcer that holds a disk's read-ahead: journalled, and restored however the agent ends."""

    def set_read_ahead(self, device: str, kilobytes: int, why: str) -> object:
        """Set it in KiB."""

    def release_read_ahead(self, device: str, why: str) -> Iterable[WriteResult]:
        """Put it back."""


@dataclass(frozen=True, slots=True)
class Pass:
    """What one pass of the loop knows: the mode, reports by job, the decision, devices, page-cache counters by job."""

    mode: str
    jobs: Mapping[JobId, JobReport]
    decision: Decision
    devices: Mapping[str, DeviceView]
    cache: Mapping[JobId, CacheCounters]


class _Counts(NamedTuple):
    """Bytes that the helper told for a job, and what of `ahead` came from the disk that the slot is on."""

    ahead: int = 0
    used: int = 0
    unused: int = 0
    from_disk: int = 0


@dataclass(slots=True)
class _Slot:
    """One job on one disk: its judge, and the share of the disk that it used when reading ahead began.

    `last` is what the helper told, `earlier` the sum of what it had told each time before it began at zero again.
    `would`: a dry run has said that it would read ahead.
    """

    judge: Judge
    own_share: float = 0.0
    earlier: _Counts = field(default_factory=_Counts)
    last: _Counts = field(default_factory=_Counts)
    would: bool = False


class DiskWatch:
    """Utilisation, queue and request size of disks, from /proc/diskstats over the last passes."""

    def __init__(self, read: Callable[[], str]) -> None:
        self._read = read
        self._first: dict[str, tuple[float, DiskCounters]] = {}
        self._queues: dict[str, list[int]] = {}
        self._found: dict[str, Disk] = {}

    def look(self, now: float, devices: Iterable[str]) -> Mapping[str, Disk]:
        """The disks that were watched for long enough; others are forgotten."""
        wanted = set(devices)
        self._first = {device: one for device, one in self._first.items() if device in wanted}
        self._queues = {device: one for device, one in self._queues.items() if device in wanted}
        self._found = {device: one for device, one in self._found.items() if device in wanted}
        if not wanted:
            return self._found
        disks = parse_diskstats(self._read())
        for device in wanted & disks.keys():
            self._look_at(now, device, disks[device])
        return self._found

    def _look_at(self, now: float, device: str, counters: DiskCounters) -> None:
        began, first = self._first.setdefault(device, (now, counters))
        queue = self._queues.setdefault(device, [])
        queue.append(counters.in_flight)
        if now - began < WATCH_SECONDS:
            return
        requests = counters.reads + counters.writes - first.reads - first.writes
        moved = counters.read_bytes + counters.write_bytes - first.read_bytes - first.write_bytes
        busy = (counters.busy_ms - first.busy_ms) / 1e3 / (now - began)
        self._found[device] = Disk(busy, sum(queue) / len(queue), moved / requests if requests > 0 else 0.0)
        self._first[device], self._queues[device] = (now, counters), []


class Rearranger:
    """All jobs and disks of this node. `step` once a pass; `close` ends the helper."""

    def __init__(
        self,
        helper: Served[Told],
        settings: StopSettings,
        *,
        reads_ahead: bool = True,
        mending: Mending | None = None,
        read_ahead: ReadAhead | None = None,
        read_ahead_kilobytes: int = 0,
        diskstats: Callable[[], str] = lambda: Path("/proc/diskstats").read_text(encoding="ascii", errors="replace"),
    ) -> None:
        self._helper = helper
        self._settings = settings
        self._reads_ahead = reads_ahead
        self._mending = mending
        self._read_ahead = read_ahead
        self._read_ahead_kilobytes = read_ahead_kilobytes
        self._watch = DiskWatch(diskstats)
        self._slots: dict[Slot, _Slot] = {}
        self._raised: set[str] = set()
        self._release_at: dict[str, float] = {}
        self._stops: Counter[str] = Counter()
        self._skips: Counter[str] = Counter()
        self._last_skips: Mapping[str, int] = {}
        self._used_at = 0.0

    def step(self, now: float, here: Pass) -> RearrangeReport:
        """Take in a pass; start and stop; returns how it stands."""
        self._slots = {slot: one for slot, one in self._slots.items() if slot[0] in here.jobs}
        for slot in here.decision.rearrange:
            self._slots.setdefault(slot, _Slot(Judge(self._settings)))
        self._mend(now, here)
        if not self._reads_ahead:
            return self._report()
        asked = {slot[1] for slot in here.decision.rearrange}
        try:
            disks = self._watch.look(now, asked)
        except OSError as error:
            log.warning("disks cannot be watched: %s", error)
            disks = {}
        if here.mode != "enforce":
            return self._pretend(now, here, disks)
        for slot, one in self._slots.items():
            self._follow(now, slot, one, here, disks)
        running = {slot: one for slot, one in self._slots.items() if one.judge.state is State.RUNNING}
        self._serve(now, running, here)
        self._hold_read_ahead(now, {device for _, device in running})
        return self._report()

    def close(self, why: str) -> None:
        """End it all; disks get their read-ahead back with everything else that is restored."""
        for slot, one in self._slots.items():
            if one.judge.state is State.RUNNING:
                log.info("read-ahead for cgroup %d on %s ends: %s", *slot, why)
        self._helper.end()  # both at once: each may have to wait for the disk
        if self._mending is not None:
            self._mending.close()
        self._helper.close()

    def _mend(self, now: float, here: Pass) -> None:
        """Make files contiguous for those that are asked for, or were."""
        if self._mending is not None:
            places = {
                slot: Place(here.jobs[slot[0]].job.path, _capacity(slot, here), _reading(now, slot, here, Told()))
                for slot in self._slots
            }
            self._mending.step(now, here.decision.rearrange, places, may=here.mode == "enforce")

    def _pretend(self, now: float, here: Pass, disks: Mapping[str, Disk]) -> RearrangeReport:
        """Anything but enforce: what runs is ended, and what would be done is said once."""
        for slot, one in self._slots.items():
            if one.judge.state is State.RUNNING:
                self._stopped(slot, one.judge.stop(Stop.MODE, now), here)
            would = here.mode == "dry-run" and slot in here.decision.rearrange and not gate(disks.get(slot[1]))
            if would and not one.would:
                log.info("would read ahead for %s on %s", _names(slot, here), _device(slot, here))
            one.would = would
        self._hold_read_ahead(now, set())
        if self._helper.pid:
            self._helper.end()
        return self._report()

    def _follow(self, now: float, slot: Slot, one: _Slot, here: Pass, disks: Mapping[str, Disk]) -> None:
        reading = _reading(now, slot, here, self._told(slot, one))
        if reading is None:
            return
        was = one.judge.state
        one.would = False
        closed = gate(disks.get(slot[1]))
        stop = one.judge.step(reading, asked=slot in here.decision.rearrange, gate_says=closed)
        if stop is not None:
            self._stopped(slot, stop, here)
        elif was is not State.RUNNING and one.judge.state is State.RUNNING:
            one.own_share = _used(slot, here)
            log.info("reading ahead for %s on %s: %s", _names(slot, here), _device(slot, here), one.judge.why)

    def _told(self, slot: Slot, one: _Slot) -> Told:
        """What the helper said of the job; counts that began at zero again go on here."""
        told = self._helper.told.get(slot[0], Told())
        now = _Counts(told.ahead, told.used, told.unused, told.ahead_of.get(slot[1], 0))
        one.earlier = _Counts(*(
            before + last if fresh < last else before
            for before, last, fresh in zip(one.earlier, one.last, now, strict=True)
        ))  # fmt: skip
        one.last = now
        ahead, used, unused, _ = map(add, one.earlier, now)
        return Told(ahead, used, unused, told.outstanding)

    def _stopped(self, slot: Slot, stop: Stop, here: Pass) -> None:
        self._stops[stop] += 1
        log.info("read-ahead for %s on %s ends: %s", _names(slot, here), _device(slot, here), stop)

    def _serve(self, now: float, running: Mapping[Slot, _Slot], here: Pass) -> None:
        if running:
            self._used_at = now
        elif not self._helper.pid or now - self._used_at > LINGER_SECONDS:
            if self._helper.pid or self._helper.is_lost:
                self._helper.end()
            return
        fresh = not self._helper.pid and not self._helper.is_lost and self._helper.start()
        if self._helper.serve(_targets(running, here), now) or fresh:
            self._count_skips()
            return
        for slot, one in running.items():
            self._stopped(slot, one.judge.stop(Stop.HELPER_LOST, now), here)

    def _count_skips(self) -> None:
        """Counts of one helper start at zero; these go on."""
        for reason, count in self._helper.skips.items():
            self._skips[reason] += max(0, count - self._last_skips.get(reason, 0))
        self._last_skips = dict(self._helper.skips)

    def _hold_read_ahead(self, now: float, devices: set[str]) -> None:
        """A larger read_ahead_kb while readers on the disk are read ahead for, where the configuration allows it."""
        if self._read_ahead is None or not self._read_ahead_kilobytes:
            return
        for device in devices - self._raised:
            if _read_ahead_of(device) < self._read_ahead_kilobytes:
                self._read_ahead.set_read_ahead(device, self._read_ahead_kilobytes, "jobs starve on this disk")
        self._raised |= devices
        for device in self._raised - devices:
            if self._release_at.get(device, now) <= now:
                self._release_read_ahead(now, device, self._read_ahead)

    def _release_read_ahead(self, now: float, device: str, held: ReadAhead) -> None:
        results = held.release_read_ahead(device, "no job starves on this disk")
        if any(one.result == "error" for one in results):
            self._release_at[device] = now + RETRY_SECONDS
        else:
            self._raised.discard(device)
            self._release_at.pop(device, None)

    def _report(self) -> RearrangeReport:
        slots = {
            slot: Rearranged(
                state="would" if one.would else str(one.judge.state),
                why=one.judge.why if self._reads_ahead else "switched off",
                ahead_bytes=one.earlier.from_disk + one.last.from_disk,
                hit_ratio=one.judge.hit_ratio,
                gain_seconds=one.judge.gain_seconds,
            )
            for slot, one in self._slots.items()
        }
        report = RearrangeReport(slots, dict(self._skips), dict(self._stops), self._helper.problem)
        mending = self._mending
        if mending is None:
            return report
        return replace(
            report, mended=mending.mended(), mend_skips=dict(mending.leaves), mend_stops=dict(mending.stops),
            mend_problem=mending.problem,
        )  # fmt: skip


def _reading(now: float, slot: Slot, here: Pass, told: Told) -> Reading | None:
    """The job's counts, and those of the other training jobs on the disk; None while the job has no signals."""
    job, device = slot
    signals = here.jobs[job].signals
    if signals is None:
        return None
    others = {
        other: (one.signals.iterations, one.signals.wait_seconds_total)
        for other, one in here.jobs.items()
        if other != job and one.signals is not None and device in one.signals.devices
        and one.signals.wait_seconds_total is not None
    }  # fmt: skip
    cache = here.cache.get(job)
    return Reading(
        time=now,
        iterations=signals.iterations,
        wait_seconds=signals.wait_seconds_total,
        ahead_bytes=told.ahead,
        used_bytes=told.used,
        unused_bytes=told.unused,
        read_bytes=cache.read_bytes if cache else None,
        missed_bytes=cache.missed_bytes if cache else None,
        others=others,
    )


def _targets(running: Mapping[Slot, _Slot], here: Pass) -> list[Target]:
    """One target per job, with the rate that it may have on each of its disks."""
    rates: dict[JobId, dict[str, float]] = {}
    shared: set[JobId] = set()
    for slot, one in running.items():
        capacity = _capacity(slot, here)
        if capacity is not None:
            rates.setdefault(slot[0], {})[slot[1]] = _share(slot, one, here, len(running)) * capacity.rbps
            if any(_used((job, slot[1]), here) > 0.0 for job in here.jobs.keys() - {slot[0]}):
                shared.add(slot[0])
    return [
        Target(job, here.jobs[job].job.path, found, in_flight=IN_FLIGHT_BESIDE if job in shared else 0)
        for job, found in rates.items()
    ]


def _share(slot: Slot, one: _Slot, here: Pass, running: int) -> float:
    """The helper's share for this job; what helpers of other jobs need is theirs."""
    device = slot[1]
    pool = here.decision.pools.get(device)
    free = ELASTIC_SHARE if pool is None else max(0.0, pool.capacity - pool.lent)
    others = sum(_used((job, device), here) for job in here.jobs if job != slot[0])
    tight = any(
        report.health is not None and report.health.score < TIGHT_SCORE
        for job, report in here.jobs.items()
        if job != slot[0] and _used((job, device), here) > 0.0
    )
    return helper_share(free / running, one.own_share, others, others_tight=tight or running > 1)


def _used(slot: Slot, here: Pass) -> float:
    """The share of the disk that a job uses."""
    signals, capacity = here.jobs[slot[0]].signals, _capacity(slot, here)
    if signals is None or capacity is None or slot[1] not in signals.devices:
        return 0.0
    return used_share(signals.devices[slot[1]], capacity)


def _capacity(slot: Slot, here: Pass) -> Capacity | None:
    view = here.devices.get(slot[1])
    return view.info.capacity if view is not None else None


def _names(slot: Slot, here: Pass) -> str:
    return here.jobs[slot[0]].job.name


def _device(slot: Slot, here: Pass) -> str:
    view = here.devices.get(slot[1])
    return view.info.name if view is not None else slot[1]


def _read_ahead_of(device: str) -> int:
    """The disk's own read-ahead, KiB; where it cannot be read, more than anybody asks for."""
    try:
        return int(Path(f"/sys/dev/block/{device}/queue/read_ahead_kb").read_text(encoding="ascii"))
    except (OSError, ValueError):
        return 1 << 30
