"""What the contract suite cannot show on a real kernel: failing files, a full journal, the guardian's part."""

import errno
import logging
import os
from pathlib import Path

import pytest

from cgroup.enforce import RETRY_SECONDS, Enforcer
from cgroup.errors import ControllerMissing, JournalError, JournalFull
from cgroup.journal import Entry, Journal
from cgroup.lines import Limit, Target, Weight, line_of
from tests.contract.nodes import FakeNode

MIB = 1 << 20


class Watchman:
    def __init__(self):
        self.beats = 0
        self.restores = []

    def beat(self):
        self.beats += 1

    def take_restores(self):
        return self.restores.pop(0) if self.restores else 0


@pytest.fixture
def node():
    return FakeNode()


@pytest.fixture
def journal(tmp_path):
    journal = Journal.open(str(tmp_path / "journal"))
    yield journal
    journal.close()


@pytest.fixture
def watchman():
    return Watchman()


@pytest.fixture
def enforcer(node, journal, watchman):
    return Enforcer(node.files, journal, "enforce", guardian=watchman)


def kinds(results):
    return [result.result for result in results]


def want(*pairs):
    return {target: (setting, "need") for target, setting in pairs}


def broken(number=errno.EIO):
    return OSError(number, "broken", "/sys/fs/cgroup/x/io.max")


def test_enforcement_without_a_journal_is_refused(node):
    with pytest.raises(JournalError, match="needs a journal"):
        Enforcer(node.files, None, "enforce")
    assert Enforcer(node.files, None, "dry-run").mode == "dry-run"


def test_the_journal_has_it_before_it_is_written(node, journal, enforcer):
    target = node.make("a")
    seen = []
    node.files.before_write = lambda line: seen.append(journal.entries[line].wrote["rbps"])
    enforcer.reconcile(want((target, Limit(rbps=MIB))), 0.0)
    enforcer.reconcile(want((target, Limit(rbps=2 * MIB))), 1.0)
    assert seen == [MIB, 2 * MIB]


def test_every_write_is_logged_with_before_after_and_why(node, enforcer, caplog):
    target = node.make("a")
    caplog.set_level(logging.INFO)
    enforcer.reconcile({target: (Limit(rbps=4 * MIB), "j1 starves")}, 0.0)
    enforcer.reconcile({target: (Limit(rbps=2 * MIB), "j2 starves")}, 1.0)
    enforcer.release_all("the gate closed")
    assert [record.getMessage() for record in caplog.records] == [
        "wrote /contract/a io.max 8:0: rbps=max -> rbps=4194304 (j1 starves)",
        "wrote /contract/a io.max 8:0: rbps=4194304 -> rbps=2097152 (j2 starves)",
        "released /contract/a io.max 8:0: rbps=2097152 -> rbps=max (the gate closed)",
    ]


def test_a_failed_write_is_an_error_once_then_tried_again_later(node, journal, enforcer):
    target = node.make("a")
    node.files.fail["write"] = [broken(), broken()]
    assert kinds(enforcer.reconcile(want((target, Limit(rbps=MIB))), 0.0)) == ["error"]
    assert journal.entries == {}
    assert kinds(enforcer.reconcile(want((target, Limit(rbps=MIB))), RETRY_SECONDS - 0.1)) == []
    assert kinds(enforcer.reconcile(want((target, Limit(rbps=MIB))), RETRY_SECONDS)) == ["error"]
    assert kinds(enforcer.reconcile(want((target, Limit(rbps=MIB))), 2 * RETRY_SECONDS)) == ["written"]
    assert dict(enforcer.counters) == {"error": 2, "written": 1}


def test_what_fails_for_days_is_said_once_until_it_is_another_trouble_or_over(node, enforcer, caplog):
    target = node.make("a")

    def go_on(number, now):
        node.files.fail["write"] = [broken(number)] if number else []
        enforcer.reconcile(want((target, Limit(rbps=MIB))), now * RETRY_SECONDS)
        enforcer.release(target, "test")
        node.files.fail["write"] = []
        return len([record for record in caplog.records if record.levelno == logging.ERROR])

    numbers = [errno.EIO, errno.EIO, errno.EIO, errno.EINVAL, errno.EINVAL, None, errno.EINVAL, errno.EINVAL]
    assert [go_on(number, now) for now, number in enumerate(numbers)] == [1, 1, 1, 2, 2, 2, 3, 3]


def test_a_failed_second_write_leaves_the_journal_at_the_first(node, journal, enforcer):
    target = node.make("a")
    enforcer.reconcile(want((target, Limit(rbps=4 * MIB))), 0.0)
    node.files.fail["write"] = [broken(errno.EINVAL)]
    assert kinds(enforcer.reconcile(want((target, Limit(rbps=MIB))), 1.0)) == ["error"]
    entry = journal.entries[line_of(target)]
    assert (entry.was["rbps"], entry.wrote["rbps"]) == (4 * MIB, 4 * MIB)
    assert kinds(enforcer.release_all("end")) == ["written"]
    assert node.limits(target) == {}


def test_one_bad_line_does_not_stop_the_others(node, enforcer):
    targets = [node.make(name) for name in "abc"]
    node.files.fail["read"] = [broken()]
    told = kinds(enforcer.reconcile(want(*((t, Limit(rbps=MIB)) for t in targets)), 0.0))
    assert sorted(told) == ["error", "written", "written"]


def test_a_change_between_plan_and_write_is_seen(node, journal, enforcer):
    target = node.make("a")
    reads = []
    real = node.files.read

    def read(line):
        values = real(line)
        reads.append(line)
        if len(reads) == 1:
            node.meddle(target, rbps=9 * MIB)
        return values

    node.files.read = read
    results = enforcer.reconcile(want((target, Limit(rbps=MIB))), 0.0)
    node.files.read = real
    assert (kinds(results), node.limits(target), journal.entries) == (["unchanged"], {"rbps": 9 * MIB}, {})
    assert kinds(enforcer.reconcile(want((target, Limit(rbps=MIB))), 0.1)) == ["written"]


def test_a_change_between_plan_and_write_of_a_managed_line_is_a_conflict(node, journal, enforcer):
    target = node.make("a")
    enforcer.reconcile(want((target, Limit(rbps=4 * MIB))), 0.0)
    real = node.files.read
    reads = []

    def read(line):
        values = real(line)
        reads.append(line)
        if len(reads) == 1:
            node.meddle(target, rbps=9 * MIB)
        return values

    node.files.read = read
    told = [kinds(enforcer.reconcile(want((target, Limit(rbps=MIB))), now)) for now in (1.0, 1.1)]
    assert told == [["unchanged"], ["conflict"]]
    assert (node.limits(target), journal.entries) == ({"rbps": 9 * MIB}, {})


def test_a_disk_whose_limits_go_before_it_does_is_no_foreign_change(node, journal, enforcer):
    target = node.make("a")
    enforcer.reconcile(want((target, Limit(rbps=4 * MIB))), 0.0)
    node.meddle(target, rbps=None)
    assert kinds(enforcer.reconcile(want((target, Limit(rbps=MIB))), 0.1)) == []
    node.pull(target.device)
    assert kinds(enforcer.reconcile(want((target, Limit(rbps=MIB))), 0.2)) == ["vanished"]
    assert kinds(enforcer.reconcile(want((target, Limit(rbps=MIB))), 0.3)) == [], "told once, not at every pass"
    node.plug(target.device)
    assert kinds(enforcer.reconcile(want((target, Limit(rbps=MIB))), 0.2 + RETRY_SECONDS)) == ["written"]
    assert enforcer.conflicts == {}


def test_a_cgroup_that_loses_its_files_before_it_vanishes_is_no_error(node, journal, enforcer):
    target = node.make("a")
    enforcer.reconcile(want((target, Limit(rbps=4 * MIB))), 0.0)
    node.files.fail["read"] = [ControllerMissing("no io.max")]
    assert kinds(enforcer.reconcile(want((target, Limit(rbps=4 * MIB))), 0.1)) == []
    node.remove(target)
    assert kinds(enforcer.reconcile(want((target, Limit(rbps=4 * MIB))), 0.2)) == ["vanished"]
    assert journal.entries == {}


def test_a_cgroup_that_loses_its_files_between_plan_and_write_is_no_error(node, journal, enforcer):
    target = node.make("a")
    node.files.fail["write"] = [ControllerMissing("no io.max")]
    assert kinds(enforcer.reconcile(want((target, Limit(rbps=4 * MIB))), 0.0)) == ["vanished"]
    assert journal.entries == {}
    assert kinds(enforcer.reconcile(want((target, Limit(rbps=4 * MIB))), 0.1)) == ["written"]


class TestNoRoomForTheJournal:
    @pytest.fixture
    def full(self, journal, monkeypatch):
        def refuse(entries):
            raise JournalFull("no room for the journal")

        def probe():
            if journal.record is refuse:
                raise JournalFull("no room for the journal")

        monkeypatch.setattr(journal, "record", refuse)
        monkeypatch.setattr(journal, "probe", probe)
        return monkeypatch

    def test_nothing_is_enforced(self, node, enforcer, full):
        target = node.make("a")
        assert kinds(enforcer.reconcile(want((target, Limit(rbps=MIB))), 0.0)) == ["error"]
        assert enforcer.suspended == "no room for the journal"
        assert kinds(enforcer.reconcile(want((target, Limit(rbps=MIB))), 0.1)) == []
        assert node.limits(target) == {}

    def test_what_stands_is_put_back_where_its_record_is_gone_and_cannot_be_made_again(
        self, node, enforcer, journal, monkeypatch
    ):
        target = node.make("a")
        enforcer.reconcile(want((target, Limit(rbps=4 * MIB))), 0.0)
        Path(journal.path).unlink()
        monkeypatch.setattr(os, "rename", lambda *_: (_ for _ in ()).throw(OSError(errno.EROFS, "read-only")))
        assert kinds(enforcer.reconcile(want((target, Limit(rbps=4 * MIB))), 1.0)) == ["written"]
        assert (node.limits(target), "read-only" in enforcer.suspended) == ({}, True)

    def test_what_stands_is_put_back_and_enforcement_resumes_with_room(self, node, enforcer, journal, request):
        target = node.make("a")
        enforcer.reconcile(want((target, Limit(rbps=4 * MIB))), 0.0)
        monkeypatch = request.getfixturevalue("full")
        assert kinds(enforcer.reconcile(want((target, Limit(rbps=MIB))), 1.0)) == ["error", "written"]
        assert node.limits(target) == {}
        assert dict(enforcer.counters) == {"written": 2, "error": 1}
        monkeypatch.undo()
        assert kinds(enforcer.reconcile(want((target, Limit(rbps=MIB))), 2.0)) == [], "not at once: caps would flap"
        assert kinds(enforcer.reconcile(want((target, Limit(rbps=MIB))), 1.0 + RETRY_SECONDS)) == ["written"]
        assert enforcer.suspended is None
        assert node.limits(target) == {"rbps": MIB}


class TestStuckLines:
    def test_what_cannot_be_freed_is_tried_again_and_not_taken_for_what_was_before(self, node, journal, enforcer):
        target = node.make("a")
        enforcer.reconcile(want((target, Limit(rbps=4 * MIB))), 0.0)
        node.files.fail["write"] = [broken()]
        assert kinds(enforcer.set_mode("dry-run")) == ["error"]
        assert line_of(target) in journal.entries
        enforcer.set_mode("enforce")
        assert node.limits(target) == {}, "leaving and entering frees it too"

    def test_it_is_freed_by_reconcile_in_any_mode(self, node, journal, enforcer):
        target = node.make("a")
        enforcer.reconcile(want((target, Limit(rbps=4 * MIB))), 0.0)
        node.files.fail["write"] = [broken(), broken()]
        enforcer.set_mode("observe")
        assert kinds(enforcer.reconcile({}, 1.0)) == ["error"]
        assert kinds(enforcer.reconcile({}, 1.1)) == []
        assert kinds(enforcer.reconcile({}, 1.0 + RETRY_SECONDS)) == ["written"]
        assert (node.limits(target), journal.entries) == ({}, {})

    def test_it_is_not_written_meanwhile(self, node, enforcer):
        target = node.make("a")
        enforcer.reconcile(want((target, Limit(rbps=4 * MIB))), 0.0)
        node.files.fail["write"] = [broken(), broken()]
        enforcer.release_all("test")
        told = enforcer.reconcile(want((target, Limit(rbps=MIB))), 1.0)
        assert kinds(told) == ["error"]
        assert node.limits(target) == {"rbps": 4 * MIB}

    def test_a_crash_whose_restore_fails_is_remembered(self, node, tmp_path, journal, enforcer):
        target = node.make("a")
        enforcer.reconcile(want((target, Limit(rbps=4 * MIB))), 0.0)
        node.files.fail["write"] = [broken(), broken()]
        successor = Enforcer(node.files, journal, "enforce")
        assert len(successor.recovered.errors) == 1
        assert kinds(successor.reconcile({}, 0.0)) == ["written"]
        assert node.limits(target) == {}

    def test_a_crash_before_the_write_that_was_announced_too(self, node, journal, enforcer):
        target = node.make("a")
        enforcer.reconcile(want((target, Limit(rbps=4 * MIB))), 0.0)
        held = journal.entries[line_of(target)]
        journal.record([Entry(held.line, held.prior, held.wrote, {**held.wrote, "rbps": MIB})])
        node.files.fail["write"] = [broken(), broken()]
        successor = Enforcer(node.files, journal, "enforce")
        assert len(successor.recovered.errors) == 1
        assert kinds(successor.reconcile({}, 0.0)) == ["written"]
        assert node.limits(target) == {}


class TestGuardian:
    def test_every_reconcile_is_a_heartbeat_in_every_mode(self, enforcer, watchman):
        enforcer.reconcile({}, 0.0)
        enforcer.set_mode("observe")
        enforcer.reconcile({}, 0.1)
        assert watchman.beats == 2

    def test_what_the_guardian_put_back_is_no_foreign_change(self, node, journal, enforcer, watchman):
        target = node.make("a")
        enforcer.reconcile(want((target, Limit(rbps=4 * MIB))), 0.0)
        node.meddle(target, rbps=None)
        watchman.restores = [1]
        assert kinds(enforcer.reconcile(want((target, Limit(rbps=4 * MIB))), 30.0)) == ["written"]
        assert (node.limits(target), enforcer.conflicts) == ({"rbps": 4 * MIB}, {})

    def test_it_is_asked_again_before_a_change_is_called_foreign(self, node, enforcer, watchman):
        target = node.make("a")
        enforcer.reconcile(want((target, Limit(rbps=4 * MIB))), 0.0)
        node.meddle(target, rbps=None)
        watchman.restores = [0, 0, 1]
        told = [kinds(enforcer.reconcile(want((target, Limit(rbps=4 * MIB))), now)) for now in (30.0, 31.0, 31.1)]
        assert told == [[], ["unchanged"], ["written"]]
        assert enforcer.conflicts == {}

    def test_an_agent_that_stood_still_while_it_looked_releases_nothing_twice(self, node, journal, enforcer, watchman):
        """One line was read before the guardian put everything back, the other after."""
        early, late = node.make("a"), node.make("b")
        node.meddle(late, rbps=9 * MIB)
        enforcer.reconcile(want((early, Limit(rbps=4 * MIB)), (late, Limit(rbps=4 * MIB))), 0.0)
        watchman.restores, read = [0, 1], node.files.read

        def stand_still(line):
            if line == line_of(late) and len(watchman.restores) == 1:
                node.files.read = read
                node.meddle(early, rbps=None)
                node.meddle(late, rbps=9 * MIB)
            return read(line)

        node.files.read = stand_still
        told = enforcer.reconcile({}, 30.0)
        assert {one.line.path: one.result for one in told} == {early.path: "unchanged", late.path: "unchanged"}
        assert (node.limits(early), node.limits(late), journal.entries) == ({}, {"rbps": 9 * MIB}, {})

    def test_a_write_that_raced_with_the_guardian_stays_under_control(self, node, journal, enforcer, watchman):
        target = node.make("a")
        enforcer.reconcile(want((target, Limit(rbps=4 * MIB))), 0.0)
        watchman.restores = [1]
        assert kinds(enforcer.reconcile({}, 30.0)) == ["written"]
        assert (node.limits(target), journal.entries) == ({}, {})

    def test_what_somebody_else_wrote_meanwhile_is_foreign(self, node, enforcer, watchman):
        target = node.make("a")
        enforcer.reconcile(want((target, Limit(rbps=4 * MIB))), 0.0)
        node.meddle(target, rbps=7 * MIB)
        watchman.restores = [1]
        assert kinds(enforcer.reconcile(want((target, Limit(rbps=4 * MIB))), 30.0)) == ["conflict"]
        assert node.limits(target) == {"rbps": 7 * MIB}


def test_weights_are_written_and_put_back(node, enforcer):
    target = node.make("a")
    enforcer.reconcile(want((target, Weight(300))), 0.0)
    assert node.limits(target, "io.weight") == {"weight": 300}
    enforcer.reconcile(want((target, Weight(300, "io.bfq.weight"))), 1.0)
    assert node.limits(target, "io.weight") == {}
    assert node.limits(target, "io.bfq.weight") == {"weight": 300}
    enforcer.release_all("end")
    assert node.limits(target, "io.bfq.weight") == {}


class TestReadAhead:
    def test_set_and_released(self, node, journal, enforcer):
        assert kinds(enforcer.set_read_ahead("8:0", 1023, "sequential reader")) == ["written"]
        assert node.files.read_ahead["8:0"] == 1020
        assert kinds(enforcer.set_read_ahead("8:0", 1020, "again")) == ["unchanged"]
        enforcer.reconcile({}, 1.0)
        assert node.files.read_ahead["8:0"] == 1020, "what is not a limit is not released by reconcile"
        assert kinds(enforcer.release_read_ahead("8:0", "it ended")) == ["written"]
        assert kinds(enforcer.release_read_ahead("8:0", "it ended")) == []
        assert (node.files.read_ahead["8:0"], journal.entries) == (128, {})

    def test_set_twice_goes_back_to_the_first(self, node, enforcer):
        enforcer.set_read_ahead("8:0", 512, "one")
        enforcer.set_read_ahead("8:0", 1024, "two")
        enforcer.release_all("end")
        assert node.files.read_ahead["8:0"] == 128

    def test_a_foreign_change_stays(self, node, enforcer):
        enforcer.set_read_ahead("8:0", 512, "one")
        node.files.read_ahead["8:0"] = 4096
        assert kinds(enforcer.release_all("end")) == ["conflict"]
        assert node.files.read_ahead["8:0"] == 4096

    def test_a_crash_puts_it_back(self, node, journal, enforcer):
        enforcer.set_read_ahead("8:0", 512, "one")
        Enforcer(node.files, journal, "observe")
        assert node.files.read_ahead["8:0"] == 128

    def test_a_crash_right_after_the_write_too(self, node, journal, enforcer, monkeypatch):
        """The kernel rounds to whole pages, and the journal must know what then stands there."""
        write = node.files.write

        def crash(line, changes):
            write(line, changes)
            raise KeyboardInterrupt

        monkeypatch.setattr(node.files, "write", crash)
        with pytest.raises(KeyboardInterrupt):
            enforcer.set_read_ahead("8:0", 1023, "one")
        monkeypatch.undo()
        assert node.files.read_ahead["8:0"] == 1020
        Enforcer(node.files, journal, "observe")
        assert node.files.read_ahead["8:0"] == 128

    def test_what_could_not_be_written_is_not_in_the_journal(self, node, journal, enforcer):
        node.files.fail["write"] = [broken()]
        assert kinds(enforcer.set_read_ahead("8:0", 512, "one")) == ["error"]
        assert journal.entries == {}
        enforcer.set_read_ahead("8:0", 512, "one")
        node.files.fail["write"] = [broken()]
        assert kinds(enforcer.set_read_ahead("8:0", 1024, "two")) == ["error"]
        assert kinds(enforcer.release_all("end")) == ["written"]
        assert node.files.read_ahead["8:0"] == 128

    def test_a_pulled_disk(self, node, enforcer):
        enforcer.set_read_ahead("8:0", 512, "one")
        node.pull("8:0")
        assert kinds(enforcer.release_all("end")) == ["vanished"]
        assert kinds(enforcer.set_read_ahead("8:0", 512, "one")) == ["vanished"]

    def test_a_dry_run_sets_nothing(self, node, journal):
        enforcer = Enforcer(node.files, journal, "dry-run")
        assert kinds(enforcer.set_read_ahead("8:0", 512, "one")) == ["dry_run"]
        assert node.files.read_ahead["8:0"] == 128

    def test_without_room_it_is_not_set(self, node, journal, enforcer, monkeypatch):
        def refuse(entries):
            raise JournalFull("no room")

        monkeypatch.setattr(journal, "record", refuse)
        assert kinds(enforcer.set_read_ahead("8:0", 512, "one")) == ["error"]
        assert node.files.read_ahead["8:0"] == 128


def test_raises_are_forgotten_with_time(node, enforcer):
    for number in range(50):
        target = node.make(f"j{number}")
        enforcer.reconcile(want((target, Limit(rbps=MIB))), number * 3.0)
        enforcer.reconcile({}, number * 3.0 + 1.5)
    assert len(enforcer._raises) <= 2


def test_enable_io_of_a_cgroup_that_is_gone(node, journal):
    enforcer = Enforcer(node.files, journal, "enforce", may_enable_io=True)
    assert kinds(enforcer.enable_io("/contract/gone/x", "test"))[-1] == "vanished"


def test_controllers_of_cgroups_that_are_gone_are_not_remembered(node, journal):
    enforcer = Enforcer(node.files, journal, "enforce", may_enable_io=True)
    for number in range(5):
        node.files.make(f"/contract/j{number}/step", hands_on_io=False)
        assert kinds(enforcer.enable_io(f"/contract/j{number}/step", "test"))[-1] == "written"
        node.files.remove(f"/contract/j{number}/step")
        node.files.remove(f"/contract/j{number}")
    assert [line.path for line in journal.entries] == ["/contract", "/contract/j4"]


def test_a_dry_run_enables_nothing(node, journal):
    target = Target(node.files.make("/contract/j/step", hands_on_io=False), "/contract/j/step", "8:0")
    enforcer = Enforcer(node.files, journal, "dry-run", may_enable_io=True)
    told = [kinds(enforcer.reconcile(want((target, Limit(rbps=MIB))), now)) for now in (0.0, 0.1, 0.2)]
    assert told == [[], ["dry_run", "dry_run"], []]
    assert not node.files.folders["/contract/j"].hands_on_io


def test_the_observer_does_not_even_look(node, journal):
    node.files.fail["read"] = [broken()]
    assert Enforcer(node.files, journal).reconcile(want((Target(1, "/x", "8:0"), Limit(rbps=1))), 0.0) == ()
    assert len(node.files.fail["read"]) == 1


class Clock:
    now = 50.0

    def __call__(self):
        return self.now


def waiting_cut(node, journal):
    """A cut from 100 to 50 MiB/s that waits, since a tenth of the sixth slice is over: (clock, target, enforcer)."""
    clock, target = Clock(), node.make("a")
    enforcer = Enforcer(node.files, journal, "enforce", clock=clock)
    enforcer.reconcile(want((target, Limit(rbps=100 * MIB))), 0.0)
    clock.now += 0.51
    assert kinds(enforcer.reconcile(want((target, Limit(rbps=50 * MIB))), 0.51)) == ["rate_limited"]
    return clock, target, enforcer


def test_a_cut_waits_for_its_moment_in_the_slice_and_is_then_made(node, journal):
    clock, target, enforcer = waiting_cut(node, journal)
    assert node.limits(target) == {"rbps": 100 * MIB}
    clock.now = enforcer.due
    assert kinds(enforcer.reconcile_due(0.56)) == ["written"]
    assert node.limits(target) == {"rbps": 50 * MIB}
    assert enforcer.due is None


def test_what_waits_is_not_written_over_what_came_in_between(node, journal):
    clock, target, enforcer = waiting_cut(node, journal)
    node.meddle(target, rbps=7 * MIB)
    clock.now = enforcer.due
    assert kinds(enforcer.reconcile_due(0.56)) == ["unchanged"]
    assert node.limits(target) == {"rbps": 7 * MIB}
    assert kinds(enforcer.reconcile(want((target, Limit(rbps=50 * MIB))), 0.7)) == ["conflict"]


def test_nothing_waits_once_the_mode_is_left(node, journal):
    _, target, enforcer = waiting_cut(node, journal)
    enforcer.set_mode("dry-run")
    assert enforcer.due is None
    assert enforcer.reconcile_due(1.0) == ()
    assert node.limits(target) == {}
