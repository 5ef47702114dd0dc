"""A scenario file that cannot be used is refused in one sentence that quotes what is wrong and says what to do."""

from __future__ import annotations

from pathlib import Path

import pytest

from agent.simulate.scenario import ScenarioError, load_scenario, parse_scenario

SHIPPED = sorted((Path(__file__).parents[3] / "lab" / "scenarios").glob("*.toml"))
GOOD = """\
name = "small"
description = "one job beside a scan"
duration_seconds = 3

[[devices]]
name = "ssd0"
kind = "ssd"
size = "1 GiB"
bytes_per_second = "120 MiB"

[[jobs]]
name = "vision"
device = "ssd0"
batch_reads = 8
read_size = "256 KiB"
compute_ms = 90

[[best_effort]]
name = "scan"
device = "ssd0"
"""


def refusal(text: str) -> str:
    with pytest.raises(ScenarioError) as caught:
        parse_scenario(text, "node.toml")
    message = str(caught.value)
    assert message.startswith("node.toml")
    assert message.endswith(".")
    assert "\n" not in message
    return message


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_what_is_shipped_can_be_used(path):
    assert load_scenario(path).name == path.stem


@pytest.mark.parametrize(
    ("before", "after", "words"),
    [
        ("duration_seconds = 3", "duration_seconds = nan", ["'duration_seconds'", "nan", "a number > 0"]),
        ("duration_seconds = 3", "duration_seconds = 2026-01-01", ["2026-01-01", "a number, got a date"]),
        ("duration_seconds = 3", "duration_seconds = 1e9", ["1000000000.0", "<= 604800"]),
        ("compute_ms = 90", "compute_ms = -5", ["'jobs[0].compute_ms'", "-5", "a number >= 0"]),
        ("compute_ms = 90", "compute_ms = true", ["true", "got true or false"]),
        ("compute_ms = 90", "compute_mss = 90", ["'jobs[0].compute_mss'", "known here", "compute_ms,"]),
        ("compute_ms = 90", "", ["'compute_ms' is missing in 'jobs[0]'"]),
        ("compute_ms = 90", "compute_ms = 90\nburst = {}", ["'every' is missing in 'jobs[0].burst'"]),
        ("compute_ms = 90", "compute_ms = 90\nburst = {ever = 3}", ["'jobs[0].burst.ever'", "every, length, factor"]),
        ("compute_ms = 90", "compute_ms = 90\naccess = 'x'", ["'x'", "one of direct, filesystem"]),
        ("compute_ms = 90", "compute_ms = 90\nmemory = '1 XB'", ["'1 XB'", "is no size"]),
        ('kind = "ssd"', 'kind = "tape"', ["'tape'", "one of ssd, hdd, nfs"]),
        ("[[devices]]", "[devices]", ["'devices'", "which [[devices]] makes"]),
        ('name = "small"', 'name = "../up"', ["'../up'", "that matches"]),
        ('device = "ssd0"', 'device = "ssd1"', ["'vision'", "'ssd1'", "the devices are ssd0"]),
        ('size = "1 GiB"', 'size = "128 KiB"', ["262144", "'vision'", "131072 bytes of 'ssd0'"]),
        ("compute_ms = 90", "compute_ms = 90\nstart_seconds = 2\nstop_seconds = 1", ["stop_seconds 1", "seconds 2"]),
        (
            "compute_ms = 90",
            "compute_ms = 90\nburst = {every = 5, length = 10, factor = 2}",
            ["length 10", "every 5", "'vision'"],
        ),
    ],
)
def test_a_refusal_quotes_key_and_value(before, after, words):
    assert before in GOOD
    message = refusal(GOOD.replace(before, after, 1))
    for word in words:
        assert word in message


def test_nothing_to_do_and_nothing_to_do_it_on_are_refused():
    head = GOOD[: GOOD.index("[[devices]]")]
    assert "add a [[jobs]] or [[best_effort]] section" in refusal(f"{head}devices = []\njobs = []\n")
    users = GOOD[GOOD.index("[[jobs]]") :]
    assert "add a [[devices]] section" in refusal(f"{head}devices = []\n{users}")


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "'name' is missing in the file; add it."),
        (b"a = " + b"[" * 5000, "nested too deeply"),
        (b"name = \xff", "is no UTF-8 text (byte 0xff at 7)"),
        (GOOD.encode("utf-16"), "is no UTF-8 text"),
        (b"\0" * 100, "is not valid TOML"),
        (b"#" * (5 << 20), "more than 4 MiB"),
    ],
)
def test_a_file_that_is_none_is_a_sentence(content, words, tmp_path):
    path = tmp_path / "x.toml"
    path.write_bytes(content)
    with pytest.raises(ScenarioError, match=r"x\.toml") as caught:
        load_scenario(path)
    assert words in str(caught.value)


def test_a_byte_order_mark_is_passed_over(tmp_path):
    path = tmp_path / "small.toml"
    path.write_text("\ufeff" + GOOD, encoding="utf-8")
    assert load_scenario(path).name == "small"
