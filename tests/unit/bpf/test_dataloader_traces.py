"""Event streams of real trainers of which an epoch once was miscounted: the ring's records as the kernel gave them."""

import gzip
from pathlib import Path

import pytest

from bpf.dataloader_events import EVENT, decode_event
from tests.unit.bpf.dataloader_script import Seen

FIXTURES = Path(__file__).parent / "fixtures"

TRACES = {
    # An epoch's last batch needed no read of its own, and the workers were told of the next epoch before the loop was
    # seen to wait for them: 2 workers, 60 batches an epoch.
    "dataloader-persistent": (180, 3, 4, "S2"),
    # A task for a worker whose iterable was at its end was sent after another worker had been told of the next epoch:
    # 4 workers, 80 batches an epoch.
    "dataloader-iterable-persistent": (160, 2, 8, "S2"),
}


def events_of(name):
    records = gzip.decompress((FIXTURES / f"{name}.ring.gz").read_bytes())
    return [decode_event(records[at : at + EVENT.size]) for at in range(0, len(records), EVENT.size)]


@pytest.mark.parametrize("name", TRACES)
def test_epochs_of_real_trainers(name):
    stream, iterations = Seen(events_of(name), after=2_000_000_000).only()
    assert (stream.iterations, stream.epoch, stream.capacity, stream.grade) == TRACES[name]
    assert len(iterations) == stream.iterations
    assert [seen.time_ns for seen in iterations] == sorted(seen.time_ns for seen in iterations)
