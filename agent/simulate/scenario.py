"""Scenarios: what happens on a node, as data, read alike by the simulator and the lab.

A scenario is a TOML file with devices, training jobs and best-effort neighbours. Sizes and rates are texts with a
unit ("256 KiB", "120 MiB") or numbers of bytes (a second). Times count from the start of the scenario.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec

from agent.config import ByteRate
from agent.errors import UsageError
from agent.toml_text import convert, parse_toml, quoted, read_text

DeviceKind = Literal["ssd", "hdd", "nfs"]
Pattern = Literal["random", "sequential"]
Access = Literal["direct", "filesystem"]
Trainer = Literal["plain", "torch"]

MAX_SECONDS = 7 * 86400
"""The longest scenario."""
Seconds = Annotated[float, msgspec.Meta(ge=0, le=MAX_SECONDS)]
Milliseconds = Annotated[float, msgspec.Meta(ge=0, le=3_600_000)]
Count = Annotated[int, msgspec.Meta(ge=1, le=1_000_000)]
Factor = Annotated[int, msgspec.Meta(ge=1, le=100)]
Workers = Annotated[int, msgspec.Meta(ge=1, le=256)]
Name = Annotated[str, msgspec.Meta(pattern=r"^[a-z0-9][a-z0-9_-]{0,19}$")]


class ScenarioError(UsageError):
    """A scenario that cannot be used; the message names the file, the key and the value."""


class ByteSize(int):
    """A number of bytes; written as a number or as text with a unit: "256 KiB", "1 GB"."""

    __slots__ = ()

    @classmethod
    def parse(cls, value: object) -> ByteSize:
        """Read a number of bytes or a text with a unit."""
        try:
            return cls(ByteRate.parse(value))
        except ValueError:
            raise ValueError(f'{quoted(value)} is no size; write bytes or a text like "256 KiB" or "1 GB"') from None


class _Section(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Base of all sections: frozen, keyword only, unknown keys refused."""


class Device(_Section, frozen=True, kw_only=True):
    """One disk or mount. Of an HDD the rate is that of sequential reads; its seeks follow from `kind`.

    `iops` (requests per second) limits an SSD; `queueing` says whether an HDD reorders its requests. An NFS mount
    is served over a link of `bytes_per_second` with `round_trip_ms`.
    """

    name: Name
    kind: DeviceKind
    size: ByteSize = ByteSize(1 << 30)
    bytes_per_second: ByteRate
    iops: Count = 4000
    queueing: bool = True
    round_trip_ms: Milliseconds = 0.2


class Burst(_Section, frozen=True, kw_only=True):
    """Every `every` batches, `length` of them are `factor` times as large (shard boundaries)."""

    every: Count
    length: Count
    factor: Factor


class Job(_Section, frozen=True, kw_only=True):
    """One training job: workers read batches into a bounded queue, the loop takes one and computes.

    A batch is `batch_reads` reads of `read_size`. The first `cold_batches` after each start are `cold_factor` times as
    large. `prepare_cpu_ms` is worker CPU time per batch. `slow_device` serves the fraction `slow_ratio` of the reads.
    `access = "filesystem"` reads a file of `data` bytes through the page cache, within `memory` where given. A restart
    ends the process and starts it a second later. `hints` says whether the job tells its queue to the agent.
    `trainer = "torch"` is a real PyTorch DataLoader in the lab, which gives no hints; models make no difference.
    """

    name: Name
    trainer: Trainer = "plain"
    device: str
    slow_device: str = ""
    slow_ratio: Annotated[float, msgspec.Meta(ge=0, le=1)] = 0.0
    access: Access = "direct"
    data: ByteSize = ByteSize(128 << 20)
    memory: ByteSize | None = None
    pattern: Pattern = "random"
    batch_reads: Count
    read_size: ByteSize
    workers: Workers = 4
    queue_batches: Count = 8
    compute_ms: Milliseconds
    prepare_cpu_ms: Milliseconds = 0.0
    burst: Burst | None = None
    cold_batches: Annotated[int, msgspec.Meta(ge=0)] = 10
    cold_factor: Factor = 4
    start_seconds: Seconds = 0.0
    stop_seconds: Seconds | None = None
    restarts_seconds: tuple[Seconds, ...] = ()
    hints: bool = True

    def batch_factor(self, batch: int) -> int:
        """Return how many times its normal size the batch with this number (0 = first since the start) has."""
        if batch < self.cold_batches:
            return self.cold_factor
        if self.burst and batch % self.burst.every < self.burst.length:
            return self.burst.factor
        return 1

    @property
    def need_bytes_per_second(self) -> float:
        """What keeps the loop fed between cold start and bursts; infinite for a job that does not compute."""
        per_batch = float(self.batch_reads * self.read_size)
        return per_batch / (self.compute_ms / 1e3) if self.compute_ms else float("inf")


class Neighbour(_Section, frozen=True, kw_only=True):
    """A best-effort neighbour: `threads` readers or writers without pause, from start to stop."""

    name: Name
    device: str
    kind: Literal["reader", "writer"] = "reader"
    pattern: Pattern = "sequential"
    threads: Workers = 16
    read_size: ByteSize = ByteSize(256 << 10)
    start_seconds: Seconds = 0.0
    stop_seconds: Seconds | None = None


class Scenario(_Section, frozen=True, kw_only=True):
    """The whole: `name` is also the file's, `duration_seconds` ends every job that has no earlier stop."""

    name: Name
    description: str
    duration_seconds: Annotated[float, msgspec.Meta(gt=0, le=MAX_SECONDS)]
    devices: tuple[Device, ...]
    jobs: tuple[Job, ...]
    best_effort: tuple[Neighbour, ...] = ()

    def device(self, name: str) -> Device:
        """Return the device of that name; `KeyError` where there is none."""
        return next(device for device in self.devices if device.name == name)

    def users_of(self, name: str) -> tuple[str, ...]:
        """Return the names of the jobs and neighbours that use a device, in file order."""
        jobs = tuple(job.name for job in self.jobs if name in (job.device, job.slow_device))
        return jobs + tuple(other.name for other in self.best_effort if other.device == name)


def load_scenario(path: Path) -> Scenario:
    """Read a scenario file; raises `ScenarioError` with one sentence."""
    return parse_scenario(read_text(path, "Scenario", ScenarioError), str(path))


def parse_scenario(text: str, source: str) -> Scenario:
    """Read TOML text; raises `ScenarioError` with one sentence that names the key."""
    scenario = convert(parse_toml(text, source, ScenarioError), Scenario, source, ScenarioError, _decode_hook)
    _check(scenario, source)
    return scenario


def _decode_hook(kind: type, value: Any) -> Any:
    if issubclass(kind, ByteRate | ByteSize):
        return kind.parse(value)
    raise NotImplementedError(kind)


def _check(scenario: Scenario, source: str) -> None:
    """Refuse what types alone cannot say."""
    users: tuple[Job | Neighbour, ...] = (*scenario.jobs, *scenario.best_effort)
    if not users:
        raise ScenarioError(f"{source}: nothing uses a device; add a [[jobs]] or [[best_effort]] section.")
    names = [device.name for device in scenario.devices] + [user.name for user in users]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice:
        raise ScenarioError(f"{source}: the name {twice!r} is used twice; devices, jobs and neighbours share one list.")
    used = [(user.name, user.device) for user in users]
    used += [(job.name, job.slow_device) for job in scenario.jobs if job.slow_device]
    devices = {device.name: device for device in scenario.devices}
    for name, device in used:
        if device not in devices:
            known = ", ".join(devices) or "declared; add a [[devices]] section"
            raise ScenarioError(f"{source}: {name!r} uses device {device!r}, but the devices are {known}.")
    for user in users:
        _check_user(user, devices[user.device], source)
    for job in scenario.jobs:
        _check_job(job, devices[job.device], source)


def _check_user(user: Job | Neighbour, device: Device, source: str) -> None:
    """Reads that the device can do, at times that exist."""
    if user.read_size % 4096:
        raise ScenarioError(f"{source}: read_size {int(user.read_size)} of {user.name!r} is no multiple of 4096.")
    if user.read_size > device.size:
        raise ScenarioError(
            f"{source}: read_size {int(user.read_size)} of {user.name!r} is more than the {int(device.size)} bytes of "
            f"{device.name!r}; read less at once."
        )
    if user.stop_seconds is not None and user.stop_seconds <= user.start_seconds:
        raise ScenarioError(
            f"{source}: stop_seconds {user.stop_seconds:g} of {user.name!r} is not after its start_seconds "
            f"{user.start_seconds:g}; correct one of them."
        )


def _check_job(job: Job, device: Device, source: str) -> None:
    """Keys of a training job that go together."""
    if bool(job.slow_device) != bool(job.slow_ratio):
        raise ScenarioError(f"{source}: job {job.name!r} needs both slow_device and slow_ratio, or neither.")
    if job.burst and job.burst.length > job.burst.every:
        raise ScenarioError(
            f"{source}: job {job.name!r} has a burst of length {job.burst.length} every {job.burst.every} batches; "
            "make it shorter than what it repeats after."
        )
    if job.trainer == "torch" and (job.hints or job.slow_device or job.burst or job.prepare_cpu_ms):
        raise ScenarioError(
            f"{source}: job {job.name!r} is trained by torch; write hints = false, and no slow_device, burst or "
            "prepare_cpu_ms."
        )
    if job.access == "direct" and device.kind == "nfs":
        raise ScenarioError(f'{source}: job {job.name!r} reads a mount; write access = "filesystem".')
