"""Labelled workloads: scenarios built to have exactly one cause of starvation, with parameters drawn at random. Pure.

The drive is a small one (`DRIVE`), so that an emulated CPU is never what limits a job that is not meant to be limited
by it. Parameters depend on seed, label and number alone: the same run can be made again.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec

from agent.config import ByteRate
from agent.simulate.scenario import ByteSize, Device, Job, Neighbour, Scenario

MIB = 1 << 20
LABELS = (
    "cold_start",
    "cache_thrash",
    "remote_congestion",
    "device_contention",
    "self_throttled",
    "cpu_bound",
    "none",
)
SUBJECT = "subject"
"""The job whose cause is asked for; in a run with two equal jobs the first."""

DRIVE = Device(name="ssd0", kind="ssd", size=ByteSize(1024 * MIB), bytes_per_second=ByteRate(30 * MIB), iops=1000)
MOUNT = "store0"
RESTART_SECONDS = 1.0
"""How long the trainer is away between two lives."""


@dataclass(frozen=True, slots=True)
class Labelled:
    """One run: what happens, and from when on (seconds of the scenario) its one cause is at work.

    `own_rate` and `own_requests` (bytes and requests per second) cap the subject itself from `begin` on;
    `shared_memory` (bytes) is what all jobs together may hold; `drop_caches` (seconds) empties the page cache then.
    `parameters` is what was drawn, for the record.
    """

    label: str
    number: int
    scenario: Scenario
    begin: float
    own_rate: int | None = None
    own_requests: int | None = None
    shared_memory: int | None = None
    drop_caches: float | None = None
    parameters: Mapping[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """A file name of its own."""
        return f"{self.label}-{self.number}"


def labelled(label: str, number: int, seed: int) -> Labelled:
    """The run of this number; KeyError for a label that is none."""
    return _BUILD[label](random.Random(f"{seed} {label} {number}"), number)


def _job(chance: random.Random, need: float, **given: Any) -> tuple[Job, dict[str, Any]]:
    """A job that needs `need` bytes per second, and its parameters; `given` overrides what would be drawn."""
    compute_ms = round(given.pop("compute_ms", chance.uniform(60, 140)))
    read_size = given.pop("read_size", chance.choice((64, 128, 256)) << 10)
    drawn = {
        "read_size": ByteSize(read_size),
        "batch_reads": max(1, round(need * compute_ms / 1e3 / read_size)),
        "compute_ms": float(compute_ms),
        "workers": chance.randint(2, 5),
        "queue_batches": chance.randint(4, 10),
        "pattern": chance.choice(("random", "sequential")),
        "cold_factor": 1,
        **given,
    }
    name = drawn.pop("name", SUBJECT)
    device = drawn.pop("device", DRIVE.name)
    shown = {f"{name}_{key}": value for key, value in drawn.items()}
    return Job(name=name, device=device, **drawn), {**shown, f"{name}_need_mib_per_second": round(need / MIB, 1)}


def _scenario(
    label: str, seconds: float, jobs: tuple[Job, ...], others: tuple[Neighbour, ...] = (), mount: Device | None = None
) -> Scenario:
    devices = (DRIVE,) if mount is None else (DRIVE, mount)
    return Scenario(
        name=label.replace("_", "-"),
        description="made to starve for one cause",
        duration_seconds=seconds,
        devices=devices,
        jobs=jobs,
        best_effort=others,
    )


def _modest(chance: random.Random, count: int) -> tuple[tuple[Job, ...], dict[str, Any]]:
    """Jobs that leave the drive alone, as company."""
    jobs: list[Job] = []
    shown: dict[str, Any] = {}
    for index in range(count):
        job, drawn = _job(chance, chance.uniform(0.04, 0.08) * DRIVE.bytes_per_second, name=f"peer{index}")
        jobs.append(job)
        shown |= drawn
    return tuple(jobs), shown


def _none(chance: random.Random, number: int) -> Labelled:
    """Enough of everything: by itself or with company, read directly or out of the page cache."""
    cached = chance.random() < 0.3
    data = {"access": "filesystem", "data": ByteSize(chance.randint(24, 48) * MIB)} if cached else {}
    job, shown = _job(chance, chance.uniform(0.10, 0.35) * DRIVE.bytes_per_second, **data)
    peers, more = _modest(chance, chance.randint(0, 2))
    scenario = _scenario("none", 14.0, (job, *peers))
    return Labelled("none", number, scenario, 5.0, parameters={**shown, **more})


def _device_contention(chance: random.Random, number: int) -> Labelled:
    """A job that has enough, until a neighbour without measure comes."""
    begin = round(chance.uniform(3.5, 5.0), 1)
    job, shown = _job(chance, chance.uniform(0.35, 0.60) * DRIVE.bytes_per_second)
    peers, more = _modest(chance, chance.randint(0, 1))
    drawn: dict[str, Any] = {
        "threads": chance.randint(10, 32),
        "kind": chance.choice(("reader", "reader", "writer")),
        "pattern": chance.choice(("random", "sequential")),
        "read_size": ByteSize(chance.choice((128, 256)) << 10),
    }
    scan = Neighbour(name="scan", device=DRIVE.name, start_seconds=begin, **drawn)
    scenario = _scenario("device_contention", begin + 9.0, (job, *peers), (scan,))
    shown |= more | {f"scan_{key}": value for key, value in drawn.items()}
    return Labelled("device_contention", number, scenario, begin, parameters=shown)


def _self_throttled(chance: random.Random, number: int) -> Labelled:
    """A job that has enough, until somebody caps it below its need."""
    begin = round(chance.uniform(3.5, 5.0), 1)
    need, part = chance.uniform(0.20, 0.50) * DRIVE.bytes_per_second, chance.uniform(0.40, 0.70)
    job, shown = _job(chance, need, queue_batches=chance.randint(3, 6))  # empty within 3 s
    peers, more = _modest(chance, chance.randint(0, 1))
    by_requests = chance.random() < 0.3
    rate = None if by_requests else round(need * part)
    requests = max(2, round(need * part / job.read_size)) if by_requests else None
    scenario = _scenario("self_throttled", begin + 9.0, (job, *peers))
    shown |= more | {"cap_part_of_need": round(part, 2), "cap_counts_requests": by_requests}
    return Labelled("self_throttled", number, scenario, begin, rate, requests, parameters=shown)


def _cpu_bound(chance: random.Random, number: int) -> Labelled:
    """Preparation that takes longer than the step, by one worker or two, over storage that idles."""
    workers, times = chance.randint(1, 2), chance.uniform(1.4, 2.2)
    compute_ms = round(chance.uniform(60, 120))
    prepare = {"prepare_cpu_ms": float(round(compute_ms * times * workers))}
    job, shown = _job(
        chance, chance.uniform(0.05, 0.20) * DRIVE.bytes_per_second, workers=workers, compute_ms=compute_ms, **prepare
    )
    scenario = _scenario("cpu_bound", 12.0, (job,))
    return Labelled("cpu_bound", number, scenario, 3.0, parameters=shown)


def _remote_congestion(chance: random.Random, number: int) -> Labelled:
    """A mount behind a link that is too small, with or without somebody else on it."""
    rate, times = chance.uniform(5, 11) * MIB, chance.uniform(1.5, 2.5)
    crowded = chance.random() < 0.5
    remote = {
        "device": MOUNT,
        "access": "filesystem",
        "data": ByteSize(192 * MIB),
        "pattern": "sequential",
        "read_size": 128 << 10,
    }
    need = times * rate
    job, shown = _job(chance, need * (0.6 if crowded else 1.0), **remote)
    jobs: tuple[Job, ...] = (job,)
    if crowded:
        other, more = _job(chance, need * 0.4, name="peer0", **remote)
        jobs, shown = (job, other), shown | more
    mount = Device(
        name=MOUNT, kind="nfs", bytes_per_second=ByteRate(int(rate)), round_trip_ms=round(chance.uniform(0.5, 4.0), 1)
    )
    shown |= {"link_mib_per_second": round(rate / MIB, 1), "round_trip_ms": mount.round_trip_ms}
    scenario = _scenario("remote_congestion", 13.0, jobs, mount=mount)
    return Labelled("remote_congestion", number, scenario, 4.0, parameters=shown)


def _cache_thrash(chance: random.Random, number: int) -> Labelled:
    """Two equal jobs that read again and again what does not fit into the memory that they share.

    Equal, or the stronger one takes the cache, and the device with it: then one thrashes no more, and the other has a
    second cause.
    """
    data = ByteSize(chance.randint(80, 128) * MIB)
    memory = round(2 * data * chance.uniform(0.40, 0.55))
    job, shown = _job(
        chance,
        chance.uniform(1.6, 2.0) * DRIVE.bytes_per_second,
        access="filesystem",
        data=data,
        pattern="random",
        read_size=chance.choice((64, 128)) << 10,
    )
    jobs = (job, msgspec.structs.replace(job, name="peer0"))
    shown |= {"shared_memory_mib": memory // MIB}
    scenario = _scenario("cache_thrash", 18.0, jobs)  # the cache is full well before 9 s
    return Labelled("cache_thrash", number, scenario, 9.0, shared_memory=memory, parameters=shown)


def _cold_start(chance: random.Random, number: int) -> Labelled:
    """A job that lives on its page cache is started again after that was dropped."""
    compute_ms = round(chance.uniform(60, 110))
    need = chance.uniform(1.1, 1.6) * DRIVE.bytes_per_second
    batches = chance.randint(8, 13)
    data = ByteSize(int(need * compute_ms / 1e3 * batches) // MIB * MIB)
    restart = round(chance.uniform(6.5, 8.0), 1)
    job, shown = _job(
        chance,
        need,
        compute_ms=compute_ms,
        access="filesystem",
        data=data,
        pattern="sequential",
        read_size=256 << 10,
        queue_batches=chance.randint(3, 6),
        restarts_seconds=(restart,),
    )
    scenario = _scenario("cold_start", restart + RESTART_SECONDS + 5.0, (job,))
    begin = restart + RESTART_SECONDS
    return Labelled("cold_start", number, scenario, begin, drop_caches=restart + 0.3, parameters=shown)


_BUILD = {
    "cold_start": _cold_start,
    "cache_thrash": _cache_thrash,
    "remote_congestion": _remote_congestion,
    "device_contention": _device_contention,
    "self_throttled": _self_throttled,
    "cpu_bound": _cpu_bound,
    "none": _none,
}
