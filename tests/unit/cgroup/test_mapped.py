import random
import struct

import pytest

from cgroup.devices import Devices
from cgroup.mapped import parse_targets, passed_through, targets_of
from tests.unit.cgroup.hosts import Host

TABLES = {
    "253:0": {"cache"},
    "253:1": {"linear"},
    "253:2": {"linear"},
    "253:3": {"linear"},
    "253:4": {"crypt"},
    "253:5": {"linear"},
    "253:6": {"raid"},
    "253:7": {"cache"},
    "253:8": {"linear"},
    "253:9": {"thin"},
}


@pytest.fixture
def devices(tmp_path):
    """A cached LV as LVM builds it, what can stand on it, and what only looks like it."""
    host = Host(tmp_path)
    host.add("sda", "8:0", rotational=1)
    host.add("sdb", "8:16", rotational=1)
    host.add("nvme0n1", "259:0")
    host.add("nvme0n1p1", "259:1", parent="nvme0n1", partition=1)
    host.add("md0", "9:0", bus="virtual", md__level="raid1", slaves=("sda", "sdb"))
    host.add("loop0", "7:0", bus="virtual", rotational=1)
    for name, slaves in (
        ("dm-1", ("nvme0n1p1",)),
        ("dm-2", ("nvme0n1p1",)),
        ("dm-3", ("sda",)),
        ("dm-0", ("dm-1", "dm-2", "dm-3")),
        ("dm-4", ("dm-0",)),
        ("dm-5", ("sda", "sdb")),
        ("dm-6", ("sda", "nvme0n1")),
        ("dm-7", ("nvme0n1p1", "md0")),
        ("dm-8", ("nvme0n1", "loop0")),
        ("dm-9", ("dm-0",)),
    ):
        host.add(name, f"253:{name[3:]}", bus="virtual", dm__uuid="LVM-x", slaves=slaves)
    return Devices(str(host.sys), str(host.dev))


def passed(devices, number, named=()):
    return passed_through(number, devices, named, lambda device: frozenset(TABLES[device]))


CACHE = {"253:0", "253:1", "253:2", "253:3"}


@pytest.mark.parametrize(
    ("device", "expected"),
    [
        ("253:0", CACHE),
        ("253:9", {"253:9"} | CACHE),
        ("253:7", {"253:7"}),
        ("253:4", set()),
        ("253:5", set()),
        ("253:6", set()),
        ("253:8", set()),
        ("253:2", set()),
        ("8:0", set()),
        ("259:1", set()),
        ("9:0", set()),
        ("7:0", set()),
        ("253:99", set()),
    ],
)
def test_what_io_passes_to_reach_disks_of_both_media(devices, device, expected):
    """A cache over md ends at the md device; dm-crypt, dm-raid and stacks of one medium count as they stand."""
    assert passed(devices, device) == expected


def test_a_device_that_the_configuration_names_is_counted_as_it_stands(devices):
    assert passed(devices, "253:0", named=["253:0"]) == set()
    assert passed(devices, "253:9", named=["253:0"]) == set(), "below it is one device, of one medium"
    assert passed(devices, "253:0", named=["253:3", "8:0", "259:0"]) == CACHE - {"253:3"}


def test_of_a_stack_of_one_medium_no_table_is_asked_for(devices):
    def refuse(device):
        raise AssertionError(device)

    assert passed_through("253:5", devices, (), refuse) == set()
    with pytest.raises(AssertionError, match="253:0"):
        passed_through("253:0", devices, (), refuse)


def answer(*kinds):
    """What DM_TABLE_STATUS gives (include/uapi/linux/dm-ioctl.h): a target_spec and its text for each."""
    body = b""
    for kind, text in kinds:
        room = len(text) + 8 - len(text) % 8
        body += struct.pack("=QQiI16s", 0, 8, 0, len(body) + 40 + room, kind) + text.ljust(room, b"\0")
    head = struct.pack("=3I6IIQ128s129s7x", 4, 47, 0, 16384, 312, len(kinds), 1, 0, 0, 0, 0xFD00, b"vg-lv", b"LVM-x")
    return (head + body).ljust(16384, b"\0")


def test_the_kinds_of_target_of_a_table():
    assert parse_targets(answer((b"cache", b"8 27/4096 128 5/2048"))) == {"cache"}
    assert parse_targets(answer((b"linear", b""), (b"striped", b"2 8:0 0"), (b"linear", b""))) == {"linear", "striped"}
    assert parse_targets(answer()) == set()


def test_an_answer_that_was_cut_off_or_spoilt_never_raises():
    whole = answer((b"linear", b"x"), (b"cache", b"y" * 100))
    assert parse_targets(whole[: 312 + 48]) == {"linear"}
    chance = random.Random(3)
    for _ in range(300):
        spoilt = bytearray(whole[:600])
        for _ in range(4):
            spoilt[chance.randrange(len(spoilt))] = chance.randrange(256)
        parse_targets(bytes(spoilt))


class Mapper:
    """A control node that writes as much of a table as there is room for, and says so where that is not all."""

    BUFFER_FULL = 1 << 8

    def __init__(self, path, *kinds):
        self.path, self.whole, self.rooms = path, answer(*kinds).rstrip(b"\0"), []
        path.touch()

    def ioctl(self, descriptor, request, buffer):
        self.rooms.append(len(buffer))
        assert struct.unpack_from("=I", buffer, 12)[0] == len(buffer)
        buffer[:] = self.whole[: len(buffer)].ljust(len(buffer), b"\0")
        flags = self.BUFFER_FULL if len(self.whole) > len(buffer) else 0
        struct.pack_into("=I", buffer, 28, flags)


@pytest.fixture
def mapper(tmp_path, monkeypatch):
    def make(*kinds):
        made = Mapper(tmp_path / "control", *kinds)
        monkeypatch.setattr("cgroup.mapped.fcntl.ioctl", made.ioctl)
        return made

    return make


def test_a_table_of_any_length_is_read_to_its_end(mapper):
    """A volume that was grown again and again: the one target that matters may be the last."""
    made = mapper(*[(b"linear", b"")] * 2000, (b"crypt", b""))
    assert targets_of("253:0", str(made.path)) == {"linear", "crypt"}
    assert made.rooms[0] < len(made.whole) <= made.rooms[-1]


def test_a_table_that_is_longer_than_any_is_not_taken_for_what_is_read_of_it(mapper):
    made = mapper(*[(b"linear", b"x" * 1000000)] * 5)
    with pytest.raises(OSError, match=r"the table of 253:0 has more than 4194304 bytes") as caught:
        targets_of("253:0", str(made.path))
    assert caught.value.filename == str(made.path)


def test_a_host_without_the_mapper_says_which_file(tmp_path):
    with pytest.raises(OSError, match=r"table of 253:0") as caught:
        targets_of("253:0", str(tmp_path / "control"))
    assert caught.value.filename == str(tmp_path / "control")
