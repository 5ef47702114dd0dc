"""`prefetchd restore`: refuses what would make it forget a limit, and says what it did."""

import fcntl
import json
import os
import subprocess
import sys

import pytest

from agent import config
from agent.__main__ import main
from agent.commands import restore
from agent.errors import PrefetchdError, UsageError
from cgroup.journal import Entry, Journal, read_journal
from cgroup.journal_lock import lock_holder
from cgroup.lines import Line

FREE = dict.fromkeys(("rbps", "wbps", "riops", "wiops"))
CAPPED = {**FREE, "rbps": 1000}


@pytest.fixture
def root(tmp_path):
    """A cgroup tree with one capped job."""
    job = tmp_path / "cgroup" / "job"
    job.mkdir(parents=True)
    (tmp_path / "cgroup" / "cgroup.procs").touch()
    (job / "io.max").write_text("8:0 rbps=1000 wbps=max riops=max wiops=max\n")
    return tmp_path / "cgroup"


@pytest.fixture
def state(tmp_path, root):
    """A state directory whose journal says that the cap is ours."""
    folder = tmp_path / "state"
    folder.mkdir()
    journal = Journal.open(str(folder / "journal"))
    line = Line((root / "job").stat().st_ino, "/job", "8:0", "io.max")
    journal.record([Entry(line, FREE, FREE, CAPPED)])
    journal.close()
    return folder


def run(state, *arguments, **keywords):
    command = [sys.executable, "-m", "agent", "restore", "--state-directory", str(state), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=60, **keywords)


def left(state):
    return len(read_journal(str(state / "journal")).entries)


def test_what_is_ours_is_restored_and_told(state, root):
    done = run(state, "--cgroup-root", str(root), "--json")
    assert done.returncode == 0, done.stderr
    assert len(json.loads(done.stdout)["restored"]) == 1
    assert "rbps=max" in (root / "job" / "io.max").read_text()
    assert left(state) == 0


@pytest.mark.parametrize("named", [True, False])
def test_the_state_is_looked_for_where_the_configuration_keeps_it(state, root, tmp_path, monkeypatch, named):
    """As the unit does once the agent was killed, and the chart before a pod ends: without an option."""
    file = tmp_path / "node.toml"
    file.write_text(f'cgroup_root = "{root}"\n[enforcement]\nstate_directory = "{state}"\n')
    monkeypatch.setattr(config, "DEFAULT_PATH", file)
    assert main(["restore", *(["--config", str(file)] if named else [])]) == 0
    assert left(state) == 0


def test_a_broken_configuration_keeps_no_limit(state, root, tmp_path, monkeypatch, capsys):
    file = tmp_path / "node.toml"
    file.write_text("mode =")
    monkeypatch.setattr(config, "DEFAULT_PATH", file)
    assert main(["restore", "--state-directory", str(state), "--cgroup-root", str(root)]) == 0
    assert "not valid TOML" in capsys.readouterr().err
    assert left(state) == 0
    assert main(["restore", "--config", str(file)]) == 2


@pytest.mark.parametrize("wrong", ["/nonexistent", "/etc/passwd", "/tmp"])
def test_a_wrong_root_forgets_nothing(state, wrong):
    done = run(state, "--cgroup-root", wrong)
    assert done.returncode == 2
    assert f"Cgroup root {wrong!r} is no cgroup v2 file system" in done.stderr
    assert left(state) == 1


def test_no_state_directory_is_not_the_working_folder(state):
    done = run("", cwd=state)
    assert done.returncode == 2
    assert done.stderr.startswith("prefetchd: State directory '' names nothing;")
    assert left(state) == 1


def test_a_state_directory_that_is_a_file_is_refused(tmp_path, root):
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match="is no directory"):
        restore._check(tmp_path / "file", str(root))


def test_nothing_to_restore_is_no_error(tmp_path, root):
    done = run(tmp_path / "none", "--cgroup-root", str(root))
    assert done.returncode == 0
    assert "nothing to restore" in done.stderr


def test_an_agent_that_runs_is_left_alone(state, root):
    journal = Journal.open(str(state / "journal"))
    try:
        done = run(state, "--cgroup-root", str(root))
    finally:
        journal.close()
    assert done.returncode == 1
    assert "An agent is running" in done.stderr
    assert left(state) == 1


HOLDER = """
import signal, sys
from cgroup.journal import Journal
journal = Journal.open(sys.argv[1])
signal.signal(signal.SIGUSR1, lambda *_: {action})
print("holds", flush=True)
while True:
    signal.pause()
"""


@pytest.fixture
def holder(state):
    """Start a process that holds the journal, as an agent does, and does `action` when it is told to disarm."""
    started = []

    def start(action):
        argv = [sys.executable, "-c", HOLDER.format(action=action), str(state / "journal")]
        started.append(subprocess.Popen(argv, stdout=subprocess.PIPE))
        assert started[-1].stdout.readline() == b"holds\n"
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.communicate()


def test_a_running_agent_releases_everything_when_asked(state, root, holder):
    agent = holder("journal.forget(list(journal.entries))")
    assert lock_holder(str(state / "journal")) == agent.pid
    done = run(state, "--cgroup-root", str(root), "--running", "--json")
    assert done.returncode == 0, done.stderr
    assert "has released everything" in done.stderr
    assert json.loads(done.stdout)["errors"] == []
    assert left(state) == 0
    assert agent.poll() is None


def test_a_running_agent_that_has_set_nothing_is_told_and_named(state, root, holder):
    (state / "journal").unlink()
    agent = holder("print('asked', flush=True)")
    done = run(state, "--cgroup-root", str(root), "--running", "--json")
    assert done.returncode == 0, done.stderr
    assert done.stderr.splitlines() == [
        f"the running agent (pid {agent.pid}) has set nothing, and will set nothing until it is started again"
    ]
    assert agent.stdout.readline() == b"asked\n"


def test_an_agent_without_a_journal_is_never_denied(state, root):
    (state / "journal").unlink()
    with (state / "lock").open("w") as lock:
        lock.write("4711\n")
        lock.flush()
        fcntl.flock(lock, fcntl.LOCK_EX)
        done = run(state, "--cgroup-root", str(root), "--running")
    assert done.returncode == 1
    assert "(pid 4711), but holds no journal that can be seen from here" in done.stderr


def test_an_agent_that_does_not_release_is_named(state, holder):
    agent = holder("None")
    with pytest.raises(PrefetchdError, match=rf"pid {agent.pid}\) has not released its limits after 0.2 s; stop it"):
        restore.disarm(str(state / "journal"), 0.2)
    assert left(state) == 1


def test_an_agent_that_dies_of_it_leaves_the_work_to_us(state, root, holder):
    holder("signal.raise_signal(signal.SIGKILL)")
    done = run(state, "--cgroup-root", str(root), "--running")
    assert done.returncode == 0, done.stderr
    assert "1 restored" in done.stdout
    assert left(state) == 0


def test_without_a_running_agent_it_restores(state, root):
    assert lock_holder(str(state / "journal")) == 0
    done = run(state, "--cgroup-root", str(root), "--running")
    assert done.returncode == 0
    assert f"no agent is running with state directory {state}" in done.stderr
    assert left(state) == 0


def test_without_an_agent_and_its_journal_both_are_told(root, tmp_path):
    empty = tmp_path / "empty"
    done = run(empty, "--cgroup-root", str(root), "--running")
    assert done.returncode == 0
    assert done.stderr.splitlines() == [
        f"no agent is running with state directory {empty}",
        f"nothing to restore: no journal in {empty}",
    ]
    assert "running" not in run(empty, "--cgroup-root", str(root)).stderr


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become somebody else")
def test_somebody_else_is_told_to_be_root(state, root):
    state.chmod(0o700)
    for folder in (state.parent, *state.parent.parents[:2]):
        folder.chmod(0o755)
    done = run(state, "--cgroup-root", str(root), user=65534)
    assert done.returncode == 1
    assert "run as root" in done.stderr
    assert "Traceback" not in done.stderr
