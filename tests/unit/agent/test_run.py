"""What `prefetchd run` checks and prepares before anything is attached."""

import contextlib
import os
import resource
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from agent.commands import run
from agent.commands.wiring import be_the_only_one, make_pods
from agent.config import BestEffortRule, Config, ConfigError
from agent.errors import CannotEnforceError, PrefetchdError
from agent.recording import refuse_other_file
from bpf.samples import ProbeState, ProbeStatus
from cgroup.hierarchy import Hierarchy

PROJECT = Path(__file__).parents[3]
V2 = Hierarchy("v2", "/sys/fs/cgroup")


def python(code, *, limit=None):
    """Run code in an interpreter of its own, with (soft, hard) open files."""
    command = [sys.executable, "-c", f"from agent.commands import run\n{code}"]
    start = None if limit is None else lambda: resource.setrlimit(resource.RLIMIT_NOFILE, limit)
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=60, preexec_fn=start)


@pytest.mark.parametrize("text", ["abc", "", "-1", "0", "nan", "inf", "1e999"])
def test_bad_durations_are_quoted(text):
    command = [sys.executable, "-m", "agent", "run", f"--duration={text}"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 2
    assert f"{text!r} is no duration; give seconds above zero" in done.stderr


def test_a_low_limit_of_open_files_is_raised_as_far_as_allowed():
    done = python("run._raise_file_limit(); import resource; print(resource.getrlimit(7))", limit=(64, 1000))
    assert done.stdout == "(1000, 1000)\n"


def test_a_limit_that_cannot_be_raised_enough_is_a_sentence():
    done = python("run._raise_file_limit()", limit=(100, 100))
    assert "Only 100 files may be open at once, and the agent needs 256; raise the limit" in done.stderr


def test_an_abort_says_where_even_while_standard_error_is_caught():
    code = "import os\nwith run._last_words():\n os.dup2(os.open(os.devnull, os.O_WRONLY), 2); os.abort()"
    done = python(code)
    assert done.returncode < 0
    assert "Fatal Python error: Aborted" in done.stderr
    assert 'File "<string>"' in done.stderr


def test_a_cgroup_root_that_is_none_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="is no cgroup v2 file system; remove it"):
        run._cgroup_root(Config(cgroup_root=str(tmp_path)), V2)
    (tmp_path / "cgroup.procs").touch()
    assert run._cgroup_root(Config(cgroup_root=str(tmp_path)), V2) == str(tmp_path)


def test_without_cgroup_v2_the_fix_is_told():
    with pytest.raises(CannotEnforceError, match="mount it"):
        run._cgroup_root(Config(), Hierarchy("none", None, "nothing is mounted", "Please mount it."))


def test_a_mode_that_is_impossible_is_noted(caplog):
    hybrid = Hierarchy("hybrid", "/sys/fs/cgroup/unified", "the host runs the hybrid hierarchy", "Use cgroup v2 alone.")
    mode, notes = run._possible_mode(Config(mode="enforce"), hybrid)
    because = "the host runs the hybrid hierarchy. Use cgroup v2 alone."
    assert (mode, notes) == ("observe", (f"enforce was asked for, observing because {because}",))
    assert f"cannot enforce here, observing instead: {because}" in caplog.text
    assert run._loop_settings(Config(), notes).notes == notes
    assert run._possible_mode(Config(mode="enforce"), V2) == ("enforce", ())
    assert run._possible_mode(Config(), hybrid) == ("observe", ())


REFUSAL = "cannot attach block.c to fentry:bio_endio: bpf: Failed to load program: Operation not permitted"


@pytest.mark.parametrize(
    ("why", "level"),
    [("nfs is missing: the module is not loaded", "INFO"), ("this kernel takes none of its programs", "WARNING")],
)
def test_a_probe_that_only_waits_for_its_module_is_no_warning(why, level, caplog):
    node = SimpleNamespace(probes=lambda: (ProbeStatus("nfs", ProbeState.UNAVAILABLE, why),))
    with caplog.at_level("INFO", logger="prefetchd"):
        run._announce(Config(), node, SimpleNamespace(port=1), "observe")
    assert [one.levelname for one in caplog.records if "probe nfs" in one.getMessage()] == [level]


@pytest.mark.parametrize(
    ("detail", "more"), [(f"{REFUSAL}; {REFUSAL}", " (prefetchd doctor --attach --all says why)"), ("", "")]
)
def test_a_probe_is_told_in_a_sentence_and_the_rest_at_debug(detail, more, caplog):
    status = ProbeStatus("block", ProbeState.DEGRADED, "throttle wait is unknown", "tracepoint", detail=detail)
    node = SimpleNamespace(probes=lambda: (status,))
    with caplog.at_level("DEBUG", logger="prefetchd"):
        run._announce(Config(), node, SimpleNamespace(port=1), "observe")
    lines = [(one.levelname, one.getMessage()) for one in caplog.records if "probe block" in one.getMessage()]
    raw = [("DEBUG", f"probe block: {detail}")] if detail else []
    assert lines == [("WARNING", f"probe block: degraded (tracepoint): throttle wait is unknown{more}"), *raw]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gets as far as that")
def test_rules_that_can_match_nothing_are_said(caplog, monkeypatch):
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    with contextlib.ExitStack() as stack:
        assert make_pods(stack, Config()) is None
        assert not caplog.records
        assert make_pods(stack, Config(best_effort=(BestEffortRule(cgroup="/a", label="b"),))) is None
    assert "rules with a label match nothing" in caplog.text


def test_a_record_without_a_name_is_not_passed_over(tmp_path):
    config = tmp_path / "node.toml"
    config.write_text(f'[enforcement]\nstate_directory = "{tmp_path}"\n[metrics]\nlisten = "127.0.0.1:0"\n'
                      "[hint]\nenabled = false\n[probes]\nblock = false\nnfs = false\nobject_store = false\n"
                      "page_cache = false\ndataloader = false\n")  # fmt: skip
    command = [sys.executable, "-m", "agent", "run", "--config", config, "--record", "", "--duration", "1"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith("prefetchd: Recording '.' cannot be written")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gets as far as that")
@pytest.mark.parametrize(
    ("arguments", "status", "words"),
    [
        (("run", "--listen", "192.0.2.1:9999"), 2, "Cannot listen on '192.0.2.1:9999'"),
        (("record", "notes.txt", "--listen", "127.0.0.1:0"), 1, "'notes.txt' exists and is no recording"),
    ],
)
def test_what_cannot_be_used_is_refused_before_the_probes_are_compiled(tmp_path, arguments, status, words):
    (tmp_path / "notes.txt").write_text("important")
    config = tmp_path / "node.toml"
    config.write_text(f'[enforcement]\nstate_directory = "{tmp_path}"\n')
    command = [sys.executable, "-m", "agent", *arguments, "--config", config, "--duration", "1"]
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, timeout=60, cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(PROJECT)},
    )  # fmt: skip
    assert done.returncode == status
    assert words in done.stderr
    assert "compiling" not in done.stderr
    assert (tmp_path / "notes.txt").read_text() == "important"


def test_looking_at_a_recording_that_is_to_be_made_leaves_nothing(tmp_path):
    refuse_other_file(tmp_path / "new.rec")
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(PrefetchdError, match="cannot be written"):
        refuse_other_file(tmp_path / "no/such/folder.rec")


def test_the_lock_holds_on_a_disk_without_room_for_the_number_of_its_owner(tmp_path):
    (tmp_path / "lock").symlink_to("/dev/full")
    with run._only_instance(tmp_path):
        pass
    (tmp_path / "lock").unlink()
    with run._only_instance(tmp_path):
        assert (tmp_path / "lock").read_text() == f"{os.getpid()}\n"
        other = rf"Another agent runs on this node \(pid {os.getpid()}\); stop it"
        with pytest.raises(PrefetchdError, match=other), run._only_instance(tmp_path):
            pass


def test_two_agents_never_enforce_on_one_node(tmp_path):
    """Each would take the other's limits for an administrator's, and put them back when it ends."""
    with contextlib.ExitStack() as first:
        be_the_only_one(first, str(tmp_path))
        with contextlib.ExitStack() as second, pytest.raises(CannotEnforceError, match="another prefetchd enforces"):
            be_the_only_one(second, str(tmp_path))
    with contextlib.ExitStack() as third:
        be_the_only_one(third, str(tmp_path))
