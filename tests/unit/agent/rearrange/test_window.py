"""What is read ahead next: windows, pieces, budgets, orders, index messages."""

import pickle
import random
import struct
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.rearrange.index import Task, parse_task, tasks_in
from agent.rearrange.order import DirectoryOrder, IndexMap
from agent.rearrange.window import (
    MIB,
    PIECE_BYTES,
    Extent,
    Range,
    helper_share,
    job_window_bytes,
    memory_budget_bytes,
    pieces_of,
    plan_window,
    rest_of_file,
)

FILE = (8, 1)


@st.composite
def files(draw):
    """Files with extents that cover them in part, scattered over a disk, and ranges of them that are wanted."""
    extents = {}
    wanted = []
    for number in range(draw(st.integers(1, 6))):
        at, mine = 0, []
        for _ in range(draw(st.integers(0, 6))):
            at += draw(st.sampled_from([0, 4096, 3 * MIB]))
            length = 4096 * draw(st.integers(1, 1000))
            mine.append(Extent(at, 4096 * draw(st.integers(0, 10**6)), length))
            at += length
        extents[8, number] = mine
        start = draw(st.integers(0, 4 * MIB))
        wanted.append(Range((8, number), start, start + draw(st.integers(1, 8 * MIB))))
    return extents, wanted


@given(files(), st.integers(0, 20 * MIB))
def test_window_keeps_the_budget_and_the_order(made, room):
    extents, wanted = made
    window = plan_window(wanted, extents, room)
    assert window.size <= sum(one.end - one.start for one in window.taken) <= room
    assert all(0 < piece.length <= PIECE_BYTES for piece in window.pieces)
    assert list(window.pieces) == sorted(window.pieces, key=lambda piece: piece.physical)
    for piece in window.pieces:
        inside = [one for one in window.taken if one.file == piece.file]
        assert any(one.start <= piece.offset and piece.offset + piece.length <= one.end for one in inside)
        where = piece.physical - piece.offset
        assert any(
            e.physical - e.logical == where
            and e.logical <= piece.offset
            and piece.offset + piece.length <= e.logical + e.length
            for e in extents[piece.file]
        )


@given(files())
def test_with_room_all_that_lies_on_the_disk_is_asked_for_once(made):
    extents, wanted = made
    window = plan_window(wanted, extents, 1 << 40)
    expected = sum(
        max(0, min(one.end, e.logical + e.length) - max(one.start, e.logical))
        for one in wanted
        for e in extents[one.file]
    )
    assert (window.size, window.over_budget) == (expected, 0)
    assert window.taken == tuple(wanted)


def test_what_is_needed_first_gets_the_room():
    extents = {(8, n): [Extent(0, (10 - n) * 100 * MIB, 4 * MIB)] for n in range(3)}
    wanted = [Range((8, n), 0, 4 * MIB) for n in range(3)]
    window = plan_window(wanted, extents, 6 * MIB)
    assert [(one.file[1], one.end - one.start) for one in window.taken] == [(0, 4 * MIB), (1, 2 * MIB)]
    assert window.over_budget == 1
    assert [piece.file[1] for piece in window.pieces] == [1, 1, 0, 0, 0, 0], "sorted by place on the disk"


def test_pieces_leave_holes_out():
    extents = [Extent(0, 7 * MIB, 4096), Extent(MIB, 2 * MIB, MIB + 4096)]
    pieces = list(pieces_of(Range(FILE, 0, 3 * MIB), extents))
    assert [(p.offset, p.length) for p in pieces] == [(0, 4096), (MIB, MIB), (2 * MIB, 4096)]


def read_through(size, ahead):
    """Read a file of this size to its end, asking as the helper does; the ranges asked for."""
    asked, position, ranges = 0, 0, []
    while position < size:
        found = rest_of_file(FILE, position, size, asked, ahead)
        if found:
            ranges.append(found)
            asked = found.end
        assert asked <= position + ahead, "never more ahead than allowed"
        position += 256 * 1024
    return ranges


def test_the_rest_of_a_file_is_asked_for_once_and_in_long_runs():
    ranges = read_through(64 * MIB, 8 * MIB)
    assert [one.start for one in ranges[1:]] == [one.end for one in ranges[:-1]]
    assert (ranges[0].start, ranges[-1].end) == (0, 64 * MIB)
    assert all(one.end - one.start >= 4 * MIB for one in ranges[:-1])


def test_a_reader_that_overtakes_is_not_followed():
    assert rest_of_file(FILE, 20 * MIB, 64 * MIB, 8 * MIB, 8 * MIB) == Range(FILE, 20 * MIB, 28 * MIB)
    assert rest_of_file(FILE, 64 * MIB, 64 * MIB, 0, 8 * MIB) is None


@given(st.integers(0, 64), st.integers(MIB, 1 << 34), st.integers(0, 50))
def test_windows_of_all_jobs_together_fit_the_memory(workers, memory, jobs):
    budget = memory_budget_bytes(memory)
    window = job_window_bytes(workers, budget, jobs)
    assert 3 * window * max(1, jobs) <= memory
    assert window <= min(32 * MIB, 8 * MIB * max(1, workers))


@pytest.mark.parametrize(
    ("free", "own", "others", "tight", "share"),
    [
        (0.15, 0.3, 0.0, False, 0.97),
        (0.15, 0.3, 0.4, False, 0.57),
        (0.15, 0.3, 0.9, False, 0.45),
        (0.15, 0.3, 0.1, True, 0.45),
        (0.0, 0.0, 2.0, False, 0.0),
        (0.15, 1.2, 0.0, True, 0.97),
    ],
)
def test_share_of_the_helper(free, own, others, tight, share):
    assert helper_share(free, own, others, others_tight=tight) == pytest.approx(share)


def order_of(places):
    order = DirectoryOrder()
    for place in places:
        order.see(place)
    return order


@pytest.mark.parametrize(
    ("places", "files", "following"),
    [
        ([0, 1, 2, 3], 30, [4, 5, 6]),
        ([2, 6, 10, 14], 30, [18, 22, 26]),
        ([0, 0, 4, 4, 8, 12], 30, [16, 20, 24]),
        ([24, 25, 26, 27, 28], 30, [29, 0, 1]),
        ([1, 5, 1, 5], 8, [1]),
        ([9, 8, 7, 6, 5], 30, [4, 3, 2]),
        ([295, 297, 298, 299, 0, 1, 3], 300, [4, 5, 6]),
        ([10, 13, 15, 16, 20, 21, 25], 300, [26, 27, 28]),
        ([26, 27, 28], 30, []),
        ([26, 27, 28, 28], 30, []),
        ([3, 17, 9, 1, 22, 4, 28, 11], 30, []),
        ([0, 0, 0, 0], 1, []),
    ],
)
def test_next_files_of_a_folder(places, files, following):
    assert order_of(places).next_places(3, files) == following


@pytest.mark.parametrize("files", [12, 40, 2048])
def test_shuffled_files_are_taken_for_what_they_are(files):
    chance = random.Random(1)
    taken_for_order = 0
    for _ in range(500):
        places = chance.sample(range(files), 9)
        taken_for_order += order_of(places).step(files) is not None
    assert taken_for_order < 5
    assert order_of(range(9)).is_known


@pytest.mark.parametrize(("place", "passed"), [(5, False), (4, True), (6, False), (29, True), (20, False), (21, True)])
def test_what_lies_behind(place, passed):
    assert order_of([2, 3, 4, 5]).has_passed(place, 30) is passed


PATHS = [f"/data/class{k:02d}/img{n}.jpg" for k in range(16) for n in range(128)]


@pytest.mark.parametrize("key", [None, lambda path: path.rpartition("/")[::2]])
def test_index_map_finds_how_files_are_numbered(key):
    paths = [*PATHS, "/data/class01-extra/img0.jpg"]
    numbered = sorted(paths, key=key) if key is None else sorted(paths, key=lambda path: path.rpartition("/")[::2])
    known = IndexMap(paths)
    chance = random.Random(2)
    for _ in range(6):
        in_hand = chance.sample(range(len(numbered)), 32)
        assert known.files(in_hand) == []
        known.observe(numbered[in_hand[5]], in_hand)
    numbers = [5, 1999, 2048, 0]
    assert known.files(numbers) == [numbered[number] for number in numbers]
    assert known.files([99999, -1]) == []


def test_index_map_does_not_believe_in_chance():
    known = IndexMap(PATHS)
    shuffled = random.Random(3).sample(PATHS, len(PATHS))
    chance = random.Random(4)
    for _ in range(200):
        in_hand = chance.sample(range(len(PATHS)), 32)
        known.observe(shuffled[in_hand[0]], in_hand)
        assert known.files([1, 2, 3]) == []
    assert known.is_unknown


def test_index_map_is_dropped_when_it_fits_no_longer():
    known = IndexMap(PATHS)
    for number in range(16):
        known.observe(sorted(PATHS)[number], [number])
    assert known.files([7])
    for number in range(8):
        known.observe(sorted(PATHS)[number], [number + 100])
    assert known.files([7]) == []


def message(value, protocol=pickle.DEFAULT_PROTOCOL):
    body = pickle.dumps(value, protocol)
    return struct.pack(">I", len(body)) + body


def body(value):
    return message(value)[4:]


@given(
    st.lists(st.tuples(st.integers(0, 2**40), st.lists(st.integers(0, 2**40), max_size=1200)), max_size=4),
    st.sampled_from([3, 4, 5]),
)
def test_index_messages_are_read_as_they_were_written(tasks, protocol):
    data = b"".join(message(task, protocol) for task in tasks)
    expected = [Task(task, tuple(numbers)) for task, numbers in tasks]
    assert list(tasks_in(data)) == expected
    if tasks:
        assert list(tasks_in(data[4:])) == expected, "the length of the first has been read"
        cut = data[: len(data) - 3]
        assert list(tasks_in(cut)) == expected[:-1]


def test_one_number_alone_is_a_task():
    assert parse_task(body((3, 70000))) == Task(3, (70000,))


@pytest.mark.parametrize(
    "value",
    [None, (1, None), (1, "text"), (1, [1, "x"]), [1, [2]], (1, [2], 3), (1, {"a": 1}), 5, (1, [[2]]), (print, [1])],
)
def test_other_messages_are_no_tasks(value):
    assert parse_task(body(value)) is None
    assert list(tasks_in(message(value) + message((1, [2])))) == [Task(1, (2,))]


@given(st.binary(max_size=400))
def test_any_bytes_are_read_without_harm(data):
    parse_task(data)
    for task in tasks_in(data):
        assert isinstance(task.task, int)


def test_marks_without_end_are_given_up_at_once():
    began = time.process_time()
    assert list(tasks_in(b"\x80\x02" + b"](e" * 300_000)) == []
    assert time.process_time() - began < 1.0
