import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent import forecast
from agent.health import BLOCKED_SCORE, HealthSettings, HealthState, level, score
from agent.types import Level
from tests.unit.agent.builders import HDD, MIB, SSD, device_signals, signals

SETTINGS = HealthSettings()


def rate(entitlement=None, state=None, settings=SETTINGS, **changes):
    """The score of a job seen for the first time (nothing is smoothed yet)."""
    return score(signals(**changes), state, settings, entitlement)[1]


def test_levels():
    assert [level(value) for value in (100, 60, 59.9, 40, 39.9, 20, 19.9, 0)] == [
        Level.HEALTHY,
        Level.HEALTHY,
        Level.TIGHT,
        Level.TIGHT,
        Level.DANGER,
        Level.DANGER,
        Level.CRITICAL,
        Level.CRITICAL,
    ]


def test_weighted_sum_by_hand():
    """queue 3/(0.75*8) = 50, latency 2x of a limit of 5x = 75, cv 0.5 of 2 = 75, demand 100 (a batch is there).

    0.45*50 + 0.20*75 + 0.10*75 + 0.25*100 = 70.
    """
    device = device_signals(latency_seconds=0.002, latency_cv=0.5)
    health = rate(queue_depth=3.0, devices={SSD: device})
    assert health.parts == pytest.approx({"queue": 50.0, "latency": 75.0, "variation": 75.0, "demand": 100.0})
    assert health.score == pytest.approx(70.0)
    assert health.confidence == pytest.approx(1.0)


def test_a_fed_job_is_healthy_and_an_empty_one_is_not():
    assert rate().score > 85
    assert rate(queue_depth=0.0, wait_seconds=0.1).score < 60


def test_blocked_before_an_empty_queue_is_never_high():
    assert rate(blocked_seconds=0.010).score == BLOCKED_SCORE
    assert rate(blocked_seconds=5.0).score == BLOCKED_SCORE
    assert BLOCKED_SCORE < rate(blocked_seconds=0.005).score < 100


FIRST = {"iterations_since_start": 1, "queue_depth": 0.0, "next_batch_bytes": None}
"""After the first batch of a job: its workers have not had the time to make more."""


def test_a_queue_that_had_no_time_to_fill_is_unknown():
    quiet = device_signals(latency_seconds=None, latency_cv=None)
    health = rate(devices={SSD: quiet}, **FIRST)
    assert health.parts["queue"] is None
    assert (health.score, health.level, health.confidence) == (SETTINGS.neutral_score, Level.HEALTHY, 0.0)


@pytest.mark.parametrize(
    "changes",
    [{"blocked_seconds": 0.1}, {"iterations_since_start": 2}, {"iterations_since_start": 1000}],
    ids=["stands before it", "second batch", "runs since long"],
)
def test_an_empty_queue_counts_once_it_tells_something(changes):
    health = rate(**(FIRST | changes))
    assert health.parts["queue"] == 0.0


def test_a_cold_start_that_was_seen_waiting_is_short():
    """It stood before its queue when nobody knew the size of it; the first batch does not make it well."""
    waiting = signals(
        blocked_seconds=0.1, wait_seconds=None, queue_capacity=None, **(FIRST | {"iterations_since_start": 0})
    )
    state, _ = score(waiting, None, SETTINGS, None)
    assert state.queue_fraction is None
    assert rate(state=state, **FIRST).parts["queue"] == 0.0


def test_a_start_keeps_what_was_known_of_the_queue():
    """A job that resumes with an empty queue falls from where it was, in the smoothing's time."""
    health = rate(state=HealthState(queue_fraction=0.5), **FIRST)
    assert 0.0 < health.parts["queue"] < 50.0


def test_rates_are_unknown_in_the_first_sample():
    assert rate(dt=0.0, queue_depth=0.0).parts["demand"] is None
    assert rate(dt=0.0, queue_depth=1.0).parts["demand"] == 100.0
    assert rate(dt=0.1, queue_depth=0.0).parts["demand"] is not None


def test_unknown_metrics_are_left_out_and_lower_the_confidence():
    quiet = device_signals(latency_seconds=None, latency_cv=None)
    health = rate(queue_depth=3.0, next_batch_bytes=None, devices={SSD: quiet})
    assert health.parts["latency"] is None
    assert health.parts["demand"] is None
    assert health.score == pytest.approx(50.0)
    assert health.confidence == pytest.approx(0.45)


def test_with_nothing_known_the_controller_has_nothing_to_do():
    health = rate(queue_depth=None, wait_seconds=None, next_batch_bytes=None, devices={})
    assert health.score == 75.0
    assert health.confidence == 0.0


def test_waits_stand_in_for_a_depth_that_cannot_be_seen():
    assert rate(queue_depth=None, wait_seconds=0.0).parts["queue"] == 100.0
    assert rate(queue_depth=None, wait_seconds=0.025).parts["queue"] == pytest.approx(50.0)
    assert rate(queue_depth=None, wait_seconds=0.09).parts["queue"] == 0.0


def test_a_data_set_that_the_cache_keeps_can_be_rated_under_a_quota():
    """After thousands of batches without a read the next one is all but nothing, and its part on a device even less."""
    batches = forecast.observe(forecast.BatchForecast(), 1, MIB, None, None)
    for _ in range(5000):
        batches = forecast.observe(batches, 1, 0.0, None, None)
    devices = {SSD: device_signals(access_share=0.3), HDD: device_signals(HDD, access_share=0.7)}
    health = rate({SSD: MIB}, devices=devices, next_batch_bytes=batches.batch_bytes)
    assert health.parts["demand"] == 100.0


def test_demand_against_a_quota_and_without():
    """1 MiB each 0.1 s needs 10 MiB/s; a quota of 6 MiB/s with the margin of 1.2 is half of what it should be."""
    assert rate({SSD: 6 * MIB}).parts["demand"] == pytest.approx(50.0)
    assert rate({SSD: 12 * MIB}).parts["demand"] == pytest.approx(100.0)
    slow = device_signals(read_bytes_per_second=2.5 * MIB)
    assert rate(queue_depth=0.0, devices={SSD: slow}).parts["demand"] == pytest.approx(25.0)


def test_the_shortest_of_several_devices_limits():
    devices = {SSD: device_signals(access_share=0.5), HDD: device_signals(HDD, access_share=0.5)}
    health = rate({SSD: 100 * MIB, HDD: 3 * MIB}, devices=devices)
    assert health.parts["demand"] == pytest.approx(50.0)


def test_latency_below_the_floor_is_good_whatever_the_normal():
    fast = device_signals(latency_seconds=0.0004, reference_seconds=0.00005)
    assert rate(devices={SSD: fast}).parts["latency"] == 100.0


def test_devices_count_by_access():
    devices = {
        SSD: device_signals(latency_seconds=0.001, access_share=0.25),
        HDD: device_signals(HDD, latency_seconds=0.1, reference_seconds=0.01, access_share=0.75),
    }
    assert rate(devices=devices).parts["latency"] == pytest.approx(25.0)


def test_smoothing_by_time_constant():
    """A queue that empties: after 0.3 s of steps of any length the smoothed part is 1/e of what it was."""
    for steps in (1, 3, 30):
        state = HealthState(1.0, 1.0)
        for _ in range(steps):
            state, health = score(signals(queue_depth=0.0, dt=0.3 / steps), state, SETTINGS, None)
        assert health.parts["queue"] == pytest.approx(36.79, abs=0.01)


def test_weights_must_sum_to_one():
    with pytest.raises(ValueError, match=r"weights sum to 1\.3"):
        HealthSettings(queue_weight=0.75)


def test_weights_are_those_of_the_settings():
    only_queue = HealthSettings(queue_weight=1.0, latency_weight=0.0, variation_weight=0.0, demand_weight=0.0)
    assert rate(queue_depth=3.0, settings=only_queue).score == pytest.approx(50.0)


amount = st.floats(0.0, 1.0)


@given(st.tuples(amount, amount, amount, amount, amount), amount, st.booleans())
def test_monotone_in_each_metric(metrics, more, capped):
    """A deeper queue never lowers the score; more latency, variation, bytes to come or waiting never raise it."""

    def value(depth, latency, variation, batch, blocked):
        device = device_signals(
            read_bytes_per_second=10 * MIB, latency_seconds=0.01 * latency + 1e-6, latency_cv=3.0 * variation
        )
        return rate(
            {SSD: 20 * MIB} if capped else None,
            queue_depth=8.0 * depth,
            next_batch_bytes=1.0 + 4 * MIB * batch,
            blocked_seconds=0.02 * blocked,
            devices={SSD: device},
        ).score

    depth, latency, variation, batch, blocked = metrics
    here = value(*metrics)
    assert 0.0 <= here <= 100.0
    assert value(min(1.0, depth + more), latency, variation, batch, blocked) >= here - 1e-9
    assert value(depth, latency + more, variation, batch, blocked) <= here + 1e-9
    assert value(depth, latency, variation + more, batch, blocked) <= here + 1e-9
    assert value(depth, latency, variation, batch + more, blocked) <= here + 1e-9
    assert value(depth, latency, variation, batch, blocked + more) <= here + 1e-9


@given(st.lists(st.none() | st.floats(0, 1e15), min_size=6, max_size=6), st.floats(0, 1e6))
def test_any_input_gives_a_score(values, blocked):
    depth, capacity, batch, compute, latency, variation = values
    device = device_signals(latency_seconds=latency, latency_cv=variation)
    health = rate(
        queue_depth=depth,
        queue_capacity=capacity,
        next_batch_bytes=batch,
        compute_seconds=compute,
        blocked_seconds=blocked,
        devices={SSD: device},
    )
    assert 0.0 <= health.score <= 100.0
    assert 0.0 <= health.confidence <= 1.0


def test_batches_behind_a_missing_one_do_not_fill_the_queue():
    """Nor do they make the next batch come in time; they count for what is still to be read, elsewhere."""
    slow = device_signals(read_bytes_per_second=0.25 * MIB / 0.1)
    health = rate(queue_depth=6.0, queue_takeable=0.0, devices={SSD: slow})
    assert health.parts["queue"] == 0.0
    assert health.parts["demand"] == pytest.approx(25.0)
    assert health.score < rate(queue_depth=6.0, devices={SSD: slow}).score - 60.0
