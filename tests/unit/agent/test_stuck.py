"""A cap behind which requests stay queued is given back once, and only such a one."""

from types import SimpleNamespace

import pytest

from agent import loop
from agent.core import Core, CoreSettings
from agent.policies.base import PolicySettings, make_policy
from agent.stuck import StuckQueues
from agent.types import Capacity, Decision, DeviceInfo, DeviceView, Job, Medium, Quota
from bpf.samples import BlockCounters, BlockKey, ProbeState, ProbeStatus, Sample
from cgroup.enforce import Enforcer
from cgroup.files import KernelFiles
from cgroup.journal import Journal
from cgroup.lines import Limit, Line
from cgroup.plan import LineState
from tests.unit.cgroup.trees import Tree

DISK = "8:0"
MIB = 1 << 20


@pytest.fixture
def tree(tmp_path):
    return Tree(tmp_path)


@pytest.fixture
def job(tree):
    return tree.make("/train/a")


def did(tree, requests, waited_seconds):
    folder = tree.root / "train/a"
    (folder / "io.stat").write_text(
        f"{DISK} rbytes={requests * 4096} wbytes=0 rios={requests} wios=0 dbytes=0 dios=0\n"
    )
    total = int(waited_seconds * 1e6)
    (folder / "io.pressure").write_text(f"some avg10=0.00 avg60=0.00 avg300=0.00 total={total}\n")


def under_way(job, in_flight=1, throttle_ns=0):
    return {BlockKey(job, DISK, "read"): BlockCounters(7, 7 * 4096, 0, 0, in_flight, (), throttle_ns)}


def found(tree, job, steps, blocks):
    """The times of (time, requests, seconds waited) at which the job is found stuck."""
    queues, seen = StuckQueues(str(tree.root)), []
    line = Line(job, "/train/a", DISK, "io.max")
    values = Limit(rbps=100 * MIB).values()
    managed = {line: LineState(dict.fromkeys(values), values)}
    for now, requests, waited in steps:
        did(tree, requests, waited)
        seen += [now for target in queues.look(now, managed, blocks) if target.cgroup_id == job]
    return seen


def test_requests_that_do_not_pass_while_tasks_wait(tree, job):
    assert found(tree, job, [(t, 7, t) for t in range(12)], under_way(job)) == [5, 10]


def test_progress_is_not_stuck(tree, job):
    assert found(tree, job, [(t, t, t) for t in range(12)], under_way(job)) == []


def test_who_waits_elsewhere_is_not_stuck_here(tree, job):
    steps = [(t, 7, t) for t in range(12)]
    assert found(tree, job, steps, under_way(job, in_flight=0)) == []
    assert found(tree, job, steps, under_way(job, in_flight=0, throttle_ns=None)) == [5, 10], "this tier cannot tell"


def test_a_cgroup_that_went_away_is_left_alone(tree, job):
    queues = StuckQueues(str(tree.root))
    values = Limit(rbps=MIB).values()
    managed = {Line(job, "/train/gone", DISK, "io.max"): LineState(dict.fromkeys(values), values)}
    assert queues.look(1.0, managed, under_way(job)) == []


def test_the_loop_gives_the_line_back_once_and_caps_it_anew(tree, job, tmp_path):
    sample = Sample(0, blocks=under_way(job))
    device = DeviceView(DeviceInfo(DISK, "sda", Medium.SSD, Capacity(1000 * MIB, 1e9, 1e6, 1e6)))
    node = SimpleNamespace(
        jobs=lambda now: (Job(job, "a", "/train/a", training=True),),
        sample=lambda now_ns: sample,
        devices=lambda sample, jobs: {DISK: device},
        job_samples=lambda sample, jobs: {},
        probes=lambda: (ProbeStatus("block", ProbeState.ATTACHED),),
    )
    core = Core(make_policy("adaptive", PolicySettings()), CoreSettings())
    core.policy.step = lambda state, view: (state, Decision({(job, DISK): Quota(0.5, "why")}, {}, {}, {}))
    journal = Journal.open(str(tmp_path / "journal"))
    enforcer = Enforcer(KernelFiles(str(tree.root), str(tree.sys)), journal, "enforce")
    agent = loop.Loop(node, core, enforcer, loop.LoopSettings(), stuck=StuckQueues(str(tree.root)))
    stands = []
    for tick in range(80):
        did(tree, 7, tick / 10)
        agent.tick(tick / 10)
        stands.append("rbps" in tree.text("/train/a") and "rbps=max" not in tree.text("/train/a"))
    assert [tick for tick, capped in enumerate(stands) if not capped] == [50]
    assert agent.restores == 1
    enforcer.close()
