"""Metric families over made-up reports: what is not known has no series."""

from dataclasses import replace

import pytest

from agent.metrics import ReportCollector
from bpf.samples import BlockCounters, BlockKey
from tests.unit.agent.made_reports import DISK, story


@pytest.fixture(scope="module")
def report():
    return list(story(4.0))[-1][0]


def families(report):
    return {family.name: family.samples for family in ReportCollector(lambda: report, "1").collect()}


def of_job(samples, name):
    return [sample for sample in samples if sample.labels["job"] == name]


def test_starvation_that_cannot_be_seen_has_no_series(report):
    number, entry = next((number, one) for number, one in report.jobs.items() if one.job.training)
    by_timer = entry._replace(
        signals=entry.signals._replace(iteration_source="timer"), starvation_by_cause={}
    )  # fmt: skip
    hidden = families(replace(report, jobs=dict(report.jobs) | {number: by_timer}))
    assert of_job(families(report)["prefetchd_starvation_events"], entry.job.name)
    assert not of_job(hidden["prefetchd_starvation_events"], entry.job.name)
    assert of_job(hidden["prefetchd_iterations"], entry.job.name)
    before = entry._replace(signals=by_timer.signals, starvation_by_cause={"none": 3})
    kept = families(replace(report, jobs=dict(report.jobs) | {number: before}))
    assert sum(one.value for one in of_job(kept["prefetchd_starvation_events"], entry.job.name)) == 3


def test_no_family_has_more_jobs_than_may_have_series_and_training_jobs_come_first(report):
    """Best-effort cgroups come first in the report, with limits and requests of their own."""
    entry = next(one for one in report.jobs.values() if one.job.training)
    jobs = {
        number: entry._replace(job=replace(entry.job, id=number, name=f"job-{number}", training=number >= 100))
        for number in (*range(50), *range(100, 108))
    }
    counters = BlockCounters(1, 2, 3, 0, 0, (0,) * 32)
    crowded = replace(
        report,
        jobs=jobs,
        applied={(number, DISK): (10**6, None, None, None) for number in jobs},
        sample=replace(report.sample, blocks={BlockKey(number, DISK, "read"): counters for number in jobs}),
    )
    found = {}
    for family in ReportCollector(lambda: crowded, "1", max_jobs=10).collect():
        found[family.name] = {one.labels["job"] for one in family.samples if "job" in one.labels}
        assert len(found[family.name]) <= 10, family.name
    training = {f"job-{number}" for number in range(100, 108)}
    assert found["prefetchd_health_score"] == training
    for name in ("io_latency_seconds", "io_bytes", "quota_bytes_per_second"):
        assert found[f"prefetchd_{name}"] > training
    values = {one.name: one.value for family in ReportCollector(lambda: crowded, "1", max_jobs=3).collect()
              for one in family.samples if not one.labels}  # fmt: skip
    assert (values["prefetchd_jobs"], values["prefetchd_jobs_without_series"]) == (8, 5)
