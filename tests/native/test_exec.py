"""`prefetchd exec` with real cgroups of this machine: status, signals, process trees, and nothing left behind."""

import json
import os
import pty
import select
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from agent.job_cgroup import JobCgroup, read_weight
from agent.supervise import Order, run_scope
from tests.native.conftest import cgroup_mount, missing, remove_cgroup
from tests.native.processes import alive, wait_until

pytestmark = pytest.mark.native

SLICE = (cgroup_mount() or Path("/nowhere")) / "prefetchd.slice"
TREE = """
import os, subprocess, sys, time
worker = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(300)"], start_new_session=True)
print(worker.pid, flush=True)
time.sleep(300)
"""


@pytest.fixture(autouse=True)
def own_machine():
    if os.geteuid():
        missing("making cgroups needs root")
    if cgroup_mount() is None:
        missing("no cgroup v2 hierarchy is mounted")


@pytest.fixture
def job():
    """A job name of this test's own; no cgroup of that name may be left at the end."""
    name = f"test-{os.getpid()}-{time.monotonic_ns()}"
    yield name
    left = sorted(SLICE.glob(f"{name}*"))
    for folder in left:
        (folder / "cgroup.kill").write_text("1")
        for inner in (*sorted(folder.rglob("*/"), reverse=True), folder):
            remove_cgroup(inner)
    assert left == []


def argv(job, *command, options=()):
    return [sys.executable, "-m", "agent", "exec", "--job", job, "--no-systemd", *options, "--", *command]


def run(job, *command, options=(), **keywords):
    return subprocess.run(
        argv(job, *command, options=options), capture_output=True, text=True, check=False, timeout=60, **keywords
    )


def start(job, *command, options=(), **keywords):
    return subprocess.Popen(argv(job, *command, options=options), stdout=subprocess.PIPE, text=True, **keywords)


def test_command_runs_in_its_own_cgroup(job):
    done = run(job, "sh", "-c", "grep ^0:: /proc/self/cgroup; echo err >&2; exit 7")
    assert done.stdout == f"0::/prefetchd.slice/{job}\n"
    assert done.stderr == "err\n"
    assert done.returncode == 7


@pytest.mark.parametrize("name", ["SIGKILL", "SIGTERM", "SIGSEGV"])
def test_death_by_signal_is_128_plus_n(job, name):
    assert run(job, "sh", "-c", f"kill -{name[3:]} $$").returncode == 128 + getattr(signal, name)


@pytest.mark.parametrize(
    ("command", "status", "words"),
    [
        (("no-such-command",), 127, "was not found"),
        (("/etc/passwd",), 126, "not executable"),
        ((), 2, "No command is given"),
    ],
)
def test_what_cannot_be_run(job, command, status, words):
    done = run(job, *command)
    assert done.returncode == status
    assert words in done.stderr
    assert "Traceback" not in done.stderr


def test_a_keeper_that_was_killed_costs_nobody_the_status(job):
    """The kernel ends it when memory is short; the job goes on, and its status is still its own."""
    process = start(job, "sh", "-c", "echo there; read line; exit 7", stdin=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout.readline() == "there\n"
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    (keeper,) = [child for child in children if "agent" in Path(f"/proc/{child}/cmdline").read_text()]
    os.kill(int(keeper), signal.SIGKILL)
    wait_until(lambda: not alive(keeper))
    _, errors = process.communicate("\n", timeout=60)
    assert (process.returncode, errors) == (7, "")


def test_bad_executable_format_leaves_nothing(job, tmp_path):
    file = tmp_path / "broken"
    file.write_bytes(b"\x7fELF broken")
    file.chmod(0o755)
    assert run(job, str(file)).returncode == 126


def test_stdin_and_descriptors_pass_through(job):
    reading, writing = os.pipe()
    script = f"import os, sys; os.write({writing}, b'mine'); print(sys.stdin.read(), end='')"
    done = run(job, sys.executable, "-c", script, input="hello", pass_fds=(writing,))
    os.close(writing)
    assert done.stdout == "hello"
    assert os.read(reading, 10) == b"mine"
    os.close(reading)


@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT", "SIGHUP", "SIGUSR1", "SIGUSR2", "SIGQUIT"])
def test_signals_are_passed_on(job, name):
    script = f"trap 'echo got; exit 9' {name[3:]}; echo ready; while :; do sleep 0.05; done"
    process = start(job, "sh", "-c", script)
    assert process.stdout.readline() == "ready\n"
    process.send_signal(getattr(signal, name))
    assert process.communicate(timeout=60)[0] == "got\n"
    assert process.returncode == 9


def test_command_has_the_signals_it_would_have_without_us(job):
    """What the caller ignores stays ignored (a CI runner may ignore one that the C library keeps for itself)."""
    shown = ["sh", "-c", "grep -E '^Sig(Blk|Ign)' /proc/self/status"]
    alone = subprocess.run(shown, capture_output=True, text=True, check=True).stdout
    assert len(alone.splitlines()) == 2
    assert run(job, *shown).stdout == alone


def test_ctrl_c_on_a_terminal_arrives_once(job):
    script = (
        "import signal, sys, time\nseen = []\nsignal.signal(signal.SIGINT, lambda *_: seen.append(1))\n"
        "print('ready', flush=True)\n"
        "while not seen: time.sleep(0.05)\n"
        "time.sleep(0.5)\n"  # for a second one
        "print('seen', len(seen), flush=True)"
    )
    pid, terminal = pty.fork()
    if pid == 0:
        os.execv(sys.executable, argv(job, sys.executable, "-c", script))
    shown = b""
    while b"seen" not in shown:
        assert select.select([terminal], [], [], 60)[0], shown
        shown += os.read(terminal, 1000)
        if b"ready" in shown and b"^C" not in shown:
            os.write(terminal, b"\x03")
            shown += b"^C"
    assert b"seen 1" in shown
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    os.close(terminal)


def test_processes_left_behind_are_ended(job):
    done = run(job, "sh", "-c", "setsid sleep 300 >/dev/null 2>&1 & echo $!; sleep 0.2", options=("--grace", "3"))
    assert done.returncode == 0
    assert "ended 1 process(es)" in done.stderr
    assert not alive(int(done.stdout))


def test_stubborn_processes_are_killed_after_the_grace(job):
    script = "setsid sh -c \"trap '' TERM; while :; do sleep 0.1; done\" >/dev/null 2>&1 & sleep 0.3"
    begun = time.monotonic()
    assert run(job, "sh", "-c", script, options=("--grace", "0.5")).returncode == 0
    assert time.monotonic() - begun < 10


def test_cgroups_made_by_the_command_are_removed_too(job):
    inner = SLICE / job / "inner"
    script = f"mkdir {inner}; sh -c 'echo 0 > {inner}/cgroup.procs; exec setsid sleep 300' >&- 2>&- & sleep 0.3"
    assert run(job, "sh", "-c", script, options=("--grace", "1")).returncode == 0


def test_sigkill_of_the_command_ends_its_tree(job):
    process = start(job, sys.executable, "-c", TREE, options=("--grace", "2"))
    worker = int(process.stdout.readline())
    (parent,) = [pid for pid in JobCgroup(SLICE / job, own=True).processes() if pid != worker]
    os.kill(parent, signal.SIGKILL)
    process.communicate(timeout=60)
    assert process.returncode == 137
    assert not alive(worker)


def test_sigkill_of_exec_itself_ends_the_job(job):
    process = start(job, sys.executable, "-c", TREE, options=("--grace", "2"))
    worker = int(process.stdout.readline())
    process.kill()
    process.communicate(timeout=60)
    wait_until(lambda: not (SLICE / job).exists())
    assert not alive(worker)


def test_a_name_in_use_is_refused(job):
    process = start(job, "sh", "-c", "echo ready; exec sleep 300")
    process.stdout.readline()
    done = run(job, "true")
    assert done.returncode == 125
    assert "already runs" in done.stderr
    process.terminate()
    process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGTERM


def test_left_over_folders_are_swept(job):
    (SLICE / f"{job}-stale" / "inner").mkdir(parents=True)
    assert run(job, "true").returncode == 0
    assert not (SLICE / f"{job}-stale").exists()


def test_weight_stands_on_the_cgroup(job):
    process = start(job, "sh", "-c", "echo ready; read x", options=("--weight", "250"), stdin=subprocess.PIPE)
    process.stdout.readline()
    assert read_weight(SLICE / job) == 250.0
    process.communicate("go\n", timeout=60)
    assert read_weight(SLICE / job) is None
    assert "is not from 1 to 10000" in run(job, "true", options=("--weight", "0")).stderr


def test_command_can_run_as_another_user(job):
    script = "import json, os; print(json.dumps([os.getresuid(), os.getresgid(), os.environ['HOME']]))"
    done = run(job, sys.executable, "-c", script, options=("--user", "daemon"))
    assert json.loads(done.stdout) == [[1, 1, 1], [1, 1, 1], "/usr/sbin"]
    assert run(job, "true", options=("--user", "no-such-user")).returncode == 125


@pytest.mark.skipif(shutil.which("setpriv") is None, reason="setpriv is not installed")
def test_a_user_that_one_cannot_become_is_said_and_leaves_nothing(job):
    """Root alone is not enough in a container."""
    command = ["setpriv", "--bounding-set", "-setuid,-setgid", "--inh-caps", "-all"]
    done = subprocess.run(
        [*command, *argv(job, "true", options=("--user", "nobody"))],
        capture_output=True, text=True, check=False, timeout=60,
    )  # fmt: skip
    assert done.returncode == 125
    assert done.stderr.count("\n") == 1
    assert "become user 'nobody'" in done.stderr


def test_many_at_once_do_not_disturb_each_other(job):
    processes = [start(f"{job}-{i}", "sh", "-c", f"sleep 0.1; exit {i}") for i in range(8)]
    assert [process.wait(timeout=60) for process in processes] == list(range(8))
    for process in processes:
        process.stdout.close()
    assert not any((SLICE / f"{job}-{i}").exists() for i in range(8))


def test_without_rights_it_says_what_to_do(job, tmp_path):
    done = subprocess.run(
        ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups", *argv(job, "true")],
        capture_output=True, text=True, check=False, timeout=60,
    )  # fmt: skip
    assert done.returncode == 125
    assert "sudo prefetchd exec" in done.stderr


def test_scope_is_asked_of_systemd(job, tmp_path, monkeypatch):
    """A stand-in for systemd-run makes the scope's cgroup as systemd does, and its end as systemd would."""
    folder = SLICE / f"{job}.scope"
    stand_in = tmp_path / "systemd-run"
    stand_in.write_text(
        f"""#!/bin/sh
echo "$@" > {tmp_path}/asked
mkdir -p {folder}
(until [ -e {tmp_path}/joined ] && [ -z "$(cat {folder}/cgroup.procs)" ]; do sleep 0.05; done
 rmdir {folder} {SLICE}) >/dev/null 2>&1 &
echo 0 > {folder}/cgroup.procs
touch {tmp_path}/joined
while [ "$1" != -- ]; do shift; done
shift
exec "$@"
"""
    )
    stand_in.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    order = Order(job, ["sh", "-c", "sleep 0.5; exit 5"], weight=None, grace_seconds=1.0)
    assert run_scope(str(SLICE.parent), order) == 5
    asked = (tmp_path / "asked").read_text()
    assert "--scope" in asked
    assert f"--unit={job}.scope" in asked
    assert "--slice=prefetchd.slice" in asked
