"""Metric families over made-up reports: what is not known has no series."""

from dataclasses import replace

import pytest

from agent.metrics import ReportCollector
from tests.unit.agent.made_reports import story


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
