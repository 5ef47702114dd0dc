import pytest

from agent.simulate.node import FIRST_CGROUP, SimulatedNode
from agent.simulate.run import simulate, starvation_events, starved_phases, summarise
from agent.simulate.scenario import Burst, ByteSize
from agent.simulate.trainer import Iteration, Warmth
from tests.unit.agent.simulate.builders import KIB, MIB, PLAIN, job, scan, scenario, ssd


def run(spec, policy="none", seed=1, **options):
    return simulate(spec, policy, seed, machine=PLAIN, **options)


def waits(outcome):
    return [one.wait for one in outcome.jobs[0].iterations]


def test_a_job_alone_with_slack_waits_for_its_first_batch_and_never_again():
    outcome = run(scenario(job(), seconds=30))
    first, *others = waits(outcome)
    assert 0 < first < 0.1
    assert max(others) == 0.0
    assert summarise(outcome)["starvation_events"] == 1.0


def test_a_job_that_runs_already_does_not_wait_at_all():
    outcome = run(scenario(job(), seconds=10), warm={"job": Warmth(500)})
    assert max(waits(outcome)) == 0.0


def test_iterations_follow_the_compute_time():
    outcome = run(scenario(job(compute_ms=50.0), seconds=20))
    assert len(outcome.jobs[0].iterations) == pytest.approx(400, rel=0.03)


def test_a_job_that_needs_more_than_the_device_gives_what_the_device_gives():
    hungry = job(batch_reads=40, compute_ms=50.0)  # 200 MiB/s
    outcome = run(scenario(hungry, devices=(ssd(100 * MIB),), seconds=30))
    assert outcome.jobs[0].moved_bytes / 30 == pytest.approx(100 * MIB, rel=0.02)
    assert summarise(outcome)["utilisation"] == pytest.approx(0.5, rel=0.05)


def test_no_more_batches_are_read_ahead_than_the_queue_holds():
    node = SimulatedNode(scenario(job(compute_ms=1000.0), seconds=100), PLAIN, 1)
    node.events.run(20.5)
    trainer = node.trainers[FIRST_CGROUP]
    taken = len(trainer.iterations)
    assert node.moved_bytes(FIRST_CGROUP) == (taken + 4) * 4 * 256 * KIB
    assert trainer.stream().depth == 3  # as of the last iteration, which took one of four


def test_a_cold_start_reads_more():
    node = SimulatedNode(scenario(job(cold_batches=3, cold_factor=5, compute_ms=1000.0), seconds=100), PLAIN, 1)
    node.events.run(0.5)
    assert node.moved_bytes(FIRST_CGROUP) == (3 * 5 + 2) * 4 * 256 * KIB


def test_bursts_come_at_their_batches():
    spec = job(burst=Burst(every=10, length=2, factor=3))
    assert [spec.batch_factor(batch) for batch in (0, 1, 2, 9, 10, 11, 12)] == [3, 3, 1, 1, 3, 3, 1]


def test_a_restart_is_a_new_life_after_a_second():
    outcome = run(scenario(job(restarts_seconds=(5.0,)), seconds=10))
    lives = [one.life for one in outcome.jobs[0].iterations]
    assert set(lives) == {0, 1}
    first = outcome.jobs[0].iterations[lives.index(1)]
    assert 6.0 <= first.time < 6.2
    assert first.depth == 0
    assert first.number == 1


def test_preparation_that_is_slower_than_the_loop_starves_it_whatever_storage_does():
    slow = job(workers=1, prepare_cpu_ms=150.0, compute_ms=100.0)
    for policy in ("none", "unlimited"):
        assert waits(run(scenario(slow, seconds=10), policy))[-1] == pytest.approx(0.05, rel=0.2)


def test_data_in_memory_is_read_from_the_device_once():
    spec = job(access="filesystem", data=ByteSize(16 * MIB), pattern="sequential")
    outcome = run(scenario(spec, seconds=60))
    assert outcome.jobs[0].moved_bytes == 16 * MIB


def test_too_little_memory_makes_a_job_read_again():
    spec = job(access="filesystem", data=ByteSize(64 * MIB), memory=ByteSize(16 * MIB))
    node = SimulatedNode(scenario(spec, seconds=60), PLAIN, 1)
    node.events.run(60.0)
    cache = node.samples()[FIRST_CGROUP].cache
    assert 1 - cache.missed_bytes / cache.read_bytes == pytest.approx(0.25, abs=0.05)


def test_a_neighbour_takes_what_it_gets_from_start_to_stop():
    outcome = run(scenario(best_effort=(scan(start_seconds=2.0, stop_seconds=7.0),), seconds=10))
    moved, seconds = outcome.neighbours["scan"]
    assert seconds == 5.0
    assert moved / seconds == pytest.approx(100 * MIB, rel=0.03)


def test_a_greedy_neighbour_starves_the_job_and_a_cap_on_it_helps():
    spec = scenario(
        job(compute_ms=20.0), best_effort=(scan(threads=24, start_seconds=1.0),), devices=(ssd(120 * MIB),), seconds=15
    )
    free, capped = (summarise(run(spec, policy)) for policy in ("none", "nbcap"))
    assert free["wait_ms"] > 10 * capped["wait_ms"]
    assert capped["neighbour_bytes_per_second"] == pytest.approx(12 * MIB, rel=0.05)


def test_equal_parts_cap_every_user():
    spec = scenario(
        job(batch_reads=40, compute_ms=50.0), best_effort=(scan(), scan("scan2"), scan("scan3")), seconds=20
    )
    outcome = run(spec, "static")
    assert outcome.jobs[0].moved_bytes / 20 == pytest.approx(25 * MIB, rel=0.03)
    assert sum(moved for moved, _ in outcome.neighbours.values()) / 20 == pytest.approx(75 * MIB, rel=0.03)


def test_with_two_devices_the_slow_one_gets_its_part():
    devices = (ssd(), ssd(name="ssd1"))
    node = SimulatedNode(
        scenario(job(slow_device="ssd1", slow_ratio=0.25, compute_ms=20.0), devices=devices, seconds=60), PLAIN, 1
    )
    node.events.run(60.0)
    read = {key.device: counters.bytes for key, counters in node.samples()[FIRST_CGROUP].blocks.items()}
    assert read["ssd1"] / sum(read.values()) == pytest.approx(0.25, abs=0.02)


def test_the_same_seed_gives_the_same_run_and_another_one_another():
    spec = scenario(job(pattern="random", compute_ms=20.0), best_effort=(scan(),), seconds=10)
    once, again, other = (summarise(run(spec, "adaptive", seed)) for seed in (1, 1, 2))
    assert once == again
    assert once != other


def test_hints_tell_what_comes_next_and_a_job_without_them_is_seen_by_its_loader():
    for hints, source in ((True, "hint"), (False, "dataloader")):
        node = SimulatedNode(scenario(job(hints=hints), seconds=10), PLAIN, 1)
        node.events.run(5.05)
        stream = node.samples()[FIRST_CGROUP].streams[0]
        assert (stream.source, stream.capacity) == (source, 4)
        assert (stream.next_batch_bytes == MIB) if hints else (stream.next_batch_bytes is None)
        assert len(stream.recent) == stream.iterations
        assert node.samples()[FIRST_CGROUP].streams[0].recent == ()


def test_a_loop_before_an_empty_queue_is_seen_to_wait():
    node = SimulatedNode(scenario(job(batch_reads=400), seconds=100), PLAIN, 1)
    node.events.run(0.005)
    assert node.samples()[FIRST_CGROUP].streams == ()
    node.events.run(0.5)
    stream = node.samples()[FIRST_CGROUP].streams[0]
    assert stream.waiting_since_ns == 0
    assert stream.depth == 0


def test_counters_only_grow():
    node = SimulatedNode(scenario(job(), best_effort=(scan(),), seconds=10), PLAIN, 1)
    before = None
    for tick in range(1, 60):
        node.events.run(tick / 10)
        blocks = node.samples()[FIRST_CGROUP].blocks
        for key, counters in (before or {}).items():
            assert blocks[key].requests >= counters.requests
            assert blocks[key].latency_ns >= counters.latency_ns
        before = blocks


def rows(*triples, life=0):
    return [Iteration(time, wait, depth, 1, life, taken=True) for time, wait, depth in triples]


@pytest.mark.parametrize(
    ("iterations", "events"),
    [
        (rows((0, 0.5, 0), (1, 0.5, 0), (2, 0.0, 1), (3, 0.5, 0)), 2),
        (rows((0, 0.009, 0), (1, 0.5, 1)), 0),
        (rows((0, 0.5, 0)) + rows((1, 0.5, 0), life=1), 2),
    ],
)
def test_starvation_events_are_episodes_of_one_life(iterations, events):
    assert starvation_events(iterations) == events
    assert starvation_events(iterations, since=10.0) == 0


def test_a_phase_is_a_time_in_which_the_loop_mostly_waits():
    fed = [(second, 0.0, 1) for second in range(30)]
    starved = [(30 + second, 0.8, 0) for second in range(30)]
    fed_again = [(60 + second, 0.0, 1) for second in range(60)]
    starved_again = [(120 + second, 0.8, 0) for second in range(30)]
    one_stall = [(150 + second, 1.0 if second == 40 else 0.0, 0) for second in range(60)]
    day = rows(*fed, *starved, *fed_again, *starved_again, *one_stall)
    assert starved_phases(day, 10.0, 0.2, since=0.0) == 2
    assert starved_phases(day, 10.0, 0.2, since=100.0) == 1
    assert starved_phases(rows(*fed), 10.0, 0.2, since=0.0) == 0
