"""The agent as it is shipped, on this machine's own kernel: real BPF, a real job, a real scrape."""

import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from agent import hint
from tests.native import workload
from tests.native.conftest import cgroup_mount, missing

pytestmark = pytest.mark.native

MIB = 1 << 20
PREFETCHD = Path(sys.executable).with_name("prefetchd")
START_SECONDS = 180.0


class Running:
    """An agent that runs, and where it answers."""

    def __init__(self, process, log, port):
        self.process, self.log, self.port = process, log, port

    def get(self, path):
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}{path}", timeout=5) as response:
            return response.read().decode()

    def state(self):
        return json.loads(self.get("/state"))

    def end(self, number=signal.SIGTERM):
        self.process.send_signal(number)
        return self.process.wait(60)


@pytest.fixture
def agent(tmp_path, make_cgroup):
    """Start an agent that watches one job cgroup; gives a function (mode) -> Running and the cgroup's folder."""
    if os.geteuid():
        missing("BPF needs root: run as root or with sudo")
    job = make_cgroup()
    started = []

    def start(*arguments, command=("run",), more=""):
        config = tmp_path / "node.toml"
        config.write_text(f"""
[[jobs]]
cgroup = "/{job.relative_to(cgroup_mount())}"
name = "mine"
[enforcement]
state_directory = "{tmp_path}"
kill_switch_file = "{tmp_path}/disable"
[hint]
socket = "{tmp_path}/hint.sock"
{more}""")
        log = tmp_path / "log"
        argv = [PREFETCHD, *command, "--config", config, "--listen", "127.0.0.1:0", *arguments]
        with log.open("w") as stream:
            process = subprocess.Popen(argv, stderr=stream)
        started.append(process)
        return Running(process, log, wait_for_port(process, log))

    yield start, job
    for process in started:
        process.kill()
        process.wait()


def wait_for_port(process, log):
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline and process.poll() is None:
        for line in log.read_text().splitlines():
            if "answering on" in line:
                return int(line.rsplit(":", 1)[1].partition("/")[0])
        time.sleep(0.1)
    raise AssertionError(f"the agent did not start:\n{log.read_text()}")


def wait_until(true, seconds=60.0):
    deadline = time.monotonic() + seconds
    while not true() and time.monotonic() < deadline:
        time.sleep(0.1)
    return true()


def bytes_read(running):
    """Sum of the job's read bytes in a scrape; a tick later than the reads, and missed ends are found soon after."""
    rows = [row for row in running.get("/metrics").splitlines() if row.startswith("prefetchd_io_bytes_total{")]
    assert all('job="mine"' in row for row in rows)
    return sum(float(row.rsplit(" ", 1)[1]) for row in rows if 'op="read"' in row)


def test_it_measures_a_real_process_and_ends_cleanly(agent, disk_folder):
    start, job = agent
    running = start()
    data = workload.make_file(disk_folder / "agent-data", 32 * MIB)
    wait_until(lambda: running.state().get("jobs"))
    (report,) = workload.finish(workload.start(job, "read", data, MIB, 32))
    wait_until(lambda: bytes_read(running) == report.fetched)
    assert bytes_read(running) == report.fetched >= 32 * MIB
    assert running.get("/readyz") == "ok\n"
    assert running.end() == 0
    assert not (running.log.parent / "hint.sock").exists()


def test_promtool_accepts_the_metrics(agent, disk_folder):
    start, job = agent
    running = start()
    data = workload.make_file(disk_folder / "agent-data", 4 * MIB)
    workload.finish(workload.start(job, "read", data, MIB, 4))
    assert wait_until(lambda: "prefetchd_io_latency_seconds_bucket" in running.get("/metrics"))
    scrape = running.get("/metrics")
    try:
        done = subprocess.run(
            ["promtool", "check", "metrics"], input=scrape, capture_output=True, text=True, check=False
        )
    except FileNotFoundError:
        missing("promtool is missing: install Debian's `prometheus`")
    assert (done.returncode, done.stdout + done.stderr) == (0, "")


def test_a_training_loop_that_tells_its_queue_is_scored(agent):
    start, job = agent
    running = start()
    program = (
        "import itertools, sys, time; from agent import hint; open(sys.argv[1] + '/cgroup.procs', 'w').write('0')\n"
        "for step in itertools.count():\n"
        "    hint.iteration(depth=0 if step > 10 else 7, capacity=8, next_batch_bytes=1 << 20, wait_seconds=0.03)\n"
        "    time.sleep(0.05)\n"
    )
    environment = {**os.environ, "PREFETCHD_HINT_SOCKET": str(running.log.parent / "hint.sock")}
    command = [sys.executable, "-c", program, str(job)]
    with subprocess.Popen(command, env=environment, cwd=Path(hint.__file__).parents[1]) as loop:
        try:
            wait_until(lambda: (running.state().get("jobs") or [{}])[0].get("iterations", 0) >= 30)
            (row,) = running.state()["jobs"]
            assert loop.poll() is None
        finally:
            loop.kill()
    assert row["iteration_source"] == "hint"
    assert row["iterations"] >= 30
    assert row["queue_capacity"] == 8
    assert row["score"] < 60
    assert row["starvation_events"] >= 1


def test_enforce_is_what_it_says_or_says_what_to_change(agent):
    start, _ = agent
    running = start("--mode", "enforce")
    able = "io" in (cgroup_mount() / "cgroup.controllers").read_text().split()
    assert wait_until(lambda: running.state().get("mode") == ("enforce" if able else "observe"))
    warnings = [line for line in running.log.read_text().splitlines() if "cannot enforce here" in line]
    assert len(warnings) == (0 if able else 1)
    assert all("boot with" in line or "Use a kernel" in line for line in warnings)
    assert running.end(signal.SIGINT) == 0


def test_a_second_agent_is_refused(agent, tmp_path):
    start, _ = agent
    first = start()
    command = [PREFETCHD, "run", "--config", tmp_path / "node.toml", "--listen", "127.0.0.1:0"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    assert f"pid {first.process.pid}" in done.stderr
    assert "Traceback" not in done.stderr


def test_duration_ends_it(agent):
    start, _ = agent
    running = start("--duration", "1")
    assert running.process.wait(60) == 0
    with pytest.raises(urllib.error.URLError):
        running.get("/healthz")


@pytest.fixture
def small(tmp_path):
    """A folder with room for 4 KiB. Taken before the agent: what that has open would keep it from being unmounted."""
    folder = tmp_path / "small"
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=16k", "prefetchd-test", folder], check=True)
    (folder / "filler").write_bytes(bytes(12288))
    yield folder
    subprocess.run(["umount", folder], check=True)


def test_a_recording_that_breaks_off_is_a_failure(small, agent):
    """The disk fills while it records; all that was asked for was the recording."""
    start, _ = agent
    running = start("--duration", "8", command=("record", small / "node.rec"), more="[loop]\ninterval_seconds = 0.02\n")
    assert running.process.wait(60) == 1
    assert "node.rec has ended: No space left on device" in running.log.read_text()
    assert 0 < (small / "node.rec").stat().st_size <= 4096
