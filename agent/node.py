"""The node as the loop reads it: cgroup tree, probes, devices, and what unmanaged cgroups use of them."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from math import exp
from pathlib import Path
from typing import Protocol

from agent.config import Config
from agent.guarded import Guarded
from agent.job_cgroup import read_weight
from agent.jobs import PodInfo, PodLookup, no_pods, select_jobs
from agent.named_devices import NamedDevices
from agent.signals import IoCounts, JobSample
from agent.stacks import Stacks
from agent.types import Capacity, DeviceInfo, DeviceView, Job, JobId, Medium
from bpf.link_state import interface_packets
from bpf.probes import Probe
from bpf.samples import (
    BlockCounters,
    BlockKey,
    LinkState,
    ObjectKey,
    ProbeState,
    ProbeStatus,
    Sample,
    StreamCounters,
    merge_samples,
)
from cgroup.devices import Devices
from cgroup.diskstats import parse_diskstats
from cgroup.errors import CgroupError, DeviceRefused
from cgroup.io_files import parse_io_stat
from cgroup.mapped import passed_through
from cgroup.tree import Cgroup, join
from cgroup.watch import TreeWatch

log = logging.getLogger(__name__)

PACKETS_EVERY_NS = 1_000_000_000

UNMANAGED_SECONDS = 1.0
"""Time constant of the estimate of unmanaged traffic."""


class PodSource(Protocol):
    """Tells what is known of a pod, and how the telling goes."""

    def __call__(self, uid: str) -> PodInfo | None:
        """What is known of the pod with this UID."""

    def status(self) -> ProbeStatus:
        """Reported beside the probes."""


class LocalNode:
    """This machine. `root` is where cgroup v2 is mounted; probes are attached by the caller and closed by `close`."""

    def __init__(
        self,
        root: str,
        config: Config,
        probes: Sequence[Probe],
        named: NamedDevices,
        pods: PodSource | None = None,
    ) -> None:
        self._root = root
        self._config = config
        self._probes = tuple(Guarded(probe) for probe in probes)
        self._named = named
        self._configured = named.known
        self._devices = dict(self._configured)
        self._pods = pods
        self._lookup: PodLookup = pods or no_pods
        self._watch = TreeWatch(root, config.loop.scan_seconds)
        self._jobs: tuple[Job, ...] | None = None
        self._selected_at = 0.0
        self._traffic = UnmanagedTraffic()
        self._sysfs = Devices()
        self._stacks = Stacks(probes, lambda device: passed_through(device, self._sysfs, self._configured))
        self._packets = NicPackets(interface_packets)
        self._links = JobLinks()

    def jobs(self, now: float) -> tuple[Job, ...]:
        """The jobs as the tree stands; rules are applied again on a change, and now and then for new pod labels."""
        changes = self._watch.changes(now)
        if self._jobs is None or changes or now - self._selected_at >= self._config.loop.scan_seconds:
            self._selected_at = now
            self._links.forget()
            jobs = tuple(
                self._weighed(job) for job in select_jobs(self._watch.known.values(), self._config, self._lookup)
            )
            if jobs != self._jobs:
                self._announce(self._jobs or (), jobs)
                self._jobs = jobs
                for probe in self._probes:
                    probe.manage([job.id for job in jobs])
        return self._jobs

    def _weighed(self, job: Job) -> Job:
        """The job with the weight that `prefetchd exec --weight` left on its cgroup, if it did."""
        weight = read_weight(join(self._root, job.path)) if job.training else None
        return job if weight is None else replace(job, weight=weight)

    def _announce(self, before: tuple[Job, ...], after: tuple[Job, ...]) -> None:
        for job in sorted(set(after) - set(before), key=lambda one: one.path):
            log.info("%s %s: %s", "training job" if job.training else "best effort", job.name, job.path)
        for job in sorted(set(before) - set(after), key=lambda one: one.path):
            log.info("gone: %s (%s)", job.name, job.path)

    def sample(self, now_ns: int) -> Sample:
        """What every probe reads now."""
        merged = self._stacks.without(merge_samples(now_ns, tuple(probe.read(now_ns) for probe in self._probes)))
        if not merged.links:
            return merged
        return replace(merged, links=self._links.of(merged.links, self._watch.known.values(), self._jobs or ()))

    def job_samples(self, sample: Sample, jobs: Mapping[JobId, Job]) -> Mapping[JobId, JobSample]:
        """The sample by job; io.stat joins in where the block probe is missing."""
        parts = split_by_job(sample, jobs)
        if sample.nfs or sample.objects or sample.fuse:
            packets = self._packets.at(sample.time_ns)
            parts = {job: replace(part, nic_packets=packets) for job, part in parts.items()}
        if any(probe.name == "block" and probe.status().state is not ProbeState.UNAVAILABLE for probe in self._probes):
            return parts
        return {job: replace(part, io_stat=self._io_stat(jobs[job].path)) for job, part in parts.items()}

    def _io_stat(self, path: str) -> Mapping[str, IoCounts]:
        try:
            text = Path(join(self._root, path), "io.stat").read_text(encoding="utf-8", errors="replace")
            lines = parse_io_stat(text)
        except (OSError, CgroupError):
            return {}
        return {
            device: IoCounts(line.rbytes or 0, line.wbytes or 0, line.rios or 0, line.wios or 0)
            for device, line in lines.items()
        }

    def devices(self, sample: Sample, jobs: Mapping[JobId, Job]) -> Mapping[str, DeviceView]:
        """The configured devices and those that jobs were seen to use, with what unmanaged cgroups take of them."""
        named = self._named.at(sample.time_ns)
        if named is not self._configured:
            self._configured, self._devices = named, dict(named)
        for key in sample.blocks:
            if key.device not in self._devices:
                self._devices[key.device] = self._observed(key.device)
        try:
            disks = parse_diskstats(Path("/proc/diskstats").read_text(encoding="ascii", errors="replace"))
        except OSError:
            disks = {}
        totals = {device: (disk.read_bytes, disk.write_bytes) for device, disk in disks.items()}
        managed = managed_bytes(sample.blocks, jobs)
        shares = self._traffic.update(sample.time_ns, totals, managed, self._devices)
        return {device: DeviceView(info, shares.get(device, 0.0)) for device, info in self._devices.items()}

    def _observed(self, device: str) -> DeviceInfo:
        """A device that no rule names: measured, never enforced."""
        try:
            found = self._sysfs.resolve(device)
        except DeviceRefused as refusal:
            name = self._sysfs.name_of(device)
            log.info("device %s (%s) is observed only: %s", name, device, refusal)
            return DeviceInfo(device, name, Medium.SSD)
        return DeviceInfo(device, found.name, Medium(found.medium))

    def probes(self) -> tuple[ProbeStatus, ...]:
        """The state of every probe, and of the pod labels where there are any."""
        statuses = tuple(probe.status() for probe in self._probes)
        return (*statuses, self._pods.status()) if self._pods is not None else statuses

    def filenos(self) -> Sequence[int]:
        """The descriptor of the tree's change events."""
        return (self._watch.fileno(),)

    def close(self) -> None:
        """Detach every probe."""
        for probe in self._probes:
            probe.close()
        self._watch.close()


def split_by_job(sample: Sample, jobs: Mapping[JobId, Job]) -> dict[JobId, JobSample]:
    """One `JobSample` per job; slots of cgroups that are no job (any more) are left out."""
    blocks: dict[JobId, dict[BlockKey, BlockCounters]] = defaultdict(dict)
    for key, counters in sample.blocks.items():
        blocks[key.cgroup_id][key] = counters
    nfs: dict[JobId, dict] = defaultdict(dict)  # type: ignore[type-arg]  # typed by JobSample below
    for nfs_key, rpc in sample.nfs.items():
        nfs[nfs_key.cgroup_id][nfs_key] = rpc
    objects: dict[JobId, dict] = defaultdict(dict)  # type: ignore[type-arg]
    for object_key, request in sample.objects.items():
        objects[object_key.cgroup_id][object_key] = request
    fuse: dict[JobId, dict] = defaultdict(dict)  # type: ignore[type-arg]
    for fuse_key, asked in sample.fuse.items():
        fuse[fuse_key.cgroup_id][fuse_key] = asked
    streams: dict[JobId, list] = defaultdict(list)  # type: ignore[type-arg]
    for stream in sample.streams:
        streams[stream.cgroup_id].append(stream)
    return {
        job: JobSample(
            job=job,
            time_ns=sample.time_ns,
            blocks=blocks.get(job, {}),
            streams=preferred_streams(streams.get(job, ())),
            nfs=nfs.get(job, {}),
            objects=objects.get(job, {}),
            cache=sample.cache.get(job),
            workers=sample.workers.get(job),
            fuse=fuse.get(job, {}),
        )
        for job in jobs
    }


def links_by_job(
    links: Mapping[ObjectKey, LinkState], cgroups: Iterable[Cgroup], jobs: Iterable[Job]
) -> dict[ObjectKey, LinkState]:
    """Link states by job: a socket belongs to the innermost job above the cgroup that it was made in; others go."""
    paths = {one.id: one.path for one in cgroups}
    owners = {job.path: job.id for job in jobs}
    found: dict[ObjectKey, list[LinkState]] = defaultdict(list)
    for key, state in links.items():
        path = paths.get(key.cgroup_id, "")
        while path and path not in owners:
            path = path.rpartition("/")[0]
        if path:
            found[ObjectKey(owners[path], key.endpoint)].append(state)
    return {key: _joined(states) for key, states in found.items()}


class JobLinks:
    """`links_by_job`, worked out again where something changed: links change every few seconds, a pass comes in 0.1."""

    def __init__(self) -> None:
        self._told: Mapping[ObjectKey, LinkState] = {}
        self._found: dict[ObjectKey, LinkState] = {}

    def forget(self) -> None:
        """The cgroups or the jobs may be others now."""
        self._told = {}

    def of(
        self, links: Mapping[ObjectKey, LinkState], cgroups: Iterable[Cgroup], jobs: Iterable[Job]
    ) -> dict[ObjectKey, LinkState]:
        """See `links_by_job`."""
        if links != self._told:
            self._told, self._found = links, links_by_job(links, cgroups, jobs)
        return self._found


def _joined(states: Sequence[LinkState]) -> LinkState:
    """Of the containers of one job at one endpoint: the round trip is the mean over connections."""
    retransmits = sum(one.retransmits for one in states)
    counts = [one.connections for one in states if one.connections is not None]
    if len(counts) < len(states):
        return LinkState(None, None, retransmits)
    total = sum((one.connections or 0) * (one.round_trip_ns or 0) for one in states)
    return LinkState(sum(counts), total // sum(counts) if sum(counts) else None, retransmits)


def preferred_streams(streams: Sequence[StreamCounters]) -> tuple[StreamCounters, ...]:
    """A loop that tells its own state is believed; what is inferred of the same job besides would count twice.

    A job of which only validation tells trains unheard: what is inferred of that counts.
    """
    told = tuple(stream for stream in streams if stream.source == "hint")
    return told if any(not stream.validation for stream in told) else tuple(streams)


def managed_bytes(
    blocks: Mapping[BlockKey, BlockCounters], jobs: Mapping[JobId, Job]
) -> dict[str, dict[tuple[JobId, str], int]]:
    """Cumulative bytes by device, then by (job, op)."""
    result: dict[str, dict[tuple[JobId, str], int]] = defaultdict(dict)
    for key, counters in blocks.items():
        if key.cgroup_id in jobs:
            result[key.device][key.cgroup_id, key.op] = counters.bytes
    return result


class NicPackets:
    """Packets of all interfaces since boot; read once a second, since netlink costs milliseconds, and drawn on between.

    Without that, rates taken ten times a second would be nothing but spikes.
    """

    def __init__(self, read: Callable[[], Mapping[str, int]]) -> None:
        self._read = read
        self._known: tuple[int, int] | None = None
        self._per_ns = 0.0

    def at(self, now_ns: int) -> int | None:
        """The count at this moment; None where netlink cannot be asked."""
        if self._known is None or now_ns - self._known[0] >= PACKETS_EVERY_NS:
            try:
                packets = sum(self._read().values())
            except OSError:
                self._known = None
                return None
            if self._known is not None:
                self._per_ns = max(0, packets - self._known[1]) / (now_ns - self._known[0])
            self._known = (now_ns, packets)
        at_ns, packets = self._known
        return packets + int(self._per_ns * (now_ns - at_ns))


class UnmanagedTraffic:
    """What cgroups that match no rule use of each device: the device's own counters less those of the jobs."""

    def __init__(self) -> None:
        self._time_ns: int | None = None
        self._totals: Mapping[str, tuple[int, int]] = {}
        self._managed: Mapping[str, Mapping[tuple[JobId, str], int]] = {}
        self._shares: dict[str, float] = {}

    def update(
        self,
        now_ns: int,
        totals: Mapping[str, tuple[int, int]],
        managed: Mapping[str, Mapping[tuple[JobId, str], int]],
        devices: Mapping[str, DeviceInfo],
    ) -> Mapping[str, float]:
        """Shares of capacity by device; `totals` holds (read, write) bytes since boot, `managed` those by job."""
        if self._time_ns is not None and now_ns > self._time_ns:
            dt = (now_ns - self._time_ns) / 1e9
            weight = 1.0 - exp(-dt / UNMANAGED_SECONDS)
            for device, info in devices.items():
                if info.capacity is not None and device in totals and device in self._totals:
                    share = self._share(device, info.capacity, totals[device], managed.get(device, {}), dt)
                    old = self._shares.get(device, 0.0)
                    self._shares[device] = old + weight * (share - old)
        self._time_ns, self._totals, self._managed = now_ns, totals, managed
        return self._shares

    def _share(
        self,
        device: str,
        capacity: Capacity,
        total: tuple[int, int],
        managed: Mapping[tuple[JobId, str], int],
        dt: float,
    ) -> float:
        before = self._managed.get(device, {})
        ours = {"read": 0, "write": 0}
        for (job, op), count in managed.items():
            ours[op] += max(0, count - before.get((job, op), 0))
        read = total[0] - self._totals[device][0] - ours["read"]
        write = total[1] - self._totals[device][1] - ours["write"]
        return max(0.0, read / dt / capacity.rbps) + max(0.0, write / dt / capacity.wbps)
