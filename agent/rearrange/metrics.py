"""Metric families of reading ahead and of making files contiguous on disks with moving parts."""

from __future__ import annotations

from agent.metric_families import (
    DEVICE_LABELS,
    JOB_LABELS,
    Families,
    add,
    counted,
    labels_of,
    new_counter,
    new_gauge,
    slot_labels,
)
from agent.rearrange.defragment import Leave
from agent.rearrange.pay import MoveStop
from agent.rearrange.stop import Stop
from agent.rearrange.window import Skip
from agent.types import JobId, TickReport


def rearrange_families(report: TickReport) -> Families:
    """Reading ahead: a job has series from its first time on."""
    active = new_gauge(
        "rearrange_active", "1 while the agent reads ahead for the job on the device, else 0.", DEVICE_LABELS
    )
    ahead = new_counter("rearrange_bytes", "Bytes brought into the page cache ahead of the job.", DEVICE_LABELS)
    hits = new_gauge("rearrange_hit_ratio", "What the job used of the bytes read ahead lately, 0 to 1.", DEVICE_LABELS)
    gain = new_gauge("rearrange_gain_seconds", "Wait per iteration before reading ahead less that now.", DEVICE_LABELS)
    for (job, device), one in report.rearrange.slots.items():
        if job in report.jobs:
            labels = slot_labels(report, report.jobs[job], device)
            add(active, labels, one.state == "running")
            add(ahead, labels, one.ahead_bytes)
            add(hits, labels, one.hit_ratio)
            add(gain, labels, one.gain_seconds)
    yield from (active, ahead, hits, gain)
    text = "Files, or parts of them, that were not read ahead, by reason."
    yield counted("rearrange_skips", text, Skip, report.rearrange.skips)
    yield counted("rearrange_stops", "Ends of reading ahead for a job, by cause.", Stop, report.rearrange.stops)


def mend_families(report: TickReport) -> Families:
    """Making files contiguous: a job has series from its first time on; what was moved counts once for all disks."""
    active = new_gauge("defragment_active", "1 while the job's files on the device are made contiguous, else 0.",
                    DEVICE_LABELS)  # fmt: skip
    moved = new_counter("defragment_files", "Files of the job that were made contiguous.", JOB_LABELS)
    size = new_counter("defragment_bytes", "Bytes of those files.", JOB_LABELS)
    left = new_gauge("defragment_files_left", "Badly fragmented files of the job that are known and not moved yet.",
                  JOB_LABELS)  # fmt: skip
    gain = new_gauge("defragment_gain_seconds", "Wait per iteration before files were moved less that now.", JOB_LABELS)
    told: set[JobId] = set()
    for (job, device), one in report.rearrange.mended.items():
        if job in report.jobs:
            add(active, slot_labels(report, report.jobs[job], device), one.running)
        if job in report.jobs and job not in told:
            told.add(job)
            for family, value in (
                (moved, one.files),
                (size, one.bytes),
                (left, one.left_files),
                (gain, one.gain_seconds),
            ):
                add(family, labels_of(report.jobs[job]), value)
    yield from (active, moved, size, left, gain)
    text = "Fragmented files that were left as they are, by reason."
    yield counted("defragment_skips", text, Leave, report.rearrange.mend_skips)
    text = "Ends of making a job's files contiguous, by cause."
    yield counted("defragment_stops", text, MoveStop, report.rearrange.mend_stops)
