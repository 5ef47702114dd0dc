from pathlib import Path

import pytest

from cgroup.hierarchy import detect_hierarchy

FIXTURES = Path(__file__).parent / "fixtures"


@pytest.fixture
def host(tmp_path):
    def write(mountinfo, controllers=None):
        (tmp_path / "mountinfo").write_text(mountinfo)
        if controllers is not None:
            (tmp_path / "sys/fs/cgroup").mkdir(parents=True)
            (tmp_path / "sys/fs/cgroup/cgroup.controllers").write_text(controllers)
        return detect_hierarchy(str(tmp_path / "mountinfo"), prefix=str(tmp_path))

    return write


def test_v2(host):
    found = host((FIXTURES / "mountinfo.v2").read_text(), "cpuset cpu io memory pids\n")
    assert (found.kind, found.root, found.problem) == ("v2", "/sys/fs/cgroup", None)


def test_v2_without_the_io_controller(host):
    found = host((FIXTURES / "mountinfo.v2").read_text(), "cpu memory\n")
    assert found.kind == "v2"
    assert "does not list `io` but cpu, memory" in (found.problem or "")
    assert "CONFIG_BLK_CGROUP" in (found.fix or "")


def test_v2_of_which_only_a_part_is_shown(host):
    found = host("29 23 0:26 /kubepods.slice/x /sys/fs/cgroup ro - cgroup2 cgroup rw\n", "io\n")
    assert "/kubepods.slice/x" in (found.problem or "")


def test_the_whole_tree_is_preferred_to_a_part(host):
    part = "29 23 0:26 /../.. /sys/fs/cgroup ro - cgroup2 cgroup rw\n"
    found = host(part + "30 23 0:26 / /host/cgroup rw - cgroup2 cgroup rw\n")
    assert found.root == "/host/cgroup"
    assert "cannot be read" in (found.problem or "")


def test_hybrid_is_refused_with_the_fix(host):
    found = host((FIXTURES / "mountinfo.hybrid").read_text())
    assert (found.kind, found.root) == ("hybrid", "/sys/fs/cgroup/unified")
    assert "bound to cgroup v1 at /sys/fs/cgroup/blkio" in (found.problem or "")
    assert "systemd.unified_cgroup_hierarchy=1" in (found.fix or "")


def test_v1_only_is_refused_with_the_fix(host):
    lines = (FIXTURES / "mountinfo.hybrid").read_text().splitlines(keepends=True)
    found = host("".join(line for line in lines if "cgroup2" not in line))
    assert (found.kind, found.root) == ("v1", None)
    assert "cgroup v1 only" in (found.problem or "")
    assert "systemd.unified_cgroup_hierarchy=1" in (found.fix or "")


def test_a_named_v1_hierarchy_alone_is_no_obstacle(host):
    named = "33 30 0:28 / /sys/fs/cgroup/systemd rw - cgroup cgroup rw,xattr,name=systemd\n"
    found = host((FIXTURES / "mountinfo.v2").read_text() + named, "io\n")
    assert (found.kind, found.problem) == ("v2", None)


def test_no_cgroup_at_all(host):
    assert host("22 1 254:0 / / rw - ext4 /dev/vda rw\n").kind == "none"


def test_this_machine_is_recognised():
    found = detect_hierarchy()
    assert found.kind in ("v2", "hybrid", "v1", "none")
    assert (found.problem is None) == (found.fix is None)
