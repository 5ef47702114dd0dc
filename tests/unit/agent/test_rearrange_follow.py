"""One job as the helper follows it, over made-up processes, pipes and disks."""

import os
import random

import pytest

from agent.rearrange import MIB, Extent, Skip
from agent.rearrange_files import OpenFile
from agent.rearrange_follow import STALE_SECONDS, Follow, Place, Seen
from agent.rearrange_index import Task

DEV = 2049
ROOM = 16 * MIB


class Disk:
    """Files of one size in folders, one after the other on the disk; everything is known at once."""

    def __init__(self, folders, size):
        self.size = size
        self.paths = sorted(path for paths in folders.values() for path in paths)
        self.ids = {path: (DEV, 100 + i) for i, path in enumerate(self.paths)}
        self.hidden = set()

    def place(self, path, file=None):
        file = file or self.ids[path]
        if file in self.hidden:
            return None
        return Place(file, self.size, [Extent(0, file[1] * 100 * MIB, self.size)], path)

    def listing(self, root, *, below):
        return [
            path for path in self.paths if path.startswith(root + "/") and (below or path.rpartition("/")[0] == root)
        ]


def shards(count=12, size=64 * MIB):
    return Disk({"/data": [f"/data/shard{i:02d}" for i in range(count)]}, size)


def images(count=256, size=256 * 1024):
    return Disk({"": [f"/data/class{i % 8}/img{i:04d}" for i in range(count)]}, size)


def process(disk, pid, *files, command="python"):
    """`files`: (path, position) or (path, position, flags)."""
    opened, names = [], {}
    for number, (path, position, *flags) in enumerate(files, start=3):
        opened.append(OpenFile(pid, number, disk.ids[path], position, disk.size, flags[0] if flags else os.O_RDONLY))
        names[number] = path
    return Seen(pid, command, opened, names)


class Job:
    """Looks every 0.1 s and asks for what it is told."""

    def __init__(self, disk, room=ROOM):
        self.disk, self.room, self.now, self.follow = disk, room, 100.0, Follow()

    def look(self, *processes, tasks=None, seconds=0.1):
        self.now += seconds
        wanted = self.follow.look(self.now, processes, tasks or {}, self.disk, self.room)
        window = self.follow.window(self.now, wanted, self.room)
        assert self.follow.outstanding_bytes <= max(self.room, 0)
        return [(piece.file[1] - 100, piece.offset // MIB, piece.length) for piece in window.pieces]

    def asked(self, pieces):
        return sum(length for _, _, length in pieces)


def test_rest_of_an_open_file_is_asked_for_once():
    disk = shards()
    job = Job(disk)
    first = job.look(process(disk, 1, ("/data/shard03", MIB)))
    assert first == [(3, k, MIB) for k in range(1, 9)]
    assert job.look(process(disk, 1, ("/data/shard03", 2 * MIB))) == []
    more = job.look(process(disk, 1, ("/data/shard03", 5 * MIB)))
    assert more == [(3, k, MIB) for k in range(9, 13)]
    assert (job.follow.used_bytes, job.follow.outstanding_bytes) == (4 * MIB, 8 * MIB)
    job.look()
    assert (job.follow.used_bytes, job.follow.unused_bytes, job.follow.outstanding_bytes) == (12 * MIB, 0, 0)


def test_workers_share_the_room_of_the_job_and_pieces_are_in_the_order_of_the_disk():
    disk = shards()
    job = Job(disk)
    workers = [process(disk, pid, (f"/data/shard{11 - pid:02d}", 0)) for pid in range(4)]
    pieces = job.look(*workers)
    assert job.asked(pieces) == ROOM
    assert pieces == sorted(pieces)
    assert {shard: sum(p[2] for p in pieces if p[0] == shard) for shard, *_ in pieces} == dict.fromkeys(
        range(8, 12), 4 * MIB
    )


def test_what_finds_no_room_is_counted_and_asked_for_once_there_is_some():
    disk = shards()
    job = Job(disk)
    job.room = 8 * MIB
    assert job.asked(job.look(process(disk, 1, ("/data/shard00", 0)))) == 8 * MIB
    both = [process(disk, 1, ("/data/shard00", 0)), process(disk, 2, ("/data/shard05", 0))]
    for _ in range(3):
        assert job.look(*both) == []
    assert job.follow.skips == {Skip.OVER_BUDGET: 1}
    both[0] = process(disk, 1, ("/data/shard00", 8 * MIB))
    assert 5 in {shard for shard, *_ in job.look(*both)}


@pytest.mark.parametrize(
    ("flags", "why"),
    [
        (os.O_RDONLY | os.O_DIRECT, Skip.DIRECT),
        (os.O_RDWR, Skip.WRITABLE),
        (os.O_WRONLY | os.O_APPEND, Skip.WRITABLE),
    ],
)
def test_files_that_are_left_out_are_counted_once(flags, why):
    disk = shards()
    job = Job(disk)
    for _ in range(3):
        assert job.look(process(disk, 1, ("/data/shard00", 0, flags))) == []
    assert job.follow.skips == {why: 1}


def test_a_file_whose_place_is_not_known_yet_is_asked_for_later():
    disk = shards()
    job = Job(disk)
    disk.hidden.add(disk.ids["/data/shard00"])
    assert job.look(process(disk, 1, ("/data/shard00", 0))) == []
    disk.hidden.clear()
    assert job.asked(job.look(process(disk, 1, ("/data/shard00", 0)))) == 8 * MIB


def test_a_reader_that_stands_still_frees_its_room_and_is_served_again_when_it_moves():
    disk = shards()
    job = Job(disk)
    here = process(disk, 1, ("/data/shard00", 0))
    job.look(here)
    assert job.look(here, seconds=STALE_SECONDS + 1) == []
    assert (job.follow.unused_bytes, job.follow.outstanding_bytes) == (8 * MIB, 0)
    assert job.follow.skips[Skip.UNUSED] == 1
    assert job.look(here) == [], "nothing more for one that stands still"
    assert job.asked(job.look(process(disk, 1, ("/data/shard00", 30 * MIB)))) == 8 * MIB


def test_a_reader_that_goes_back_is_served_from_there():
    disk = shards()
    job = Job(disk)
    job.look(process(disk, 1, ("/data/shard00", 30 * MIB)))
    assert job.look(process(disk, 1, ("/data/shard00", 0)))[0] == (0, 0, MIB)


def read_shards(job, disk, order):
    """One worker that reads these shards to their end; what was asked for of each before it was opened."""
    early = {}
    for at in order:
        path = f"/data/shard{at:02d}"
        for position in range(0, disk.size, 2 * MIB):
            for shard, _, length in job.look(process(disk, 1, (path, position))):
                if shard != at:
                    early[shard] = early.get(shard, 0) + length
    return early


def test_the_next_shard_is_asked_for_before_it_is_opened():
    disk = shards(size=16 * MIB)
    job = Job(disk)
    early = read_shards(job, disk, [0, 2, 4, 6, 8])
    assert set(early) == {8, 10}, "known after three steps of two"
    assert all(length >= 4 * MIB for length in early.values())
    assert job.follow.unused_bytes == 0
    assert Skip.UNPREDICTABLE not in job.follow.skips


def test_shuffled_shards_are_not_guessed():
    disk = shards(size=16 * MIB)
    job = Job(disk)
    assert read_shards(job, disk, [5, 1, 9, 0, 7, 3, 11, 2]) == {}
    assert job.follow.skips[Skip.UNPREDICTABLE] == 1


class Loader:
    """A DataLoader with two workers and four samples a batch; files are numbered by sorted path."""

    def __init__(self, disk, *, numbering=None):
        self.disk, self.chance = disk, random.Random(5)
        self.numbering = numbering or disk.paths
        self.queues = {70: [], 71: []}
        self.in_hand, self.sent = {}, 0
        for _ in range(8):
            self.send()

    def send(self):
        numbers = tuple(self.chance.sample(range(len(self.disk.paths)), 4))
        self.queues[70 + self.sent % 2].append(Task(self.sent, numbers))
        self.sent += 1

    def step(self, job):
        """Each worker takes a task and is seen with one of its files open; the loop sends another."""
        for pipe, queue in self.queues.items():
            self.in_hand[pipe] = queue.pop(0)
            self.send()
        early = job.look(tasks=self.queues)  # the messages are gone a moment before the files are open
        workers = [
            process(self.disk, pipe, (self.numbering[task.numbers[1]], 0), command="pt_data_worker")
            for pipe, task in self.in_hand.items()
        ]
        return early + job.look(*workers, tasks=self.queues)


def test_numbers_that_wait_in_pipes_name_the_files_once_that_was_learned():
    disk = images()
    job, loader = Job(disk), Loader(disk)
    found = [loader.step(job) for _ in range(30)]
    waiting = {number for queue in loader.queues.values() for task in queue for number in task.numbers}
    asked = {file for pieces in found for file, _, _ in pieces}
    assert waiting <= asked
    before = job.follow.used_bytes
    for _ in range(10):
        loader.step(job)
    assert job.follow.used_bytes - before >= 10 * 2 * 4 * disk.size
    assert job.follow.unused_bytes == 0
    assert Skip.UNPREDICTABLE not in job.follow.skips


def test_numbers_that_stand_for_something_else_are_not_believed():
    disk = images()
    job = Job(disk)
    loader = Loader(disk, numbering=random.Random(6).sample(disk.paths, len(disk.paths)))
    early = 0
    for _ in range(60):
        seen = {task.numbers[1] for task in loader.in_hand.values()}
        early += sum(file not in seen and length == disk.size for file, _, length in loader.step(job))
    assert job.follow.skips[Skip.UNPREDICTABLE] == 1
    assert early <= 120, "only what is open already"


def test_files_that_are_opened_ahead_are_read_ahead_whole():
    disk = images()
    job = Job(disk)
    paths = random.Random(8).sample(disk.paths, 48)
    here = process(disk, 1, *((path, 0) for path in paths))
    pieces = job.look(here)
    assert {file for file, _, _ in pieces} == {disk.ids[path][1] - 100 for path in paths}
    assert pieces == sorted(pieces)
    job.look(process(disk, 1, *((path, 0) for path in paths[16:])))
    assert job.follow.used_bytes == 16 * disk.size


def test_counters_do_not_grow_with_time():
    disk = images()
    job, loader = Job(disk), Loader(disk)
    for _ in range(200):
        loader.step(job)
    assert len(job.follow._asked) < 100
    assert len(job.follow._in_hand) == 2
