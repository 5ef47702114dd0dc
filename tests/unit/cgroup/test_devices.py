import random

import pytest

from cgroup.devices import ATTRIBUTES, BlockDevice, Devices, describe
from cgroup.errors import DeviceRefused
from tests.unit.cgroup.fuzzing import variants
from tests.unit.cgroup.hosts import Host

TIB = 2**40


@pytest.fixture
def host(tmp_path):
    host = Host(tmp_path)
    host.add("sda", "8:0", rotational=1, size=2 * TIB // 512)
    host.add("sda1", "8:1", parent="sda", partition=1)
    host.add("sdb", "8:16")
    host.add("sdb3", "259:1048575", parent="sdb", partition=3)
    host.add("nvme0n1", "259:300", bus="virtual/nvme-subsystem/nvme-subsys0")
    host.add("nvme0c0n1", None, bus="pci0000:00/nvme/nvme0", hidden=1)
    host.add("nvme1n1", "259:4", bus="pci0000:00/nvme/nvme1")
    host.add("cciss!c0d0", "104:0", rotational=1)
    host.add("dm-0", "253:0", bus="virtual", rotational=1, dm__uuid="LVM-abcdef", slaves=("sda1",))
    host.add("dm-1", "253:1", bus="virtual", dm__uuid="CRYPT-LUKS2-0123-secret", slaves=("sdb3",))
    host.add("dm-2", "253:2", bus="virtual", dm__uuid="part1-mpath-3600", dm__name="p1", slaves=("dm-1",))
    host.add("md0", "9:0", bus="virtual", md__level="raid1", md__raid_disks=2, slaves=("sda1", "sdb3"))
    host.add("loop0", "7:0", bus="virtual", rotational=1)
    host.add("zram0", "252:0", bus="virtual")
    host.add("ram0", "1:0", bus="virtual")
    host.add("sr0", "11:0", rotational=1)
    host.add("sdz", "65:144", size=0)
    host.add("dm-7", "253:7", bus="virtual", dm__uuid="LVM-x", slaves=("loop0",))
    host.link("disk/by-id/ata-DISK_1-part1", "sda1")
    host.link("disk/by-path/pci-0000:00:1f.2-ata-1", "sda")
    host.link("mapper/vg-data", "dm-0")
    return host


@pytest.fixture
def devices(host):
    return Devices(str(host.sys), str(host.dev))


@pytest.mark.parametrize(
    ("spec", "device", "kind", "medium"),
    [
        ("8:0", "8:0", "disk", "hdd"),
        ("sda", "8:0", "disk", "hdd"),
        ("/dev/sda", "8:0", "disk", "hdd"),
        ("/dev/sda1", "8:0", "disk", "hdd"),
        ("8:1", "8:0", "disk", "hdd"),
        ("259:1048575", "8:16", "disk", "ssd"),
        ("/dev/disk/by-id/ata-DISK_1-part1", "8:0", "disk", "hdd"),
        ("/dev/disk/by-path/pci-0000:00:1f.2-ata-1", "8:0", "disk", "hdd"),
        ("/dev/mapper/vg-data", "253:0", "dm", "hdd"),
        ("/dev/dm-1", "253:1", "dm", "ssd"),
        ("dm-2", "253:2", "dm", "ssd"),
        ("/dev/md0", "9:0", "md", "hdd"),
        ("/dev/nvme0n1", "259:300", "nvme-multipath", "ssd"),
        ("nvme0c0n1", "259:300", "nvme-multipath", "ssd"),
        ("/dev/nvme1n1", "259:4", "disk", "ssd"),
        ("/dev/cciss/c0d0", "104:0", "disk", "hdd"),
        ("dm-7", "253:7", "dm", "hdd"),
    ],
)
def test_whatever_an_operator_names(devices, spec, device, kind, medium):
    found = devices.resolve(spec)
    assert (found.device, found.kind, found.medium) == (device, kind, medium)


def test_everything_that_is_known_of_a_disk(devices):
    assert devices.resolve("sda") == BlockDevice("8:0", "sda", "hdd", rotational=True, size_bytes=2 * TIB, kind="disk")


def test_a_stack_knows_its_members_and_their_medium(devices):
    md = devices.resolve("md0")
    assert (md.members, md.layout, md.rotational, md.medium) == (("8:0", "8:16"), "raid1", False, "hdd")
    assert devices.resolve("dm-1").layout == "CRYPT"
    assert devices.resolve("dm-2").layout == "mpath"
    assert devices.resolve("dm-2").members == ("253:1",)


def test_the_medium_can_be_overridden(devices):
    assert devices.resolve("sda", medium="ssd").medium == "ssd"
    assert devices.resolve("sda", medium="ssd").rotational


def test_what_is_refused_has_a_name_all_the_same(devices):
    assert [devices.name_of(number) for number in ("8:0", "1:0", "8:99")] == ["sda", "ram0", "8:99"]


@pytest.mark.parametrize(
    ("spec", "reason"),
    [
        ("loop0", "a loop device passes its IO on to a file"),
        ("/dev/zram0", "compressed memory"),
        ("1:0", "a RAM disk does no IO"),
        ("sr0", "removable media"),
        ("sdz", "size 0"),
        ("/dev/sdq", "'/dev/sdq' is no block device"),
        ("8:99", "'8:99' is no block device"),
        ("../../etc/passwd", "is no block device"),
        ("/dev/../../x", "is no block device"),
        ("", "is no block device"),
        ("sd\0a", "is no block device"),
        ("/dev/", "is no block device"),
    ],
)
def test_refusals_say_why(devices, spec, reason):
    with pytest.raises(DeviceRefused, match=reason):
        devices.resolve(spec)


def test_all_lists_whole_usable_devices_once(devices):
    names = [device.name for device in devices.all()]
    assert names == ["sda", "sdb", "md0", "cciss!c0d0", "dm-0", "dm-1", "dm-2", "dm-7", "nvme1n1", "nvme0n1"]


def test_a_pulled_disk_is_gone_and_a_new_one_seen(host, devices):
    for link in ("class/block/sdb", "dev/block/8:16", "class/block/sdb3", "dev/block/259:1048575"):
        (host.sys / link).unlink()
    with pytest.raises(DeviceRefused):
        devices.resolve("/dev/sdb")
    host.add("sdc", "8:32")
    assert devices.resolve("/dev/sdc").device == "8:32"


def test_a_ring_of_links_ends(host, devices):
    host.add("dm-8", "253:8", bus="virtual", dm__uuid="LVM-a")
    host.add("dm-9", "253:9", bus="virtual", dm__uuid="LVM-b", slaves=("dm-8",))
    (host.sys / "devices/virtual/block/dm-8/slaves").mkdir()
    (host.sys / "devices/virtual/block/dm-8/slaves/dm-9").symlink_to(host.sys / "class/block/dm-9")
    with pytest.raises(DeviceRefused, match="more than 16 layers"):
        devices.resolve("dm-9")


def test_this_machine():
    for device in Devices().all():
        assert Devices().resolve(device.device) == device


@pytest.mark.parametrize("count", [5_000, pytest.param(100_000, marks=pytest.mark.nightly)])
def test_fuzz(count):
    seeds = ["8:0\n", "4294967296\n", "1\n", "LVM-abc\n", "raid5\n", "part1-mpath-3600\n", "", "0\n"]
    rng = random.Random(7)
    understood = 0
    for text in variants(seeds, count):
        attributes = {name: rng.choice(seeds) for name in ATTRIBUTES if rng.random() < 0.8}
        attributes |= {"dev": "8:0\n", "size": "7\n"} if rng.random() < 0.5 else {}
        attributes[rng.choice(ATTRIBUTES)] = text
        try:
            device = describe("sda", attributes)
        except DeviceRefused:
            continue
        assert device.size_bytes > 0
        understood += 1
    assert 0 < understood < count
