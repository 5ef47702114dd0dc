"""Where the helpers look: nothing but regular files is opened, and what nobody asks for is forgotten."""

import os
import time
from itertools import count
from pathlib import Path

import pytest

from agent.rearrange import places as rearrange_places
from agent.rearrange.asker import Ahead, Asker, Target
from agent.rearrange.defragment import Leave
from agent.rearrange.facts import open_here
from agent.rearrange.follow import Follow
from agent.rearrange.places import FORGET_SECONDS, JobPlaces, Resolver, _place
from agent.rearrange.window import Skip
from tests.unit.waiting_writer import pipe_with_writer


@pytest.fixture
def pipe(tmp_path):
    """A named pipe, and the thread of a writer that waits until somebody opens it for reading."""
    path = tmp_path / "shard-0"
    with pipe_with_writer(path) as writer:
        yield str(path), writer


def asked(path):
    asker = Asker(Target(1, "", frozenset(), 1e9, 0), Ahead())
    asker.close()
    return asker._open((0, 0), path)


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


@pytest.fixture
def shard(tmp_path):
    """A file, who it is, and what opens it anew: each time another path below /proc."""
    path = tmp_path / "shard"
    path.write_bytes(b"x" * 8192)
    status, held = path.stat(), []

    def link():
        held.append(os.open(path, os.O_RDONLY))
        return f"/proc/self/fd/{held[-1]}"

    yield (status.st_dev, status.st_ino), link, held
    for descriptor in held:
        os.close(descriptor)


def places_on_any_disk(monkeypatch):
    places = JobPlaces(Resolver(), Follow(), "", frozenset({"8:0"}))
    monkeypatch.setattr(places._resolver, "devices_of", lambda number: frozenset({"8:0"}))
    return places


def test_a_file_is_reached_by_who_has_it_open_now(shard, monkeypatch):
    """In every epoch a shard is opened by other workers, at other descriptors."""
    file, link, held = shard
    places, first = places_on_any_disk(monkeypatch), link()
    wait_for(lambda: places.place(first, file))
    second = link()
    os.close(held.pop(0))
    found = places.place(second, file)
    assert Path(found.path).samefile(second)


def test_a_file_on_a_disk_that_is_not_served_is_left_out(shard, monkeypatch):
    file, link, _ = shard
    places, path = places_on_any_disk(monkeypatch), link()
    wait_for(lambda: places.place(path, file))
    monkeypatch.setattr(places._resolver, "devices_of", lambda number: frozenset({"8:16"}))
    assert places.place(path, file) is None
    assert places._follow.skips[Skip.OTHER_DEVICE] == 1


def test_a_descriptor_that_leads_elsewhere_by_now_says_nothing_of_the_file(shard, tmp_path, monkeypatch):
    """A worker closes one shard and opens the next one at the same descriptor before anybody has looked."""
    file, link, _ = shard
    places = places_on_any_disk(monkeypatch)
    assert places.place("/proc/self/fd/0", file) is None
    wait_for(lambda: not places._resolver._pending)
    now = link()
    wait_for(lambda: places.place(now, file))
    assert Skip.VANISHED not in places._follow.skips


def wait_for(condition):
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.005)
