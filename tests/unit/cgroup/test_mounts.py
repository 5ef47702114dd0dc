import pytest

from cgroup.devices import Devices
from cgroup.errors import DeviceRefused
from cgroup.mounts import Mounts
from tests.unit.cgroup.hosts import Host

MOUNTINFO = """\
1 0 8:1 / / rw - ext4 /dev/root rw
2 1 8:17 / /no-such-data rw - xfs /dev/sdb1 rw
3 1 8:32 / /no-such-data rw - ext4 /dev/sdc rw
4 1 8:32 /shards /no-such-bind rw - ext4 /dev/sdc rw
5 1 0:40 /@ /no-such-btrfs rw - btrfs /dev/sdb1 rw,subvol=/@
6 1 0:41 / /no-such-wide-btrfs rw - btrfs /dev/sdc rw
7 1 0:42 / /no-such-nfs rw - nfs4 10.0.0.1:/x rw
8 1 0:43 / /no-such-fuse rw - fuse.s3fs s3fs rw
9 1 0:44 / /no-such-tmp rw - tmpfs tmpfs rw
10 1 0:45 / /no-such-zfs rw - zfs tank rw
11 1 0:46 / /no-such-overlay rw - overlay overlay rw,lowerdir=/no-such-data/l1:/no-such-bind/l2,upperdir=/no-such-data/u
12 1 0:47 / /no-such-split rw - overlay overlay rw,lowerdir=/no-such-data/l1,upperdir=/no-such-btrfs/u
13 1 8:16 / /no-such-rt rw - xfs /dev/sdb rw,rtdev=/dev/sdc
14 1 0:48 / /no-such-bcachefs rw - bcachefs /dev/sdb:/dev/sdc rw
15 1 0:49 / /no-such-hidden rw - overlay overlay rw
16 1 7:0 / /no-such-loop ro - squashfs /dev/loop0 ro
17 1 0:50 / /no-such\\040space rw - btrfs /dev/sdb1 rw
"""


@pytest.fixture
def mounts(tmp_path):
    host = Host(tmp_path)
    for name, number in (("sda", "8:0"), ("sdb", "8:16"), ("sdc", "8:32")):
        host.add(name, number)
    host.add("sda1", "8:1", parent="sda", partition=1)
    host.add("sdb1", "8:17", parent="sdb", partition=1)
    host.add("loop0", "7:0", bus="virtual")
    for folder in ("a/devices/sdb1", "b/devices/sdc", "b/devices/sdd"):
        (host.sys / "fs/btrfs" / folder).mkdir(parents=True)
    (tmp_path / "mountinfo").write_text(MOUNTINFO)
    return Mounts(Devices(str(host.sys), str(host.dev)), str(tmp_path / "mountinfo"), str(host.sys))


@pytest.mark.parametrize(
    ("path", "device"),
    [
        ("/", "8:0"),
        ("/no-such-file", "8:0"),
        ("/no-such-database", "8:0"),
        ("/no-such-data", "8:32"),
        ("/no-such-data/deep/file", "8:32"),
        ("/no-such-bind/x", "8:32"),
        ("/no-such-btrfs", "8:16"),
        ("/no-such space/x", "8:16"),
        ("/no-such-overlay/x", "8:32"),
        ("/dev/sdb1", "8:16"),
        ("8:17", "8:16"),
        ("sdc", "8:32"),
    ],
)
def test_paths(mounts, path, device):
    assert mounts.resolve(path).device == device


@pytest.mark.parametrize(
    ("path", "reason"),
    [
        ("/no-such-wide-btrfs", r"btrfs on several devices \(sdc, sdd\)"),
        ("/no-such-nfs/x", "nfs4, a remote file system"),
        ("/no-such-fuse", "fuse.s3fs, a remote file system"),
        ("/no-such-tmp", "lives in memory"),
        ("/no-such-zfs", "ZFS"),
        ("/no-such-split", r"several devices \(sdb, sdc\)"),
        ("/no-such-hidden", "none that is visible here"),
        ("/no-such-rt", "real-time device /dev/sdc"),
        ("/no-such-bcachefs", "bcachefs on several devices"),
        ("/no-such-loop", "loop device"),
    ],
)
def test_refusals_say_why(mounts, path, reason):
    with pytest.raises(DeviceRefused, match=reason):
        mounts.resolve(path)


def test_the_medium_override_reaches_the_device(mounts):
    assert mounts.resolve("/no-such-data", medium="hdd").medium == "hdd"


def test_a_path_on_no_mount(tmp_path):
    (tmp_path / "mountinfo").write_text("")
    with pytest.raises(DeviceRefused, match="no mount"):
        Mounts(Devices(), str(tmp_path / "mountinfo")).resolve("/x")
