import contextlib
import os
from pathlib import Path

import pytest

from cgroup import files as files_module
from cgroup.errors import ControllerMissing, IoFileError, Vanished
from cgroup.files import KernelFiles
from cgroup.lines import Line
from tests.unit.cgroup.trees import Tree


@pytest.fixture
def tree(tmp_path):
    return Tree(tmp_path)


@pytest.fixture
def files(tree):
    return KernelFiles(str(tree.root), str(tree.sys))


def test_read_and_write(tree, files):
    line = Line(tree.make("/a", "8:0 rbps=5 wbps=max riops=max wiops=max\n"), "/a", "8:0", "io.max")
    assert files.read(line)["rbps"] == 5
    files.write(line, {"rbps": 7, "wbps": None})
    assert tree.text("/a") == "8:0 rbps=7 wbps=max"


def test_one_write_call_per_line(tree, files, monkeypatch):
    line = Line(tree.make("/a"), "/a", "8:0", "io.max")
    calls = []
    monkeypatch.setattr(files_module.os, "write", lambda file, data: calls.append(data))
    files.write(line, {"rbps": 7, "wbps": 8, "riops": 9, "wiops": None})
    assert calls == [b"8:0 rbps=7 wbps=8 riops=9 wiops=max\n"]


def test_a_recycled_path_is_not_written(tree, files):
    old = tree.make("/a")
    with pytest.raises(Vanished, match="another one now"):
        files.write(Line(old + 1, "/a", "8:0", "io.max"), {"rbps": 7})
    assert tree.text("/a") == ""


def test_a_gone_cgroup_and_a_missing_controller_are_told_apart(tree, files):
    number = tree.make("/a")
    (tree.root / "a/io.max").unlink()
    with pytest.raises(ControllerMissing, match="enable `io`"):
        files.read(Line(number, "/a", "8:0", "io.max"))
    with pytest.raises(Vanished, match="/b"):
        files.read(Line(number, "/b", "8:0", "io.max"))


@pytest.mark.parametrize("number", [19, 6])
def test_enodev_is_churn(tree, files, monkeypatch, number):
    def gone(file, data):
        raise OSError(number, os.strerror(number))

    line = Line(tree.make("/a"), "/a", "8:0", "io.max")
    monkeypatch.setattr(files_module.os, "write", gone)
    with pytest.raises(Vanished, match="device 8:0 is gone"):
        files.write(line, {"rbps": 7})


def test_other_errors_carry_the_path(tree, files, monkeypatch):
    def refuse(file, data):
        raise OSError(22, os.strerror(22))

    line = Line(tree.make("/a"), "/a", "8:0", "io.max")
    monkeypatch.setattr(files_module.os, "write", refuse)
    with pytest.raises(OSError, match="Invalid argument") as caught:
        files.write(line, {"rbps": 7})
    assert caught.value.filename == f"{tree.root}/a/io.max"


def test_bytes_that_are_no_text(tree, files):
    number = tree.make("/a")
    (tree.root / "a/io.max").write_bytes(b"8:0 rbps=\xff")
    with pytest.raises(IoFileError):
        files.read(Line(number, "/a", "8:0", "io.max"))


def test_long_files_are_read_whole(tree, files):
    lines = [f"259:{n} rbps={n} wbps=max riops=max wiops=max" for n in range(1, 5000)]
    number = tree.make("/a", "\n".join(lines))
    assert files.read(Line(number, "/a", "259:4999", "io.max"))["rbps"] == 4999


def test_read_ahead(tree, files):
    line = Line(0, "", "8:0", "read_ahead_kb")
    files.write(line, {"kilobytes": 1024})
    assert files.read(line) == {"kilobytes": 1024}
    assert files.locate(line) is line
    with pytest.raises(Vanished):
        files.read(Line(0, "", "8:16", "read_ahead_kb"))


def test_locate_and_id(tree, files):
    number = tree.make("/a/b")
    assert files.cgroup_id("/a/b") == number
    assert files.locate(Line(number, "/wrong", "8:0", "io.max")).path == "/a/b"
    with pytest.raises(Vanished, match="does not exist"):
        files.locate(Line(number + 99999, "/a/b", "8:0", "io.max"))


def test_generation_follows_the_file_and_the_disk(tree, files):
    line = Line(tree.make("/a"), "/a", "8:0", "io.max")
    first = files.generation(line)
    (tree.root / "a/other").write_text("takes no inode of the old file")
    (tree.root / "a/io.max").rename(tree.root / "a/old")
    (tree.root / "a/io.max").write_text("")
    second = files.generation(line)
    assert second[0] != first[0]
    assert second[1] == first[1] > 0
    assert files.generation(Line(line.cgroup_id, "/a", "8:16", "io.max"))[1] == 0


def test_in_use(tree, files):
    line = Line(tree.make("/a"), "/a", "", "cgroup.subtree_control")
    assert not files.in_use(line)
    tree.make("/a/b", "8:0 rbps=1 wbps=max riops=max wiops=max")
    assert files.in_use(line)
    tree.make("/a/b")
    (tree.root / "a/b/cgroup.subtree_control").write_text("cpu io\n")
    assert files.in_use(line)


@pytest.mark.parametrize(
    ("file", "text", "in_use"),
    [
        ("io.weight", "default 100\n", False),
        ("io.weight", "default 300\n", True),
        ("io.weight", "default 100\n8:0 50\n", True),
        ("io.bfq.weight", "100\n", False),
        ("io.bfq.weight", "default 100\n8:0 700\n", True),
        ("io.latency", "8:0 target=5000\n", True),
        ("io.latency", "", False),
    ],
)
def test_what_others_set_besides_limits_is_use_too(tree, files, file, text, in_use):
    line = Line(tree.make("/a"), "/a", "", "cgroup.subtree_control")
    tree.make("/a/b")
    (tree.root / "a/b" / file).write_text(text)
    assert files.in_use(line) == in_use


def open_below(folder):
    """What this process has open there."""
    found = []
    for descriptor in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # another thread's may be closed meanwhile
            found.append(descriptor.readlink())
    return [path for path in found if path.is_relative_to(folder)]


def test_no_descriptor_is_left_open(tree, files):
    line = Line(tree.make("/a"), "/a", "8:0", "io.max")
    before = open_below(tree.root)
    for _ in range(5):
        files.write(line, {"rbps": 7})
        files.read(line)
        files.generation(line)
        with pytest.raises(Vanished):
            files.read(Line(1, "/a", "8:0", "io.max"))
    assert open_below(tree.root) == before
