"""The values that flow through the agent: no behaviour beyond what follows from the fields alone.

Flow: Sample -> Signals -> Health, Diagnosis -> (policy) Decision -> Limit lines -> TickReport -> metrics.
Shares are fractions of a device's capacity; times are seconds (monotonic) unless a name says otherwise. What is made
anew for every job in every pass is a named tuple: a frozen dataclass takes four times as long to make.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple

from bpf.samples import ProbeStatus, Sample

make = tuple.__new__
"""`make(Signals, (…))`: a named tuple of *all* its fields in order, in half the time that its own constructor takes.

For what is made for every job in every pass, where this is a tenth of the whole; nothing checks the fields, so
elsewhere call the class.
"""

JobId = int
"""A job is known by the id (inode) of its cgroup, never by its path: paths recycle."""


class Medium(StrEnum):
    """What kind of storage serves a request."""

    SSD = "ssd"
    HDD = "hdd"
    REMOTE = "remote"


class Level(StrEnum):
    """Health levels: healthy >= 60 > tight >= 40 > danger >= 20 > critical (paper, section 3)."""

    HEALTHY = "healthy"
    TIGHT = "tight"
    DANGER = "danger"
    CRITICAL = "critical"


class Cause(StrEnum):
    """Why a job starves: the paper's three, ours, or none."""

    NONE = "none"
    COLD_START = "cold_start"
    CACHE_THRASH = "cache_thrash"
    REMOTE_CONGESTION = "remote_congestion"
    DEVICE_CONTENTION = "device_contention"
    SELF_THROTTLED = "self_throttled"
    CPU_BOUND = "cpu_bound"


@dataclass(frozen=True, slots=True)
class Job:
    """One cgroup under watch: a training job, or a best-effort cgroup (never scored, may be capped)."""

    id: JobId
    name: str
    path: str
    training: bool
    weight: float = 100.0
    namespace: str = ""
    pod: str = ""


@dataclass(frozen=True, slots=True)
class Capacity:
    """What a device can do under the present mix: bytes/s and requests/s, reads and writes."""

    rbps: float
    wbps: float
    riops: float
    wiops: float


@dataclass(frozen=True, slots=True)
class DeviceInfo:
    """A whole device that `io.max` accepts; `capacity` None means observed, never enforced.

    `actuator` is the control file that limits are written to: io.max, io.weight or io.bfq.weight.
    """

    device: str
    name: str
    medium: Medium
    capacity: Capacity | None = None
    actuator: str = "io.max"


class DeviceSignals(NamedTuple):
    """One job on one device between two samples.

    Rates per second; `latency_seconds` is the mean completion latency *without* the wait in blk-throttle, smoothed
    over the last requests, `latency_cv` its coefficient of variation (dimensionless), `reference_seconds` the learned
    normal latency of this job here. `throttle_ratio` is the share of request time spent in blk-throttle (0..1),
    `throttle_wait_seconds` the mean of that wait per request.
    `access_share` is the share of the job's bytes that this device served. Unknown is None.
    """

    device: str
    medium: Medium
    read_bytes_per_second: float
    write_bytes_per_second: float
    read_requests_per_second: float
    write_requests_per_second: float
    latency_seconds: float | None
    latency_cv: float | None
    reference_seconds: float | None
    throttle_ratio: float | None
    throttle_wait_seconds: float | None
    queueing_ratio: float | None
    in_flight: int
    access_share: float


_NO_DEVICES: Mapping[str, DeviceSignals] = {}


class Signals(NamedTuple):
    """One job between two samples: what its slowest training stream and its storage did.

    `iterations` is cumulative; `iterations_since_start` counts from the start or the last resume. `queue_depth` is
    that of the stream with the smallest fraction of its queue; `queue_takeable` how many batches of such a queue the
    loop could take without waiting, fewer where one is missing before others that are ready. `blocked_seconds` > 0
    while the loop stands before an empty queue. `compute_seconds` is the EWMA of the iteration without its wait.
    `next_batch_bytes` is made of what the hint tells of a batch, `hinted_batch_bytes`, and of what batches made storage
    deliver, `read_batch_bytes` (see `agent.forecast`). Ratios are 0..1; unknown is None.
    """

    job: JobId
    time: float
    dt: float
    iteration_source: str
    iterations: int
    iterations_since_start: int
    new_iterations: int
    iteration_seconds: float | None
    compute_seconds: float | None
    wait_seconds: float | None
    wait_seconds_total: float | None
    blocked_seconds: float
    starvation_events: int
    queue_depth: float | None
    queue_capacity: float | None
    queue_takeable: float | None
    next_batch_bytes: float | None
    first_io_latency_seconds: float | None = None
    cache_hit_ratio: float | None = None
    remote_queueing_ratio: float | None = None
    nic_packets_per_second: float | None = None
    cpu_ratio: float | None = None
    devices: Mapping[str, DeviceSignals] = _NO_DEVICES
    hinted_batch_bytes: float | None = None
    read_batch_bytes: float | None = None


class Health(NamedTuple):
    """A score 0..100 with its parts (0..100 each, None where unknown) and the weight of what was known (0..1)."""

    score: float
    level: Level
    parts: Mapping[str, float | None]
    confidence: float


class Diagnosis(NamedTuple):
    """The most likely cause with the numbers it came from; `actionable` is False where local bandwidth cannot help."""

    cause: Cause
    evidence: Mapping[str, float]
    confidence: float
    actionable: bool
    advice: str = ""


class Need(NamedTuple):
    """What a job needs from one device to keep its queue filled: bytes/s and requests/s, forecast plus refill."""

    bytes_per_second: float
    requests_per_second: float


class JobView(NamedTuple):
    """All a policy may know of one training job at one moment. `new_iteration` marks a tick of the job."""

    job: Job
    signals: Signals
    health: Health
    diagnosis: Diagnosis
    need: Mapping[str, Need]
    new_iteration: bool


class NeighbourView(NamedTuple):
    """A best-effort cgroup: what it does on each device; never scored."""

    job: Job
    devices: Mapping[str, DeviceSignals]


@dataclass(frozen=True, slots=True)
class DeviceView:
    """One device with known capacity; `unmanaged_share` is what cgroups that match nothing use of it (0..1)."""

    info: DeviceInfo
    unmanaged_share: float = 0.0


@dataclass(frozen=True, slots=True)
class NodeView:
    """Everything a policy decides from."""

    now: float
    jobs: tuple[JobView, ...]
    neighbours: tuple[NeighbourView, ...]
    devices: Mapping[str, DeviceView]


@dataclass(frozen=True, slots=True)
class Loan:
    """Elastic share lent to a job until its cooldown has run out.

    The cooldown counts the borrower's own iterations (`expires_iteration`) but at least until `expires_at` (monotonic
    seconds); when iterations stop, a wall-clock limit ends the loan all the same.
    """

    job: JobId
    device: str
    share: float
    granted_at: float
    expires_at: float
    expires_iteration: int


class Entitlement(NamedTuple):
    """What a job may use while the gate is open, as shares of the device."""

    regular: float
    loan: float = 0.0

    @property
    def share(self) -> float:
        """Regular share plus loan."""
        return self.regular + self.loan


class Quota(NamedTuple):
    """A cap to be written: shares of each dimension's capacity in force, with the reason in one short phrase."""

    share: float
    why: str
    cut: bool = False


class PidTerms(NamedTuple):
    """The last step of one controller, for metrics and explanations: error in points, output as a relative change."""

    error: float
    proportional: float
    integral: float
    derivative: float
    output: float


class PoolState(NamedTuple):
    """One device's elastic part: capacity and what of it is lent, as shares."""

    capacity: float
    lent: float
    regular: float
    loans: tuple[Loan, ...] = ()


Slot = tuple[JobId, str]
"""(job, device)."""


@dataclass(frozen=True, slots=True)
class Decision:
    """What a policy wants: caps (absent = uncapped), entitlements (absent = none), and how it got there."""

    quotas: Mapping[Slot, Quota]
    entitlements: Mapping[Slot, Entitlement]
    pools: Mapping[str, PoolState]
    gate_open: Mapping[str, bool]
    pid: Mapping[Slot, PidTerms] = field(default_factory=dict)
    rearrange: frozenset[Slot] = frozenset()
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Rearranged:
    """Reading ahead for one job on one disk.

    `state`: idle, running, cooling (it did not pay), would (a dry run). `ahead_bytes` is cumulative; `hit_ratio` (0..1)
    is what the job used of it over the last window, `gain_seconds` what it waits less per iteration; None is unknown.
    """

    state: str
    why: str
    ahead_bytes: int
    hit_ratio: float | None
    gain_seconds: float | None


@dataclass(frozen=True, slots=True)
class Mended:
    """Making the badly fragmented files of one job contiguous: files and bytes moved, files known to be left.

    `gain_seconds` is what the job waits less per iteration than before, None is unknown.
    """

    running: bool
    why: str
    files: int
    bytes: int
    left_files: int
    gain_seconds: float | None


@dataclass(frozen=True, slots=True)
class RearrangeReport:
    """All of it: files left out by reason, ends by cause (both cumulative), and why the helper cannot run, or "".

    What begins with `mend` is about making files contiguous, all else about reading ahead.
    """

    slots: Mapping[Slot, Rearranged] = field(default_factory=dict)
    skips: Mapping[str, int] = field(default_factory=dict)
    stops: Mapping[str, int] = field(default_factory=dict)
    problem: str = ""
    mended: Mapping[Slot, Mended] = field(default_factory=dict)
    mend_skips: Mapping[str, int] = field(default_factory=dict)
    mend_stops: Mapping[str, int] = field(default_factory=dict)
    mend_problem: str = ""


class JobReport(NamedTuple):
    """One job as the last tick saw it."""

    job: Job
    signals: Signals | None
    health: Health | None
    diagnosis: Diagnosis | None
    need: Mapping[str, Need]
    starvation_by_cause: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class TickReport:
    """One pass of the loop: what was seen, decided and written. Metrics are read from it and decide nothing.

    `sample` holds the raw counters of this pass; `applied` the caps in force per slot (rbps, wbps, riops, wiops; None =
    max); `writes` counts control-file writes by result since the start, `seconds_total` the time of all ticks.
    """

    time: float
    wall_time: float
    mode: str
    policy: str
    jobs: Mapping[JobId, JobReport]
    devices: Mapping[str, DeviceView]
    decision: Decision
    applied: Mapping[Slot, tuple[int | None, int | None, int | None, int | None]]
    writes: Mapping[str, int]
    conflicts: int
    restores: int
    sample: Sample
    probes: tuple[ProbeStatus, ...]
    ticks: int
    duration_seconds: float
    seconds_total: float
    job_errors: int = 0
    violations: int = 0
    notes: tuple[str, ...] = ()
    rearrange: RearrangeReport = RearrangeReport()
