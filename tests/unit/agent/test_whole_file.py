"""Files of the operator are there whole or not at all."""

import resource
import subprocess
import sys

import pytest

from agent.errors import PrefetchdError
from agent.whole_file import replacing


def test_it_takes_the_place_at_the_end(tmp_path):
    path = tmp_path / "out"
    path.write_text("before")
    with replacing(path, "Page") as file:
        file.write(b"after")
        assert path.read_text() == "before"
    assert path.read_text() == "after"
    assert list(tmp_path.iterdir()) == [path]


def write_half(path, interruption):
    with replacing(path, "Page") as file:
        file.write(b"half")
        raise interruption


@pytest.mark.parametrize("interruption", [KeyboardInterrupt, ZeroDivisionError])
def test_what_breaks_off_leaves_what_was_there(tmp_path, interruption):
    path = tmp_path / "out"
    path.write_text("before")
    with pytest.raises(interruption):
        write_half(path, interruption)
    assert path.read_text() == "before"
    assert list(tmp_path.iterdir()) == [path]


def test_what_lies_in_wait_beside_it_is_not_written_to(tmp_path):
    path, other = tmp_path / "out", tmp_path / "other"
    other.write_text("somebody's")
    (tmp_path / "out.partial").symlink_to(other)
    with replacing(path, "Page", permissions=0o600) as file:
        file.write(b"secret")
    assert other.read_text() == "somebody's"
    assert (path.read_text(), path.is_symlink(), path.stat().st_mode & 0o777) == ("secret", False, 0o600)


def test_a_folder_that_takes_no_file_is_a_sentence(tmp_path):
    path = tmp_path / "missing" / "out"
    with pytest.raises(PrefetchdError, match=r"Page '.*/out' cannot be written \(No such file .*\); choose another"):
        write_half(path, AssertionError)


SCENARIO = """
name = "mine"
description = "made up"
duration_seconds = 2
[[devices]]
name = "ssd0"
kind = "ssd"
bytes_per_second = "100 MiB"
[[jobs]]
name = "job"
device = "ssd0"
batch_reads = 4
read_size = "256 KiB"
compute_ms = 50
"""


@pytest.mark.parametrize("before", [None, "before"])
@pytest.mark.parametrize("command", ["simulate", "doctor"])
def test_a_full_disk_leaves_nothing_half(tmp_path, command, before):
    """Where no byte more fits into a file."""
    path, scenario = tmp_path / "out", tmp_path / "mine.toml"
    scenario.write_text(SCENARIO)
    if before:
        path.write_text(before)
    words = {
        "simulate": ["--scenario", scenario, "--policy", "none", "--json", path],
        "doctor": ["--address", "127.0.0.1:1", "--bundle", path],
    }[command]
    done = subprocess.run(
        [sys.executable, "-m", "agent", command, *words],
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0)),
        capture_output=True, text=True, check=False, timeout=120,
    )  # fmt: skip
    assert done.returncode == 1
    assert done.stderr.endswith("cannot be written (File too large); choose another path.\n")
    assert "Traceback" not in done.stderr
    assert {file.name for file in tmp_path.iterdir()} == {"mine.toml"} | ({"out"} if before else set())
    assert not before or path.read_text() == before
