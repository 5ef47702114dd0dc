"""Making files contiguous as the loop sees it: off unless asked for, for whom, at what rate, and how it ends."""

from math import inf

import pytest
from prometheus_client import CollectorRegistry

from agent.checks.agent import check
from agent.commands.wiring import make_rearranger
from agent.config import parse
from agent.explanation import explain
from agent.metrics import ReportCollector
from agent.rearrange_defragment import Leave, Mend
from agent.rearrange_mending import LINGER_SECONDS, Mending, Place
from agent.rearrange_pay import MoveStop, PaySettings
from agent.rearrange_process import HelperProcess, MoverProcess
from agent.rearrange_stop import Reading, StopSettings
from agent.snapshot import snapshot
from tests.unit.agent.builders import CAPACITY, HDD, MIB
from tests.unit.agent.test_rearranger import FakeHelper, report_of
from tests.unit.agent.test_rearranger import Node as Watched

SLOT = (1, HDD)


class FakeMover(FakeHelper):
    """Moves 1 MiB a pass of what is left."""

    def work(self):
        for one in self.targets:
            before = self.told.get(one.job, Mend())
            self.told[one.job] = Mend(before.files + 1, before.bytes + MIB, 5, 5 * MIB)
            self.skips = {Leave.OPEN: 1}


class Node:
    """A job that waits less as its files are moved; another one beside it where `others`."""

    def __init__(self):
        self.mover = FakeMover()
        self.mending = Mending(self.mover, PaySettings(StopSettings()), 0.1)
        self.now, self.iterations, self.waited = 0.0, 0, 0.0
        self.asked, self.may, self.others, self.jobs = frozenset({SLOT}), True, {}, (SLOT,)

    def run(self, seconds):
        for _ in range(round(seconds * 10)):
            self.now += 0.1
            self.iterations += 1
            self.waited += 0.2 if not self.mover.told else 0.05
            reading = Reading(self.now, self.iterations, self.waited, others=self.others)
            places = {slot: Place(f"/train/{slot[0]}", CAPACITY, reading) for slot in self.jobs}
            self.mending.step(self.now, self.asked, places, may=self.may)
        return self.mending.mended().get(SLOT)


@pytest.fixture
def node():
    return Node()


def test_it_is_off_by_default_and_needs_the_mode_enforce():
    stack = None
    assert parse("").rearrange.defragment is False
    for text in ('mode = "observe"\n[rearrange]\ndefragment = true', "[rearrange]\nenabled = false\ndefragment = true"):
        assert make_rearranger(stack, parse(text), "/root", None) is None


def test_the_mover_has_a_cgroup_of_its_own_and_low_limits(tmp_path):
    mover = MoverProcess(str(tmp_path), "/prefetchd-rearrange-defragment", 256 * MIB)
    assert mover.line("8:0", 15e6, 12.4) == "8:0 rbps=15000000 wbps=15000000 riops=12"
    assert mover.line("8:0", 10.0, 0.2) == "8:0 rbps=1048576 wbps=1048576 riops=1"
    assert mover.line("8:0", 15e6, inf) == "8:0 rbps=15000000 wbps=15000000", "requests of unknown capacity"
    assert HelperProcess(str(tmp_path), "/x", 256 * MIB).line("8:0", 15e6, 12.4) == "8:0 rbps=15000000"


def test_files_are_moved_for_a_job_that_is_asked_for(node):
    assert node.run(1.5).running is False
    row = node.run(3)
    assert (row.running, row.why) == (True, "it starves")
    assert row.files > 10
    assert row.bytes == row.files * MIB
    assert row.gain_seconds == pytest.approx(0.15, abs=0.05)
    (target,) = node.mover.targets
    assert (target.job, target.path) == (1, "/train/1")


def test_the_share_is_small_beside_others_and_larger_alone(node):
    node.run(3)
    assert node.mover.targets[0].rates[HDD] == pytest.approx(0.4 * min(CAPACITY.rbps, CAPACITY.wbps))
    node.others = {2: (0, 0.0)}
    node.run(0.2)
    assert node.mover.targets[0].rates[HDD] == pytest.approx(0.1 * min(CAPACITY.rbps, CAPACITY.wbps))
    assert node.mover.targets[0].requests[HDD] == pytest.approx(0.1 * CAPACITY.riops)


def test_jobs_share_it(node):
    node.jobs = (SLOT, (2, HDD))
    node.asked = frozenset(node.jobs)
    node.run(3)
    rates = [target.rates[HDD] for target in node.mover.targets]
    assert rates == [pytest.approx(0.2 * min(CAPACITY.rbps, CAPACITY.wbps))] * 2


def test_nothing_is_moved_unless_asked_or_in_another_mode(node):
    node.asked = frozenset()
    assert node.run(5) is None
    node.asked, node.may = frozenset({SLOT}), False
    assert node.run(5).running is False
    assert node.mover.starts == 0


def test_a_dry_run_says_what_it_would_do_once(node, caplog):
    caplog.set_level("INFO")
    node.may = False
    node.run(5)
    assert [r.message for r in caplog.records] == [f"would make fragmented files of /train/1 on {HDD} contiguous"]


def test_the_kill_switch_ends_it(node):
    node.run(3)
    node.may = False
    node.run(0.1)
    assert (node.mover.targets, dict(node.mending.stops)) == ((), {MoveStop.MODE: 1})
    node.run(LINGER_SECONDS + 1)
    assert node.mover.pid == 0


def test_a_mover_that_cannot_run_is_said_and_tried_again_later(node):
    node.mover.works = False
    node.run(3)
    assert (node.mending.problem, dict(node.mending.stops)) == ("no memory controller", {MoveStop.HELPER_LOST: 1})
    state = {"rearrange": {"defragment": {"problem": node.mending.problem}}}
    assert "no memory controller" in next(one for one in check(state) if one.name == "agent.defragment").evidence


def test_counts_go_on_with_the_next_mover(node):
    moved = node.run(5).files
    node.mover.die()
    assert node.run(0.1).why == MoveStop.HELPER_LOST
    assert node.run(40).files > moved + 10
    assert node.mover.starts == 2
    assert node.mending.leaves == {Leave.OPEN: 2}


def test_a_job_that_is_gone_is_forgotten(node):
    node.run(3)
    node.jobs = ()
    assert node.run(0.1) is None
    assert node.mover.targets == ()


def test_state_and_metrics_carry_it():
    watched, mover = Watched(), FakeMover()
    watched.rearranger._mending = Mending(mover, PaySettings(StopSettings()), 0.1)
    watched.run(5)
    report = report_of(watched)
    registry = CollectorRegistry()
    registry.register(ReportCollector(lambda: report, "0"))
    job = {"job": "job1", "namespace": "", "pod": ""}
    moved = report.rearrange.mended[SLOT].files
    assert moved > 10
    assert registry.get_sample_value("prefetchd_defragment_active", job | {"device": "sda", "medium": "hdd"}) == 1.0
    assert registry.get_sample_value("prefetchd_defragment_files_total", job) == moved
    assert registry.get_sample_value("prefetchd_defragment_bytes_total", job) == moved * MIB
    assert registry.get_sample_value("prefetchd_defragment_files_left", job) == 5.0
    assert registry.get_sample_value("prefetchd_defragment_skips_total", {"cause": "open"}) == 1.0
    assert registry.get_sample_value("prefetchd_defragment_stops_total", {"cause": "harm"}) == 0.0
    rows = snapshot(report)
    assert rows["jobs"][0]["devices"][0]["defragment"]["moved_files"] == moved
    words = f"{moved} of its fragmented files ({moved * MIB / 1e6:.0f} MB) were made contiguous so far, 5 are left"
    assert words in "\n".join(explain(rows["jobs"][0], {}))
    assert rows["rearrange"]["defragment"] == {"problem": "", "skips": {"open": 1}, "stops": {}}
    watched.rearranger.close("the agent stops")
    assert mover.pid == 0
