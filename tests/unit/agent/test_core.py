"""The control core over hand-made samples: reports, forgetting, one bad job, and causes of starvation."""

from dataclasses import replace

import pytest

from agent.core import Core, CoreSettings, violations
from agent.policies.base import PolicySettings, make_policy
from agent.signals import JobSample
from agent.types import Capacity, Decision, DeviceInfo, DeviceView, Entitlement, Job, Medium, Quota
from bpf.samples import BlockCounters, BlockKey, IterationEvent, StreamCounters

MIB = 1 << 20
DISK = "259:0"
VIEW = {DISK: DeviceView(DeviceInfo(DISK, "nvme0n1", Medium.SSD, Capacity(120 * MIB, 120 * MIB, 4000, 4000)))}


def job(number, training=True):
    return Job(number, f"job{number}", f"/train.slice/job{number}", training)


def sample(number, tick, *, rate=10 * MIB, wait_ns=0, depth=6, device=DISK):
    """A job that reads `rate` bytes/s in 256 KiB requests and finishes one iteration every 100 ms."""
    time_ns = 1_000_000_000 + tick * 100_000_000
    done = int(rate * tick / 10)
    requests = done // (256 * 1024)
    counters = BlockCounters(requests, done, requests * 2_000_000, requests * 2000**2, 0, (0,) * 32)
    event = IterationEvent(time_ns, wait_ns, depth)
    stream = StreamCounters(
        number, "1/0", "hint", False, tick, depth, 8, wait_ns * tick, None, 1 * MIB, time_ns, (event,)
    )
    return JobSample(number, time_ns, {BlockKey(number, device, "read"): counters}, (stream,))


def run(core, jobs, ticks, enforced=True, **options):
    for tick in ticks:
        samples = {one.id: sample(one.id, tick, **options) for one in jobs}
        result = core.step(1.0 + tick / 10, samples, jobs, VIEW, enforced=enforced)
    return result


@pytest.fixture
def core():
    return Core(make_policy("adaptive", PolicySettings()), CoreSettings())


def test_a_fed_job_is_healthy_and_uncapped(core):
    result = run(core, [job(1)], range(40))
    report = result.reports[1]
    assert report.health.score > 80
    assert report.signals.iterations == 39
    assert report.signals.devices[DISK].medium is Medium.SSD
    assert report.need[DISK].bytes_per_second > 5 * MIB
    assert result.decision.quotas == {}
    assert result.errors == 0


def test_starvation_is_counted_under_a_cause(core):
    result = run(core, [job(1)], range(40), wait_ns=60_000_000, depth=0, rate=2 * MIB)
    report = result.reports[1]
    assert report.health.score < 60
    assert sum(report.starvation_by_cause.values()) == report.signals.starvation_events > 0


@pytest.mark.parametrize("enforced", [True, False])
def test_caps_that_are_only_planned_hold_nobody_back(enforced):
    """How near a job is to its cap tells why it starves only where the cap stands."""
    core = Core(make_policy("paper", PolicySettings()), CoreSettings())
    result = run(core, [job(1)], range(40), enforced=enforced, wait_ns=60_000_000, depth=0)
    assert result.decision.quotas
    assert ("quota_achieved_ratio" in result.reports[1].diagnosis.evidence) == enforced


def test_a_job_that_is_gone_is_forgotten_at_once(core):
    run(core, [job(1), job(2)], range(10))
    result = core.step(3.0, {2: sample(2, 20)}, [job(2)], VIEW)
    assert set(result.reports) == {2}
    again = core.step(4.0, {1: sample(1, 30), 2: sample(2, 30)}, [job(1), job(2)], VIEW)
    assert again.reports[1].signals.dt == 0.0


def test_best_effort_is_never_scored(core):
    result = run(core, [job(1), job(9, training=False)], range(10))
    assert result.reports[9].health is None
    assert result.reports[9].signals is not None


def test_a_sample_out_of_order_costs_one_job_one_pass(core, caplog):
    run(core, [job(1), job(2)], range(10))
    older = {1: sample(1, 3), 2: sample(2, 10)}
    result = core.step(3.0, older, [job(1), job(2)], VIEW)
    assert result.errors == 1
    assert result.reports[1].health is None
    assert result.reports[2].health is not None
    assert "starting afresh" in caplog.text
    assert core.step(3.1, {1: sample(1, 11)}, [job(1)], VIEW).errors == 0


def test_a_job_that_no_one_thought_of_does_not_stop_the_others(core):
    """Something that is no sample at all stands for what a probe may get wrong one day."""
    run(core, [job(1), job(2)], range(10))
    result = core.step(2.0, {1: sample(1, 10), 2: JobSample(2, None)}, [job(1), job(2)], VIEW)
    assert (result.errors, result.reports[2].health) == (1, None)
    assert result.reports[1].health is not None


def test_a_policy_that_fails_caps_nobody_and_starts_afresh(core, caplog):
    run(core, [job(1)], range(10))
    step, failing = core.policy.step, [True]

    def fail(state, view):
        if failing.pop():
            raise KeyError("a device that was there a moment ago")
        return step(state, view)

    core.policy.step = fail
    result = core.step(2.0, {1: sample(1, 10)}, [job(1)], VIEW)
    assert (result.errors, result.decision) == (1, Decision({}, {}, {}, {}))
    assert "the policy failed" in caplog.text
    failing.append(False)
    assert core.step(2.1, {1: sample(1, 11)}, [job(1)], VIEW).errors == 0


def test_a_device_without_capacity_is_observed_only(core):
    view = {DISK: replace(VIEW[DISK], info=replace(VIEW[DISK].info, capacity=None))}
    for tick in range(30):
        result = core.step(1.0 + tick / 10, {1: sample(1, tick, wait_ns=50_000_000, depth=0)}, [job(1)], view)
    assert result.decision.quotas == {}
    assert result.decision.entitlements == {}
    assert result.reports[1].signals.devices[DISK].read_bytes_per_second > 0


@pytest.mark.parametrize(
    ("entitlements", "words"),
    [
        ({(1, DISK): Entitlement(0.5), (2, DISK): Entitlement(0.36)}, "regular shares"),
        ({(1, DISK): Entitlement(0.1, 0.1), (2, DISK): Entitlement(0.1, 0.06)}, "loans"),
        ({(1, DISK): Entitlement(-0.1)}, "is -0.1"),
        ({(1, DISK): Entitlement(float("nan"))}, "nan"),
    ],
)
def test_broken_decisions_are_seen(entitlements, words):
    (found, *_) = violations(Decision({}, entitlements, {}, {}))
    assert words in found


def test_sound_decisions_are_not():
    entitlements = {(1, DISK): Entitlement(0.5, 0.15), (2, DISK): Entitlement(0.35), (3, "8:0"): Entitlement(0.85)}
    assert violations(Decision({(1, DISK): Quota(0.3, "x")}, entitlements, {}, {})) == ()


def test_a_broken_decision_is_not_carried_out(core, caplog):
    class Broken:
        name = "broken"

        def initial(self):
            return None

        def step(self, state, view):
            return None, Decision({(1, DISK): Quota(0.1, "x")}, {(1, DISK): Entitlement(0.9)}, {}, {})

    core.policy = Broken()
    result = run(core, [job(1)], range(3))
    assert result.violations
    assert result.decision.quotas == {}
    assert "broke its own rules" in caplog.text
