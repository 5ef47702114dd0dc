from pathlib import Path

import pytest

from cgroup.errors import IoFileError
from cgroup.mountinfo import parse_mountinfo
from tests.unit.cgroup.fuzzing import survivors

FIXTURES = Path(__file__).parent / "fixtures"


def mounts():
    return {mount.point: mount for mount in parse_mountinfo((FIXTURES / "mountinfo.v2").read_text())}


def test_plain_mount():
    root = mounts()["/"]
    assert (root.device, root.fstype, root.source) == ("259:2", "ext4", "/dev/nvme0n1p2")
    assert root.super_options == ("rw", "errors=remount-ro")


def test_octal_escapes_and_wide_minors():
    data = mounts()["/data/my set"]
    assert (data.device, data.source) == ("253:1048575", "/dev/mapper/vg-data\\x")


def test_optional_fields_and_an_empty_source():
    tmp = mounts()["/tmp"]
    assert (tmp.fstype, tmp.source, tmp.super_options) == ("tmpfs", "", ("rw", "inode64"))


def test_bind_mount_keeps_its_root():
    assert mounts()["/srv/shards"].root == "/shards"


def test_overlay_options_with_an_escaped_comma():
    overlay = mounts()["/var/lib/docker/overlay2/x/merged"]
    assert overlay.option("lowerdir") == "/l1:/l2"
    assert overlay.option("upperdir") == "/u,p"
    assert overlay.option("rw") is None


def test_no_super_options():
    assert mounts()["/mnt/fuse"].super_options == ()


@pytest.mark.parametrize("line", ["22 1 259:2 / / rw - ", "22 1 sda / / rw - ext4 /dev/sda rw", "22 1 8:0 /", "- - -"])
def test_errors_quote_the_line(line):
    with pytest.raises(IoFileError, match="mountinfo has a line"):
        parse_mountinfo(line)


@pytest.mark.parametrize("count", [5_000, pytest.param(100_000, marks=pytest.mark.nightly)])
def test_fuzz(count):
    seeds = [*(FIXTURES / "mountinfo.v2").read_text().splitlines(), (FIXTURES / "mountinfo.hybrid").read_text()]
    assert 0 < survivors(parse_mountinfo, IoFileError, seeds, count) < count
