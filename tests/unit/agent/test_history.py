"""The last decisions of every job: rows that stand while nothing changes, at a cost that does not grow squared."""

import time
from dataclasses import replace
from itertools import islice

import pytest

from agent.history import History
from agent.snapshot import snapshot
from agent.types import Loan
from tests.unit.agent.made_reports import DISK, story


@pytest.fixture(scope="module")
def report():
    """A pass in which a training job has all that a row can tell."""
    return list(islice(story(12.0), 100))[-1][0]


def crowded(report, count):
    """As many jobs, each with a cap and a loan."""
    entry = next(one for one in report.jobs.values() if one.job.training)
    pool = report.decision.pools[DISK]
    loans = tuple(Loan(job, DISK, 0.15 / count, 0.0, 1e9, 10**9) for job in range(count))
    return replace(
        report,
        jobs={job: entry._replace(job=replace(entry.job, id=job, name=f"job-{job}")) for job in range(count)},
        applied={(job, DISK): (10**6 + job, None, None, None) for job in range(count)},
        decision=replace(report.decision, pools={DISK: pool._replace(loans=loans)}),
    )


def test_a_row_stands_until_a_loan_or_a_cap_changes(report):
    history, two = History(), crowded(report, 2)
    history.add(two)
    history.add(two)
    assert [row["passes"] for row in history.rows(0)] == [2]
    history.add(replace(two, applied={(0, DISK): (10**9, None, None, None)}))
    assert [row["passes"] for row in history.rows(0)] == [2, 1]
    assert [row["passes"] for row in history.rows(1)] == [2, 1]
    rows = [row["devices"][0]["quota_bytes_per_second"] for row in history.rows(0)]
    assert rows == [10**6, 10**9]
    assert history.rows(0)[-1]["devices"][0]["loan_ratio"] == pytest.approx(0.075)


def test_the_work_for_a_job_does_not_grow_with_their_number(report):
    few, many = crowded(report, 100), crowded(report, 1600)

    def seconds(told):
        began = time.process_time()
        history = History()
        history.add(told)
        assert len(snapshot(told, history)["jobs"]) == len(told.jobs)
        return time.process_time() - began

    assert min(seconds(many) for _ in range(3)) < 5 * 16 * min(seconds(few) for _ in range(5))
