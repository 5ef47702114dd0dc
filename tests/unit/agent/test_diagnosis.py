import pytest

from agent.diagnosis import ADVICE, diagnose
from agent.evidence import DiagnosisSettings, DiagnosisState, NodeContext
from agent.types import Cause, Medium
from tests.unit.agent.builders import HDD, SSD, device_signals, health, signals

SETTINGS = DiagnosisSettings()
ALONE = NodeContext()
SHARED = NodeContext(used_share={SSD: 0.4}, others_share={SSD: 0.5})
CROWDED = NodeContext(used_share={SSD: 0.1}, others_share={SSD: 0.85})


def run(count, state=None, start=100.0, *, score=20.0, node=ALONE, dt=0.1, **changes):
    """`count` samples of the same kind; the last diagnosis and the state."""
    result = None
    for n in range(count):
        changes_now = {key: value(n) if callable(value) else value for key, value in changes.items()}
        one = signals(time=start + dt * n, dt=dt, **changes_now)
        state, result = diagnose(one, health(score), node, state, SETTINGS)
    return state, result


def cause(*args, **changes):
    return run(*args, **changes)[1].cause


class TestCauses:
    def test_a_healthy_job_has_none(self):
        _, result = run(20, score=90.0, node=CROWDED, cpu_ratio=0.95)
        assert result.cause is Cause.NONE
        assert result.advice == ""

    def test_starving_without_any_indicator_is_none(self):
        assert cause(20) is Cause.NONE

    def test_device_contention(self):
        _, result = run(20, node=CROWDED)
        assert result.cause is Cause.DEVICE_CONTENTION
        assert result.actionable
        assert result.evidence["others_share"] == pytest.approx(0.85)
        assert result.evidence["busy_share"] == pytest.approx(0.95)

    def test_the_use_of_a_device_whose_capacity_is_unknown_is_no_evidence(self):
        _, result = run(20, node=NodeContext(others_share={SSD: 0.0}))
        assert not {"others_share", "busy_share"} & result.evidence.keys()

    def test_others_on_an_idle_device_are_no_contention(self):
        assert cause(20, node=NodeContext(used_share={SSD: 0.1}, others_share={SSD: 0.2})) is Cause.NONE

    def test_a_slow_device_with_others_is_contention_even_when_not_full(self):
        devices = {HDD: device_signals(HDD, latency_seconds=0.1, reference_seconds=0.01)}
        node = NodeContext(used_share={HDD: 0.05}, others_share={HDD: 0.3})
        assert cause(20, node=node, devices=devices) is Cause.DEVICE_CONTENTION

    def test_self_throttled(self):
        devices = {SSD: device_signals(throttle_ratio=0.6)}
        node = NodeContext(quota_share={SSD: 0.1}, used_share={SSD: 0.099}, others_share={SSD: 0.85})
        _, result = run(20, node=node, devices=devices)
        assert result.cause is Cause.SELF_THROTTLED
        assert result.evidence["throttle_ratio"] == pytest.approx(0.6)
        assert result.evidence["quota_achieved_ratio"] == pytest.approx(0.99)

    def test_a_cap_that_is_not_reached_throttles_nobody(self):
        devices = {SSD: device_signals(throttle_ratio=0.6)}
        node = NodeContext(quota_share={SSD: 0.5}, used_share={SSD: 0.1}, others_share={SSD: 0.85})
        assert cause(20, node=node, devices=devices) is Cause.DEVICE_CONTENTION

    def test_a_cap_that_somebody_else_set_shows_by_its_wait(self):
        _, result = run(20, devices={SSD: device_signals(throttle_ratio=0.6)})
        assert result.cause is Cause.SELF_THROTTLED
        assert "quota_achieved_ratio" not in result.evidence
        assert cause(20, devices={SSD: device_signals(throttle_ratio=0.1)}) is Cause.NONE
        assert cause(20, devices={SSD: device_signals(throttle_ratio=None)}) is Cause.NONE

    def test_reaching_the_cap_is_weak_evidence_where_the_wait_is_unknown(self):
        devices = {SSD: device_signals(throttle_ratio=None)}
        _, result = run(20, node=NodeContext(quota_share={SSD: 0.1}, used_share={SSD: 0.1}), devices=devices)
        assert result.cause is Cause.SELF_THROTTLED
        assert result.confidence == pytest.approx(0.5)

    def test_cpu_bound_gets_advice_and_no_bandwidth(self):
        _, result = run(20, cpu_ratio=0.95, node=CROWDED)
        assert result.cause is Cause.CPU_BOUND
        assert not result.actionable
        assert result.advice == ADVICE[Cause.CPU_BOUND]

    def test_a_device_that_the_job_keeps_busy_limits_it_whatever_its_workers_do(self):
        assert cause(20, cpu_ratio=0.9, node=SHARED) is Cause.DEVICE_CONTENTION
        idle = NodeContext(used_share={SSD: 0.4}, others_share={SSD: 0.1})
        assert cause(20, cpu_ratio=0.9, node=idle) is Cause.CPU_BOUND

    def test_remote_congestion(self):
        devices = {
            "nas:/d": device_signals("nas:/d", medium=Medium.REMOTE, latency_seconds=0.2, reference_seconds=0.02)
        }
        _, result = run(20, devices=devices, remote_queueing_ratio=0.7, queue_depth=0.0)
        assert result.cause is Cause.REMOTE_CONGESTION
        assert not result.actionable
        assert result.evidence["remote_queueing_ratio"] == pytest.approx(0.9)

    @pytest.mark.parametrize("backlog", [None, 0.0])
    def test_queueing_at_the_link_shows_by_the_round_trip(self, backlog):
        devices = {
            "nas:/d": device_signals("nas:/d", medium=Medium.REMOTE, latency_seconds=0.05, reference_seconds=0.02)
        }
        _, result = run(20, devices=devices, remote_queueing_ratio=backlog)
        assert result.cause is Cause.REMOTE_CONGESTION
        assert result.evidence["remote_queueing_ratio"] == pytest.approx(0.6)
        assert result.confidence == pytest.approx(1.0)

    def test_at_the_usual_latency_a_mount_is_only_suspected(self):
        """A link that was too narrow from the first moment has shown no better latency."""
        devices = {"nas:/d": device_signals("nas:/d", medium=Medium.REMOTE)}
        _, result = run(20, devices=devices, remote_queueing_ratio=0.35)
        assert result.cause is Cause.REMOTE_CONGESTION
        assert result.confidence == pytest.approx(SETTINGS.fallback)
        assert cause(20, devices=devices, cpu_ratio=0.9) is Cause.CPU_BOUND
        young = {"iterations_since_start": 2, "first_io_latency_seconds": 0.001}
        assert cause(20, devices=devices, **young) is Cause.COLD_START

    def test_a_little_remote_reading_does_not_make_the_job_remote(self):
        devices = {
            SSD: device_signals(access_share=0.9),
            "nas:/d": device_signals("nas:/d", medium=Medium.REMOTE, access_share=0.1),
        }
        assert cause(20, devices=devices, remote_queueing_ratio=0.9) is Cause.NONE

    def test_queue_falling_with_packets_supports_congestion(self):
        devices = {
            "nas:/d": device_signals("nas:/d", medium=Medium.REMOTE, latency_seconds=0.03, reference_seconds=0.02)
        }
        wave = {
            "nic_packets_per_second": lambda n: 1000.0 + 100.0 * (n % 5),
            "queue_depth": lambda n: 4.0 - (n % 5),
        }
        _, result = run(40, devices=devices, remote_queueing_ratio=0.35, **wave)
        _, without = run(40, devices=devices, remote_queueing_ratio=0.35, queue_depth=4.0)
        assert result.evidence["packet_correlation"] == pytest.approx(-1.0)
        assert result.confidence > without.confidence

    def test_cold_start_needs_a_young_job_and_slow_first_reads(self):
        warm, _ = run(200, score=90.0, cache_hit_ratio=0.9)
        cold = {"iterations_since_start": 3, "first_io_latency_seconds": 0.001}
        _, result = run(5, warm, 200.0, **cold)
        assert result.cause is Cause.COLD_START
        assert result.evidence["first_io_times_steady"] > 3.0
        assert cause(5, warm, 200.0, **(cold | {"iterations_since_start": 11})) is Cause.NONE
        assert cause(5, warm, 200.0, **(cold | {"first_io_latency_seconds": 0.0001})) is Cause.NONE

    def test_a_first_start_is_cold_only_where_nothing_else_is_wrong(self):
        young = {"iterations_since_start": 2, "first_io_latency_seconds": 0.001}
        assert cause(5, **young) is Cause.COLD_START
        assert cause(5, node=CROWDED, **young) is Cause.DEVICE_CONTENTION

    def test_cache_thrash_is_low_and_unsteady(self):
        thrash = {"cache_hit_ratio": lambda n: 0.1 if (n // 10) % 2 else 0.7}
        _, result = run(200, node=SHARED, **thrash)
        assert result.cause is Cause.CACHE_THRASH
        assert result.evidence["cache_hit_mean"] == pytest.approx(0.4, abs=0.1)
        assert result.evidence["cache_hit_variance"] == pytest.approx(0.09, abs=0.02)
        assert cause(200, cache_hit_ratio=0.1) is Cause.NONE
        assert cause(200, cache_hit_ratio=lambda n: 0.99 if (n // 10) % 2 else 0.7) is Cause.NONE

    def test_a_hit_ratio_stuck_halfway_is_thrash_even_when_steady(self):
        _, result = run(200, node=SHARED, cache_hit_ratio=0.55)
        assert result.cause is Cause.CACHE_THRASH
        assert cause(200, node=SHARED, cache_hit_ratio=0.95) is Cause.DEVICE_CONTENTION

    def test_a_cache_that_fills_is_no_thrash(self):
        assert cause(200, node=SHARED, cache_hit_ratio=lambda n: 0.2 + 0.002 * n) is Cause.DEVICE_CONTENTION

    def test_who_gets_little_of_a_crowded_device_suffers_from_the_others(self):
        assert cause(200, node=CROWDED, cache_hit_ratio=0.55) is Cause.DEVICE_CONTENTION

    def test_a_cold_cache_is_no_thrash(self):
        state, _ = run(200, score=90.0, cache_hit_ratio=0.95)
        state, result = run(100, state, 200.0, cache_hit_ratio=lambda n: n / 100, iterations_since_start=5)
        assert result.cause is not Cause.CACHE_THRASH
        assert state.hits == ()


class TestHysteresis:
    def test_the_first_cause_stands_at_once(self):
        assert cause(1, node=CROWDED) is Cause.DEVICE_CONTENTION

    def test_another_cause_must_last(self):
        state, _ = run(10, node=CROWDED)
        state, result = run(2, state, 110.0, node=CROWDED, cpu_ratio=0.9)
        assert result.cause is Cause.DEVICE_CONTENTION
        state, result = run(1, state, 110.2, node=CROWDED)
        assert state.rival is None
        _, result = run(5, state, 111.0, node=CROWDED, cpu_ratio=0.9)
        assert result.cause is Cause.CPU_BOUND

    def test_a_cause_outlives_a_short_recovery(self):
        state, _ = run(10, node=CROWDED)
        state, result = run(10, state, 101.0, score=90.0, node=CROWDED)
        assert result.cause is Cause.DEVICE_CONTENTION
        _, result = run(30, state, 102.0, score=90.0, node=CROWDED)
        assert result.cause is Cause.NONE

    def test_short_episodes_at_a_good_score_count(self):
        state, _ = run(5, score=90.0, node=CROWDED)
        assert state.cause is Cause.NONE
        _, result = run(1, state, 100.5, score=90.0, node=CROWDED, starvation_events=1)
        assert result.cause is Cause.DEVICE_CONTENTION


def test_confidence_falls_with_what_is_known():
    node = CROWDED
    _, sure = diagnose(signals(), health(20.0, 1.0), node, None, SETTINGS)
    _, unsure = diagnose(signals(), health(20.0, 0.45), node, DiagnosisState(), SETTINGS)
    assert unsure.confidence == pytest.approx(0.45 * sure.confidence)


def test_every_cause_says_what_to_do():
    assert set(ADVICE) == set(Cause)
    assert all(ADVICE[one] for one in Cause if one is not Cause.NONE)


def test_memory_is_bounded():
    state, _ = run(5000, cache_hit_ratio=0.5, nic_packets_per_second=10.0, dt=0.5)
    assert len(state.hits) <= SETTINGS.hit_points + 1
    assert len(state.packets) <= SETTINGS.hit_points
