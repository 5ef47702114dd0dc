"""Whatever happens to the files, the disks, the journal and the agent: in the end nothing of ours stands.

Found with it: a file was made anew while its line held no limit, and a foreign change later looked like a line that
nobody had touched; what stood there of ours became what "was there before us".
"""

import errno
import random
from collections import defaultdict
from contextlib import suppress

import pytest

from cgroup.enforce import Enforcer
from cgroup.errors import JournalFull
from cgroup.journal import Journal
from cgroup.lines import IO_MAX, Limit, Target
from cgroup.restore import recover
from tests.contract.nodes import FakeNode

MIB = 1 << 20
KEYS = ("rbps", "wbps", "riops", "wiops")


class Life:
    """A node with four cgroups that come and go, two disks, another writer, and an agent that now and then dies."""

    def __init__(self, seed, path):
        self.rng, self.path, self.node, self.now = random.Random(seed), path, FakeNode(), 100.0
        self.cgroups, self.pulled = {}, set()
        self.theirs = defaultdict(dict)  # what somebody else wrote last, by (name, disk) and key
        self.has_clock = self.rng.random() < 0.5
        self.begin()

    def begin(self):
        self.journal = Journal.open(self.path)
        clock = (lambda: self.now) if self.has_clock else None
        self.enforcer = Enforcer(
            self.node.files, self.journal, "enforce", clock=clock, may_enable_io=self.rng.random() < 0.5
        )

    def wishes(self, part=0.6):
        limits = {target: self.limit() for target in self.targets() if self.rng.random() < part}
        return {target: (limit, "life") for target, limit in limits.items()}

    def limit(self):
        rbps, riops = self.rng.randint(1, 50) * MIB, self.rng.randint(10, 5000)
        return Limit(rbps=self.rng.choice([None, rbps]), riops=self.rng.choice([None, riops]))

    def targets(self):
        return [Target(one.cgroup_id, one.path, disk) for one in self.cgroups.values() for disk in self.node.devices]

    def cgroup_comes_or_goes(self):
        name = self.rng.choice("abcd")
        if name in self.cgroups:
            self.node.remove(self.cgroups.pop(name))
        else:
            self.cgroups[name] = self.node.make(name)
        for disk in self.node.devices:
            self.theirs[name, disk] = {}

    def disk_comes_or_goes(self):
        disk = self.rng.choice(self.node.devices)
        (self.node.plug if disk in self.pulled else self.node.pull)(disk)
        self.pulled ^= {disk}
        for name in self.cgroups:
            self.theirs[name, disk] = {}

    def controller_goes_and_comes(self):
        self.node.toggle_io()
        self.theirs.clear()

    def somebody_else_writes(self):
        name, disk, key = self.rng.choice("abcd"), self.rng.choice(self.node.devices), self.rng.choice(KEYS)
        if name in self.cgroups and disk not in self.pulled:
            value = self.rng.choice([None, 60 * MIB + self.rng.randint(1, MIB)])
            self.node.files.fail = {}
            self.node.meddle(Target(self.cgroups[name].cgroup_id, self.cgroups[name].path, disk), **{key: value})
            self.theirs[name, disk][key] = value

    def files_fail(self):
        fault = OSError(self.rng.choice([errno.EIO, errno.EINVAL]), "broken")
        self.node.files.fail[self.rng.choice(["read", "write"])] = [fault] * self.rng.randint(1, 3)

    def mode_changes(self):
        self.enforcer.set_mode(self.rng.choice(["enforce", "enforce", "dry-run", "observe"]))

    def journal_is_full(self):
        def refuse(entries):
            raise JournalFull("no room")

        self.journal.record = refuse
        self.enforcer.reconcile(self.wishes(), self.now)
        del self.journal.record

    def agent_dies(self):
        """Between two writes, or between the journal and one."""
        write, left = self.node.files.write, [self.rng.randint(0, 3)]

        def die(line, changes):
            if not left[0]:
                raise KeyboardInterrupt
            left[0] -= 1
            write(line, changes)

        self.node.files.write = die
        with suppress(KeyboardInterrupt):
            self.enforcer.reconcile(self.wishes(), self.now)
        self.node.files.write = write
        self.journal.close()
        self.begin()

    def go_on(self):
        """One pass, after something happened or not."""
        self.now += self.rng.choice([0.05, 0.1, 0.1, 0.1, 0.5, 2.0, 6.0])
        events = (self.cgroup_comes_or_goes, self.disk_comes_or_goes, self.controller_goes_and_comes, self.mode_changes,
                  self.somebody_else_writes, self.files_fail, self.journal_is_full, self.agent_dies)  # fmt: skip
        if self.rng.random() < 0.4:
            self.rng.choices(events, weights=(10, 3, 3, 2, 7, 10, 2, 3))[0]()
        self.enforcer.reconcile(self.wishes(), self.now)
        if self.enforcer.due is not None and self.rng.random() < 0.7:
            self.now = max(self.now, self.enforcer.due)
            self.enforcer.reconcile_due(self.now)

    def end(self):
        """In order, or not; then what every start and `prefetchd restore` do. Returns what the journal still holds."""
        self.node.files.fail = {}
        if self.rng.random() < 0.5:
            self.enforcer.close()
        self.journal.close()
        journal = Journal.open(self.path)
        recover(self.node.files, journal)
        journal.close()
        return dict(journal.entries)

    def stands(self):
        """What stands in the files that is not what somebody else wrote last, by (name, disk, key)."""
        return {
            (name, disk, key): found.get(key)
            for name, cgroup in self.cgroups.items()
            for disk in self.node.devices
            for found in (self.node.files.folders[cgroup.path].values.get((IO_MAX, disk), {}),)
            for key in KEYS
            if found.get(key) != self.theirs[name, disk].get(key)
        }


def live(seed, folder):
    life = Life(seed, str(folder / f"journal{seed}"))
    for _ in range(120):
        life.go_on()
    left = life.end()
    assert (life.stands(), left) == ({}, {}), f"seed {seed}"


@pytest.mark.parametrize("seeds", [range(40), pytest.param(range(40, 1500), marks=pytest.mark.nightly)])
def test_nothing_of_ours_stands_in_the_end(tmp_path, seeds):
    for seed in seeds:
        live(seed, tmp_path)
