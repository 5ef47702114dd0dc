"""A simulated node: a scenario's devices, jobs and neighbours behind what the agent reads and writes.

It gives raw counters (`samples`) like the probes and takes limits (`throttles`) like io.max; how it serves requests is
told by the models that it is built from.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from agent.job_sample import JobSample
from agent.simulate.bfq import Bfq
from agent.simulate.blk_throttle import Throttle
from agent.simulate.devices import FairQueue, Link, Unlimited
from agent.simulate.events import Events
from agent.simulate.machine import Machine, build_device, device_info
from agent.simulate.page_cache import PageCache
from agent.simulate.processors import Processors
from agent.simulate.requests import Account, Stage
from agent.simulate.scanner import Scanner
from agent.simulate.scenario import Job as JobSpec
from agent.simulate.scenario import Neighbour, Scenario
from agent.simulate.source import Source
from agent.simulate.trainer import Trainer, Warmth
from agent.types import DeviceView, Job, JobId, Slot
from bpf.samples import BlockCounters, BlockKey, CacheCounters, NfsCounters, NfsKey, WorkerTime

FIRST_CGROUP = 1000
EXTENT_BLOCK = 1 << 20
"""Extents are aligned to it, as in the lab."""
BLOCK_KINDS = ("ssd", "hdd")
"""Kinds of devices that the block layer serves; any other is a mount."""


@dataclass(frozen=True, slots=True)
class Scheduling:
    """An IO scheduler or io.cost before every block device: equal or 500:50 weights; see `FairQueue`.

    `depth` requests are in the device at most (None: no limit); `pace` is io.cost's way. `cost` says by device name
    what a byte and a request are thought to cost (seconds).
    """

    weights: tuple[float, float]
    depth: int | None = None
    pace: bool = False
    cost: Mapping[str, tuple[float, float]] | None = None


class Foreign(NamedTuple):
    """Traffic of other machines on a mount's link: device, from when to when (s), bytes/s."""

    device: str
    start: float
    stop: float
    bytes_per_second: float


class SimulatedNode:
    """Everything of one run.

    `unlimited` are the kinds of devices that are never short. `warm` tells by job name how far it has run already
    (absent: it starts cold), `shift_bursts` see `Trainer`, `foreign` what other machines do on the links of mounts.
    """

    def __init__(
        self,
        scenario: Scenario,
        machine: Machine,
        seed: int,
        *,
        scheduling: Scheduling | None = None,
        unlimited: Collection[str] = (),
        warm: Mapping[str, Warmth] | None = None,
        shift_bursts: bool = False,
        foreign: Sequence[Foreign] = (),
    ) -> None:
        self.events = Events()
        self.scenario = scenario
        self.machine = machine
        self.devices = {one.name: build_device(self.events, one, machine) for one in scenario.devices}
        self.views = {one.name: DeviceView(device_info(one, machine)) for one in scenario.devices}
        self._sources: dict[JobId, list[Source]] = {}
        self._packets = {one.name for one in scenario.devices if one.kind not in BLOCK_KINDS}
        self._shift_bursts = shift_bursts
        for traffic in foreign:
            self.events.at(traffic.start, self._add_foreign, (traffic.device, traffic.bytes_per_second))
            self.events.at(traffic.stop, self._add_foreign, (traffic.device, -traffic.bytes_per_second))
        self._entries = self._schedule(scheduling, unlimited)
        self._node_cache = PageCache(machine.memory_bytes)
        users: tuple[JobSpec | Neighbour, ...] = (*scenario.jobs, *scenario.best_effort)
        self._jobs = {
            FIRST_CGROUP + index: Job(FIRST_CGROUP + index, user.name, f"/{user.name}", isinstance(user, JobSpec))
            for index, user in enumerate(users)
        }
        processors = Processors(self.events, machine.cpus)
        self.trainers: dict[JobId, Trainer] = {}
        self.scanners: dict[JobId, Scanner] = {}
        for cgroup, user in zip(self._jobs, users, strict=True):
            if isinstance(user, JobSpec):
                self.trainers[cgroup] = self._trainer(user, cgroup, processors, seed, (warm or {}).get(user.name))
            else:
                self.scanners[cgroup] = self._scanner(user, cgroup, seed)
        self._weigh(scheduling)
        self._throttles = {
            (cgroup, source.device): source.throttle
            for cgroup, sources in self._sources.items()
            for source in sources
            if source.throttle is not None
        }

    def _schedule(self, scheduling: Scheduling | None, unlimited: Collection[str]) -> dict[str, Stage]:
        """What a request meets first on each device."""
        entries: dict[str, Stage] = dict(self.devices)
        for one in self.scenario.devices:
            if one.kind in unlimited:
                entries[one.name] = Unlimited(self.events)
        if scheduling is None:
            return entries
        for one in self.scenario.devices:
            if one.kind not in BLOCK_KINDS:
                continue
            if scheduling.depth is not None and one.kind == "hdd":
                entries[one.name] = Bfq(self.events, self.devices[one.name])
                continue
            per_byte, per_request = (scheduling.cost or {}).get(one.name, (1.0 / one.bytes_per_second, 0.0))
            entries[one.name] = FairQueue(
                self.events,
                self.devices[one.name],
                depth=scheduling.depth or 1_000_000,
                pace=scheduling.pace,
                seconds_per_byte=per_byte,
                seconds_per_request=per_request,
            )
        return entries

    def _weigh(self, scheduling: Scheduling | None) -> None:
        if scheduling is None:
            return
        training, other = scheduling.weights
        weights = {cgroup: training if job.training else other for cgroup, job in self._jobs.items()}
        for entry in self._entries.values():
            if isinstance(entry, FairQueue | Bfq):
                entry.weights = weights

    def _source(self, user: JobSpec | Neighbour, cgroup: int, device: str) -> Source:
        """The user's extent of a device: an equal part of it, as the lab lays data out."""
        spec = self.scenario.device(device)
        users = self.scenario.users_of(device)
        part = max(user.read_size, spec.size // len(users) // EXTENT_BLOCK * EXTENT_BLOCK)
        buffered = isinstance(user, JobSpec) and user.access == "filesystem"
        source = Source(
            self.events,
            device,
            Account(cgroup),
            self._entries[device],
            offset=users.index(user.name) * part,
            length=user.data if buffered and isinstance(user, JobSpec) else part,
            read_size=user.read_size,
            remote=spec.kind not in BLOCK_KINDS,
            cache=self._cache(user) if buffered else None,
            file=cgroup,
            copy_bytes_per_second=self.machine.copy_bytes_per_second,
            writes=isinstance(user, Neighbour) and user.kind == "writer",
        )
        self._sources.setdefault(cgroup, []).append(source)
        return source

    def _cache(self, user: JobSpec | Neighbour) -> PageCache:
        if isinstance(user, JobSpec) and user.memory is not None:
            return PageCache(float(user.memory))
        return self._node_cache

    def _trainer(self, spec: JobSpec, cgroup: int, processors: Processors, seed: int, warm: Warmth | None) -> Trainer:
        names = [spec.device, spec.slow_device] if spec.slow_device else [spec.device]
        return Trainer(
            self.events,
            spec,
            cgroup,
            [self._source(spec, cgroup, name) for name in names],
            processors,
            seed=seed,
            duration=self.scenario.duration_seconds,
            machine=self.machine,
            warm=warm,
            shift_bursts=self._shift_bursts,
        )

    def _add_foreign(self, change: tuple[str, float]) -> None:
        link = self.devices[change[0]]
        if isinstance(link, Link):
            link.foreign += change[1]

    def _scanner(self, spec: Neighbour, cgroup: int, seed: int) -> Scanner:
        source = self._source(spec, cgroup, spec.device)
        duration = self.scenario.duration_seconds
        return Scanner(self.events, spec, cgroup, source, seed=seed, duration=duration, machine=self.machine)

    def jobs(self) -> tuple[Job, ...]:
        """All cgroups of the scenario; they exist from its start to its end, as in the lab."""
        return tuple(self._jobs.values())

    def throttles(self) -> Mapping[Slot, Throttle]:
        """Where limits can be set, by (cgroup, device)."""
        return self._throttles

    def moved_bytes(self, cgroup: JobId) -> int:
        """All bytes that a cgroup has had from its devices, or written."""
        return sum(sum(source.account.bytes) for source in self._sources[cgroup])

    def samples(self) -> dict[JobId, JobSample]:
        """What the probes would read now."""
        time_ns = int(self.events.now * 1e9)
        return {cgroup: self._sample(cgroup, time_ns) for cgroup in self._jobs}

    def _sample(self, cgroup: JobId, time_ns: int) -> JobSample:
        blocks: dict[BlockKey, BlockCounters] = {}
        nfs: dict[NfsKey, NfsCounters] = {}
        sources = self._sources[cgroup]
        for source in sources:
            for index, op in ((0, "read"), (1, "write")):
                account = source.account
                if not account.requests[index] and not account.in_flight[index]:
                    continue
                if source.remote:
                    nfs[NfsKey(cgroup, source.device, op)] = account.nfs_counters(index)  # type: ignore[arg-type]
                else:
                    blocks[BlockKey(cgroup, source.device, op)] = account.block_counters(index)  # type: ignore[arg-type]
        trainer = self.trainers.get(cgroup)
        stream = trainer.stream() if trainer else None
        return JobSample(
            cgroup,
            time_ns,
            blocks=blocks,
            streams=(stream,) if stream else (),
            nfs=nfs,
            cache=_cache_counters(sources),
            workers=_worker_time(trainer) if trainer else None,
            nic_packets=self._nic_packets(sources),
        )

    def _nic_packets(self, sources: list[Source]) -> int | None:
        names = {source.device for source in sources if source.device in self._packets}
        links = [self.devices[name] for name in names]
        return sum(link.packets for link in links if isinstance(link, Link)) if links else None


def _cache_counters(sources: list[Source]) -> CacheCounters | None:
    cached = [source for source in sources if source.cache is not None]
    if not cached:
        return None
    return CacheCounters(sum(one.read_bytes for one in cached), sum(one.missed_bytes for one in cached))


def _worker_time(trainer: Trainer) -> WorkerTime:
    clock = trainer.clock
    return WorkerTime(
        on_cpu_ns=int(clock.on_cpu * 1e9),
        block_ns=int(clock.block * 1e9),
        nfs_ns=int(clock.nfs * 1e9),
        network_ns=0,
        fault_ns=0,
        other_ns=0,
        runnable_ns=int(clock.runnable * 1e9),
    )
