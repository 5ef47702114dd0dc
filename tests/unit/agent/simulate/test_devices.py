import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.simulate.devices import FairQueue, Link, Ssd, Unlimited
from agent.simulate.events import Events
from agent.simulate.requests import Account, Request
from tests.unit.agent.simulate.builders import KIB, MIB, Load


def test_a_lone_request_takes_latency_and_transfer():
    events = Events()
    load = Load(events, Ssd(events, 100 * MIB, 1e5, latency=0.001), size=MIB, threads=1)
    events.run(0.0109)
    assert not load.finished
    events.run(0.0111)
    assert load.finished == [pytest.approx(0.011)]


def test_many_readers_get_the_byte_rate_and_no_more():
    events = Events()
    load = Load(events, Ssd(events, 100 * MIB, 1e5), threads=32)
    events.run(20.0)
    assert load.rate == pytest.approx(100 * MIB, rel=0.01)
    assert load.rate <= 100 * MIB


def test_small_requests_meet_the_request_rate():
    events = Events()
    load = Load(events, Ssd(events, 1e12, 4000), size=4 * KIB, threads=32)
    events.run(5.0)
    assert len(load.finished) / 5.0 == pytest.approx(4000, rel=0.02)


def test_a_burst_passes_before_the_rate_bites():
    events = Events()
    load = Load(events, Ssd(events, 100 * MIB, 1e9, latency=0.0, transfer=1e12, burst_seconds=0.1), threads=400)
    events.run(0.001)
    assert sum(time < 0.001 for time in load.finished) * load.size >= 10 * MIB
    events.run(10.0)
    assert load.account.bytes[0] <= 100 * MIB * 10.1 + load.size


@given(
    sizes=st.lists(st.integers(4 * KIB, 2 * MIB), min_size=1, max_size=60),
    burst=st.sampled_from([0.0, 0.1]),
)
def test_bytes_served_never_exceed_capacity(sizes, burst):
    events = Events()
    rate = 50 * MIB
    device = Ssd(events, rate, 5000, burst_seconds=burst)
    served = []
    for size in sizes:
        request = Request(Account(1), 0, size, 0, lambda one: served.append((events.now, one.size)))
        request.submit(0.0)
        device.accept(request)
    events.run(1000.0)
    assert len(served) == len(sizes)
    total = 0
    for time, size in served:
        total += size
        assert total <= rate * (time + burst) + max(sizes)


def test_a_link_shares_its_rate_and_adds_its_round_trip():
    events = Events()
    load = Load(events, Link(events, 10 * MIB, 0.02), size=MIB, threads=1)
    events.run(0.1201)
    assert load.finished == [pytest.approx(0.12)]
    busy = Load(events, Link(events, 10 * MIB, 0.02), threads=16, cgroup=2)
    events.run(10.12)
    assert busy.account.bytes[0] / 10 == pytest.approx(10 * MIB, rel=0.02)


def test_requests_without_a_slot_wait_in_the_backlog_and_it_shows_as_queueing():
    events = Events()
    link = Link(events, 10 * MIB, 0.001, slots=4)
    load = Load(events, link, threads=16)
    events.run(5.0)
    account = load.account
    assert account.queue[0] > account.service[0]
    assert account.queue[0] + account.service[0] == pytest.approx(account.latency[0])


def test_foreign_traffic_leaves_less_of_a_link():
    events = Events()
    link = Link(events, 10 * MIB, 0.001)
    link.foreign = 8 * MIB
    load = Load(events, link)
    events.run(10.0)
    assert load.rate == pytest.approx(2 * MIB, rel=0.02)


def test_packets_of_a_link_follow_its_bytes():
    events = Events()
    link = Link(events, 100 * MIB, 0.001)
    load = Load(events, link)
    events.run(1.0)
    frames = load.account.bytes[0] / Link.FRAME_BYTES
    assert frames < link.packets < 1.7 * frames


def test_weights_divide_a_device_that_everybody_wants():
    events = Events()
    queue = FairQueue(events, Ssd(events, 100 * MIB, 1e6), depth=2)
    queue.weights = {1: 300.0, 2: 100.0}
    loads = [Load(events, queue, cgroup=cgroup) for cgroup in (1, 2)]
    events.run(10.0)
    assert loads[0].rate / loads[1].rate == pytest.approx(3.0, rel=0.05)
    assert loads[0].rate + loads[1].rate == pytest.approx(100 * MIB, rel=0.03)


def test_a_paced_queue_charges_requests_as_well_as_bytes():
    events = Events()
    queue = FairQueue(
        events, Ssd(events, 1e12, 1e9), pace=True, seconds_per_byte=1 / (100 * MIB), seconds_per_request=0.001
    )
    load = Load(events, queue, size=100 * KIB)
    events.run(10.0)
    assert load.rate == pytest.approx(100 * KIB / (100 * KIB / (100 * MIB) + 0.001), rel=0.02)


def test_a_queue_alone_keeps_the_device_busy():
    events = Events()
    queue = FairQueue(events, Ssd(events, 100 * MIB, 1e6), depth=4)
    queue.weights = {1: 100.0, 2: 900.0}
    load = Load(events, queue, cgroup=1)
    events.run(5.0)
    assert load.rate == pytest.approx(100 * MIB, rel=0.03)


def test_unlimited_storage_serves_at_once():
    events = Events()
    load = Load(events, Unlimited(events, seconds=0.001), size=MIB, threads=100)
    events.run(1.0)
    assert len(load.finished) == pytest.approx(100_000, rel=0.01)
