import pytest

from agent.forecast import BatchForecast, ForecastSettings, expected_bytes, needs, observe, restarted
from tests.unit.agent.builders import HDD, MIB, SSD, device_signals, signals

SETTINGS = ForecastSettings()


def learn(steps, hinted=None):
    state = BatchForecast()
    for iterations, read, depth in steps:
        state = observe(state, iterations, read, depth, hinted)
    return state


class TestBatch:
    def test_bytes_per_iteration(self):
        assert expected_bytes(learn([(1, 5.0 * MIB, None)] * 20), None) == pytest.approx(5 * MIB)

    def test_a_filling_queue_holds_what_was_read(self):
        """Two batches produced for each one taken: each is half of the bytes read per iteration."""
        steps = [(1, 10.0 * MIB, float(depth)) for depth in range(8)]
        assert expected_bytes(learn(steps), None) == pytest.approx(5 * MIB, rel=0.15)

    def test_bytes_of_a_batch_in_progress_are_carried_over(self):
        assert (
            expected_bytes(learn([(0, 3.0 * MIB, None), (0, 1.0 * MIB, None), (1, 1.0 * MIB, None)]), None) == 5 * MIB
        )

    def test_unknown_until_the_first_batch(self):
        assert expected_bytes(learn([(0, 9.0 * MIB, 0.0)]), None) is None

    def test_a_hint_is_believed_at_first(self):
        assert expected_bytes(BatchForecast(), 20.0 * MIB) == 20 * MIB

    def test_a_cold_start_shows_in_the_hint_at_once(self):
        state = learn([(1, 4.0 * MIB, None)] * 20, hinted=4.0 * MIB)
        assert expected_bytes(state, 16.0 * MIB) == pytest.approx(16 * MIB, rel=0.01)

    def test_a_hint_counts_for_what_storage_delivers(self):
        """The loop asks for 10 MiB, the page cache holds 90 % of it."""
        state = learn([(1, 1.0 * MIB, None)] * 20, hinted=10.0 * MIB)
        assert expected_bytes(state, 20.0 * MIB) == pytest.approx(2 * MIB, rel=0.01)
        assert expected_bytes(restarted(state), 20.0 * MIB) == 20 * MIB

    def test_the_newest_batches_count_most(self):
        state = learn([(1, 1.0 * MIB, None)] * 20 + [(1, 4.0 * MIB, None)] * 9)
        assert 3.8 * MIB < expected_bytes(state, None) < 4 * MIB


class TestNeeds:
    def test_consumption_and_refill_by_hand(self):
        """2 MiB each 0.1 s is 20 MiB/s; 0.75*8 - 2 = 4 batches missing over 1 s is 8 MiB/s more."""
        fed = needs(signals(next_batch_bytes=2.0 * MIB), SETTINGS)
        short = needs(signals(next_batch_bytes=2.0 * MIB, queue_depth=2.0), SETTINGS)
        assert fed[SSD].bytes_per_second == pytest.approx(20 * MIB)
        assert short[SSD].bytes_per_second == pytest.approx(28 * MIB)

    def test_split_by_access(self):
        devices = {
            SSD: device_signals(access_share=0.25),
            HDD: device_signals(HDD, access_share=0.75),
            "253:0": device_signals("253:0", access_share=0.0),
        }
        need = needs(signals(next_batch_bytes=4.0 * MIB, devices=devices), SETTINGS)
        assert set(need) == {SSD, HDD}
        assert need[SSD].bytes_per_second == pytest.approx(10 * MIB)
        assert need[HDD].bytes_per_second == pytest.approx(30 * MIB)

    def test_requests_follow_the_size_seen(self):
        device = device_signals(read_bytes_per_second=8.0 * MIB, read_requests_per_second=32.0)
        need = needs(signals(next_batch_bytes=1.0 * MIB, devices={SSD: device}), SETTINGS)
        assert need[SSD].requests_per_second == pytest.approx(40)

    def test_a_long_iteration_does_not_ask_for_its_whole_queue_in_a_second(self):
        need = needs(signals(next_batch_bytes=100.0 * MIB, compute_seconds=10.0, queue_depth=0.0), SETTINGS)
        assert need[SSD].bytes_per_second == pytest.approx(70 * MIB)

    @pytest.mark.parametrize("missing", ["next_batch_bytes", "compute_seconds"])
    def test_what_is_not_known_is_not_guessed(self, missing):
        assert needs(signals(**{missing: None}), SETTINGS) == {}

    def test_a_loop_that_does_not_compute_has_a_finite_need(self):
        assert needs(signals(compute_seconds=0.0), SETTINGS)[SSD].bytes_per_second == pytest.approx(1000 * MIB)
