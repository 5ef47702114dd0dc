"""A made-up node's hour in miniature: reports and samples as the loop makes them, for recordings, `top` and the page.

Three training jobs on an NVMe drive; a greedy scan of a batch queue comes and goes. The same pure core as in production
decides; in the second half its caps are obeyed.
"""

from dataclasses import replace
from math import log2

from agent.config import Config
from agent.core import Core, CoreSettings
from agent.policies.base import PolicySettings, make_policy
from agent.recording import Recorder
from agent.types import Capacity, DeviceInfo, DeviceView, Job, Medium, TickReport
from bpf.samples import HISTOGRAM_BUCKETS, BlockKey, ProbeState, ProbeStatus, merge_samples
from tests.unit.agent.closed_loop import MIB, Node, Trainer

DISK = "259:0"
START_UNIX = 1_764_500_000.0
INTERVAL = 0.1
NAMES = {11: "resnet50", 12: "bert-large", 13: "clip", 90: "nightly-scan"}


def node(seconds):
    """Jobs and neighbours; the scan runs in the middle of each half."""
    capacity = Capacity(120 * MIB, 120 * MIB, 4000, 4000)
    scans = [
        Trainer(90, training=False, streams=24, start=0.1 * seconds, stop=0.45 * seconds),
        Trainer(91, training=False, streams=24, start=0.6 * seconds, stop=0.9 * seconds),
    ]
    return Node(
        [
            Trainer(11, batch=4 * MIB, compute=0.1),
            Trainer(12, batch=1 * MIB, compute=0.2),
            Trainer(13, batch=6 * MIB, compute=0.25, start=0.2 * seconds, cold=6),
            *scans,
        ],
        {DISK: DeviceView(DeviceInfo(DISK, "nvme0n1", Medium.SSD, capacity))},
    )


def story(seconds=40.0):
    """Yield (report, samples by job), one per pass; enforcing from the half on."""
    made = node(seconds)
    core = Core(make_policy("adaptive", PolicySettings()), CoreSettings(signals=made.settings()))
    writes = 0
    histograms = {}
    for tick in range(1, int(seconds / INTERVAL) + 1):
        made.advance(INTERVAL)
        enforcing = tick * INTERVAL > seconds / 2
        present = [one for one in made.jobs if one.start <= made.now < one.stop]
        jobs = {one.id: _job(one) for one in present}
        samples = {one.id: _with_histogram(one.sample(made.now), histograms) for one in present}
        result = core.step(made.now, samples, jobs.values(), made.devices, enforced=enforcing)
        made.caps = {slot: quota.share for slot, quota in result.decision.quotas.items()} if enforcing else {}
        writes += len(made.caps)
        yield (
            TickReport(
                time=made.now,
                wall_time=START_UNIX + made.now,
                mode="enforce" if enforcing else "observe",
                policy="adaptive",
                jobs=result.reports,
                devices=made.devices,
                decision=result.decision,
                applied={slot: (int(share * 120 * MIB), None, None, None) for slot, share in made.caps.items()},
                writes={"written": writes},
                conflicts=0,
                restores=0,
                sample=merge_samples(int(made.now * 1e9), ()),
                probes=(
                    ProbeStatus("block", ProbeState.ATTACHED, tier="fentry"),
                    ProbeStatus("nfs", ProbeState.UNAVAILABLE, why="sunrpc is not loaded"),
                ),
                ticks=tick,
                duration_seconds=0.002,
                seconds_total=0.002 * tick,
            ),
            samples,
        )


def record_twice(path, told, shift, again):
    """Record the story (report, samples) and once more `shift` seconds later, job 11 then being number `again`."""
    for later, number in ((0.0, 11), (shift, again)):
        renamed = {11: number}
        recorder = Recorder(path, Config())
        for report, samples in told:
            jobs = {
                renamed.get(job, job): one._replace(job=replace(one.job, id=renamed.get(job, job)))
                for job, one in report.jobs.items()
            }
            moved = replace(report, wall_time=report.wall_time + later, jobs=jobs)
            recorder.add(moved, {renamed.get(job, job): sample for job, sample in samples.items()})
        recorder.close()


def _job(trainer):
    return Job(trainer.id, NAMES.get(trainer.id, "nightly-scan"), f"/train.slice/{trainer.id}", trainer.training)


def _with_histogram(sample, histograms):
    """The closed loop keeps no histogram: put each pass's requests at their mean latency."""
    blocks = {}
    for key, counters in sample.blocks.items():
        before, counts = histograms.get(key, (None, [0] * HISTOGRAM_BUCKETS))
        fresh = counters.requests - (before.requests if before else 0)
        if fresh > 0:
            spent = counters.latency_ns - (before.latency_ns if before else 0)
            counts[min(HISTOGRAM_BUCKETS - 1, max(0, int(log2(max(spent / fresh / 1000, 1.0)))))] += fresh
        histograms[key] = (counters, counts)
        blocks[BlockKey(*key)] = replace(counters, histogram=tuple(counts))
    return replace(sample, blocks=blocks)
