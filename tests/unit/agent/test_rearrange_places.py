"""Where the helpers look: nothing but regular files is opened, and what nobody asks for is forgotten."""

import time
from itertools import count

import pytest

from agent import rearrange_places
from agent.rearrange import Skip
from agent.rearrange_defragment import Leave
from agent.rearrange_facts import open_here
from agent.rearrange_helper import Asker
from agent.rearrange_places import FORGET_SECONDS, Resolver, _place
from tests.unit.waiting_writer import pipe_with_writer


@pytest.fixture
def pipe(tmp_path):
    """A named pipe, and the thread of a writer that waits until somebody opens it for reading."""
    path = tmp_path / "shard-0"
    with pipe_with_writer(path) as writer:
        yield str(path), writer


def asked(path):
    return Asker()._open((0, 0), path)


@pytest.mark.parametrize(
    ("look", "expected"),
    [
        (lambda path: _place(path, None), Skip.VANISHED),
        (lambda path: open_here(path, (0, 0)), Leave.VANISHED),
        (asked, None),
    ],
    ids=["resolver", "mover", "asker"],
)
def test_a_pipe_put_in_the_place_of_a_file_is_not_opened(pipe, look, expected):
    path, writer = pipe
    assert look(path) == expected
    writer.join(0.1)
    assert writer.is_alive(), "its writer was let go, as a device would have been opened"


def test_listings_that_nobody_asks_for_are_forgotten(tmp_path, monkeypatch):
    resolver, clock = Resolver(), count(1000.0, FORGET_SECONDS / 4)
    for number in range(40):
        (tmp_path / str(number)).mkdir()
        now = next(clock)
        monkeypatch.setattr(rearrange_places.time, "monotonic", lambda now=now: now)
        assert resolver.listing(str(tmp_path / str(number)), below=True) is None
        wait_for(lambda number=number: (str(tmp_path / str(number)), True) in resolver._listings)
    assert len(resolver._listings) <= 6


def wait_for(condition):
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.005)
