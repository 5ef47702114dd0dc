"""The operator's commands on a node that works: a job started by `exec` starves beside a scan while the agent enforces.

One night in small: doctor before, agent with a recording, two jobs, a scan; `top` and `explain` in the middle; then
replay, report, calibrate, and a look at what is left behind.
"""

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import tomllib
from pathlib import Path

import pytest

from agent.client import AgentClient, AgentUnreachable
from tests.lab import groups
from tests.lab.devices import Ssd
from tests.lab.disks import find_disk
from tests.lab.undo import undo

pytestmark = [pytest.mark.guest, pytest.mark.nightly, pytest.mark.timeout(1200)]

TRAINING = """
import mmap, os, queue, random, sys, threading, time
from agent import hint
device, seconds, compute = sys.argv[1], float(sys.argv[2]), float(sys.argv[3])
descriptor, ready = os.open(device, os.O_RDONLY | os.O_DIRECT), queue.Queue(maxsize=8)

def prepare():
    buffer = mmap.mmap(-1, 1 << 20)
    while True:
        for _ in range(4):
            os.preadv(descriptor, [buffer], random.randrange(1000) << 20)
        ready.put(None)

for _ in range(2):
    threading.Thread(target=prepare, daemon=True).start()
end = time.monotonic() + seconds
while time.monotonic() < end:
    asked = time.monotonic()
    ready.get()
    hint.iteration(depth=ready.qsize(), capacity=8, next_batch_bytes=4 << 20, wait_seconds=time.monotonic() - asked)
    time.sleep(compute)
sys.exit(7)
"""
SCAN = """
import mmap, os, random, sys, threading, time
descriptor = os.open(sys.argv[1], os.O_RDONLY | os.O_DIRECT)
def read():
    buffer = mmap.mmap(-1, 1 << 20)
    while True:
        os.preadv(descriptor, [buffer], random.randrange(1000) << 20)
for _ in range(16):
    threading.Thread(target=read, daemon=True).start()
time.sleep(float(sys.argv[2]))
"""
CONFIG = """
[[jobs]]
cgroup = "/prefetchd.slice/*"
[[best_effort]]
cgroup = "/batch.slice/*"
[[devices]]
device = "{node}"
medium = "ssd"
read_bytes_per_second = {rate}
write_bytes_per_second = {rate}
[enforcement]
enable_io_controller = true
"""


def prefetchd(*arguments, timeout=240.0):
    command = [sys.executable, "-m", "agent", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=timeout)
    print(f"--- prefetchd {' '.join(map(str, arguments))} -> {done.returncode}")
    print(done.stdout[-3000:], done.stderr[-1500:])
    return done


def wait_until(condition, seconds):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.2)


def answers():
    with contextlib.suppress(AgentUnreachable):
        return bool(AgentClient("http://127.0.0.1:9753").state())


def watch(folder, seconds):
    """What io.max of a cgroup said, looked at ten times a second."""
    seen, end = [], time.monotonic() + seconds
    while time.monotonic() < end:
        seen.append(groups.io_max(folder))
        time.sleep(0.1)
    return seen


class Night:
    """What each command said."""


@pytest.fixture(scope="module")
def night(tmp_path_factory):
    """The whole story, told once; the tests look at its parts."""
    tmp, disk, seen = tmp_path_factory.mktemp("night"), find_disk("ssd0"), Night()
    config, recording = tmp / "prefetchd.toml", tmp / "night.rec"
    config.write_text(CONFIG.format(node=disk.node, rate=Ssd.bytes_per_second))
    (tmp / "train.py").write_text(TRAINING)
    (tmp / "scan.py").write_text(SCAN)
    seen.doctor = prefetchd("doctor", "--config", config, "--mode", "enforce", "--attach", "--json")
    with (tmp / "agent.log").open("w") as log:
        agent = subprocess.Popen(
            [sys.executable, "-m", "agent", "run", "--mode", "enforce", "--config", config, "--record", recording],
            stderr=log,
        )
    scan_group, jobs = groups.BATCH / "scan", []
    try:
        groups.BATCH.mkdir()
        (groups.ROOT / "cgroup.subtree_control").write_text("+io")
        (groups.BATCH / "cgroup.subtree_control").write_text("+io")
        scan_group.mkdir()
        wait_until(answers, 400)
        jobs += [
            subprocess.Popen([sys.executable, "-m", "agent", "exec", "--job", name, "--weight", "150", "--",
                              sys.executable, tmp / "train.py", disk.node, "110", compute])
            for name, compute in (("hungry", "0.08"), ("modest", "0.4"))
        ]  # fmt: skip
        time.sleep(10)
        scan = subprocess.Popen(
            ["sh", "-c", f'echo $$ > {scan_group}/cgroup.procs; exec "$@"', "sh", sys.executable, tmp / "scan.py",
             disk.node, "75"],
        )  # fmt: skip
        seen.caps = watch(scan_group, 20)
        seen.top = prefetchd("top", "--once", "--ascii")
        seen.state = json.loads(prefetchd("top", "--json").stdout)
        seen.explain = prefetchd("explain", "hungry")
        seen.doctor_meanwhile = prefetchd("doctor", "--config", config, "--json")
        scan.wait()
        seen.statuses = [job.wait(timeout=120) for job in jobs]
        agent.send_signal(signal.SIGTERM)
        seen.agent_status = agent.wait(timeout=60)
        seen.left = [str(path) for path in groups.ROOT.glob("prefetchd.slice*")] + [groups.io_max(scan_group)]
    finally:
        for process in (agent, *jobs):
            process.kill()
            process.wait()
        print((tmp / "agent.log").read_text()[-4000:])
        assert groups.remove(groups.BATCH)
    seen.recording, seen.replay = recording, prefetchd("replay", recording, "--check")
    seen.report = prefetchd("report", recording, "-o", tmp / "report.html")
    seen.page = (tmp / "report.html").read_text()
    keep(recording, tmp / "report.html")
    return seen


def keep(*files):
    """Leave files where the host finds them, for people to look at."""
    folder = os.environ.get("PREFETCHD_LAB_OUT")
    for file in files if folder else ():
        shutil.copy(file, folder)


def test_doctor_says_that_this_node_can_enforce(night):
    told = json.loads(night.doctor.stdout)
    assert night.doctor.returncode == 0, [check for check in told["checks"] if check["severity"] == "error"]
    assert told["can"] == {"observe": True, "dry-run": True, "enforce": True}
    states = {check["check"]: check["result"] for check in told["checks"]}
    assert states["probe.block"] == "ok"
    assert states["cgroup.hierarchy"] == "ok"
    assert states["kernel.kprobes"] == "ok"


def test_top_shows_jobs_scan_and_device(night):
    assert night.top.returncode == 0
    for words in ("enforce/adaptive", "hungry", "modest", "best effort: scan", find_disk("ssd0").name):
        assert words in night.top.stdout
    assert max(map(len, night.top.stdout.splitlines())) <= 80


def test_state_names_weight_and_limits(night):
    jobs = {job["job"]: job for job in night.state["jobs"]}
    assert set(jobs) == {"hungry", "modest"}
    assert jobs["hungry"]["iterations"] > 20
    assert jobs["hungry"]["cgroup"] == "/prefetchd.slice/hungry"
    assert len(jobs["hungry"]["decisions"]) >= 2


def test_the_scan_is_capped_while_the_job_is_served(night):
    caps = [int(found[1]) for text in night.caps if (found := re.search(r"rbps=(\d+)", text))]
    assert caps
    assert max(caps) < Ssd.bytes_per_second


def test_explain_tells_the_reason(night):
    assert night.explain.returncode == 0
    for words in ("hungry: score", "Why this score", "Why this cause", "Why this quota", "decisions, newest first"):
        assert words in night.explain.stdout


def test_doctor_sees_the_running_agent(night):
    checks = {check["check"]: check for check in json.loads(night.doctor_meanwhile.stdout)["checks"]}
    assert "an agent runs as process" in checks["state.instance"]["evidence"]
    assert checks["agent.answers"]["result"] == "ok"
    assert checks["cgroup.io_max"]["result"] == "ok"


def test_exec_passes_the_status_on_and_leaves_nothing(night):
    assert night.statuses == [7, 7]
    assert night.agent_status == 0
    assert night.left == [""]


def test_replay_decides_the_same(night):
    assert night.replay.returncode == 0
    assert "nothing differs" in night.replay.stdout


def test_recording_is_small(night):
    iterations = sum(job["iterations"] for job in night.state["jobs"])
    assert night.recording.stat().st_size / max(iterations, 1) < 1024


def test_report_tells_it(night):
    assert night.report.returncode == 0
    assert "<strong>hungry</strong> lost" in night.page
    assert "Who reads from" in night.page


@pytest.fixture(scope="module")
def mounted(tmp_path_factory):
    disk, folder = find_disk("ssd0"), tmp_path_factory.mktemp("mounted")
    # Tables written now, not in the background: calibrate refuses a busy device.
    made = ["mkfs.ext4", "-q", "-F", "-E", "lazy_itable_init=0,lazy_journal_init=0", str(disk.node)]
    subprocess.run(made, check=True, capture_output=True)
    subprocess.run(["mount", str(disk.node), str(folder)], check=True)
    yield folder
    undo("umount", folder)


def test_calibrate_finds_what_the_drive_can_do(night, mounted):
    """The drive is throttled to a known rate; the device is named, so its mount must be found."""
    disk = find_disk("ssd0")
    done = prefetchd("calibrate", disk.node, "--size", "128 MiB", "--seconds", "3", "--reader", "own")
    assert done.returncode == 0
    (rule,) = tomllib.loads(done.stdout)["devices"]
    assert rule["device"] == str(disk.node)
    assert rule["read_bytes_per_second"] == pytest.approx(Ssd.bytes_per_second, rel=0.2)
    assert sorted(path.name for path in mounted.iterdir()) == ["lost+found"]


def test_calibrate_reads_a_raw_device_only_when_asked(night):
    hdd = find_disk("hdd0")
    refused = prefetchd("calibrate", hdd.node)
    assert refused.returncode == 2
    assert "--raw" in refused.stderr
    before = Path(f"/sys/block/{hdd.name}/stat").read_text().split()[4]
    done = prefetchd("calibrate", hdd.node, "--raw", "--seconds", "3", "--reader", "own")
    assert done.returncode == 0
    (rule,) = tomllib.loads(done.stdout)["devices"]
    assert rule["medium"] == "hdd"
    assert "write_bytes_per_second" not in rule
    assert Path(f"/sys/block/{hdd.name}/stat").read_text().split()[4] == before
