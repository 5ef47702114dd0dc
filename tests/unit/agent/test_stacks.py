"""Which mapped devices the probe is told to look through, and when."""

import logging

import pytest

from agent.stacks import LOOK_SECONDS, Stacks
from bpf.loader import ProbeError
from bpf.samples import BlockCounters, BlockKey, ProbeState, ProbeStatus, Sample

CACHE, SSD, HDD, OTHER = "253:3", "259:0", "8:0", "253:9"
WAY = frozenset({CACHE, "253:1"})


class SeeingProbe:
    name = "block"

    def __init__(self, refusal=None):
        self.told = []
        self.refusal = refusal

    def look_through(self, devices):
        if self.refusal:
            raise ProbeError(self.refusal)
        self.told.append(set(devices))

    def status(self):
        return ProbeStatus(self.name, ProbeState.ATTACHED)

    def manage(self, cgroup_ids):
        pass

    def read(self, now_ns):
        return Sample(now_ns)

    def close(self):
        pass


class Host:
    """What stands on what; counts the questions."""

    def __init__(self):
        self.ways = {CACHE: WAY}
        self.asked = []

    def find(self, device):
        self.asked.append(device)
        found = self.ways.get(device, frozenset())
        if isinstance(found, OSError):
            raise found
        return found


def sample(seconds, *devices):
    counters = BlockCounters(1, 4096, 0, 0, 0, (0,) * 32)
    return Sample(int(seconds * 1e9), {BlockKey(7, device, "read"): counters for device in devices})


def seen(stacks, seconds, *devices):
    return {key.device for key in stacks.without(sample(seconds, *devices)).blocks}


@pytest.fixture
def host():
    return Host()


@pytest.fixture
def probe():
    return SeeingProbe()


@pytest.fixture
def stacks(probe, host):
    return Stacks([probe], host.find)


def test_what_was_counted_on_it_before_is_left_out_at_once(stacks, probe):
    assert seen(stacks, 0, SSD) == {SSD}
    assert probe.told == []
    assert seen(stacks, 0.1, SSD, CACHE) == {SSD}
    assert set(WAY) in probe.told


def test_what_is_counted_in_between_is_dropped_again(stacks, probe):
    seen(stacks, 0, CACHE)
    before = len(probe.told)
    assert seen(stacks, 0.1, CACHE, HDD) == {HDD}
    assert probe.told[before:] == [set(WAY)]
    assert seen(stacks, 0.2, HDD) == {HDD}
    assert len(probe.told) == before + 1


def test_a_device_is_asked_about_once_between_looks(stacks, host):
    for tick in range(50):
        seen(stacks, tick / 10, SSD, HDD, OTHER)
    assert sorted(host.asked) == sorted([SSD, HDD, OTHER])


def test_a_cache_that_is_gone_is_no_longer_looked_through(stacks, probe, host, caplog):
    caplog.set_level(logging.INFO)
    seen(stacks, 0, CACHE)
    host.ways = {}
    assert seen(stacks, LOOK_SECONDS / 2) == set()
    assert seen(stacks, LOOK_SECONDS + 1, CACHE) == {CACHE}, "another device has its number"
    assert probe.told[-1] == set()
    assert f"{CACHE} count as they stand again" in caplog.text


def test_a_device_that_becomes_a_cache_while_it_is_used(stacks, probe, host):
    assert seen(stacks, 0, OTHER) == {OTHER}
    host.ways[OTHER] = frozenset({OTHER})
    assert seen(stacks, LOOK_SECONDS + 1, OTHER, HDD) == {HDD}
    assert probe.told[-1] == {OTHER}


def test_where_the_table_cannot_be_read_it_counts_as_it_stands(stacks, probe, host, caplog):
    host.ways[CACHE] = PermissionError(1, "Operation not permitted", "/dev/mapper/control")
    for seconds in range(60):
        assert seen(stacks, seconds, CACHE) == {CACHE}
    assert probe.told == []
    assert caplog.text.count("'/dev/mapper/control'") == 1
    host.ways[CACHE] = WAY
    assert seen(stacks, 61 + LOOK_SECONDS, CACHE) == set()


def test_where_the_kernel_does_not_tell_nothing_is_lost(host, caplog):
    stacks = Stacks([SeeingProbe("no tracepoint block_bio_remap")], host.find)
    for tick in range(300):
        assert seen(stacks, tick / 10, CACHE, HDD) == {CACHE, HDD}
    assert caplog.text.count("no tracepoint block_bio_remap") == 1


def test_without_a_probe_that_can_nothing_is_asked(host):
    assert seen(Stacks([], host.find), 0, CACHE) == {CACHE}
    assert host.asked == []
