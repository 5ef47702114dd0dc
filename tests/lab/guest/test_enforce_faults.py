"""Limits on the kernel's cgroups and disks, with everything going wrong that can: none of ours is ever left behind."""

import contextlib
import json
import random
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from cgroup.restore import restore
from tests.contract.nodes import KernelNode
from tests.lab import groups
from tests.lab.cache import PROJECT
from tests.lab.undo import undo
from tests.unit.cgroup.kills import Agent, kill_many, wait_until

pytestmark = [pytest.mark.guest, pytest.mark.timeout(3000)]
MIB = 1 << 20
KEYS = ["rbps", "wbps", "riops", "wiops"]
SLOW_START_SECONDS = 60.0
FIXED = {"rbps": 4000 * MIB}
"""For a driver that wants every limit at every pass."""


@pytest.fixture
def node():
    node = KernelNode()
    yield node
    node.close()


@pytest.fixture
def state(tmp_path):
    """The agent's state folder on a tmpfs, as /run is one."""
    return tmp_path


class Scene:
    """Three jobs on two disks, one with limits of an administrator, and agents that come and go."""

    def __init__(self, node, state, ssd):
        self.node = node
        self.state = state
        self.journal = str(state / "journal")
        self.targets = [node.make("free"), node.make("limited"), node.make("nvme")]
        node.meddle(self.targets[1], wbps=7000 * MIB, riops=3999)
        self.devices = [node.devices[0], node.devices[0], ssd.number]
        self.agents = []
        self.prior = self.limits()

    def limits(self):
        """The text of io.max of every job."""
        return [Path(f"/sys/fs/cgroup{target.path}/io.max").read_text() for target in self.targets]

    def is_prior(self):
        return self.limits() == self.prior

    def start(self, *, pod=None, **options):
        paths = [[target.path, device] for target, device in zip(self.targets, self.devices, strict=True)]
        settings = {
            "journal": self.journal,
            "root": "/sys/fs/cgroup",
            "sys_root": "/sys",
            "keys": KEYS,
            "targets": paths,
        }
        settings |= {"status": str(self.state / "status"), "seed": len(self.agents), **options}
        argv = [*(inside(pod) if pod else ()), sys.executable, "-m", "tests.unit.cgroup.driver", json.dumps(settings)]
        with (self.state / "log").open("a") as log:
            agent = Agent(argv, self.journal, cwd=PROJECT, stderr=log)
        self.agents.append(agent)
        agent.ready = json.loads(agent.first_line())
        return agent

    def status(self):
        return json.loads((self.state / "status").read_text())

    def restore(self):
        return restore(self.journal, wait_seconds=5.0)

    def end(self):
        for agent in self.agents:
            agent.end()


@pytest.fixture
def scene(node, state, ssd):
    scene = Scene(node, state, ssd)
    yield scene
    scene.end()
    print((state / "log").read_text()[-3000:])


def test_kills(scene):
    assert len(kill_many(lambda _: scene.start(), scene.is_prior, scene.restore, 9)) == 9


@pytest.mark.nightly
def test_190_kills(scene):
    assert len(kill_many(lambda _: scene.start(), scene.is_prior, scene.restore, 190)) == 190


def test_the_guardian_is_small(scene):
    agent = scene.start()
    print(f"guardian RSS in the guest: {agent.ready['rss'] / MIB:.1f} MiB")
    assert 0 < agent.ready["rss"] < 20 * MIB
    assert Path(f"/proc/{agent.ready['guardian']}/oom_score_adj").read_text() == "-1000\n"


def test_cgroups_vanish_and_reappear_under_the_loop(scene, node):
    agent = scene.start()
    for _ in range(40):
        target = scene.targets[0]
        node.remove(target)
        time.sleep(0.01)
        scene.targets[0] = node.make("free")
        time.sleep(0.05)
    assert wait_until(lambda: scene.limits()[0] != "", SLOW_START_SECONDS) is not None, "the last one has limits again"
    status = scene.status()
    print(status)
    assert agent.process.poll() is None
    assert status["conflicts"] == []
    assert status["counters"]["vanished"] >= 1
    assert "error" not in status["counters"]
    agent.kill()
    assert wait_until(scene.is_prior, 2.0) is not None


def test_a_disk_is_pulled_and_comes_back(scene, node):
    agent = scene.start()
    disk = node.devices[0]
    node.pull(disk)
    time.sleep(1.0)
    assert agent.process.poll() is None
    assert scene.limits()[:2] == ["", ""]
    assert wait_until(lambda: scene.limits()[2] != "", 10.0) is not None, "not wanted now and then, never for long"
    node.plug(disk)
    assert wait_until(lambda: scene.limits()[0] != "", SLOW_START_SECONDS) is not None, "the new disk has limits"
    status = scene.status()
    print(status)
    assert status["conflicts"] == []
    agent.kill()
    scene.prior[1] = ""  # the administrator's limit went with the disk
    assert wait_until(scene.is_prior, 2.0) is not None


def test_the_journals_file_system_fills(scene, state):
    small = state / "small"
    small.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256k", "small", str(small)], check=True)
    try:
        scene.journal = str(small / "journal")
        agent = scene.start()
        with contextlib.suppress(OSError), (small / "filler").open("wb", buffering=0) as file:
            while True:
                file.write(bytes(4096))
        assert wait_until(lambda: scene.status()["suspended"], SLOW_START_SECONDS) is not None
        assert scene.is_prior(), "what cannot be written down is not enforced"
        assert "no room for the journal" in scene.status()["suspended"]
        time.sleep(0.3)
        assert scene.is_prior()
        (small / "filler").unlink()
        assert wait_until(lambda: not scene.is_prior(), SLOW_START_SECONDS) is not None, "with room, it enforces again"
        agent.kill()
        assert wait_until(scene.is_prior, 2.0) is not None
        assert wait_until(lambda: not agent.guardians(), 5.0) is not None
    finally:
        scene.end()
        undo("umount", small)


def test_another_writer_fights_for_the_line(scene, node):
    agent = scene.start()
    fighting = threading.Event()
    fighting.set()
    written = []

    def fight():
        while fighting.is_set():
            written.append(random.randint(1, 900) * MIB)
            node.meddle(scene.targets[0], rbps=written[-1])
            time.sleep(0.005)

    fighter = threading.Thread(target=fight)
    fighter.start()
    try:
        path = scene.targets[0].path
        assert wait_until(lambda: scene.status()["conflicts"] == [path], SLOW_START_SECONDS) is not None
        before = scene.limits()[1:]
        assert wait_until(lambda: scene.limits()[1:] != before, SLOW_START_SECONDS) is not None, "the others go on"
    finally:
        fighting.clear()
        fighter.join()
    status = scene.status()
    print(f"{len(written)} foreign writes, {status['counters']}")
    assert status["counters"]["conflict"] == 1, "it is told once, and not fought over"
    theirs = f"{scene.devices[0]} rbps={written[-1]} wbps=max riops=max wiops=max\n"
    assert scene.limits()[0] == theirs, "the line is theirs, and what was still ours in it is gone"
    agent.kill()
    scene.prior[0] = theirs
    assert wait_until(scene.is_prior, 2.0) is not None


@pytest.mark.parametrize(("stopped", "limit"), [(5.0, 2.0), pytest.param(30.0, 5.0, marks=pytest.mark.nightly)])
def test_the_agent_is_stopped(scene, stopped, limit):
    agent = scene.start(limit_seconds=limit)
    agent.stop()
    began = time.monotonic()
    seconds = wait_until(scene.is_prior, limit + 2.0)
    assert seconds is not None
    print(f"stopped: limits back after {seconds:.2f} s with a heartbeat limit of {limit:g} s")
    time.sleep(max(0.0, stopped - (time.monotonic() - began)))
    assert scene.is_prior()
    agent.process.send_signal(signal.SIGCONT)
    assert wait_until(lambda: not scene.is_prior(), SLOW_START_SECONDS) is not None, "it goes on"
    assert wait_until(lambda: scene.status()["restores"] >= 1, SLOW_START_SECONDS) is not None
    assert scene.status()["conflicts"] == [], "what the guardian did is not taken for a foreign change"
    agent.kill()
    assert wait_until(scene.is_prior, 2.0) is not None


@pytest.fixture
def pod():
    """The agent's own cgroup, as a runtime makes one for a pod."""
    folder = Path("/sys/fs/cgroup/pod-of-the-agent")
    folder.mkdir()
    yield folder
    assert groups.remove(folder), (folder / "cgroup.procs").read_text()
    with contextlib.suppress(OSError):
        Path("/sys/fs/cgroup/prefetchd-guardian").rmdir()


def inside(folder):
    """The words before a command that run it in a cgroup."""
    return ["sh", "-c", 'echo 0 >"$0/cgroup.procs"; exec "$@"', str(folder)]


def test_everything_in_the_agents_pod_is_killed(scene, pod):
    agent = scene.start(pod=pod, guardian_cgroup="/prefetchd-guardian")
    assert agent.ready["moved"], agent.ready["note"]
    assert str(agent.ready["guardian"]) not in (pod / "cgroup.procs").read_text().split()
    (pod / "cgroup.kill").write_text("1")
    seconds = wait_until(scene.is_prior, 5.0)
    assert seconds is not None
    print(f"pod killed: limits back after {seconds:.2f} s")
    assert seconds < 2.0
    assert agent.process.wait(30) == -signal.SIGKILL


def test_a_guardian_that_stays_in_the_pod_dies_with_it_and_the_next_start_restores(scene, pod):
    agent = scene.start(pod=pod, fixed=FIXED)
    assert not agent.ready["moved"]
    (pod / "cgroup.kill").write_text("1")
    agent.process.wait(30)
    assert wait_until(lambda: not agent.guardians(), 5.0) is not None
    assert not scene.is_prior(), "this is why it moves"
    assert scene.start().ready["recovered"].startswith("3 restored")
    scene.agents[-1].process.terminate()
    scene.agents[-1].process.wait(20)
    assert scene.is_prior()


def test_the_agents_pod_runs_out_of_memory(scene, pod):
    parent = pod.parent
    (parent / "cgroup.subtree_control").write_text("+memory")
    (pod / "memory.oom.group").write_text("1")
    (pod / "memory.swap.max").write_text("0") if (pod / "memory.swap.max").exists() else None
    agent = scene.start(pod=pod)
    (pod / "memory.max").write_text(str(200 * MIB))
    hog = subprocess.Popen([*inside(pod), sys.executable, "-c", "x = bytearray(400 << 20)"])
    assert hog.wait(60) == -signal.SIGKILL
    assert agent.process.wait(30) == -signal.SIGKILL, "the whole group was killed"
    seconds = wait_until(scene.is_prior, 5.0)
    assert seconds is not None, "the guardian is exempt, although it stayed in the group"
    print(f"out of memory: limits back after {seconds:.2f} s")
    assert seconds < 2.0


def test_the_journal_cut_anywhere_is_restored_on_real_lines(scene, node):
    """The unit test cuts at every byte; here, on the kernel's lines, at every byte of the last two records."""
    agent = scene.start(period=0.001)
    time.sleep(0.3)
    agent.stop()
    agent.kill_guardian()
    agent.kill()
    data = Path(scene.journal).read_bytes()
    standing = scene.limits()
    tail = data.rstrip(b"\n").rfind(b"\n")
    for cut in range(len(data), tail, -7):
        for target, text in zip(scene.targets, standing, strict=True):
            put(target, text)
        Path(scene.journal).write_bytes(data[:cut])
        report = scene.restore()
        assert not report.errors
        left = [line for line, prior in zip(scene.limits(), scene.prior, strict=True) if line != prior]
        assert len(left) <= (1 if cut < len(data) - 1 else 0), "one lost record costs one line at most"
    Path(scene.journal).write_bytes(data)
    for target, text in zip(scene.targets, standing, strict=True):
        put(target, text)
    scene.restore()
    assert scene.is_prior()


def put(target, text):
    """Make a cgroup's io.max read like this."""
    file = Path(f"/sys/fs/cgroup{target.path}/io.max")
    for line in file.read_text().splitlines():
        file.write_text(f"{line.split()[0]} rbps=max wbps=max riops=max wiops=max")
    for line in text.splitlines():
        file.write_text(line)


def test_a_reader_that_hangs_behind_a_cap_goes_on_when_the_agent_dies(scene, node):
    target = scene.targets[0]
    agent = scene.start(fixed={"rbps": 64 * 1024})
    disk = next(folder.name for folder in Path("/sys/block").iterdir() if number_of_disk(folder) == node.devices[0])
    read = ["dd", f"if=/dev/{disk}", "of=/dev/null", "bs=1M", "count=8", "iflag=direct"]
    reader = subprocess.Popen([*inside(Path(f"/sys/fs/cgroup{target.path}")), *read], stderr=subprocess.DEVNULL)
    time.sleep(2.0)
    assert reader.poll() is None, "8 MiB at 64 KiB a second take two minutes"
    agent.kill()
    assert reader.wait(10) == 0


def number_of_disk(folder):
    return (folder / "dev").read_text().strip()
