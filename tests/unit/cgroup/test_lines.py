import pytest
from hypothesis import given
from hypothesis import strategies as st

from cgroup.errors import IoFileError
from cgroup.lines import KEYS, Limit, Line, Target, Weight, foreign, format_line, line_of, parse_line, restorable


def line(file, device="8:0"):
    return Line(7, "/a", device, file)


def test_a_line_is_known_by_id_device_and_file_not_by_path():
    assert Line(7, "/a", "8:0", "io.max") == Line(7, "/b", "8:0", "io.max")
    assert len({Line(7, "/a", "8:0", "io.max"), Line(7, "/b", "8:0", "io.max")}) == 1
    assert Line(7, "/a", "8:0", "io.max") != Line(8, "/a", "8:0", "io.max")
    assert str(line("io.max")) == "/a io.max 8:0"
    assert str(Line(0, "", "8:0", "read_ahead_kb")) == "disk read_ahead_kb 8:0"


@pytest.mark.parametrize(
    ("file", "text", "values"),
    [
        ("io.max", "8:0 rbps=5 wbps=max riops=max wiops=max", {"rbps": 5, "wbps": None, "riops": None, "wiops": None}),
        ("io.max", "", dict.fromkeys(KEYS["io.max"])),
        ("io.weight", "default 100\n8:0 300", {"weight": 300}),
        ("io.bfq.weight", "default 100", {"weight": None}),
        ("cgroup.subtree_control", "cpu io", {"io": 1}),
        ("cgroup.subtree_control", "cpuio", {"io": None}),
        ("read_ahead_kb", "128\n", {"kilobytes": 128}),
    ],
)
def test_parse(file, text, values):
    assert parse_line(line(file), text) == values


@pytest.mark.parametrize(
    ("file", "changes", "text"),
    [
        ("io.max", {"wbps": 5, "rbps": None}, "8:0 rbps=max wbps=5"),
        ("io.weight", {"weight": 300}, "8:0 300"),
        ("io.bfq.weight", {"weight": None}, "8:0 default"),
        ("cgroup.subtree_control", {"io": 1}, "+io"),
        ("cgroup.subtree_control", {"io": None}, "-io"),
        ("read_ahead_kb", {"kilobytes": 256}, "256"),
    ],
)
def test_format(file, changes, text):
    assert format_line(line(file), changes) == text


@pytest.mark.parametrize(("file", "text"), [("read_ahead_kb", "x"), ("memory.max", "1"), ("read_ahead_kb", "")])
def test_what_cannot_be_set_is_refused(file, text):
    with pytest.raises(IoFileError):
        parse_line(line(file), text)
    with pytest.raises(IoFileError):
        format_line(line(file), {"kilobytes": None})


def test_settings_know_their_file():
    target = Target(7, "/a", "8:0")
    assert line_of(target, Limit(rbps=1).file) == line("io.max")
    assert line_of(target, Weight(5).file) == line("io.weight")
    assert Weight(5, "io.bfq.weight").values() == {"weight": 5}


limits = st.none() | st.integers(1, 4)
values = st.fixed_dictionaries(dict.fromkeys(("rbps", "wbps"), limits))


@given(values, values, st.lists(values, max_size=2).map(tuple))
def test_every_key_is_ours_or_foreign_or_as_before(actual, prior, ours):
    back = restorable(actual, prior, ours)
    theirs = foreign(actual, prior, ours)
    as_before = [key for key in prior if actual[key] == prior[key]]
    assert sorted([*back, *theirs, *as_before]) == sorted(prior)
    assert all(value == prior[key] for key, value in back.items())
    assert all(any(actual[key] == mine[key] for mine in ours) for key in back)
