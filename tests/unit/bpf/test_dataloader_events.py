"""Records of the ring buffer, and what the beginning of a pickle tells; the pickles are Python's own."""

import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bpf.dataloader_events import (
    EVENT,
    Event,
    Sampling,
    decode_event,
    is_own_object,
    is_single_process,
    sampling,
)


def head_of(message):
    """What dataloader.c keeps of `(number, payload)`: 24 bytes behind the number."""
    pickled = pickle.dumps(message, protocol=4)
    skip = {ord("K"): 2, ord("M"): 3, ord("J"): 5}.get(pickled[11], 0)
    return pickled[11 + skip : 11 + skip + 24].ljust(24, b"\0")


def test_event_layout():
    assert EVENT.size == 80
    event = Event(1, 2, 3, 4, 5, 6, 7, 8, -1, 9, 1, b"head".ljust(24, b"\0"))
    assert decode_event(EVENT.pack(*event)) == event
    assert not event.in_main_thread
    assert event._replace(thread=5).in_main_thread


@pytest.mark.parametrize(
    ("payload", "expected"),
    [
        ([0, 1, 2, 3], Sampling.SEQUENTIAL),
        ([3, 11, 19, 27], Sampling.SEQUENTIAL),  # rank 3 of 8
        ([300, 1300, 2300], Sampling.SEQUENTIAL),
        ([1, 2], Sampling.SHUFFLED),  # rank 1 of 1 there is none
        ([0, 1, 3, 2], Sampling.SHUFFLED),
        ([70_000, 3, 500], Sampling.SHUFFLED),
        ([900, 17, 4000], Sampling.SHUFFLED),
        ([None, None], Sampling.ITERABLE),
        ([None], Sampling.ITERABLE),
        (None, Sampling.ITERABLE),
        ([5], Sampling.UNKNOWN),
        (5, Sampling.UNKNOWN),
        (["a", "b"], Sampling.UNKNOWN),
        ([], Sampling.UNKNOWN),
    ],
)
@pytest.mark.parametrize("number", [0, 300, 70_000])
def test_sampling(number, payload, expected):
    assert sampling(head_of((number, payload))) == expected


@given(st.binary(max_size=24))
def test_no_bytes_make_sampling_fail(head):
    sampling(head)
    sampling(b"]\x94(" + head)


def test_own_objects():
    assert is_own_object(b"\x8c\x1etorch.utils.data._utils")
    assert not is_own_object(b"\x8c!torch.multiprocessing.re")
    assert not is_own_object(bytes(24))


def test_class_of_a_span():
    assert is_single_process(b"_SingleProcessDataLoader")
    assert not is_single_process(b"_MultiProcessingDataLoad")
