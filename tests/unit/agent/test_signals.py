import math
from dataclasses import replace
from statistics import mean

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.forecast import told_too_little
from agent.job_sample import JobSample, SignalSettings
from agent.reference import learn
from agent.signals import IoCounts, derive
from agent.types import Medium
from bpf.samples import CacheCounters, FuseCounters, FuseKey, NfsCounters, NfsKey, ObjectCounters, ObjectKey, WorkerTime
from tests.unit.agent.builders import HDD, MIB, MS, SECOND, SSD, block, event, reads, stream, writes

SETTINGS = SignalSettings({SSD: Medium.SSD, HDD: Medium.HDD})


def feed(samples, settings=SETTINGS):
    """Derive through a list of samples; the signals of each."""
    state, previous, result = None, None, []
    for sample in samples:
        state, signals = derive(previous, sample, state, settings)
        previous = sample
        result.append(signals)
    return result


def at(ms, **fields):
    return JobSample(1, int(ms * MS), **fields)


def test_first_sample_sets_the_stage():
    (first,) = feed([at(0, blocks={reads(): block(1000)})])
    assert first.dt == 0.0
    assert first.devices == {} or first.devices[SSD].read_bytes_per_second == 0.0
    assert first.new_iterations == 0
    assert first.iteration_source == "timer"


def test_time_that_runs_backwards_is_refused():
    state, _ = derive(None, at(100), None, SETTINGS)
    with pytest.raises(ValueError, match="older than the one before"):
        derive(at(100), at(99), state, SETTINGS)


def test_rates_latency_and_access_share():
    first = {reads(): block(0), writes(): block(0), reads(device=HDD): block(0)}
    then = {reads(): block(100, latency_ms=2.0), writes(): block(50, 4096), reads(device=HDD): block(300)}
    _, signals = feed([at(0, blocks=first), at(1000, blocks=then)])
    ssd, hdd = signals.devices[SSD], signals.devices[HDD]
    assert ssd.read_bytes_per_second == pytest.approx(100 * MIB)
    assert ssd.write_bytes_per_second == pytest.approx(50 * 4096)
    assert ssd.read_requests_per_second == pytest.approx(100)
    assert ssd.write_requests_per_second == pytest.approx(50)
    assert ssd.latency_seconds == pytest.approx(0.002)
    assert ssd.latency_cv == pytest.approx(0.0, abs=1e-3)
    assert ssd.medium is Medium.SSD
    assert hdd.medium is Medium.HDD
    assert hdd.access_share == pytest.approx(0.75, abs=0.01)
    assert ssd.access_share + hdd.access_share == pytest.approx(1.0)


def test_a_changed_tick_does_not_change_what_a_rate_means():
    """100 requests/s for a second, then none for a second: the smoothed rate is the same at 50 and at 200 ms ticks."""

    def rate_after(tick_ms):
        samples = [at(ms, blocks={reads(): block(min(ms, 1000) // 10)}) for ms in range(0, 2001, tick_ms)]
        return feed(samples)[-1].devices[SSD].read_requests_per_second

    assert rate_after(50) == pytest.approx(rate_after(200), rel=0.05)
    assert rate_after(50) == pytest.approx(100 * math.exp(-1 / SETTINGS.smoothing_seconds), rel=0.05)


def test_latency_is_that_of_the_last_requests():
    """64 slow reads after 640 fast ones weigh 1 - 1/e of the mean where requests come one by one."""
    samples = [at(0, blocks={reads(): block(0)})]
    samples += [at(1000 * n, blocks={reads(): block(n, latency_ms=1.0)}) for n in range(1, 641)]
    fast = 640 * MS
    for n in range(1, 65):
        counters = block(640 + n)
        counters = type(counters)(640 + n, counters.bytes, fast + n * 10 * MS, 640 * 1000**2 + n * 10_000**2, 0, ())
        samples.append(at(1000 * (640 + n), blocks={reads(): counters}))
    latency = feed(samples)[-1].devices[SSD].latency_seconds
    assert latency == pytest.approx(0.010 - 0.009 * math.exp(-1), rel=0.02)


def test_wait_in_blk_throttle_stays_out_of_latency_and_variation():
    steps = [
        at(0, blocks={reads(): block(0, throttle_ms=0.0)}),
        at(100, blocks={reads(): block(100, latency_ms=1.0, throttle_ms=0.0)}),
    ]
    before = block(100, latency_ms=1.0, throttle_ms=0.0)
    throttled = type(before)(
        110, 110 * MIB, before.latency_ns + 10 * 51 * MS, before.latency_us_squared + 10 * 51_000**2, 0, (), 500 * MS
    )
    signals = feed([*steps, at(200, blocks={reads(): throttled})])
    assert signals[-1].devices[SSD].latency_seconds == pytest.approx(0.001)
    assert signals[-1].devices[SSD].latency_cv == pytest.approx(signals[-2].devices[SSD].latency_cv)
    assert signals[-1].devices[SSD].throttle_ratio > 0.5
    assert signals[-1].devices[SSD].throttle_wait_seconds > 0.001


def test_what_a_tier_cannot_tell_is_unknown():
    _, signals = feed([at(0, blocks={reads(): block(0)}), at(100, blocks={reads(): block(10)})])
    device = signals.devices[SSD]
    assert device.throttle_ratio is None
    assert device.throttle_wait_seconds is None
    assert device.queueing_ratio is None
    assert signals.cache_hit_ratio is None
    assert signals.cpu_ratio is None
    assert signals.queue_depth is None


def test_variation_of_two_equally_frequent_latencies():
    """Half 1 ms, half 3 ms: mean 2, standard deviation 1, so the variation is 0.5."""
    mixed = type(block(0))(100, 100 * MIB, 200 * MS, 50 * 1000**2 + 50 * 3000**2, 0, ())
    _, signals = feed([at(0, blocks={reads(): block(0)}), at(100, blocks={reads(): mixed})])
    assert signals.devices[SSD].latency_cv == pytest.approx(0.5)


def test_latency_of_a_silent_device_becomes_unknown():
    samples = [at(0, blocks={reads(): block(0)}), at(100, blocks={reads(): block(10)})]
    samples += [at(100 + 1000 * n, blocks={reads(): block(10)}) for n in range(1, 12)]
    signals = feed(samples)
    assert signals[5].devices[SSD].latency_seconds == pytest.approx(0.001)
    assert signals[-1].devices[SSD].latency_seconds is None
    assert signals[-1].devices[SSD].reference_seconds == pytest.approx(0.001)


def test_a_counter_that_fell_was_reset():
    _, _, signals = feed(
        [
            at(0, blocks={reads(): block(900)}),
            at(1000, blocks={reads(): block(1000)}),
            at(2000, blocks={reads(): block(30)}),
        ]
    )
    assert 0.0 < signals.devices[SSD].read_requests_per_second <= 100.0
    assert signals.devices[SSD].latency_seconds == pytest.approx(0.001)


def test_io_stat_stands_in_where_the_block_probe_has_nothing():
    _, signals = feed(
        [
            at(0, io_stat={SSD: IoCounts(0, 0, 0, 0), HDD: IoCounts(0, 0, 0, 0)}, blocks={reads(): block(0)}),
            at(1000, io_stat={SSD: IoCounts(7, 7, 7, 7), HDD: IoCounts(MIB, 2, 8, 1)}, blocks={reads(): block(1)}),
        ]
    )
    assert signals.devices[HDD].read_bytes_per_second == pytest.approx(MIB)
    assert signals.devices[HDD].latency_seconds is None
    assert signals.devices[SSD].read_requests_per_second == pytest.approx(1)


class TestReference:
    def test_a_slow_start_does_not_become_the_norm(self):
        reference = None
        for _ in range(100):
            reference = learn(reference, 0.050, 0.002, 0.1, may_rise=False)
        assert reference.seconds == pytest.approx(0.002)
        for _ in range(100):
            reference = learn(reference, 0.0005, 0.002, 0.1, may_rise=True)
        assert reference.seconds == pytest.approx(0.0005, rel=0.1)

    def test_a_slower_device_is_learned_while_the_job_is_fed(self):
        reference = learn(None, 0.008, 0.002, 0.1, may_rise=True)
        for _ in range(600):
            reference = learn(reference, 0.008, 0.002, 0.1, may_rise=True)
        assert reference.seconds == pytest.approx(0.008, rel=0.1)

    def test_one_bad_second_teaches_little(self):
        reference = learn(None, 0.001, 0.002, 0.1, may_rise=True)
        for _ in range(1200):
            reference = learn(reference, 0.00101, 0.002, 0.1, may_rise=True)
        for _ in range(10):
            reference = learn(reference, 1.0, 0.002, 0.1, may_rise=True)
        assert reference.seconds < 0.0012

    def test_starving_and_cold_jobs_teach_no_rise(self):
        samples = [at(0, blocks={reads(): block(0)}, streams=(stream(),))]
        for n in range(1, 40):
            done = stream(iterations=n, recent=(event(100 * n, wait_ms=50, depth=0),), depth=0)
            samples.append(at(100 * n, blocks={reads(): block(10 * n, latency_ms=40.0)}, streams=(done,)))
        assert feed(samples)[-1].devices[SSD].reference_seconds == pytest.approx(0.002)


class TestIterations:
    def test_events_give_interval_compute_and_wait(self):
        samples = [at(0, streams=(stream(),))]
        samples += [
            at(100 * n, streams=(stream(iterations=n, recent=(event(100 * n, wait_ms=20, depth=3),), depth=3),))
            for n in range(1, 60)
        ]
        signals = feed(samples)[-1]
        assert signals.iteration_source == "dataloader"
        assert signals.iterations == 59
        assert signals.iterations_since_start == 59
        assert signals.new_iterations == 1
        assert signals.iteration_seconds == pytest.approx(0.1)
        assert signals.compute_seconds == pytest.approx(0.08)
        assert signals.wait_seconds == pytest.approx(0.02)
        assert signals.wait_seconds_total == pytest.approx(59 * 0.02)
        assert (signals.queue_depth, signals.queue_capacity) == (3.0, 8.0)

    def test_each_iteration_counts_alike_in_the_averages(self):
        """Nine of ten iterations of 20 ms do not wait and the tenth waits 40 ms: 4 ms an iteration, 24 ms each."""
        times = [20 * n + 40 * (n // 10) for n in range(1, 301)]
        waits = [40.0 if n % 10 == 0 else 0.0 for n in range(1, 301)]
        samples = [at(0, streams=(stream(),))]
        samples += [
            at(time, streams=(stream(iterations=n, recent=(event(time, wait_ms=wait),)),))
            for n, (time, wait) in enumerate(zip(times, waits, strict=True), 1)
        ]
        last = feed(samples)[-100:]
        assert mean(signals.wait_seconds for signals in last) == pytest.approx(0.004, rel=0.1)
        assert mean(signals.iteration_seconds for signals in last) == pytest.approx(0.024, rel=0.1)

    def test_the_slowest_training_stream_is_the_clock(self):
        samples = []
        for n in range(31):
            fast = stream("fast", 2 * n, recent=(event(100 * n - 50), event(100 * n)) if n else ())
            slow = stream("slow", n // 3, recent=(event(100 * n, wait_ms=100),) if n and n % 3 == 0 else ())
            valid = stream("valid", n // 10, validation=True, depth=0)
            samples.append(at(100 * n, streams=(fast, slow, valid)))
        signals = feed(samples)
        assert signals[-1].iterations == 10
        assert sum(s.new_iterations for s in signals) == 10
        assert signals[-1].iteration_seconds == pytest.approx(0.3)
        assert signals[-1].queue_depth is None

    def test_the_scarcest_queue_counts(self):
        streams = (stream("a", depth=7, capacity=8), stream("b", depth=1, capacity=4), stream("c", depth=2, capacity=4))
        (signals,) = feed([at(0, streams=streams)])
        assert (signals.queue_depth, signals.queue_capacity) == (1.0, 4.0)

    def test_what_can_be_taken_is_by_the_rank_that_waits(self):
        """It need not be the one with the fewest batches ready; what only has a depth can take all of it."""
        streams = (stream("a", depth=2, takeable=1), stream("b", depth=5, takeable=0), stream("c", depth=4))
        (signals,) = feed([at(0, streams=streams)])
        assert (signals.queue_depth, signals.queue_takeable, signals.queue_capacity) == (2.0, 0.0, 8.0)
        (signals,) = feed([at(0, streams=streams[2:])])
        assert (signals.queue_depth, signals.queue_takeable) == (4.0, 4.0)
        uneven = (stream("a", depth=4, takeable=1, capacity=16), stream("b", depth=4, takeable=2, capacity=4))
        (signals,) = feed([at(0, streams=uneven)])
        assert (signals.queue_depth, signals.queue_takeable, signals.queue_capacity) == (4.0, 1.0, 16.0)

    def test_batches_read_are_counted_by_what_is_ready_in_any_order(self):
        """One batch taken, and three more made behind a missing one, of 4 MiB in all."""
        samples = [
            at(0, streams=(stream(depth=0, takeable=0),), blocks={reads(): block(0)}),
            at(100, streams=(stream(iterations=1, depth=3, takeable=0),), blocks={reads(): block(4)}),
        ]
        assert feed(samples)[-1].next_batch_bytes == pytest.approx(MIB)

    def test_a_queue_of_unknown_size_is_as_large_as_the_deepest_seen(self):
        samples = [at(100 * n, streams=(stream(depth=d, capacity=None),)) for n, d in enumerate((2, 6, 3))]
        signals = feed(samples)[-1]
        assert (signals.queue_depth, signals.queue_takeable, signals.queue_capacity) == (3.0, 3.0, 6.0)

    def test_the_deepest_seen_is_of_what_is_ready_not_of_what_can_be_taken(self):
        last = stream(iterations=1, depth=2, takeable=0, capacity=None, recent=(event(90, 0, 6, 0),))
        signals = feed([at(0, streams=(stream(depth=1, capacity=None),)), at(100, streams=(last,))])[-1]
        assert (signals.queue_depth, signals.queue_takeable, signals.queue_capacity) == (2.0, 0.0, 6.0)

    def test_validation_never_starts_the_clock(self):
        samples = [at(100 * n, streams=(stream(validation=True, iterations=n, depth=0),)) for n in range(5)]
        signals = feed(samples)[-1]
        assert signals.iteration_source == "timer"
        assert signals.new_iterations == 0
        assert signals.queue_depth is None

    def test_a_timer_stands_in(self):
        signals = feed([at(100 * n) for n in range(36)])
        assert signals[-1].iteration_source == "timer"
        assert signals[-1].iterations == 3
        assert sum(s.new_iterations for s in signals) == 3
        assert signals[-1].wait_seconds is None

    def test_hints_count_instead_of_what_was_inferred(self):
        pair = (stream("pipe", iterations=5), stream("hint", iterations=9, source="hint", depth=2))
        (signals,) = feed([at(0, streams=pair)])
        assert signals.iteration_source == "hint"
        assert signals.queue_depth == 2.0

    def test_attached_late_is_no_cold_start(self):
        signals = feed([at(0, streams=(stream(iterations=500),)), at(100, streams=(stream(iterations=501),))])
        assert signals[-1].iterations_since_start == 501
        assert signals[-1].new_iterations == 1

    def test_a_new_process_starts_anew(self):
        samples = [at(100 * n, streams=(stream("old", n),)) for n in range(30)]
        samples += [at(3000 + 100 * n, streams=(stream("new", n),)) for n in range(3)]
        signals = feed(samples)
        assert signals[29].iterations_since_start == 29
        assert signals[-1].iterations_since_start == 2
        assert signals[-1].iterations == 31

    def test_a_long_pause_is_a_resume(self):
        samples = [
            at(100 * n, streams=(stream(iterations=n, recent=(event(100 * n),) if n else ()),)) for n in range(30)
        ]
        late = stream(iterations=30, recent=(event(32_900),))
        signals = feed([*samples, at(32_950, streams=(late,))])
        assert signals[-2].iterations_since_start == 29
        assert signals[-1].iterations_since_start == 0

    def test_a_checkpoint_is_no_new_pace(self):
        samples = [
            at(100 * n, streams=(stream(iterations=n, recent=(event(100 * n),) if n else ()),)) for n in range(30)
        ]
        signals = feed([*samples, at(6000, streams=(stream(iterations=30, recent=(event(5900),)),))])
        assert signals[-1].compute_seconds < 0.2

    def test_counts_without_events_still_tick(self):
        samples = [
            at(0, streams=(stream(iterations=5, last_iteration_ns=0),)),
            at(100, streams=(stream(iterations=7, last_iteration_ns=90 * MS),)),
        ]
        assert feed(samples)[-1].new_iterations == 2


class TestStarvation:
    def run(self, waits_depths, grade="S1"):
        """Each (wait in ms, depth) or (wait in ms, depth, takeable)."""
        samples = [at(0, streams=(stream(grade=grade),))]
        for n, (wait, *left) in enumerate(waits_depths, start=1):
            one = stream(iterations=n, recent=(event(100 * n, wait, *left),), depth=left[0], grade=grade)
            samples.append(at(100 * n, streams=(one,)))
        return [s.starvation_events for s in feed(samples)]

    def test_an_episode_needs_ten_milliseconds(self):
        assert self.run([(9.9, 0), (10.0, 0), (0, 0)]) == [0, 0, 1, 1]

    def test_starving_iterations_in_a_row_are_one_episode(self):
        assert self.run([(50, 0), (50, 0), (0, 0), (50, 0)]) == [0, 1, 1, 1, 2]

    def test_a_queue_that_held_a_batch_was_not_empty(self):
        assert self.run([(0, 2), (15, 1), (15, 0), (15, 0)], grade="S2") == [0, 0, 0, 0, 1]

    @pytest.mark.parametrize("grade", ["S2", "U"])
    def test_batches_behind_a_missing_one_do_not_feed_a_loop_that_takes_them_in_order(self, grade):
        assert self.run([(0, 6, 0), (15, 5, 0), (0, 4, 4), (15, 3, 3), (15, 6, 0)], grade) == [0, 0, 1, 1, 1, 1]
        assert self.run([(0, 2, 2), (15, 6, 0), (15, 5, 2)], grade) == [0, 0, 0, 1]

    def test_a_wait_of_grade_one_is_true_starvation(self):
        assert self.run([(0, 2), (15, 1)]) == [0, 0, 1]

    def test_a_wait_in_progress_counts_at_once_and_once(self):
        streams = [
            stream(iterations=1, recent=(event(0),), depth=0),
            stream(iterations=1, waiting_since_ns=95 * MS, depth=0),
            stream(iterations=1, waiting_since_ns=95 * MS, depth=0),
            stream(iterations=2, recent=(event(250, wait_ms=155, depth=0),), depth=0),
        ]
        signals = feed([at(100 * n, streams=(one,)) for n, one in enumerate(streams)])
        assert [s.starvation_events for s in signals] == [0, 0, 1, 1]
        assert [s.blocked_seconds for s in signals] == pytest.approx([0.0, 0.005, 0.105, 0.0])

    def test_an_overdue_hint_with_an_empty_queue_is_blocked_while_it_reads(self):
        def at_time(ms, requests):
            n = min(ms // 100, 20)
            recent = (event(100 * n, depth=0),) if ms % 100 == 0 and ms <= 2000 else ()
            one = stream(
                source="hint", grade="hint", iterations=n, recent=recent, depth=0, last_iteration_ns=100 * n * MS
            )
            return at(ms, streams=(one,), blocks={reads(): block(requests)})

        busy = feed([at_time(ms, ms) for ms in range(0, 2501, 50)])
        assert busy[40].blocked_seconds == 0.0
        assert busy[42].blocked_seconds == 0.0
        assert busy[-1].blocked_seconds == pytest.approx(0.4, abs=0.02)
        quiet = feed([at_time(ms, min(ms, 500)) for ms in range(0, 2501, 50)])
        assert quiet[-1].blocked_seconds == 0.0

    def test_a_loop_whose_hints_end_has_not_made_all_that_was_inferred_meanwhile(self):
        """Both sources call a loop alike, and each counts for itself."""

        def told(n):
            return stream(source="hint", grade="hint", iterations=n, recent=(event(100 * n, depth=2),), depth=2)

        def inferred(n):
            return stream(iterations=5000 + n, recent=(event(100 * n, depth=2),), depth=2)

        samples = [at(100 * n, streams=((told if n < 5 else inferred)(n),)) for n in range(1, 10)]
        assert max(signals.new_iterations for signals in feed(samples)) <= 1

    @pytest.mark.parametrize("what", ["checkpoint", "writes in flight", "idle connections", "reads in flight"])
    def test_only_what_reads_can_be_short_of_data(self, what):
        """A loop that writes a checkpoint is silent too, and a store's connections stay open whoever waits."""

        def at_time(ms):
            n, late = min(ms // 100, 20), max(0, ms - 2000)
            recent = (event(100 * n, depth=0),) if ms % 100 == 0 and ms <= 2000 else ()
            last = {"recent": recent, "last_iteration_ns": 100 * n * MS}
            one = stream(source="hint", grade="hint", iterations=n, depth=0, **last)
            blocks = {reads(): block(min(ms, 2000)), writes(): block(0)}
            objects = {}
            if what == "checkpoint":
                blocks[writes()] = block(late)
            elif what == "writes in flight":
                blocks[writes()] = replace(block(0), in_flight=4 if late else 0)
            elif what == "reads in flight":
                blocks[reads()] = replace(block(min(ms, 2000)), in_flight=4 if late else 0)
            else:
                objects[ObjectKey(1, "10.0.0.1:9000")] = ObjectCounters(5, MIB, 0, 0, 0, 3, ())
            return at(ms, streams=(one,), blocks=blocks, objects=objects)

        blocked = feed([at_time(ms) for ms in range(0, 4001, 50)])[-1].blocked_seconds
        assert (blocked > 1.0) is (what == "reads in flight")


def test_next_batch_from_the_past_and_from_hints():
    samples = [at(0, streams=(stream(depth=4),), blocks={reads(): block(0)})]
    for n in range(1, 30):
        one = stream(iterations=n, recent=(event(100 * n, depth=4),), depth=4)
        samples.append(at(100 * n, streams=(one,), blocks={reads(): block(3 * n)}))
    assert feed(samples)[-1].next_batch_bytes == pytest.approx(3 * MIB)
    hinted = [at(0, streams=(stream(source="hint", next_batch_bytes=4 * MIB),))]
    assert feed(hinted)[-1].next_batch_bytes == 4 * MIB


@pytest.mark.parametrize(("read", "taken", "too_little"), [(2, 2.0, False), (4, 4.0, False), (12, 4.5, True)])
def test_a_hint_that_tells_less_than_a_batch_reads_is_known(read, taken, too_little):
    """3 MiB told: what storage delivers instead counts, up to half as much again."""
    samples = [at(0, streams=(stream(source="hint", depth=4),), blocks={reads(): block(0)})]
    for n in range(1, 40):
        one = stream(source="hint", iterations=n, recent=(event(100 * n, depth=4),), depth=4, next_batch_bytes=3 * MIB)
        samples.append(at(100 * n, streams=(one,), blocks={reads(): block(read * n)}))
    found = feed(samples)
    assert not told_too_little(found[1]), "it is believed at first"
    assert found[-1].next_batch_bytes == pytest.approx(taken * MIB, rel=0.01)
    assert found[-1].hinted_batch_bytes == 3 * MIB
    assert found[-1].read_batch_bytes == pytest.approx(read * MIB, rel=0.01)
    assert told_too_little(found[-1]) is too_little


def test_cache_and_workers():
    samples = [
        at(0, cache=CacheCounters(0, 0), workers=WorkerTime(0, 0, 0, 0, 0, 0, 0)),
        at(
            100,
            cache=CacheCounters(100 * MIB, 25 * MIB),
            workers=WorkerTime(60 * MS, 20 * MS, 0, 0, 0, 500 * MS, 20 * MS),
        ),
    ]
    signals = feed(samples)[-1]
    assert signals.cache_hit_ratio == pytest.approx(0.75)
    assert signals.cpu_ratio == pytest.approx(0.8)


def test_what_the_workers_did_before_a_start_says_nothing_of_the_new_life():
    busy, blocked = WorkerTime(900 * MS, 0, 0, 0, 0, 0, 0), WorkerTime(900 * MS, 0, 50 * MS, 0, 0, 0, 0)
    samples = [
        at(0, streams=(stream(iterations=50),), workers=WorkerTime(0, 0, 0, 0, 0, 0, 0)),
        at(900, streams=(stream(iterations=60),), workers=busy),
        at(950, streams=(stream(iterations=1),), workers=blocked),
    ]
    of_old, of_new = feed(samples)[-2:]
    assert of_old.cpu_ratio == pytest.approx(1.0)
    assert of_new.cpu_ratio == pytest.approx(0.0)


def test_what_the_workers_did_is_unknown_after_half_a_second_without_work():
    none, busy = WorkerTime(0, 0, 0, 0, 0, 0, 0), WorkerTime(100 * MS, 0, 0, 0, 0, 0, 0)
    samples = [at(0, workers=none), *(at(time, workers=busy) for time in (100, 300, 590, 700))]
    assert [one.cpu_ratio for one in feed(samples)[1:]] == [pytest.approx(1.0)] * 3 + [None]


def test_remote_storage():
    nfs, s3 = NfsKey(1, "server:/data", "read"), ObjectKey(1, "10.0.0.1:9000")
    samples = [
        at(0, nfs={nfs: NfsCounters(0, 0, 0, 0, 0, 0, ())}, objects={s3: ObjectCounters(0, 0, 0, 0, 0, 0, ())}),
        at(
            1000,
            nfs={nfs: NfsCounters(10, MIB, 60 * MS, 40 * MS, 100 * MS, 10 * 10_000**2, ())},
            objects={s3: ObjectCounters(10, MIB, 50 * MS, 100 * MS, 10 * 10_000**2, 0, ())},
            nic_packets=5000,
        ),
    ]
    signals = feed(samples)[-1]
    mount = signals.devices["server:/data"]
    assert mount.medium is Medium.REMOTE
    assert mount.latency_seconds == pytest.approx(0.010)
    assert mount.queueing_ratio == pytest.approx(0.6)
    assert signals.devices["10.0.0.1:9000"].queueing_ratio == pytest.approx(0.5)
    assert signals.remote_queueing_ratio == pytest.approx(0.55)


def test_a_user_space_file_system_is_remote_and_its_look_ups_are_no_reads():
    ops = ("read", "write", "other")
    before = {FuseKey(1, "/mnt/s3", op): FuseCounters(0, 0, 0, 0, ()) for op in ops}
    after = {
        FuseKey(1, "/mnt/s3", "read"): FuseCounters(10, MIB, 80 * MS, 10 * 8_000**2, ()),
        FuseKey(1, "/mnt/s3", "write"): FuseCounters(5, 2 * MIB, 10 * MS, 5 * 2_000**2, ()),
        FuseKey(1, "/mnt/s3", "other"): FuseCounters(90, 0, 900 * MS, 90 * 10_000**2, ()),
    }
    mount = feed([at(0, fuse=before), at(1000, fuse=after)])[-1].devices["/mnt/s3"]
    assert mount.medium is Medium.REMOTE
    assert mount.latency_seconds == pytest.approx(0.008)
    assert mount.queueing_ratio is None


def test_packets_per_second():
    _, signals = feed([at(0, nic_packets=1000), at(500, nic_packets=1500)])
    assert signals.nic_packets_per_second == pytest.approx(1000)


def test_first_latency_after_a_start_counts_cached_reads_as_nothing():
    warm = [
        at(
            100 * n,
            streams=(stream("old", n, recent=(event(100 * n),) if n else ()),),
            blocks={reads(): block(n)},
            cache=CacheCounters(100 * n * MIB, n * MIB),
        )
        for n in range(30)
    ]
    cold = [
        at(
            3000 + 100 * n,
            streams=(stream("new", n, recent=(event(3000 + 100 * n),) if n else ()),),
            blocks={reads(): block(30 + 20 * n)},
            cache=CacheCounters((3000 + 20 * n) * MIB, (30 + 20 * n) * MIB),
        )
        for n in range(4)
    ]
    signals = feed([*warm, *cold])
    assert signals[29].first_io_latency_seconds < 0.0001
    assert signals[-1].first_io_latency_seconds > 0.0004


counters = st.integers(min_value=0, max_value=10**12)


@given(st.lists(st.tuples(st.integers(1, 10**9), counters, counters, counters, counters), min_size=2, max_size=12))
def test_no_counter_can_make_signals_that_are_not_numbers(steps):
    state, previous, now = None, None, 0
    for dt, requests, size, latency, squares in steps:
        now += dt
        counter = type(block(0))(requests, size, latency, squares, 0, (), latency // 2, latency // 4)
        one = stream(iterations=requests % 1000, last_iteration_ns=now, depth=requests % 9)
        sample = JobSample(1, now, {reads(): counter}, (one,))
        state, signals = derive(previous, sample, state, SETTINGS)
        previous = sample
        for device in signals.devices.values():
            for value in (
                device.read_bytes_per_second,
                device.latency_seconds,
                device.latency_cv,
                device.throttle_ratio,
                device.reference_seconds,
            ):
                assert value is None or (math.isfinite(value) and value >= 0.0)
            assert device.throttle_ratio is None or device.throttle_ratio <= 1.0
        assert signals.new_iterations >= 0
        assert signals.next_batch_bytes is None or math.isfinite(signals.next_batch_bytes)


def test_a_second_is_a_second():
    assert feed([at(0), JobSample(1, SECOND)])[-1].dt == pytest.approx(1.0)
