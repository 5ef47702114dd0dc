"""Loans as they are shown: metrics, state, explanations and history tell what the pool tells, job by job."""

from collections import Counter
from dataclasses import replace

import pytest

from agent.explanation import explain
from agent.history import History
from agent.metrics import ReportCollector
from agent.snapshot import snapshot
from tests.unit.agent.made_reports import story


@pytest.fixture(scope="module")
def reports():
    return [report for report, _ in story(40.0)]


def close(report):
    """The report as it is while loans run out after control has ended: no entitlements, the gate closed."""
    decision = report.decision
    gates = dict.fromkeys(decision.gate_open, False)
    return replace(report, decision=replace(decision, entitlements={}, quotas={}, gate_open=gates), applied={})


def exported(report):
    """(loans, what pools have lent) by device name, from the endpoint's families."""
    loans, lent = Counter(), Counter()
    for family in ReportCollector(lambda: report, "1").collect():
        for sample in family.samples:
            if sample.name == "prefetchd_loan_ratio":
                loans[sample.labels["device"]] += sample.value
            elif sample.name == "prefetchd_pool_lent_ratio":
                lent[sample.labels["device"]] += sample.value
    return loans, lent


def shown(report):
    """The same from `/state`."""
    state = snapshot(report)
    loans = Counter()
    for one in (device for row in state["jobs"] for device in row["devices"]):
        loans[one["device"]] += one["loan_ratio"] or 0.0
    return loans, {one["device"]: one["pool_lent_ratio"] for one in state["devices"]}


@pytest.mark.parametrize("told", [exported, shown])
def test_what_jobs_borrow_sums_to_what_is_lent(reports, told):
    for report in reports:
        for one in (report, close(report)):
            loans, lent = told(one)
            assert loans["nvme0n1"] == pytest.approx(lent["nvme0n1"] or 0.0)
    assert any(told(report)[1]["nvme0n1"] for report in reports), "nothing was ever lent"


def test_what_best_effort_uses_of_the_pool_is_no_loan(reports):
    spare = [
        report
        for report in reports
        for (job, _), share in report.decision.entitlements.items()
        if not report.jobs[job].job.training and share.loan > 0.0
    ]
    assert spare, "the scan never used the pool"
    for report in spare:
        families = {family.name: family for family in ReportCollector(lambda seen=report: seen, "1").collect()}
        assert {sample.labels["job"] for sample in families["prefetchd_loan_ratio"].samples} <= {
            entry.job.name for entry in report.jobs.values() if entry.job.training
        }
        entitled = {sample.labels["job"] for sample in families["prefetchd_entitlement_ratio"].samples}
        assert "nightly-scan" in entitled


def test_a_loan_that_runs_out_after_control_has_ended_is_explained(reports):
    report, job = next(
        (one, loan.job) for one in reports for pool in one.decision.pools.values() for loan in pool.loans
    )
    history = History()
    history.add(close(report))
    state = snapshot(close(report), history)
    row = next(row for row in state["jobs"] if row["id"] == job)
    assert row["decisions"][-1]["devices"][0]["loan_ratio"] == row["devices"][0]["loan_ratio"] > 0.0
    text = "\n".join(explain(row, state))
    assert "from the pool runs out for" in text
