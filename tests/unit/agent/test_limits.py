"""From shares to io.max values: scaling, bounds, unknown dimensions, and the step limit between two writes."""

from math import inf

import pytest

from agent.limits import SMALLEST_BYTES_PER_SECOND, SMALLEST_REQUESTS_PER_SECOND, desired_limits
from agent.types import Capacity, Decision, DeviceInfo, DeviceView, Entitlement, Job, Medium, Quota
from cgroup.lines import Limit, Target, Weight

DISK = "259:0"
CAPACITY = Capacity(1e9, 5e8, 1e5, 5e4)
JOBS = {7: Job(7, "a", "/train.slice/a", training=True), 8: Job(8, "b", "/batch.slice/b", training=False)}


def limits(share, *, job=7, capacity=CAPACITY, applied=None, floor=0.0, ceiling=1.0, actuator="io.max"):
    devices = {DISK: DeviceView(DeviceInfo(DISK, "nvme0n1", Medium.SSD, capacity, actuator))}
    decision = Decision({(job, DISK): Quota(share, "because")}, {}, {}, {})
    return desired_limits(decision, JOBS, devices, applied or {}, floor=floor, ceiling=ceiling)


def test_share_of_every_dimension():
    assert limits(0.25) == {
        Target(7, "/train.slice/a", DISK): (Limit(250_000_000, 125_000_000, 25_000, 12_500), "because")
    }


def test_bounds_and_smallest_caps():
    ((low, _),) = limits(0.001, floor=0.02).values()
    assert low.rbps == 20_000_000
    ((high, _),) = limits(0.99, ceiling=0.5).values()
    assert high.rbps == 500_000_000
    ((tiny, _),) = limits(1e-9).values()
    assert (tiny.rbps, tiny.riops) == (SMALLEST_BYTES_PER_SECOND, SMALLEST_REQUESTS_PER_SECOND)


def test_unknown_dimensions_are_not_limited():
    ((limit, _),) = limits(0.5, capacity=Capacity(1e9, inf, inf, inf)).values()
    assert limit == Limit(500_000_000, None, None, None)


def test_without_capacity_or_job_nothing_is_desired():
    assert limits(0.5, capacity=None) == {}
    assert limits(0.5, job=99) == {}


@pytest.mark.parametrize(("share", "expected"), [(0.9, 480_000_000), (0.1, 320_000_000), (0.41, 410_000_000)])
def test_a_training_cap_moves_by_a_fifth_at_most(share, expected):
    standing = {(7, DISK): (400_000_000, 200_000_000, 40_000, 20_000)}
    ((limit, _),) = limits(share, applied=standing).values()
    assert limit.rbps == expected


def test_best_effort_caps_move_freely():
    standing = {(8, DISK): (400_000_000, 200_000_000, 40_000, 20_000)}
    ((limit, _),) = limits(0.02, job=8, applied=standing).values()
    assert limit.rbps == 20_000_000


def test_small_numbers_can_still_move():
    standing = {(7, DISK): (400_000_000, None, 2, None)}
    ((limit, _),) = limits(0.41, applied=standing).values()
    assert limit.riops == 3
    assert limit.wbps == 205_000_000


@pytest.mark.parametrize("file", ["io.weight", "io.bfq.weight"])
def test_weights_where_the_device_is_steered_by_them(file):
    assert limits(0.05, actuator=file) == {Target(7, "/train.slice/a", DISK): (Weight(50, file), "because")}


@pytest.mark.parametrize(
    ("share", "entitled", "is_open", "weight"),
    [
        (0.2, 0.6, True, 33),  # a third of what the default weight stands for
        (0.6, 0.3, True, 100),  # never more than who has none
        (0.4, 0.0, True, 100),
        (0.05, 0.0, True, 50),
        (0.4, None, False, 100),  # nobody starves any more, and the cap is still there
        (0.05, None, False, 50),
    ],
)
def test_a_capped_flood_never_outweighs_who_starves(share, entitled, is_open, weight):
    devices = {DISK: DeviceView(DeviceInfo(DISK, "sda", Medium.HDD, CAPACITY, "io.bfq.weight"))}
    entitlements = {} if entitled is None else {(7, DISK): Entitlement(entitled)}
    decision = Decision({(8, DISK): Quota(share, "because")}, entitlements, {}, {DISK: is_open})
    ((setting, _),) = desired_limits(decision, JOBS, devices, {}, floor=0.0, ceiling=1.0).values()
    assert setting == Weight(weight, "io.bfq.weight")
