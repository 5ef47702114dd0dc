"""The ladder of kernel headers, on file trees made for it."""

import os
import subprocess

import pytest

from bpf.headers import find_headers

RELEASE = os.uname().release


@pytest.fixture(autouse=True)
def x86(monkeypatch):
    monkeypatch.delenv("BCC_KERNEL_SOURCE", raising=False)
    monkeypatch.setattr("platform.machine", lambda: "x86_64")


def touch(path, text=""):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def debian_pair(root, version):
    common = root / f"usr/src/linux-headers-{version}-common"
    specific = root / f"usr/src/linux-headers-{version}-amd64"
    touch(common / "include/linux/kconfig.h", version)
    touch(common / "include/uapi/linux/bpf.h")
    touch(common / "arch/x86/include/asm/page.h")
    touch(specific / "include/generated/autoconf.h", version)
    touch(specific / "arch/x86/include/generated/asm/x.h")


def test_nothing_is_found_where_there_is_nothing(tmp_path):
    assert find_headers(tmp_path) is None


def test_a_given_tree_comes_first(tmp_path, monkeypatch):
    monkeypatch.setenv("BCC_KERNEL_SOURCE", "/somewhere")
    (tmp_path / "lib/modules" / RELEASE / "build").mkdir(parents=True)
    assert str(find_headers(tmp_path).tree) == "/somewhere"


def test_the_running_kernels_own_are_left_to_bcc(tmp_path):
    (tmp_path / "lib/modules" / RELEASE / "build").mkdir(parents=True)
    debian_pair(tmp_path, "6.1.0-1")
    found = find_headers(tmp_path)
    assert (found.tree, found.temporary) == (None, False)


@pytest.mark.parametrize("tool", [True, False])
def test_headers_that_cannot_be_unpacked_leave_the_next_ones(tmp_path, monkeypatch, tool):
    """A container may lack tar or xz; that must not end the agent."""
    touch(tmp_path / "sys/kernel/kheaders.tar.xz", "no archive")
    debian_pair(tmp_path, "6.1.0-1")
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    if not tool:
        monkeypatch.setenv("PATH", str(tmp_path))
    found = find_headers(tmp_path)
    assert "linux-headers-6.1.0-1" in found.origin
    found.remove()
    assert not list(tmp_path.glob("prefetchd-headers-*"))


def test_headers_inside_the_kernel_are_unpacked_and_removed(tmp_path):
    touch(tmp_path / "tree/include/linux/kconfig.h", "from the kernel")
    (tmp_path / "sys/kernel").mkdir(parents=True)
    archive = tmp_path / "sys/kernel/kheaders.tar.xz"
    subprocess.run(["tar", "-cJf", archive, "-C", tmp_path / "tree", "include"], check=True)
    debian_pair(tmp_path, "6.1.0-1")
    found = find_headers(tmp_path)
    assert (found.tree / "include/linux/kconfig.h").read_text() == "from the kernel"
    found.remove()
    assert not found.tree.exists()


def test_the_newest_of_debians_pairs_is_joined(tmp_path):
    for version in ("6.1.0-9", "6.1.0-57", "5.10.0-99"):
        debian_pair(tmp_path, version)
    found = find_headers(tmp_path)
    assert (found.tree / "include/linux/kconfig.h").read_text() == "6.1.0-57"
    assert (found.tree / "include/generated/autoconf.h").read_text() == "6.1.0-57"
    for name in ("asm/page.h", "generated/asm/x.h"):
        assert (found.tree / "arch/x86/include" / name).exists()
    found.remove()
    assert not found.tree.exists()
    assert (tmp_path / "usr/src/linux-headers-6.1.0-57-common/include/linux/kconfig.h").exists()


def test_half_a_pair_does_not_do(tmp_path):
    debian_pair(tmp_path, "6.1.0-57")
    (tmp_path / "usr/src/linux-headers-6.1.0-57-common/include/linux/kconfig.h").unlink()
    assert find_headers(tmp_path) is None


def test_a_whole_tree_is_used_in_place(tmp_path):
    tree = tmp_path / "usr/src/linux-headers-6.8.0-generic"
    touch(tree / "include/linux/kconfig.h")
    touch(tree / "include/generated/autoconf.h")
    found = find_headers(tmp_path)
    assert (found.tree, found.temporary) == (tree, False)
    found.remove()
    assert tree.exists()


def test_trees_of_killed_processes_are_removed_and_those_in_use_are_not(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    debian_pair(tmp_path / "root", "6.1.0-57")
    (tmp_path / "prefetchd-headers-left").mkdir()
    first = find_headers(tmp_path / "root")
    second = find_headers(tmp_path / "root")
    assert sorted(tmp_path.glob("prefetchd-headers-*")) == sorted([first.tree, second.tree])
    first.remove()
    second.remove()
    assert not list(tmp_path.glob("prefetchd-headers-*"))
