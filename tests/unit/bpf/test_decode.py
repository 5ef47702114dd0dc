"""Raw map memory to values."""

import numpy as np
import pytest

from bpf.decode import BLOCK_SLOT, decode_block_slots, device_name, device_number
from bpf.samples import BlockKey


def slots():
    memory = np.zeros(4, BLOCK_SLOT)
    memory[1] = (77, 259 << 20 | 300, 1, 1, 5, 12, 10, 1, 4096, 9_000, 81, 1_000, 3_000, 5_000, [0, 9] + [0] * 30)
    memory[3] = (2**63 + 1, 8 << 20, 0, 1, 0, 1, 1, 0, 2**40, 7, 0, 0, 0, 7, [1] + [0] * 31)
    return memory


def test_layout_is_that_of_the_c_struct():
    """u64, four u32, nine u64, 32 u64, no padding."""
    assert BLOCK_SLOT.itemsize == 8 + 4 * 4 + 9 * 8 + 32 * 8
    assert BLOCK_SLOT.fields["started"][1] == 24


def test_live_slots_become_counters():
    found = decode_block_slots(slots(), np.zeros((4, 2), np.int64), throttle=True)
    assert list(found) == [BlockKey(77, "259:300", "write"), BlockKey(2**63 + 1, "8:0", "read")]
    counters = found[BlockKey(77, "259:300", "write")]
    assert (counters.requests, counters.bytes, counters.in_flight) == (10, 4096, 2)
    assert (counters.throttle_ns, counters.queue_ns, counters.device_ns) == (1_000, 3_000, 5_000)
    assert counters.histogram[:3] == (0, 9, 0)


def test_what_the_tier_cannot_tell_is_unknown_not_zero():
    found = decode_block_slots(slots(), np.zeros((4, 2), np.int64), throttle=False)
    assert {counters.throttle_ns for counters in found.values()} == {None}


def test_ends_found_by_user_space_count():
    reaped = np.zeros((4, 2), np.int64)
    reaped[1] = (2, 8192)
    counters = decode_block_slots(slots(), reaped, throttle=True)[BlockKey(77, "259:300", "write")]
    assert (counters.requests, counters.bytes, counters.in_flight) == (12, 4096 + 8192, 0)


def test_a_slot_read_while_it_changes_has_nothing_negative_in_flight():
    memory = slots()
    memory["started"] = 0
    assert {c.in_flight for c in decode_block_slots(memory, np.zeros((4, 2), np.int64), throttle=True).values()} == {0}


@pytest.mark.parametrize("name", ["8:0", "259:1048575", "4095:7"])
def test_device_numbers_survive_the_round_trip(name):
    assert device_name(device_number(name)) == name


@pytest.mark.parametrize("name", ["", "8", "8:", ":0", "8:x", "-1:0", "nvme0n1"])
def test_malformed_device_names_are_quoted(name):
    with pytest.raises(ValueError, match=repr(name)):
        device_number(name)
