"""Which fragmented files are moved: every reason to leave one, and what counts as fragmented."""

import socket
import threading
import time
from dataclasses import replace

import pytest

from agent.rearrange import mover as rearrange_mover
from agent.rearrange.defragment import (
    FEWEST_PIECES,
    LATER,
    Facts,
    Leave,
    Mend,
    is_fragmented,
    largest_file_bytes,
    pieces,
    tool_of,
    why_leave,
)
from agent.rearrange.facts import Here, path_here
from agent.rearrange.files import Looked, OpenFile, Processes
from agent.rearrange.mover import GIVE_UP_SECONDS, LATER_SECONDS, SOON_SECONDS, Book, Known, Mover
from agent.rearrange.mover import Target as MoverTarget
from agent.rearrange.window import MIB, Extent
from cgroup.mountinfo import parse_mountinfo

SIZE = 16 * MIB
LARGEST = 64 * MIB


def scattered(count, length=64 << 10):
    return tuple(Extent(k * length, (2 * k + 1) * length, length) for k in range(count))


FACTS = Facts(
    name_bytes=248, size=SIZE, allocated=SIZE, links=1, age_seconds=3600.0, extents=scattered(256), odd=frozenset(),
    flags=0x80000, extended=0, is_open=False, is_written=False, file_system="ext4",
    options=frozenset({"rw", "noatime"}), free=10 << 30, total=100 << 30,
)  # fmt: skip


def test_pieces_are_places_on_the_disk():
    assert pieces(()) == 0
    assert pieces((Extent(0, 100, 10), Extent(10, 110, 10), Extent(20, 200, 10))) == 2
    assert pieces((Extent(0, 110, 10), Extent(10, 100, 10))) == 2


@pytest.mark.parametrize(
    ("extents", "expected"),
    [
        ((), False),
        (scattered(FEWEST_PIECES), True),
        (scattered(FEWEST_PIECES - 1), False),
        (scattered(64, MIB - 4096), True),
        (scattered(64, MIB), False),
        (tuple(Extent(k * 4096, k * 4096, 4096) for k in range(1000)), False),
    ],
)
def test_fragmented_is_what_seeks_more_than_it_reads(extents, expected):
    assert is_fragmented(extents) is expected


def test_a_plain_file_is_moved():
    assert why_leave(FACTS, LARGEST) is None
    assert why_leave(replace(FACTS, file_system="xfs", name_bytes=255), LARGEST) is None
    assert why_leave(replace(FACTS, links=3), LARGEST) is None, "it is one file, whatever its names"


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"file_system": "btrfs"}, Leave.FILE_SYSTEM),
        ({"file_system": "nfs4"}, Leave.FILE_SYSTEM),
        ({"links": 0}, Leave.VANISHED),
        ({"options": frozenset({"ro"})}, Leave.READ_ONLY),
        ({"flags": 0x80010}, Leave.IMMUTABLE),
        ({"flags": 0x80020}, Leave.IMMUTABLE),
        ({"flags": 0x180000}, Leave.IMMUTABLE),
        ({"extended": 0x2000}, Leave.IMMUTABLE),
        ({"flags": 0x80800}, Leave.ENCRYPTED),
        ({"odd": frozenset({"encrypted"})}, Leave.ENCRYPTED),
        ({"flags": 0x80004}, Leave.COMPRESSED),
        ({"odd": frozenset({"shared"})}, Leave.SHARED),
        ({"odd": frozenset({"unwritten", "sparse"})}, Leave.UNWRITTEN),
        ({"odd": frozenset({"sparse"})}, Leave.SPARSE),
        ({"allocated": SIZE - 4096}, Leave.SPARSE),
        ({"odd": frozenset({"unmapped"})}, Leave.UNMAPPED),
        ({"flags": 0x84000}, Leave.UNMAPPED),
        ({"options": frozenset({"rw", "usrquota"})}, Leave.QUOTA),
        ({"options": frozenset({"rw", "prjquota"})}, Leave.QUOTA),
        ({"size": LARGEST + 1, "allocated": LARGEST + 1}, Leave.TOO_LARGE),
        ({"name_bytes": 249}, Leave.LONG_NAME),
        ({"is_open": True}, Leave.OPEN),
        ({"is_open": True, "is_written": True}, Leave.WRITABLE),
        ({"age_seconds": 59.0}, Leave.RECENT),
        ({"age_seconds": -5.0}, Leave.RECENT),
        ({"free": (5 << 30) + SIZE - 1}, Leave.NO_SPACE),
        ({"is_open": True, "odd": frozenset({"shared"})}, Leave.SHARED),
    ],
)
def test_every_reason_to_leave_a_file(change, why):
    assert why_leave(replace(FACTS, **change), LARGEST) == why


def test_what_passes_by_is_looked_at_again():
    assert {Leave.OPEN, Leave.WRITABLE, Leave.RECENT, Leave.NO_SPACE} == LATER


def test_a_file_needs_a_third_of_the_memory():
    assert largest_file_bytes(256 * MIB) == 256 * MIB // 3


def test_tools_are_those_of_the_file_systems():
    assert [tool_of(name) for name in ("ext4", "xfs", "ext3")] == ["e4defrag", "xfs_fsr", ""]


HOST = """\
22 1 8:1 / / rw,relatime shared:1 - ext4 /dev/sda1 rw
30 22 8:17 / /mnt/data rw,noatime shared:9 - ext4 /dev/sdb1 rw
31 22 8:33 / /mnt/fixed ro,noatime shared:9 - xfs /dev/sdc1 ro
32 22 8:17 /sets /srv/sets ro,noatime shared:9 - ext4 /dev/sdb1 rw
"""
POD = """\
90 80 0:50 / / rw - overlay overlay rw,lowerdir=/l
91 90 8:17 /sets/images /data rw,noatime - ext4 /dev/sdb1 rw
92 91 8:17 /other /data/more rw,noatime - ext4 /dev/sdb1 rw
93 90 8:33 /a /fixed rw - xfs /dev/sdc1 ro
"""


@pytest.mark.parametrize(
    ("path", "device", "expected"),
    [
        ("/data/train/a b", "8:17", "/mnt/data/sets/images/train/a b"),
        ("/data/more/x", "8:17", "/mnt/data/other/x"),
        ("/elsewhere/x", "8:17", Leave.VANISHED),
        ("/data/x", "8:99", Leave.VANISHED),
        ("/fixed/x", "8:33", Leave.READ_ONLY),
        ("/database", "8:17", Leave.VANISHED),
    ],
)
def test_a_path_of_a_container_is_found_on_the_host(path, device, expected):
    found = path_here(path, device, parse_mountinfo(POD), parse_mountinfo(HOST))
    assert (found.path if isinstance(found, Here) else found) == expected


A, B, C = (1, 1), (1, 2), (1, 3)


@pytest.fixture
def book():
    made = Book()
    for file, job, path in ((A, 7, "/a"), (B, 7, "/b"), (C, 8, "/c")):
        made.note(file, Known(job, path, ()))
    return made


def test_all_files_are_looked_at_before_any_is_moved(book):
    assert book.unseen({7}) == A
    book.looked_at(A, SIZE)
    assert book.unseen({7}) == B
    book.looked_at(B, 0)
    assert book.unseen({7}) is None
    assert book.unseen({7, 8}) == C
    assert book.fragmented({7}, 0.0) == A
    assert book.fragmented({8}, 0.0) is None
    assert book.mends()[7] == Mend(0, 0, 1, SIZE)


def test_a_moved_file_counts_and_is_done(book):
    book.looked_at(A, SIZE)
    book.tried(A, SIZE, 0.0)
    assert book.mends()[7] == Mend(1, SIZE, 0, 0)
    assert book.fragmented({7}, 100.0) is None


def test_a_file_that_is_open_is_tried_again_later_and_not_for_ever(book):
    assert times_tried(book, Leave.OPEN, SOON_SECONDS) == GIVE_UP_SECONDS / SOON_SECONDS + 1
    assert book.leaves == {A: Leave.OPEN}


def test_one_that_waits_for_space_is_tried_less_often(book):
    assert times_tried(book, Leave.NO_SPACE, LATER_SECONDS) == GIVE_UP_SECONDS / LATER_SECONDS + 1


def times_tried(book, why, each):
    """How often a file is tried that is left for that reason every time."""
    book.looked_at(A, SIZE)
    count, now = 0, 7.0
    while book.fragmented({7}, now) == A:
        book.tried(A, why, now)
        assert book.fragmented({7}, now + each / 2) is None
        count, now = count + 1, now + each
    return count


def test_a_file_that_is_moved_in_the_end_is_no_longer_left(book):
    book.looked_at(A, SIZE)
    book.tried(A, Leave.OPEN, 0.0)
    assert book.leaves == {A: Leave.OPEN}
    book.tried(A, SIZE, 10.0)
    assert book.leaves == {}


def test_who_waits_for_a_file_that_is_under_way_is_told(book):
    book.looked_at(A, SIZE)
    book.moving = A
    assert book.mends()[7].is_moving
    assert not any(mend.is_moving for job, mend in book.mends().items() if job != 7)
    book.moving = None
    assert not book.mends()[7].is_moving


def test_what_never_can_be_moved_is_tried_once(book):
    book.looked_at(A, SIZE)
    book.tried(A, Leave.SHARED, 0.0)
    assert book.fragmented({7}, 1e6) is None
    assert book.mends()[7] == Mend(0, 0, 0, 0)


def test_a_file_that_lay_well_by_then_is_not_counted(book):
    book.looked_at(A, SIZE)
    book.tried(A, 0, 0.0)
    assert book.mends()[7] == Mend(0, 0, 0, 0)


class Moving(Book):
    """A book in which a file stops being moved at the moment in which somebody asks."""

    asked = 0

    @property
    def moving(self):
        self.asked += 1
        return A if self.asked == 1 else None

    @moving.setter
    def moving(self, file):
        pass


def test_a_move_that_ends_while_it_is_told_of_does_not_end_the_mover():
    made = Moving()
    made.note(A, Known(7, "/a", ()))
    assert made.mends()[7].is_moving


def test_a_file_of_a_job_that_was_restarted_is_moved_for_the_new_one(book):
    book.looked_at(A, SIZE)
    book.note(A, Known(9, "/a", ()))
    assert book.unseen({9}) is None
    assert book.fragmented({9}, 0.0) == A
    assert book.mends()[9] == Mend(0, 0, 1, SIZE)


def test_looking_at_every_file_does_not_take_the_square_of_the_time():
    made = Book()
    for number in range(8000):
        made.note((1, number), Known(7, "/a", ()))
    began = time.process_time()
    while (file := made.unseen({7})) is not None:
        made.looked_at(file, 0)
    assert time.process_time() - began < 1.0


@pytest.fixture
def mover(monkeypatch):
    """A mover whose job has one file on its disk and one elsewhere; the mounts that it has read are counted."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    read = []
    opened = (OpenFile(77, 3, A, 0, SIZE, 0), OpenFile(77, 4, (9, 9), 0, SIZE, 0))
    monkeypatch.setattr(rearrange_mover.files, "processes_of", lambda folder: Processes((77,), too_many=False))
    monkeypatch.setattr(rearrange_mover.files, "look_at", lambda pid: Looked(opened, {}, too_many=False))
    monkeypatch.setattr(rearrange_mover.files, "name_of", lambda one: f"/file-{one.descriptor}")
    monkeypatch.setattr(rearrange_mover, "mounts_of", lambda pid: read.append(pid) or ())
    made = Mover(theirs, LARGEST, "")
    monkeypatch.setattr(made._resolver, "devices_of", lambda number: frozenset({"8:0"} if number == A[0] else ()))
    yield made, read
    made._move.close()
    ours.close()
    theirs.close()


def target(job):
    return {job: MoverTarget(job, "/sys/fs/cgroup/job", frozenset({"8:0"}), 1e6, 10.0)}


def test_mounts_are_read_for_files_that_are_new_and_on_the_disk_alone(mover):
    made, read = mover
    made._targets = target(7)
    for _ in range(5):
        made._look()
    assert list(made._book.known) == [A]
    assert read == [77]


def test_files_pass_to_the_job_that_reads_them_once_their_own_is_no_longer_served(mover):
    made, _ = mover
    for job in (7, 8):
        made._targets = target(job)
        made._look()
        assert made._book.known[A].job == job
    made._targets = target(7) | target(8)
    made._look()
    assert made._book.known[A].job == 8
    made._move_one(A, target(7))
    assert A not in made._book.leaves


@pytest.mark.parametrize("served", [{}, target(8)])
def test_a_move_ends_once_its_job_is_served_no_more_whoever_else_is(mover, monkeypatch, served):
    made, _ = mover
    stopping = made._move._stopping
    made._book.note(A, Known(7, "/a", ()))
    made._book.moving, made._targets = A, target(7) | served
    monkeypatch.setattr(made, "_look", lambda: None)
    monkeypatch.setattr(made, "_renewed_at", time.monotonic() + 60.0)
    made._move._idle.clear()
    running = threading.Thread(target=made.run)
    running.start()
    try:
        assert not stopping.wait(0.3)
        made._targets = served
        assert stopping.wait(20.0)
    finally:
        made._move._idle.set()
        made._agent.shutdown(socket.SHUT_RDWR)
        running.join()
