"""What of the lab needs no guest: exit statuses, arguments, the accelerator's memory, peers' arithmetic, locks."""

import fcntl
import os
from types import SimpleNamespace

import pytest

from agent.simulate.scenario import Device
from tests.lab import LabBroken, LabTimeout, LabUnavailable, machine
from tests.lab import __main__ as command_line
from tests.lab.cache import lock_path, machine_lock, work_folder
from tests.lab.host import remember_accelerator, remembered_accelerator
from tests.lab.machine import _Follower, last_words, locked_up_seconds
from tests.lab.peers import CostModel, cap_line, current_scheduler, slice_weights
from tests.lab.scenario_run import split_at_dashes


@pytest.mark.parametrize(("status", "ours"), [(0, 0), (1, 1), (5, 5), (124, 124), (125, 1), (126, 126), (137, 137)])
def test_status_of_the_command_is_ours(status, ours):
    assert command_line.exit_status(status) == ours


@pytest.mark.parametrize("kind", [LabBroken, LabTimeout, LabUnavailable])
def test_broken_lab_has_a_status_of_its_own(monkeypatch, capsys, kind):
    class NoLab:
        def __init__(self, **_):
            raise kind("The guest did not boot.")

    monkeypatch.setattr(command_line, "Lab", NoLab)
    assert command_line.main(["run", "--", "true"]) == 125
    assert f"lab broken ({kind.__name__}): The guest did not boot." in capsys.readouterr().err


def test_bad_scenario_is_a_usage_error(capsys):
    assert command_line.main(["scenario", "/nonexistent.toml"]) == 2
    assert "cannot be read" in capsys.readouterr().err


def test_panic_is_found_above_its_trace():
    console = "".join(f"{line}\n" for line in ["boot", "Kernel panic - not syncing: sysrq", *map(str, range(40))])
    words = last_words(console).splitlines()
    assert words[0].startswith("Kernel panic")
    assert words[1:] == [str(n) for n in range(25, 40)]
    assert last_words("") == "(nothing)"


def test_nothing_to_run(capsys):
    assert command_line.main(["run"]) == 2
    assert "after `--`" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        (["run", "--", "a", "--", "b"], (["run"], ["a", "--", "b"])),
        (["run"], (["run"], [])),
        (["--"], ([], [])),
    ],
)
def test_words_after_the_dashes(words, parts):
    assert split_at_dashes(words) == parts


def test_accelerator_is_remembered_for_this_kernel(monkeypatch, tmp_path):
    monkeypatch.setenv("PREFETCHD_LAB_CACHE", str(tmp_path))
    monkeypatch.setattr(os, "access", lambda *_: True)
    assert remembered_accelerator() is None
    remember_accelerator("tcg", "The guest ended.\nConsole: …")
    assert remembered_accelerator() == "tcg"
    monkeypatch.setattr("platform.release", lambda: "another")
    assert remembered_accelerator() is None


def test_no_kvm_device_means_emulation(monkeypatch):
    monkeypatch.setattr(os, "access", lambda *_: False)
    assert remembered_accelerator() == "tcg"


def test_one_lab_at_a_time(monkeypatch, tmp_path):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    order = []
    with lock_path().open("a") as other:
        fcntl.flock(other, fcntl.LOCK_EX)

        def release(text):
            order.append(text)
            fcntl.flock(other, fcntl.LOCK_UN)

        with machine_lock(release):
            order.append("in")
            with pytest.raises(BlockingIOError):
                fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
        fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
    assert order[0].startswith("waits for another lab")
    assert order[-1] == "in"


def test_folders_of_killed_labs_go(monkeypatch, tmp_path):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    stale = tmp_path / "prefetchd-lab-work-killed"
    stale.mkdir()
    (stale / "hdd0.img").touch()
    with work_folder(lambda _: None) as folder:
        assert not stale.exists()
        assert folder.is_dir()
    assert not folder.exists()


def test_slice_weights_keep_their_ratio():
    assert slice_weights(2500, 50, 10_000) == (2500, 50)
    assert slice_weights(2500, 50, 1000) == (1000, 20)
    assert slice_weights(500_000, 1, 1000) == (1000, 1)


def test_cap_line():
    ssd = Device(name="s", kind="ssd", bytes_per_second=1000.0, iops=50)
    assert cap_line("8:0", ssd, 0.1) == "8:0 rbps=100 wbps=100 riops=5 wiops=5"
    hdd = Device(name="h", kind="hdd", bytes_per_second=1000.0)
    assert cap_line("8:0", hdd, 0.5) == "8:0 rbps=500 wbps=500 riops=max wiops=max"


def test_cost_model_line():
    assert CostModel(100, 20, 10).text("8:0") == (
        "8:0 ctrl=user model=linear rbps=100 rseqiops=20 rrandiops=10 wbps=100 wseqiops=20 wrandiops=10"
    )


def test_current_scheduler():
    assert current_scheduler("none [mq-deadline] bfq\n") == "mq-deadline"


def test_a_lockup_is_read_from_the_console():
    console = (
        "[   76.69] watchdog: BUG: soft lockup - CPU#1 stuck for 45s! [ksoftirqd/1:21]\n"
        "[  104.69] watchdog: BUG: soft lockup - CPU#1 stuck for 71s! [ksoftirqd/1:21]\n"
    )
    assert locked_up_seconds(console) == 71
    assert locked_up_seconds("[ 1.0] clocksource: stuck for nothing\n") == 0


def test_a_guest_that_falls_silent_is_given_up(tmp_path, monkeypatch):
    heard, path, clock = [], tmp_path / "0.out", SimpleNamespace(now=100.0)
    monkeypatch.setattr(machine, "time", SimpleNamespace(monotonic=lambda: clock.now))
    follower = _Follower(path, heard.append, silence=0.05, _heard_at=clock.now)
    path.write_text("agent ready\n")
    follower.poll()
    clock.now += 0.04
    follower.poll()
    clock.now += 0.04
    with path.open("a") as file:
        file.write("one: none\n")
    follower.poll()
    assert b"".join(heard) == b"agent ready\none: none\n"
    clock.now += 0.06
    with pytest.raises(LabTimeout, match=r"printed nothing for 0.05 s; its last words are in .*0\.out"):
        follower.poll()
