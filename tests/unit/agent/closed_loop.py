"""A small closed-loop model of training jobs on one device, for tests of the control core only.

Each job has workers that read one batch at a time, a queue, and a loop that computes; the device is a fluid server:
who wants bandwidth gets a part of it by the number of its outstanding requests, caps hold it back. It is no substitute
for the simulator: it only has to starve, recover and obey caps.
"""

from dataclasses import dataclass, field

from agent.job_sample import JobSample, SignalSettings
from agent.types import Capacity, DeviceInfo, DeviceView, Job, Medium
from bpf.samples import BlockCounters, BlockKey, IterationEvent, StreamCounters

MIB = 1 << 20
NS = 1_000_000_000


@dataclass
class Trainer:
    """One training job (times in seconds, sizes in bytes); `workers` 0 makes it a greedy reader without a loop."""

    id: int
    batch: float = 4 * MIB
    compute: float = 0.1
    depth: int = 8
    workers: int = 4
    device: str = "259:0"
    request: float = 256 * 1024
    cold: int = 0
    training: bool = True
    streams: int = 8
    start: float = 0.0
    stop: float = float("inf")
    seen: bool = True
    bytes: float = 0.0
    requests: float = 0.0
    latency_ns: float = 0.0
    squares: float = 0.0
    throttle_ns: float = 0.0
    queue: int = 0
    progress: list = field(default_factory=list)
    started: int = 0
    taken: int = 0
    busy_until: float = 0.0
    asked_at: float | None = None
    wait: float = 0.0
    waits: list = field(default_factory=list)
    events: list = field(default_factory=list)
    last_ns: int = 0
    rate: float = 0.0

    def job(self) -> Job:
        return Job(self.id, f"job{self.id}", f"/job{self.id}", self.training)

    def size(self, number: int) -> float:
        return self.batch * (4 if number < self.cold else 1)

    def outstanding(self, now: float) -> int:
        if not self.start <= now < self.stop:
            return 0
        if not self.training:
            return self.streams
        while len(self.progress) < self.workers and self.queue + len(self.progress) < self.depth:
            self.progress.append(self.size(self.started))
            self.started += 1
        return len(self.progress)

    def receive(self, now: float, amount: float, seconds: float, throttled: float) -> None:
        """`amount` bytes arrived; each request took `seconds`, of which `throttled` in blk-throttle."""
        self.bytes += amount
        count = amount / self.request
        self.requests += count
        self.latency_ns += count * seconds * 1e9
        self.squares += count * (seconds * 1e6) ** 2 * 1.2
        self.throttle_ns += count * throttled * 1e9
        if not self.training or not self.progress:
            return
        each = amount / len(self.progress)
        self.progress = [left - each for left in self.progress]
        done = sum(left <= 1e-6 for left in self.progress)
        self.progress = [left for left in self.progress if left > 1e-6]
        self.queue += done

    def run_loop(self, now: float) -> None:
        if not self.training or not self.start <= now < self.stop or now < self.busy_until:
            return
        if self.asked_at is None:
            self.asked_at = now
        if self.queue == 0:
            return
        self.queue -= 1
        self.taken += 1
        waited = now - self.asked_at
        self.wait += waited
        self.waits.append((now, waited))
        self.last_ns = int(now * NS)
        self.events.append(IterationEvent(self.last_ns, int(waited * NS), self.queue))
        self.asked_at = None
        self.busy_until = now + self.compute

    def stream(self) -> StreamCounters:
        return StreamCounters(
            self.id,
            f"s{self.id}",
            "dataloader",
            validation=False,
            iterations=self.taken,
            depth=self.queue,
            capacity=self.depth,
            wait_ns=int(self.wait * NS),
            waiting_since_ns=None if self.asked_at is None else int(self.asked_at * NS),
            next_batch_bytes=None,
            last_iteration_ns=self.last_ns,
            recent=tuple(self.events[-64:]),
            grade="S1",
        )

    def sample(self, now: float) -> JobSample:
        counters = BlockCounters(
            int(self.requests), int(self.bytes), int(self.latency_ns), int(self.squares), len(self.progress), (),
            int(self.throttle_ns), 0, int(self.latency_ns - self.throttle_ns),
        )  # fmt: skip
        streams = ()
        if self.training and self.seen and now >= self.start:
            streams = (self.stream(),)
        self.events = []
        blocks = {BlockKey(self.id, self.device, "read"): counters} if self.requests >= 1 else {}
        return JobSample(self.id, int(now * NS), blocks, streams)


@dataclass
class Node:
    """Jobs on devices; `caps` maps (job, device) to a share."""

    jobs: list
    devices: dict = field(
        default_factory=lambda: {
            "259:0": DeviceView(DeviceInfo("259:0", "nvme0n1", Medium.SSD, Capacity(120 * MIB, 120 * MIB, 4000, 4000)))
        }
    )
    base_latency: float = 0.002
    now: float = 0.0
    dt: float = 0.002
    caps: dict = field(default_factory=dict)

    def settings(self) -> SignalSettings:
        return SignalSettings({name: view.info.medium for name, view in self.devices.items()})

    def advance(self, seconds: float) -> None:
        end = self.now + seconds - 1e-9
        while self.now < end:
            self.now += self.dt
            for name, view in self.devices.items():
                self._serve(name, view)
            for job in self.jobs:
                job.run_loop(self.now)

    def _serve(self, name: str, view: DeviceView) -> None:
        capacity = view.info.capacity.rbps
        active = {job.id: (job, job.outstanding(self.now)) for job in self.jobs if job.device == name}
        flight = {job: count for job, (_, count) in active.items() if count}
        limits = {job: self.caps[job, name] * capacity for job in flight if (job, name) in self.caps}
        got = dict.fromkeys(flight, 0.0)
        left, rest = dict(flight), capacity
        while left and rest > 1.0:
            total = sum(left.values())
            bound = [job for job in left if job in limits and limits[job] - got[job] < rest * left[job] / total]
            if not bound:
                for job, count in left.items():
                    got[job] += rest * count / total
                break
            for job in bound:
                rest -= limits[job] - got[job]
                got[job] = limits[job]
                del left[job]
        used = sum(got.values()) / capacity
        deep = sum(count for job, count in flight.items() if job not in limits)
        for job, (one, count) in active.items():
            rate = got.get(job, 0.0)
            one.rate = rate
            if rate <= 0.0 or not count:
                continue
            device = self.base_latency * (1.0 + (deep / 4.0 if used > 0.95 else 0.0))
            felt = max(device, count * one.request / rate)
            throttled = felt - device if job in limits and rate > 0.95 * limits[job] else 0.0
            one.receive(self.now, rate * self.dt, device + throttled, throttled)
