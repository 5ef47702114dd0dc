"""One pass over a recording: what the page shows, in bounded memory. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from math import log10
from typing import Any

from agent.recording.identity import Identities
from agent.recording.reader import Moment
from agent.report.bins import Bins
from agent.types import JobId

GAP_SECONDS = 5.0
"""A longer pause between two passes begins a new phase."""


class Waits:
    """Waits per iteration by size, in steps of 5 %: enough for a quantile."""

    def __init__(self) -> None:
        self.count = 0
        self.total = 0.0
        self._sizes: Counter[int] = Counter()

    def add(self, seconds: float) -> None:
        """Count one wait."""
        self.count += 1
        self.total += seconds
        self._sizes[round(log10(max(seconds, 1e-6)) / log10(1.05))] += 1

    @property
    def mean(self) -> float | None:
        """Seconds."""
        return self.total / self.count if self.count else None

    def quantile(self, part: float) -> float | None:
        """The wait that `part` of the iterations do not exceed, seconds."""
        left = part * self.count
        for size in sorted(self._sizes):
            left -= self._sizes[size]
            if left <= 1e-9:
                return float(1.05**size) if size > round(log10(1e-6) / log10(1.05)) else 0.0
        return None


@dataclass
class JobPhase:
    """One job in one kind of phase."""

    seconds: float = 0.0
    waits: Waits = field(default_factory=Waits)
    lost_seconds: float = 0.0
    starved: Counter[str] = field(default_factory=Counter)
    latency: dict[str, Counter[int]] = field(default_factory=dict)


@dataclass
class JobDevice:
    """One job on one device over time; bytes per second."""

    read: Bins = field(default_factory=Bins)
    need: Bins = field(default_factory=Bins)
    cap: Bins = field(default_factory=Bins)
    entitled: Bins = field(default_factory=Bins)
    loan: Bins = field(default_factory=Bins)


@dataclass
class JobStory:
    """One job over time; waits in seconds."""

    name: str
    training: bool
    wait: Bins = field(default_factory=Bins)
    score: Bins = field(default_factory=Bins)
    depth: Bins = field(default_factory=Bins)
    cause: Bins = field(default_factory=Bins)
    iterations: int = 0
    phases: dict[str, JobPhase] = field(default_factory=dict)
    devices: dict[str, JobDevice] = field(default_factory=dict)

    @property
    def lost_seconds(self) -> float:
        """Time that the loop waited."""
        return sum(phase.lost_seconds for phase in self.phases.values())


@dataclass
class DeviceStory:
    """One device over time: capacity in bytes per second, the rest as shares."""

    name: str
    medium: str
    capacity: float | None
    lent: Bins = field(default_factory=Bins)
    pool: float | None = None
    gate: Bins = field(default_factory=Bins)
    unmanaged: Bins = field(default_factory=Bins)


@dataclass
class Phase:
    """A stretch of time in one mode under one policy, in seconds since the start."""

    begin: float
    end: float
    label: str


@dataclass
class Story:
    """All that the page tells; `start` is Unix time, `seen` has a value wherever there was a pass.

    `policy` is empty where it changed; it then stands in the labels of the phases.
    """

    start: float = 0.0
    seconds: float = 0.0
    passes: int = 0
    software: str = ""
    policy: str = ""
    phases: list[Phase] = field(default_factory=list)
    jobs: dict[JobId, JobStory] = field(default_factory=dict)
    devices: dict[str, DeviceStory] = field(default_factory=dict)
    writes: dict[str, int] = field(default_factory=dict)
    notes: Counter[str] = field(default_factory=Counter)
    seen: Bins = field(default_factory=Bins)

    @property
    def labels(self) -> list[str]:
        """The kinds of phases, in the order in which they came."""
        return list(dict.fromkeys(phase.label for phase in self.phases))


def gather(moments: Iterable[Moment]) -> Story:
    """Read every pass once."""
    story = Story()
    memory = _Memory()
    for moment in moments:
        if not story.passes:
            story.start, story.software = moment.wall, moment.segment.software
        story.passes += 1
        now = max(moment.wall - story.start, story.seconds)
        _phase(story, moment, now)
        story.seconds = now
        story.seen.add(now, 1.0)
        _devices(story, moment, now)
        for job in moment.jobs:
            number = memory.identities.of(job, moment.jobs)
            if number not in story.jobs:
                story.jobs[number] = JobStory(job.name, job.training)
            _job(story.jobs[number], story, moment, job.id, now, memory)
        story.notes.update({str(value) for path, value in moment.node_outputs.items() if path[0] == "note"})
        story.writes = {str(path[1]): value for path, value in moment.node_outputs.items() if path[0] == "writes"}
    _name_policy_once(story)
    return story


def _name_policy_once(story: Story) -> None:
    """Where the policy was the same all the time, phases are told apart by their mode alone."""
    policies = {label.partition(", ")[2] for label in story.labels}
    if len(policies) != 1:
        return
    (story.policy,) = policies
    for phase in story.phases:
        phase.label = phase.label.partition(", ")[0]
    for told in story.jobs.values():
        told.phases = {label.partition(", ")[0]: phase for label, phase in told.phases.items()}


@dataclass
class _Memory:
    """What the pass before said, by job and key."""

    segment: object = None
    values: dict[tuple[Any, ...], Any] = field(default_factory=dict)
    identities: Identities = field(default_factory=Identities)

    def grown(self, key: tuple[Any, ...], value: float, first: float | None = None) -> float:
        """How much a counter has grown since the pass before; 0 where it was reset.

        `first` is what it is taken to have been before it was seen; None: what it is now.
        """
        before = self.values.get(key, first)
        self.values[key] = value
        return 0.0 if before is None else max(0.0, value - before)


def _phase(story: Story, moment: Moment, now: float) -> None:
    label = f"{moment.node_outputs.get(('mode',), '?')}, {moment.node_outputs.get(('policy',), '?')}"
    last = story.phases[-1] if story.phases else None
    if last is None or last.label != label or now - last.end > GAP_SECONDS:
        begin = last.end if last is not None and now - last.end <= GAP_SECONDS else now
        story.phases.append(Phase(begin, now, label))
    else:
        last.end = now


def _devices(story: Story, moment: Moment, now: float) -> None:
    for device, view in moment.devices.items():
        capacity = view.info.capacity
        one = story.devices.setdefault(
            device, DeviceStory(view.info.name, str(view.info.medium), capacity.rbps if capacity else None)
        )
        outputs = moment.node_outputs
        one.pool = outputs.get(("d", device, "pool_capacity_ratio"), one.pool)
        one.lent.add(now, outputs.get(("d", device, "pool_lent_ratio")))
        one.unmanaged.add(now, view.unmanaged_share)
        gate = outputs.get(("d", device, "gate_open"))
        one.gate.add(now, None if gate is None else float(gate))


def _job(told: JobStory, story: Story, moment: Moment, job: JobId, now: float, memory: _Memory) -> None:
    phase = told.phases.setdefault(story.phases[-1].label, JobPhase())
    if memory.segment is not moment.segment:
        memory.segment, memory.values = moment.segment, {}
    first = 0.0 if (job, "time") in memory.values else None  # counters that appear later began at zero
    phase.seconds += memory.grown((job, "time"), now)
    outputs = moment.job_outputs.get(job, {})
    if told.training:
        _waits(told, phase, moment, job, story.start)
        _latencies(phase, moment, job, memory, first)
        for cause, count in ((path[1], value) for path, value in outputs.items() if path[0] == "starved"):
            phase.starved[str(cause)] += int(memory.grown((job, "starved", cause), count, first))
        told.iterations += int(memory.grown((job, "iterations"), outputs.get(("iterations",), 0), 0.0))
        phase.lost_seconds += memory.grown((job, "lost"), outputs.get(("wait_seconds_total",), 0.0))
        told.score.add(now, outputs.get(("score",)) if outputs.get(("confidence",)) else None)
        told.depth.add(now, outputs.get(("queue_depth",)))
        told.cause.note(now, str(outputs.get(("cause",), "none")))
    _slots(told, moment, outputs, now)


def _waits(told: JobStory, phase: JobPhase, moment: Moment, job: JobId, start: float) -> None:
    sample = moment.samples.get(job)
    for stream in sample.streams if sample else ():
        if stream.validation:
            continue
        for event in stream.recent:
            if event.wait_ns is not None:
                phase.waits.add(event.wait_ns / 1e9)
                ago = moment.time - event.time_ns / 1e9
                told.wait.add(moment.wall - ago - start, event.wait_ns / 1e9)


def _latencies(phase: JobPhase, moment: Moment, job: JobId, memory: _Memory, first: float | None) -> None:
    sample = moment.samples.get(job)
    for key, counters in sample.blocks.items() if sample else ():
        if key.op == "read":
            counts = phase.latency.setdefault(key.device, Counter())
            for bucket, count in enumerate(counters.histogram):
                grown = memory.grown((job, key.device, bucket), count, first)
                if grown:
                    counts[bucket] += int(grown)


def _slots(told: JobStory, moment: Moment, outputs: Mapping[tuple[str | int, ...], Any], now: float) -> None:
    for device in {str(path[1]) for path in outputs if path[0] == "d"}:
        here = told.devices.setdefault(device, JobDevice())
        view = moment.devices.get(device)
        capacity = view.info.capacity.rbps if view and view.info.capacity else None
        here.read.add(now, outputs.get(("d", device, "read_bytes_per_second")))
        here.need.add(now, outputs.get(("d", device, "need_bytes_per_second")))
        here.cap.add(now, outputs.get(("d", device, "rbps")))
        loan = outputs.get(("d", device, "loan_ratio"))
        here.loan.add(now, loan)
        regular = outputs.get(("d", device, "regular_ratio"))
        here.entitled.add(now, None if regular is None or capacity is None else (regular + (loan or 0.0)) * capacity)
