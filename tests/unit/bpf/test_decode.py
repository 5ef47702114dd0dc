"""Raw map memory to values."""

import numpy as np
import pytest

from bpf.decode import (
    BLOCK_RECORD,
    BLOCK_SLOT,
    BLOCK_TOLD,
    decode_block_slots,
    device_name,
    device_number,
    old_records,
    open_records,
    places_taken,
)
from bpf.samples import BlockKey

NONE = np.zeros(0, BLOCK_RECORD)


def record(*, submitted=1_000, queued=1_500, parent=0, slot=1, epoch=5, size=512):
    return (submitted, queued, 0, parent, slot, epoch, size, 1, 0)


def slots():
    memory = np.zeros(4, BLOCK_SLOT)
    memory[1] = (77, 259 << 20 | 300, 1, 1, 5, 1, 512, 0, 3584, 9_000, 81, 1_000, 3_000, 5, 0, [0, 9] + [0] * 30)
    memory[3] = (2**63 + 1, 8 << 20, 0, 1, 0, 0, 0, 0, 2**40, 7, 0, 0, 0, 0, 0, [1] + [0] * 31)
    return memory


def told():
    return np.zeros(4, BLOCK_TOLD)


def test_layout_is_that_of_the_c_struct():
    """Six cache lines and one; what ends write begins with the second line."""
    assert (BLOCK_SLOT.itemsize, BLOCK_RECORD.itemsize) == (6 * 64, 64)
    assert (BLOCK_SLOT.fields["bytes"][1], BLOCK_SLOT.fields["histogram"][1]) == (64, 128)
    assert BLOCK_SLOT.fields["missed"][1] == 24


def test_live_slots_become_counters():
    running = np.array([record(), record()], BLOCK_RECORD)
    found = decode_block_slots(slots(), running, NONE, told(), throttle=True)
    assert list(found) == [BlockKey(77, "259:300", "write"), BlockKey(2**63 + 1, "8:0", "read")]
    counters = found[BlockKey(77, "259:300", "write")]
    assert (counters.requests, counters.bytes, counters.in_flight) == (10, 4096, 2)
    assert (counters.throttle_ns, counters.queue_ns, counters.device_ns) == (1_000, 3_000, 5_000)
    assert counters.histogram[:3] == (0, 9, 0)


def test_what_the_tier_cannot_tell_is_unknown_not_zero():
    found = decode_block_slots(slots(), NONE, NONE, told(), throttle=False)
    assert {counters.throttle_ns for counters in found.values()} == {None}


def test_ends_that_were_missed_count():
    over = np.array([record(size=4096), record(size=8192)], BLOCK_RECORD)
    running = np.append(over, np.array([record()], BLOCK_RECORD))
    counters = decode_block_slots(slots(), running, over, told(), throttle=True)[BlockKey(77, "259:300", "write")]
    assert (counters.requests, counters.bytes, counters.in_flight) == (12, 3 * 4096 + 4096, 1)
    assert sum(counters.histogram) == 9, "an end without a time is in no bucket"


def test_a_bio_that_was_taken_for_ended_and_goes_on_makes_no_counter_fall():
    """Its device stood idle for a while (a controller reset, io.cost): a fall would look like a counter begun anew."""
    bios, before, memory = np.array([record(size=4096)], BLOCK_RECORD), told(), slots()
    key, seen = BlockKey(77, "259:300", "write"), []
    for over in (bios, NONE):
        counters = decode_block_slots(memory, bios, over, before, throttle=True)[key]
        seen.append((counters.requests, counters.bytes))
    memory["histogram"][1][1] += 1
    memory["bytes"][1] += 4096
    counters = decode_block_slots(memory, NONE, NONE, before, throttle=True)[key]
    seen.append((counters.requests, counters.bytes))
    assert seen == [(11, 8192), (11, 8192), (11, 8192)]


def test_decoding_leaves_the_memory_as_it_is():
    memory = slots()
    over = np.array([record()], BLOCK_RECORD)
    decode_block_slots(memory, over, over, told(), throttle=True)
    assert (memory == slots()).all()


@pytest.mark.parametrize(
    ("entry", "is_open", "is_old"),
    [
        (record(), True, True),
        (record(submitted=2_000), True, False),
        (record(queued=0), True, False),
        (record(submitted=0), False, False),
        (record(parent=64), False, False),
        (record(epoch=4), False, False),
        (record(slot=4), False, False),
    ],
)
def test_records_of_bios_that_run_and_of_old_ones_past_the_throttle(entry, is_open, is_old):
    """Wholes alone, of slots that have not changed hands; a record may be read while it is written."""
    bios = np.array([0, 4096, 0], np.uint64)
    records = np.array([record(), entry, record()], BLOCK_RECORD)
    running = open_records(bios, records, slots())
    assert running.size == is_open
    assert old_records(running, 2_000).size == is_old


def test_stale_records_take_no_room_but_those_before_the_throttle_do():
    """Also of jobs that are gone, and of pieces whose whole has ended."""
    entries = [record(), record(parent=64), record(epoch=4), record(queued=0), record(submitted=2_000), record()]
    bios = np.array([64, 128, 192, 256, 320, 0], np.uint64)
    assert places_taken(bios, np.array(entries, BLOCK_RECORD), 2_000) == 2


@pytest.mark.parametrize("name", ["8:0", "259:1048575", "4095:7"])
def test_device_numbers_survive_the_round_trip(name):
    assert device_name(device_number(name)) == name


@pytest.mark.parametrize("name", ["", "8", "8:", ":0", "8:x", "-1:0", "nvme0n1"])
def test_malformed_device_names_are_quoted(name):
    with pytest.raises(ValueError, match=repr(name)):
        device_number(name)
