"""Reading ahead as the loop sees it: when the helper is started and for whom, at what rate, and how it ends."""

import json
from dataclasses import replace
from types import SimpleNamespace

import pytest
from prometheus_client import CollectorRegistry

from agent.checks.agent import check
from agent.core import CoreResult
from agent.explanation import ENDS, explain
from agent.loop import Loop
from agent.metrics import ReportCollector
from agent.rearrange import IN_FLIGHT_BESIDE
from agent.rearrange_pay import MoveStop
from agent.rearrange_process import Told
from agent.rearrange_stop import Stop, StopSettings
from agent.rearranger import DiskWatch, Pass, Rearranger
from agent.snapshot import snapshot
from agent.types import Decision, DeviceInfo, DeviceView, Job, JobReport, Medium, PoolState, RearrangeReport, Slot
from bpf.samples import CacheCounters, Sample
from cgroup.lines import READ_AHEAD, Line
from cgroup.results import WriteResult
from tests.unit.agent.builders import CAPACITY, HDD, MIB, device_signals, health, job_view
from tests.unit.agent.made_reports import story

SLOT: Slot = (1, HDD)
VIEWS = {HDD: DeviceView(DeviceInfo(HDD, "sda", Medium.HDD, CAPACITY))}


class FakeHelper:
    """Reads ahead what it is allowed to at once, half of it from another disk, and is used up by the job."""

    def __init__(self):
        self.problem, self.told, self.skips = "", {}, {}
        self.pid, self.starts, self.works, self.is_lost = 0, 0, True, False
        self.targets = ()

    def start(self):
        if not self.works:
            self.problem = "no memory controller"
            return False
        self.starts += 1
        self.pid, self.told, self.skips = 100 + self.starts, {}, {}
        return True

    def serve(self, targets, now):
        self.targets = tuple(targets)
        self.is_lost = False
        if self.pid:
            self.work()
        return bool(self.pid)

    def die(self):
        self.pid, self.is_lost, self.targets = 0, True, ()

    def work(self):
        for one in self.targets:
            before = self.told.get(one.job, Told())
            here = {HDD: (before.ahead + MIB) // 2}
            self.told[one.job] = Told(before.ahead + MIB, before.used + MIB, before.unused, 0, here)
        self.skips = {"direct": self.skips.get("direct", 0) + 1}

    def close(self):
        self.pid, self.is_lost = 0, False


class Enforcer:
    def __init__(self):
        self.held, self.result = [], "written"

    def set_read_ahead(self, device, kilobytes, why):
        self.held.append((device, kilobytes))

    def release_read_ahead(self, device, why):
        self.held.append((device, None))
        return [WriteResult(Line(0, "", device, READ_AHEAD), self.result, {}, {}, why)]


class Node:
    """A job that starves on an HDD, until what it reads is read ahead; another one beside it."""

    def __init__(self, **changes):
        self.helper, self.enforcer = FakeHelper(), Enforcer()
        self.busy, self.in_flight, self.sectors, self.ticks, self.busy_ms, self.reads = 1.0, 3, 256, 0, 0.0, 0
        self.wait, self.iterations, self.waited = 0.05, {1: 0, 2: 0}, {1: 0.0, 2: 0.0}
        self.rearranger = Rearranger(
            self.helper, StopSettings(), read_ahead=self.enforcer, diskstats=self.diskstats, **changes
        )
        self.jobs, self.missed = (1,), 0
        self.scores = {1: 20.0, 2: 90.0}
        self.used = {1: 0.5, 2: 0.1}
        self.asked = frozenset({SLOT})
        self.mode, self.has_cache_probe = "enforce", True

    def diskstats(self):
        return f"8 0 sda {self.reads} 0 {self.sectors * self.reads} 0 0 0 0 0 {self.in_flight} {self.busy_ms:.0f} 0\n"

    def report(self, number):
        view = job_view(number)
        reading = device_signals(HDD, self.used[number])
        seen = view.signals._replace(
            devices={HDD: reading}, iterations=self.iterations[number],
            wait_seconds_total=self.waited[number],
        )  # fmt: skip
        score = health(self.scores[number])
        return JobReport(Job(number, f"job{number}", f"/train/{number}", True), seen, score, view.diagnosis, {}, {})

    def run(self, seconds):
        for _ in range(round(seconds * 10)):
            self.ticks += 1
            self.busy_ms += 100 * self.busy
            self.reads += 10
            for number in self.iterations:
                self.iterations[number] += 1
                self.waited[number] += (0.001 if self.helper.targets else self.wait) if number == 1 else 0.0
            self.missed += 0 if self.helper.targets else MIB
            cache = {1: CacheCounters(self.ticks * MIB, self.missed)} if self.has_cache_probe else {}
            decision = Decision({}, {}, {HDD: PoolState(0.15, 0.05, 0.0)}, {}, rearrange=self.asked)
            here = Pass(self.mode, {n: self.report(n) for n in self.jobs}, decision, VIEWS, cache)
            self.last = self.rearranger.step(self.ticks / 10, here)
        return self.state

    @property
    def state(self):
        return self.last.slots[SLOT].state if SLOT in self.last.slots else None


@pytest.fixture
def node():
    return Node()


def test_starts_the_helper_where_the_policy_asks(node):
    assert node.run(0.5) == "idle"
    assert node.helper.starts == 0, "the disk was not watched for long enough"
    assert node.run(1.5) == "running"
    (target,) = node.helper.targets
    assert (target.job, target.path) == (1, "/train/1")
    assert target.rates[HDD] == pytest.approx(0.97 * CAPACITY.rbps)
    node.asked = frozenset()
    assert node.run(30) == "running", "that nobody asks any more is its success"
    one = node.last.slots[SLOT]
    assert one.ahead_bytes == (node.helper.told[1].ahead - MIB) // 2 > 0, "this disk's half, as before this pass"
    assert one.hit_ratio == pytest.approx(1.0)
    assert one.gain_seconds == pytest.approx(0.049)


def test_nothing_starts_unless_asked(node):
    node.asked = frozenset()
    node.run(10)
    assert (node.helper.starts, node.last) == (0, RearrangeReport())


def test_the_gate_keeps_it_away_from_an_idle_disk(node):
    node.busy = 0.5
    assert node.run(5) == "idle"
    assert "work for 50% of the time" in node.last.slots[SLOT].why
    assert node.helper.starts == 0


def test_the_gate_keeps_it_away_from_a_full_queue(node):
    node.in_flight, node.sectors = 12, 2048
    assert node.run(5) == "idle"
    assert "its queue is full" in node.last.slots[SLOT].why
    assert node.helper.starts == 0


def test_beside_a_job_that_starves_too_it_keeps_to_the_elastic_part_and_what_the_job_used(node):
    node.jobs, node.scores[2] = (1, 2), 30.0
    node.run(2)
    assert node.helper.targets[0].rates[HDD] == pytest.approx((0.10 + 0.5) * CAPACITY.rbps)
    node.scores[2] = 90.0
    node.run(0.1)
    assert node.helper.targets[0].rates[HDD] == pytest.approx((0.97 - 0.1) * CAPACITY.rbps)


def test_beside_a_job_that_reads_too_it_leaves_the_disks_queue_short(node):
    node.run(2)
    assert node.helper.targets[0].in_flight == 0, "nobody else reads from it"
    node.jobs = (1, 2)
    node.run(0.1)
    assert node.helper.targets[0].in_flight == IN_FLIGHT_BESIDE
    node.used[2] = 0.0
    node.run(0.1)
    assert node.helper.targets[0].in_flight == 0


def test_switched_off_it_reads_nothing_ahead_and_files_are_moved_all_the_same(caplog):
    caplog.set_level("INFO")
    mending = SimpleNamespace(steps=[], mended=dict, leaves={}, stops={}, problem="")
    mending.step = lambda now, asked, places, may: mending.steps.append((asked, may))
    node = Node(reads_ahead=False, mending=mending)
    for node.mode in ("dry-run", "enforce"):
        assert node.run(3) == "idle"
    assert node.last.slots[SLOT].why == "switched off"
    assert node.helper.starts == 0
    assert mending.steps[-1] == (node.asked, True)
    assert not [line for line in caplog.messages if "ahead" in line]


def test_a_dry_run_says_what_it_would_do(node, caplog):
    caplog.set_level("INFO")
    node.mode = "dry-run"
    assert node.run(5) == "would"
    assert node.helper.starts == 0
    assert [r.message for r in caplog.records] == ["would read ahead for job1 on sda"]


def test_the_kill_switch_ends_it_and_the_helper(node):
    node.run(3)
    assert node.helper.pid
    node.mode = "dry-run"
    node.run(0.1)
    assert (node.helper.pid, node.last.stops) == (0, {Stop.MODE: 1})
    node.mode = "enforce"
    assert node.run(3) == "running"


def test_a_helper_that_cannot_run_is_tried_again_later_and_said(node):
    node.helper.works = False
    assert node.run(3) == "cooling"
    assert (node.last.problem, node.last.stops) == ("no memory controller", {Stop.HELPER_LOST: 1})
    finding = next(one for one in check({"rearrange": {"problem": node.last.problem}}) if one.name == "agent.rearrange")
    assert "no memory controller" in finding.evidence


def test_a_helper_that_dies_is_replaced_and_counts_go_on(node):
    node.run(5)
    before, skips = node.last.slots[SLOT].ahead_bytes, node.last.skips["direct"]
    node.helper.die()
    assert node.run(0.1) == "cooling", "one that the kernel kills again and again is not started again and again"
    assert node.last.stops == {Stop.HELPER_LOST: 1}
    node.helper.targets = ()
    node.run(35)
    assert (node.state, node.helper.starts) == ("running", 2)
    assert node.last.slots[SLOT].ahead_bytes > before
    assert node.last.skips["direct"] > skips


def test_what_became_of_the_bytes_counts_on_when_a_job_is_served_again(node):
    """The helper forgets a job that is served no more, but not how much it has read for it."""
    node.has_cache_probe = False
    node.run(2)
    node.helper.told[1] = Told(12 * MIB, 4 * MIB, 8 * MIB, 0)
    node.run(1.5)
    assert node.last.slots[SLOT].hit_ratio == pytest.approx(0.7, abs=0.1)
    node.helper.told[1] = Told(30 * MIB, 0, 0, 0)
    node.run(2)
    assert node.last.slots[SLOT].hit_ratio == pytest.approx(1.0)


def test_one_that_dies_while_nobody_needs_it_is_no_loss(node):
    node.run(3)
    node.jobs, node.asked = (2,), frozenset()
    node.run(1)
    node.helper.die()
    node.run(1)
    node.jobs, node.asked = (1,), frozenset({SLOT})
    assert node.run(3) == "running"
    assert node.last.stops == {}


def test_a_job_that_is_gone_is_forgotten_and_the_helper_goes_after_a_while(node):
    node.run(3)
    node.jobs, node.asked = (2,), frozenset()
    node.run(1)
    assert (node.last.slots, node.helper.targets) == ({}, ())
    assert node.helper.pid, "it still knows where files lie"
    node.run(61)
    assert node.helper.pid == 0


def test_read_ahead_of_the_disk_is_raised_meanwhile_where_it_is_less(monkeypatch):
    monkeypatch.setattr("agent.rearranger._read_ahead_of", lambda device: 128)
    node = Node(read_ahead_kilobytes=4096)
    node.run(3)
    assert node.enforcer.held == [(HDD, 4096)]
    node.mode = "dry-run"
    node.run(0.1)
    assert node.enforcer.held == [(HDD, 4096), (HDD, None)]


def test_read_ahead_that_cannot_be_put_back_is_tried_again(monkeypatch):
    monkeypatch.setattr("agent.rearranger._read_ahead_of", lambda device: 128)
    node = Node(read_ahead_kilobytes=4096)
    node.run(3)
    node.enforcer.result, node.mode = "error", "dry-run"
    node.run(6)
    assert node.enforcer.held == [(HDD, 4096), (HDD, None), (HDD, None)]
    node.enforcer.result = "written"
    node.run(12)
    assert node.enforcer.held == [(HDD, 4096), (HDD, None), (HDD, None), (HDD, None)]


def test_read_ahead_is_left_alone_by_default_and_where_it_is_more(node, monkeypatch):
    monkeypatch.setattr("agent.rearranger._read_ahead_of", lambda device: 8192)
    other = Node(read_ahead_kilobytes=4096)
    for one in (node, other):
        one.run(3)
        assert one.state == "running"
        assert one.enforcer.held == []


def test_disks_are_judged_over_a_second_and_forgotten():
    texts = iter(f"8 0 sda {10 * k} 0 {10 * k * 512} 0 0 0 0 0 {k % 2 * 8} {90 * k} 0\n" for k in range(100))
    watch = DiskWatch(lambda: next(texts))
    assert [watch.look(k / 10, [HDD]) for k in range(10)][-1] == {}
    disk = watch.look(1.0, [HDD])[HDD]
    assert disk.busy == pytest.approx(0.9)
    assert disk.queue == pytest.approx(4.0, abs=0.5)
    assert disk.request_bytes == 512 * 512
    assert watch.look(1.1, []) == {}


def test_a_disk_that_was_busy_an_hour_ago_is_watched_anew_though_others_were_watched_meanwhile():
    rows = iter([(0, 0), (900, 0), (900, 500), (900, 500), (900, 1000), (950, 1500)])

    def read():
        return "".join(f"8 {n} sd{n} 9 0 4608 0 0 0 0 0 0 {busy} 0\n" for n, busy in enumerate(next(rows)))

    watch = DiskWatch(read)
    watch.look(0.0, ["8:0", "8:1"])
    assert watch.look(1.0, ["8:0", "8:1"])["8:0"].busy == pytest.approx(0.9)
    watch.look(2.0, ["8:1"])
    assert "8:0" not in watch.look(3600.0, ["8:0", "8:1"])
    watch.look(3600.5, ["8:0", "8:1"])
    assert watch.look(3601.0, ["8:0", "8:1"])["8:0"].busy == pytest.approx(0.05)


def report_of(node):
    """A whole report with what the node has."""
    report, _ = next(story(1.0))
    made = replace(report, jobs={1: node.report(1)}, devices=VIEWS, decision=Decision({}, {}, {}, {}), applied={})
    return replace(made, rearrange=node.last)


@pytest.mark.parametrize(
    ("state", "words"),
    [
        (
            "running",
            "the agent reads ahead for it, 20 MB so far, it uses 100 % of that, waits 49 ms less per iteration",
        ),
        ("cooling", "stays from reading ahead for it now (it starves"),
        ("would", "in mode enforce the agent would read ahead for it"),
    ],
)
def test_it_is_told_in_words(node, state, words):
    node.run(5)
    row = json.loads(json.dumps(snapshot(report_of(node))))["jobs"][0]
    row["devices"][0]["rearrange"]["state"] = state
    assert words in "\n".join(explain(row, {}))


@pytest.mark.parametrize("cause", [*Stop, *MoveStop])
def test_why_it_ended_is_told_in_words(node, cause):
    node.run(5)
    row = snapshot(report_of(node))["jobs"][0]
    row["devices"][0]["rearrange"] |= {"state": "cooling", "why": str(cause)}
    row["devices"][0]["defragment"] = {"running": False, "why": str(cause), "moved_files": 0, "moved_bytes": 0}
    assert "\n".join(explain(row, {})).count(f"({ENDS[cause]})") == 2


def test_state_and_metrics_carry_it(node):
    node.run(5)
    report = report_of(node)
    registry = CollectorRegistry()
    registry.register(ReportCollector(lambda: report, "0"))
    labels = {"job": "job1", "namespace": "", "pod": "", "device": "sda", "medium": "hdd"}
    assert registry.get_sample_value("prefetchd_rearrange_active", labels) == 1.0
    assert registry.get_sample_value("prefetchd_rearrange_bytes_total", labels) == node.last.slots[SLOT].ahead_bytes
    assert registry.get_sample_value("prefetchd_rearrange_hit_ratio", labels) == pytest.approx(1.0)
    assert registry.get_sample_value("prefetchd_rearrange_skips_total", {"cause": "direct"}) > 0
    assert registry.get_sample_value("prefetchd_rearrange_stops_total", {"cause": "harm"}) == 0.0
    assert snapshot(report)["rearrange"]["skips"]["direct"] > 0


def test_a_rearranger_that_fails_does_not_end_the_loop(caplog):
    def broken(now, here):
        raise RuntimeError("helper gone mad")

    loop = object.__new__(Loop)
    loop.rearranger = SimpleNamespace(step=broken)
    loop.enforcer = SimpleNamespace(mode="enforce")
    result = CoreResult({}, Decision({}, {}, {}, {}), 0)
    assert "the log says where" in loop._rearrange(1.0, result, {}, Sample(1)).problem
    assert "helper gone mad" in caplog.text


def test_signals_that_are_missing_start_nothing(node):
    node.report = lambda number: JobReport(Job(1, "job1", "/train/1", True), None, None, None, {}, {})
    assert node.run(5) == "idle"
    assert node.helper.starts == 0
