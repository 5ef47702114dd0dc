"""Memory that the kernel writes while it is read: a pass must not fail over it."""

import threading

import numpy as np

from bpf.decode import BLOCK_RECORD, BLOCK_SLOT, BLOCK_TOLD, decode_block_slots, old_records, open_records


def test_memory_may_change_while_it_is_searched():
    bios = np.zeros(1 << 14, np.uint64)
    records = np.zeros(1 << 14, BLOCK_RECORD)
    slots = np.zeros(1 << 10, BLOCK_SLOT)
    done = threading.Event()

    def kernel():
        while not done.is_set():
            bios[::2] = 1
            slots["live"][::3] = 1
            bios[::2] = 0
            slots["live"][::3] = 0

    writer = threading.Thread(target=kernel)
    writer.start()
    try:
        for _ in range(3000):
            running = open_records(bios, records, slots)
            over = old_records(running, 10)
            decode_block_slots(slots, running, over, np.zeros(len(slots), BLOCK_TOLD), throttle=True)
    finally:
        done.set()
        writer.join()
    assert over.size == 0
