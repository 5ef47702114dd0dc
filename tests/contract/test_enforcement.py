"""What enforcement promises, over any implementation of the files: `node` is the fake here, the kernel in the guest."""

import pytest

from cgroup.enforce import Enforcer
from cgroup.errors import ControllerMissing, Vanished
from cgroup.journal import Journal
from cgroup.lines import Limit, Line, Target, line_of
from cgroup.restore import recover, restore_line
from tests.contract.nodes import subtree_line

MIB = 1 << 20


def kinds(results):
    return [result.result for result in results]


@pytest.fixture
def enforcer(node, journal):
    enforcer = Enforcer(node.files, journal, "enforce", may_enable_io=True)
    yield enforcer
    enforcer.release_all("end of test")


def want(*pairs):
    return {target: (limit, "test") for target, limit in pairs}


class TestFiles:
    def test_a_fresh_cgroup_has_no_limits(self, node):
        assert node.files.read(line_of(node.make("a"))) == dict.fromkeys(("rbps", "wbps", "riops", "wiops"))

    def test_keys_are_set_one_by_one(self, node):
        line = line_of(node.make("a"))
        node.files.write(line, {"rbps": MIB, "wiops": 7})
        node.files.write(line, {"rbps": 2 * MIB})
        assert node.files.read(line) == {"rbps": 2 * MIB, "wbps": None, "riops": None, "wiops": 7}
        node.files.write(line, {"rbps": None, "wiops": None})
        assert node.files.read(line) == dict.fromkeys(("rbps", "wbps", "riops", "wiops"))

    def test_devices_do_not_disturb_each_other(self, node):
        target = node.make("a")
        other = Target(target.cgroup_id, target.path, node.devices[1])
        node.files.write(line_of(target), {"rbps": MIB})
        node.files.write(line_of(other), {"rbps": 3 * MIB})
        node.files.write(line_of(target), {"rbps": None})
        assert (node.limits(target), node.limits(other)) == ({}, {"rbps": 3 * MIB})

    def test_the_greatest_numbers_read_as_none(self, node):
        line = line_of(node.make("a"))
        node.files.write(line, {"rbps": 2**64 - 1, "riops": 2**32 - 1, "wbps": 2**40})
        assert node.files.read(line) == {"rbps": None, "wbps": 2**40, "riops": None, "wiops": None}

    def test_a_removed_cgroup_has_vanished(self, node):
        target = node.make("a")
        node.remove(target)
        for action in (node.files.read, node.files.generation, node.files.locate):
            with pytest.raises(Vanished):
                action(line_of(target))
        with pytest.raises(Vanished):
            node.files.write(line_of(target), {"rbps": MIB})
        with pytest.raises(Vanished):
            node.files.cgroup_id(target.path)

    def test_a_path_that_another_cgroup_took_over_is_not_ours(self, node):
        old = node.make("a")
        node.remove(old)
        new = node.make("a")
        assert new.cgroup_id != old.cgroup_id
        with pytest.raises(Vanished):
            node.files.write(line_of(old), {"rbps": MIB})
        assert node.limits(new) == {}

    def test_an_unknown_device_has_vanished(self, node):
        target = node.make("a")
        with pytest.raises(Vanished):
            node.files.write(Line(target.cgroup_id, target.path, "240:17", "io.max"), {"rbps": MIB})

    def test_a_line_is_found_by_its_id(self, node):
        target = node.make("a")
        found = node.files.locate(Line(target.cgroup_id, "/somewhere/else", target.device, "io.max"))
        assert found.path == target.path
        assert node.files.cgroup_id(target.path) == target.cgroup_id

    def test_without_the_controller_the_file_is_missing(self, node):
        target = node.make("a")
        node.files.write(subtree_line(node), {"io": None})
        with pytest.raises(ControllerMissing, match=r"subtree_control|no io.max"):
            node.files.read(line_of(target))
        node.files.write(subtree_line(node), {"io": 1})
        assert node.files.read(line_of(target))["rbps"] is None

    def test_the_generation_changes_with_the_controller_and_with_the_disk(self, node):
        target = node.make("a")
        first = node.files.generation(line_of(target))
        assert node.files.generation(line_of(target)) == first
        node.toggle_io()
        second = node.files.generation(line_of(target))
        assert second != first
        node.pull(target.device)
        node.plug(target.device)
        assert node.files.generation(line_of(target)) not in (first, second)

    def test_a_controller_is_in_use_while_a_child_has_limits(self, node):
        target = node.make("a")
        line = subtree_line(node)
        assert not node.files.in_use(line)
        node.meddle(target, rbps=MIB)
        assert node.files.in_use(line)
        node.meddle(target, rbps=None)
        assert not node.files.in_use(line)


class TestReconcile:
    def test_a_limit_appears_and_goes(self, node, enforcer, journal):
        target = node.make("a")
        results = enforcer.reconcile(want((target, Limit(rbps=4 * MIB, riops=400))), 0.0)
        assert kinds(results) == ["written"]
        assert results[0].after == {"rbps": 4 * MIB, "riops": 400}
        assert node.limits(target) == {"rbps": 4 * MIB, "riops": 400}
        assert enforcer.actual(target) == Limit(rbps=4 * MIB, riops=400)
        assert line_of(target) in journal.entries
        assert kinds(enforcer.reconcile({}, 1.0)) == ["written"]
        assert node.limits(target) == {}
        assert journal.entries == {}

    def test_what_an_administrator_had_set_is_tightened_and_comes_back(self, node, enforcer):
        target = node.make("a")
        node.meddle(target, rbps=8 * MIB, wbps=2 * MIB)
        enforcer.reconcile(want((target, Limit(rbps=4 * MIB, wbps=16 * MIB))), 0.0)
        assert node.limits(target) == {"rbps": 4 * MIB, "wbps": 2 * MIB}
        enforcer.reconcile({}, 1.0)
        assert node.limits(target) == {"rbps": 8 * MIB, "wbps": 2 * MIB}

    def test_noise_writes_nothing(self, node, enforcer):
        target = node.make("a")
        enforcer.reconcile(want((target, Limit(rbps=100 * MIB))), 0.0)
        for step in range(20):
            noisy = Limit(rbps=100 * MIB + (-1) ** step * step * MIB // 10)
            assert kinds(enforcer.reconcile(want((target, noisy)), step / 10)) == ["unchanged"]

    def test_cuts_are_made_at_once_and_raises_are_rationed(self, node, enforcer):
        target = node.make("a")
        told = []
        for step, mib in enumerate((80, 60, 70, 80, 90, 50, 60)):
            told += kinds(enforcer.reconcile(want((target, Limit(rbps=mib * MIB))), step / 10))
        assert told == ["written", "written", "written", "written", "rate_limited", "written", "rate_limited"]
        assert node.limits(target) == {"rbps": 50 * MIB}
        assert kinds(enforcer.reconcile(want((target, Limit(rbps=60 * MIB))), 1.5)) == ["written"]

    def test_a_cgroup_that_vanishes_is_dropped_and_a_new_one_starts_afresh(self, node, enforcer, journal):
        old = node.make("a")
        enforcer.reconcile(want((old, Limit(rbps=MIB))), 0.0)
        node.remove(old)
        assert kinds(enforcer.reconcile(want((old, Limit(rbps=MIB))), 0.1)) == ["vanished"]
        assert journal.entries == {}
        new = node.make("a")
        assert (
            kinds(enforcer.reconcile(want((old, Limit(rbps=MIB)), (new, Limit(rbps=2 * MIB))), 0.2)).count("written")
            == 1
        )
        assert node.limits(new) == {"rbps": 2 * MIB}

    def test_a_cgroup_that_vanishes_while_managed_and_unwanted(self, node, enforcer, journal):
        old = node.make("a")
        enforcer.reconcile(want((old, Limit(rbps=MIB))), 0.0)
        node.remove(old)
        assert kinds(enforcer.reconcile({}, 0.1)) == ["vanished"]
        assert enforcer.reconcile({}, 0.2) == ()
        assert journal.entries == {}

    def test_a_disk_that_is_pulled_and_plugged_again_gets_its_limit_again(self, node, enforcer):
        target = node.make("a")
        enforcer.reconcile(want((target, Limit(rbps=MIB))), 0.0)
        node.pull(target.device)
        assert "error" not in kinds(enforcer.reconcile(want((target, Limit(rbps=MIB))), 0.1))
        node.plug(target.device)
        assert kinds(enforcer.reconcile(want((target, Limit(rbps=MIB))), 10.0)) == ["written"]
        assert node.limits(target) == {"rbps": MIB}
        assert enforcer.conflicts == {}

    def test_a_controller_that_was_switched_off_and_on_is_drift_not_a_foreign_change(self, node, enforcer):
        target = node.make("a")
        enforcer.reconcile(want((target, Limit(rbps=MIB))), 0.0)
        node.toggle_io()
        assert node.limits(target) == {}
        assert kinds(enforcer.reconcile(want((target, Limit(rbps=MIB))), 0.1)) == ["written"]
        assert node.limits(target) == {"rbps": MIB}
        assert enforcer.conflicts == {}

    def test_a_controller_that_was_switched_while_nothing_stood_hides_no_foreign_change(self, node, enforcer):
        target = node.make("a")
        for step, limit in enumerate((Limit(rbps=MIB), Limit())):
            enforcer.reconcile(want((target, limit)), float(step))
        node.toggle_io()
        assert kinds(enforcer.reconcile(want((target, Limit(rbps=3 * MIB))), 2.0)) == ["written"]
        node.meddle(target, wbps=7 * MIB)
        assert kinds(enforcer.reconcile(want((target, Limit(rbps=3 * MIB))), 3.0)) == ["conflict"]
        assert node.limits(target) == {"wbps": 7 * MIB}

    def test_a_released_target_is_capped_anew_while_it_is_wanted(self, node, enforcer, journal):
        target, other = node.make("a"), node.make("b")
        wanted = want((target, Limit(rbps=MIB)), (other, Limit(rbps=MIB)))
        enforcer.reconcile(wanted, 0.0)
        assert kinds(enforcer.release(target, "stuck")) == ["written"]
        assert (node.limits(target), node.limits(other)) == ({}, {"rbps": MIB})
        assert line_of(target) not in journal.entries
        assert sorted(kinds(enforcer.reconcile(wanted, 0.1))) == ["unchanged", "written"]
        assert node.limits(target) == {"rbps": MIB}


class TestForeignWriters:
    def test_a_foreign_change_wins(self, node, enforcer, journal):
        target = node.make("a")
        enforcer.reconcile(want((target, Limit(rbps=4 * MIB, wbps=4 * MIB))), 0.0)
        node.meddle(target, rbps=MIB)
        assert kinds(enforcer.reconcile(want((target, Limit(rbps=3 * MIB))), 1.0)) == ["conflict"]
        assert node.limits(target) == {"rbps": MIB}, "theirs stays, what was still ours is put back"
        assert journal.entries == {}
        assert enforcer.reconcile(want((target, Limit(rbps=2 * MIB))), 2.0) == ()
        assert (list(enforcer.conflicts), enforcer.counters["conflict"]) == ([line_of(target)], 1)
        enforcer.release_all("end")
        assert node.limits(target) == {"rbps": MIB}

    def test_a_foreign_max_is_a_foreign_change(self, node, enforcer):
        target = node.make("a")
        enforcer.reconcile(want((target, Limit(rbps=4 * MIB))), 0.0)
        node.meddle(target, rbps=None)
        told = [kinds(enforcer.reconcile(want((target, Limit(rbps=4 * MIB))), now)) for now in (0.1, 1.0, 1.2)]
        assert told == [[], [], ["conflict"]], "for a second it might be a disk that is being pulled"
        assert node.limits(target) == {}

    def test_a_foreign_change_of_a_key_that_we_never_set(self, node, enforcer):
        target = node.make("a")
        enforcer.reconcile(want((target, Limit(rbps=4 * MIB))), 0.0)
        node.meddle(target, wiops=9)
        assert kinds(enforcer.reconcile(want((target, Limit(rbps=4 * MIB))), 0.1)) == ["conflict"]
        assert node.limits(target) == {"wiops": 9}

    def test_release_leaves_what_others_changed(self, node, enforcer):
        target = node.make("a")
        enforcer.reconcile(want((target, Limit(rbps=4 * MIB, riops=100))), 0.0)
        node.meddle(target, rbps=MIB)
        enforcer.release_all("end")
        assert node.limits(target) == {"rbps": MIB}

    def test_a_conflict_ends_with_its_cgroup(self, node, enforcer):
        target = node.make("a")
        enforcer.reconcile(want((target, Limit(rbps=4 * MIB))), 0.0)
        node.meddle(target, rbps=MIB)
        enforcer.reconcile({}, 0.1)
        node.remove(target)
        enforcer.reconcile({}, 0.2)
        assert enforcer.conflicts == {}


class TestModes:
    def test_observing_touches_nothing(self, node, journal):
        target = node.make("a")
        enforcer = Enforcer(node.files, journal, "observe")
        assert enforcer.reconcile(want((target, Limit(rbps=MIB))), 0.0) == ()
        assert node.limits(target) == {}

    def test_a_dry_run_plans_as_if_it_wrote(self, node, journal):
        target = node.make("a")
        enforcer = Enforcer(node.files, journal, "dry-run")
        told = [
            kinds(enforcer.reconcile(want((target, Limit(rbps=mib * MIB))), step / 10))
            for step, mib in enumerate((80, 80, 90, 99, 110))
        ]
        assert told == [["dry_run"], ["unchanged"], ["dry_run"], ["dry_run"], ["rate_limited"]]
        assert kinds(enforcer.reconcile({}, 5.0)) == ["dry_run"]
        assert (node.limits(target), journal.entries, enforcer.managed) == ({}, {}, {})

    def test_the_kill_switch_puts_everything_back_at_once(self, node, enforcer, journal):
        targets = [node.make(name) for name in "abc"]
        enforcer.reconcile(want(*((target, Limit(rbps=MIB)) for target in targets)), 0.0)
        assert kinds(enforcer.set_mode("dry-run")) == ["written"] * 3
        assert [node.limits(target) for target in targets] == [{}, {}, {}]
        assert journal.entries == {}
        assert kinds(enforcer.reconcile(want((targets[0], Limit(rbps=MIB))), 0.1)) == ["dry_run"]
        enforcer.set_mode("enforce")
        assert kinds(enforcer.reconcile(want((targets[0], Limit(rbps=MIB))), 0.2)) == ["written"]

    def test_protected_cgroups_are_never_written_and_it_is_said_once(self, node, enforcer):
        target = Target(node.files.cgroup_id("/"), "/", node.devices[0])
        told = [kinds(enforcer.reconcile(want((target, Limit(rbps=MIB))), float(step))) for step in range(3)]
        assert told == [["error"], [], []]


class TestControllers:
    def test_the_controller_is_enabled_where_allowed_and_taken_back(self, node, enforcer, journal):
        target = node.make("a")
        node.files.write(subtree_line(node), {"io": None})
        told = [kinds(enforcer.reconcile(want((target, Limit(rbps=MIB))), now)) for now in (0.0, 0.1, 0.2)]
        assert told == [[], ["written"], ["written"]], "a cgroup loses its files just before it vanishes"
        assert node.limits(target) == {"rbps": MIB}
        enforcer.release_all("end")
        assert node.files.read(subtree_line(node)) == {"io": None}
        assert journal.entries == {}

    def test_it_is_left_on_when_somebody_else_came_to_rely_on_it(self, node, enforcer):
        target = node.make("a")
        node.files.write(subtree_line(node), {"io": None})
        enforcer.enable_io(target.path, "test")
        node.meddle(target, rbps=MIB)
        enforcer.release_all("end")
        assert node.files.read(subtree_line(node)) == {"io": 1}
        assert node.limits(target) == {"rbps": MIB}

    def test_without_leave_it_is_not_enabled(self, node, journal):
        target = node.make("a")
        node.files.write(subtree_line(node), {"io": None})
        enforcer = Enforcer(node.files, journal, "enforce")
        told = [kinds(enforcer.reconcile(want((target, Limit(rbps=MIB))), now)) for now in (0.0, 0.1, 0.2)]
        assert told == [[], ["error"], []]
        assert kinds(enforcer.enable_io(target.path, "test")) == ["unchanged", "error"]
        assert node.files.read(subtree_line(node)) == {"io": None}


class TestRestore:
    def crash(self, node, path, limits, *, before=()):
        """Enforce, then lose the agent: nothing is released, only the journal stays. Give the journal reopened."""
        journal = Journal.open(path)
        enforcer = Enforcer(node.files, journal, "enforce")
        for step, wanted in enumerate((*before, limits)):
            enforcer.reconcile(want(*wanted.items()), step * 2.0)
        journal.close()
        return Journal.open(path)

    def test_start_up_after_a_crash(self, node, tmp_path):
        one, two = node.make("a"), node.make("b")
        node.meddle(two, rbps=9 * MIB, wiops=3)
        journal = self.crash(
            node,
            str(tmp_path / "crashed"),
            {one: Limit(rbps=3 * MIB), two: Limit(rbps=MIB)},
            before=({one: Limit(rbps=MIB)},),
        )
        assert node.limits(one) == {"rbps": 3 * MIB}
        enforcer = Enforcer(node.files, journal, "observe")
        assert len(enforcer.recovered.restored) == 2
        assert (node.limits(one), node.limits(two)) == ({}, {"rbps": 9 * MIB, "wiops": 3})
        assert journal.entries == {}
        journal.close()

    def test_limits_go_before_the_controller_that_carries_them(self, node, tmp_path):
        target = node.make("a")
        node.files.write(subtree_line(node), {"io": None})
        journal = Journal.open(str(tmp_path / "crashed"))
        enforcer = Enforcer(node.files, journal, "enforce", may_enable_io=True)
        enforcer.enable_io(target.path, "test")
        enforcer.reconcile(want((target, Limit(rbps=MIB))), 0.0)
        assert len(recover(node.files, journal).restored) == 2
        assert node.files.read(subtree_line(node)) == {"io": None}
        journal.close()

    def test_only_what_is_still_ours_is_restored(self, node, tmp_path):
        one, two = node.make("a"), node.make("b")
        journal = self.crash(node, str(tmp_path / "crashed"), {one: Limit(rbps=MIB, riops=50), two: Limit(rbps=MIB)})
        node.meddle(one, rbps=2 * MIB)
        node.remove(two)
        report = recover(node.files, journal)
        assert node.limits(one) == {"rbps": 2 * MIB}
        assert (len(report.restored), len(report.foreign), len(report.vanished), report.errors) == (1, 1, 1, ())
        assert recover(node.files, journal).restored == ()
        journal.close()

    def test_restoring_twice_is_harmless(self, node):
        target = node.make("a")
        line, prior = line_of(target), dict.fromkeys(("rbps", "wbps", "riops", "wiops"))
        node.meddle(target, rbps=MIB)
        ours = ({**prior, "rbps": MIB},)
        assert restore_line(node.files, line, prior, ours).after == {"rbps": None}
        assert restore_line(node.files, line, prior, ours).after == {}

    def test_a_line_is_restored_at_the_path_where_its_cgroup_lives(self, node):
        target = node.make("a")
        prior = dict.fromkeys(("rbps", "wbps", "riops", "wiops"))
        node.meddle(target, rbps=MIB)
        stray = Line(target.cgroup_id, "/as/seen/in/a/container", target.device, "io.max")
        restore_line(node.files, stray, prior, ({**prior, "rbps": MIB},))
        assert node.limits(target) == {}
