"""Where things stand, and a report of the control loop in which every metric has a value."""

from dataclasses import replace
from pathlib import Path

from agent.types import (
    Capacity,
    Cause,
    Decision,
    DeviceInfo,
    DeviceSignals,
    DeviceView,
    Diagnosis,
    Entitlement,
    Health,
    Job,
    JobReport,
    Level,
    Loan,
    Medium,
    Mended,
    Need,
    PidTerms,
    PoolState,
    Quota,
    Rearranged,
    RearrangeReport,
    Signals,
    TickReport,
)
from bpf.samples import (
    HISTOGRAM_BUCKETS,
    BlockCounters,
    BlockKey,
    FuseCounters,
    FuseKey,
    LinkState,
    NfsCounters,
    NfsKey,
    ObjectCounters,
    ObjectKey,
    ProbeState,
    ProbeStatus,
    Sample,
)

SOURCE = Path(__file__).resolve().parents[3]
PACKAGING = SOURCE / "packaging"
FIXTURES = Path(__file__).parent / "fixtures"

SSD, HDD = "259:0", "8:0"
DEVICES = {SSD: ("nvme0n1", Medium.SSD), HDD: ("sda", Medium.HDD)}
JOBS = {
    11: ("resnet", "ml", "resnet-0", 34.0, Level.DANGER, Cause.DEVICE_CONTENTION),
    12: ("bert", "nlp", "bert-0", 88.0, Level.HEALTHY, Cause.NONE),
}


def busy_report(step: int = 1, at: float = 1_700_000_000.0) -> TickReport:
    """The report of pass `step` (counters grow with it) of a node with two jobs on two devices, at Unix time `at`."""
    jobs = {id_: _job(id_, step) for id_ in JOBS}
    slots = [(id_, device) for id_ in JOBS for device in DEVICES]
    loan = Loan(11, SSD, 0.1, 0.0, 2.0, step + 3)
    return TickReport(
        time=float(step),
        wall_time=at,
        mode="enforce",
        policy="adaptive",
        jobs=jobs,
        devices={device: _device(device) for device in DEVICES},
        decision=Decision(
            quotas={slot: Quota(0.3, "fair share") for slot in slots},
            entitlements={slot: Entitlement(0.3, 0.1) for slot in slots},
            pools={device: PoolState(0.15, 0.1, 0.6, (loan,)) for device in DEVICES},
            gate_open=dict.fromkeys(DEVICES, True),
            pid={slot: PidTerms(12.0, 0.06, 0.01, -0.02, 0.05) for slot in slots},
        ),
        applied=dict.fromkeys(slots, (400000000, None, None, None)),
        writes={"written": 4 * step, "unchanged": 9 * step, "error": step},
        conflicts=step,
        restores=step,
        sample=_sample(step),
        probes=(
            ProbeStatus("block", ProbeState.ATTACHED, lost_events=step, map_fill_ratio=0.2),
            ProbeStatus("dataloader", ProbeState.DEGRADED, "no uprobe", lost_events=0, map_fill_ratio=0.1),
            ProbeStatus("hint", ProbeState.ATTACHED, counts=(("received", 100 * step), ("unmanaged", step))),
        ),
        ticks=10 * step,
        duration_seconds=0.004,
        seconds_total=0.04 * step,
        rearrange=RearrangeReport(
            {(11, HDD): Rearranged("running", "it starves", 10**8 * step, 0.9, 0.02)},
            {"direct": step},
            {"no_gain": 1},
            mended={(11, HDD): Mended(True, "it starves", step, 10**8 * step, 7, 0.02)},
            mend_skips={"open": step},
            mend_stops={"done": 1},
        ),
    )


def _job(id_: int, step: int) -> JobReport:
    name, namespace, pod, score, level, cause = JOBS[id_]
    signals = Signals(
        job=id_, time=float(step), dt=0.1, iteration_source="dataloader", iterations=20 * step,
        iterations_since_start=20 * step, new_iterations=1, iteration_seconds=0.5, compute_seconds=0.3,
        wait_seconds=0.2, wait_seconds_total=2.0 * step, blocked_seconds=0.0, starvation_events=step, queue_depth=2.0,
        queue_capacity=8.0, queue_takeable=2.0, next_batch_bytes=64e6, cache_hit_ratio=0.4, remote_queueing_ratio=0.1,
        devices={device: _traffic(device) for device in DEVICES},
    )  # fmt: skip
    return JobReport(
        job=Job(id_, name, f"/kubepods.slice/{pod}", training=True, namespace=namespace, pod=pod),
        signals=signals,
        health=Health(score, level, {"queue": score}, 0.9),
        diagnosis=Diagnosis(cause, {"queueing": 0.7}, 0.8, actionable=True),
        need=dict.fromkeys(DEVICES, Need(500e6, 2000.0)),
        starvation_by_cause={cause: step},
    )


def _traffic(device: str) -> DeviceSignals:
    return DeviceSignals(
        device=device, medium=DEVICES[device][1], read_bytes_per_second=4e8, write_bytes_per_second=1e6,
        read_requests_per_second=900.0, write_requests_per_second=4.0, latency_seconds=0.002, latency_cv=0.5,
        reference_seconds=0.001, throttle_ratio=0.1, throttle_wait_seconds=0.01, queueing_ratio=0.3, in_flight=8,
        access_share=0.5,
    )  # fmt: skip


def _device(device: str) -> DeviceView:
    name, medium = DEVICES[device]
    return DeviceView(DeviceInfo(device, name, medium, Capacity(2e9, 1e9, 5e5, 2e5)), unmanaged_share=0.05)


def _sample(step: int) -> Sample:
    histogram = tuple(step if 5 <= bucket <= 14 else 0 for bucket in range(HISTOGRAM_BUCKETS))
    block = BlockCounters(10 * step, 40_000_000 * step, 10**7 * step, 10**4 * step, 4, histogram, 10**6 * step)
    rpc = NfsCounters(10 * step, 10**6 * step, 10**6 * step, 10**6 * step, 10**7 * step, 10**4 * step, histogram)
    request = ObjectCounters(10 * step, 10**6 * step, 10**6 * step, 10**7 * step, 10**4 * step, 1, histogram)
    return Sample(
        time_ns=step * 10**9,
        blocks={BlockKey(job, device, op): block for job in JOBS for device in DEVICES for op in ("read", "write")},
        nfs={NfsKey(job, "server:/data", op): rpc for job in JOBS for op in ("read", "write")},
        objects={ObjectKey(job, "192.0.2.1:443"): replace(request, bytes=10**6 * step) for job in JOBS},
        fuse={FuseKey(job, "/mnt/s3", "other"): FuseCounters(step, 0, step, 1, histogram) for job in JOBS},
        links={ObjectKey(job, "192.0.2.1:443"): LinkState(4, 250_000, step) for job in JOBS},
        interfaces={"eth0": 1000 * step, "other": 10 * step},
    )
