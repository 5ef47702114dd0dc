import pytest

from cgroup.devices import BlockDevice
from cgroup.errors import DeviceRefused
from cgroup.stacks import EnforcementTarget, enforcement_targets


def device(number, kind="disk", members=(), layout=""):
    return BlockDevice(
        number, f"d{number}", "ssd", rotational=False, size_bytes=1024, kind=kind, members=tuple(members), layout=layout
    )


DISKS = {f"8:{n}": device(f"8:{n}") for n in (0, 16, 32, 48)}


def targets(layout, members=("8:0", "8:16", "8:32", "8:48"), kind="md", **more):
    known = DISKS | {other.device: other for other in more.values()}
    return enforcement_targets(device("9:0", kind, members, layout), known, on_members=True)


def test_one_limit_on_the_mapped_device_itself_is_the_rule():
    stack = device("9:0", "md", DISKS, "raid0")
    assert enforcement_targets(stack) == (EnforcementTarget("9:0", 1.0, 1.0),)
    assert enforcement_targets(DISKS["8:0"], on_members=True) == (EnforcementTarget("8:0", 1.0, 1.0),)


@pytest.mark.parametrize(
    ("layout", "read", "write"),
    [
        ("raid0", 0.25, 0.25),
        ("raid1", 0.25, 1.0),
        ("raid10", 0.25, 0.5),
        ("raid5", 0.25, 1 / 3),
        ("raid4", 0.25, 1 / 3),
        ("raid6", 0.25, 0.5),
    ],
)
def test_the_split_follows_the_level(layout, read, write):
    split = targets(layout)
    assert [target.device for target in split] == list(DISKS)
    assert {(target.read_factor, target.write_factor) for target in split} == {(read, write)}


def test_two_partitions_of_one_disk_add_up():
    assert targets("raid0", ("8:0", "8:0")) == (EnforcementTarget("8:0", 1.0, 1.0),)
    assert targets("raid1", ("8:0", "8:0", "8:16")) == (
        EnforcementTarget("8:0", pytest.approx(2 / 3), 2.0),
        EnforcementTarget("8:16", pytest.approx(1 / 3), 1.0),
    )


def test_stacks_on_stacks_multiply():
    crypt = device("253:0", "dm", ("8:0",), "CRYPT")
    other = device("253:1", "dm", ("8:16",), "CRYPT")
    split = targets("raid0", ("253:0", "253:1"), crypt=crypt, other=other)
    assert split == (EnforcementTarget("8:0", 0.5, 0.5), EnforcementTarget("8:16", 0.5, 0.5))


def test_what_sysfs_does_not_tell_is_refused():
    with pytest.raises(DeviceRefused, match=r"dm LVM.*joins 2 devices"):
        targets("LVM", ("8:0", "8:16"), kind="dm")
    with pytest.raises(DeviceRefused, match="md linear"):
        targets("linear", ("8:0", "8:16"))
    with pytest.raises(DeviceRefused, match="8:99"):
        targets("raid0", ("8:0", "8:99"))
