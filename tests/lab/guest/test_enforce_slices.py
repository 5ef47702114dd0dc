"""Cuts under a greedy reader on the kernel's own blk-throttle: no more passes than the limits allow, and no burst."""

import itertools
import random
import subprocess
import time
from pathlib import Path

import pytest

from cgroup.enforce import Enforcer
from cgroup.journal import Journal
from cgroup.lines import Limit, Target
from tests.contract.nodes import KernelNode
from tests.lab.disks import find_disk

pytestmark = [pytest.mark.guest, pytest.mark.timeout(300)]
MIB = 1 << 20
HIGH, LOW = 24 * MIB, 4 * MIB
SLICE_SECONDS = 0.1
INTERVAL_SECONDS = 0.1


@pytest.fixture
def node():
    node = KernelNode()
    yield node
    node.close()


class Reader:
    """16 processes that read the NVMe drive as fast as they may, in a cgroup of their own."""

    def __init__(self, node, name):
        disk = find_disk("ssd0")
        made = node.make(name)
        self.target = Target(made.cgroup_id, made.path, disk.number)
        self.folder = Path("/sys/fs/cgroup") / made.path.lstrip("/")
        fio = [
            f"--filename={disk.node}",
            "--direct=1",
            "--rw=read",
            "--bs=256k",
            "--numjobs=16",
            "--offset_increment=32m",
        ]
        fio += ["--size=32m", "--time_based", "--runtime=60", "--name=greedy", "--ioengine=psync", "--output=/dev/null"]
        join = f'echo $$ >"{self.folder}/cgroup.procs" && exec "$@"'
        self.process = subprocess.Popen(["sh", "-c", join, "sh", "fio", *fio])

    def passed(self):
        """Bytes that got through io.max until now."""
        for line in (self.folder / "io.stat").read_text().splitlines():
            number, *fields = line.split()
            if number == self.target.device:
                return int(dict(field.split("=") for field in fields)["rbytes"])
        return 0

    def end(self):
        (self.folder / "cgroup.kill").write_text("1")
        self.process.wait(20)


def drive(enforcer, target, rbps, seconds):
    """What the agent's loop does: a pass every 0.1 s, and in between what waits for its moment."""
    end = time.monotonic() + seconds
    while (began := time.monotonic()) < end:
        enforcer.reconcile({target: (Limit(rbps=rbps), "test")}, began)
        while (due := enforcer.due) is not None and due < began + INTERVAL_SECONDS:
            time.sleep(max(0.0, due - time.monotonic()))
            enforcer.reconcile_due(time.monotonic())
        time.sleep(max(0.0, began + INTERVAL_SECONDS - time.monotonic()))


def cut(node, tmp_path, name, clock):
    """MiB that passed in the second after a cut from 24 to 4 MiB/s amid a slice, and in the second after that."""
    journal = Journal.open(str(tmp_path / name))
    enforcer, reader = Enforcer(node.files, journal, "enforce", clock=clock), Reader(node, name)
    try:
        while reader.passed() < 64 * MIB:
            time.sleep(0.1)
        drive(enforcer, reader.target, HIGH, 1.0)
        time.sleep(random.uniform(0.2, 0.6) * SLICE_SECONDS)  # well into a slice
        marks = [reader.passed()]
        for _ in range(2):
            drive(enforcer, reader.target, LOW, 1.0)
            marks.append(reader.passed())
    finally:
        reader.end()
        enforcer.close()
    return [(after - before) / MIB for before, after in itertools.pairwise(marks)]


def test_a_deep_cut_amid_a_slice_lets_no_burst_through(node, tmp_path):
    """Three slices at most at or below the old limit, then the new one; and nobody is stopped to pay a debt."""
    cuts = [cut(node, tmp_path, f"held{index}", time.monotonic) for index in range(5)]
    bare = [cut(node, tmp_path, f"bare{index}", None) for index in range(3)]
    print(f"MiB in the two seconds after a cut from 24 to 4 MiB/s: {cuts}; without waiting: {bare}")
    for first, second in cuts:
        assert first <= (3 * SLICE_SECONDS * HIGH + LOW) / MIB
        assert second == pytest.approx(LOW / MIB, rel=0.3)
