"""An agent reduced to its hands: enforcer, journal and guardian, moved by a made-up sequence of wishes.

`python -m tests.unit.cgroup.driver '{"journal": …, "root": …, "sys_root": …, "targets": [["/a", "8:0"]], …}'` prints
one JSON line when the first limits stand, then goes on until it is killed; SIGTERM ends it in order.
"""

import contextlib
import json
import random
import signal
import sys
import time
from pathlib import Path

from cgroup.enforce import Enforcer
from cgroup.errors import Vanished
from cgroup.files import KernelFiles
from cgroup.guardian import Guardian
from cgroup.journal import Journal
from cgroup.lines import Limit, Target

MIB = 1 << 20


def wishes(targets, keys, rng):
    """Now and then a target is not wanted; else each key gets a number."""
    wanted = {}
    for target in targets:
        if rng.random() < 0.9:
            limits = {key: rng.randint(1, 4000) * (MIB if key.endswith("bps") else 1) for key in keys}
            wanted[target] = (Limit(**limits), "driver")
    return wanted


def present(files, paths):
    """Return the targets whose cgroups are there now, under the ids they have now."""
    targets = []
    for path, device in paths:
        with contextlib.suppress(Vanished):
            targets.append(Target(files.cgroup_id(path), path, device))
    return targets


def main(options):
    rng = random.Random(options.get("seed", 0))
    ended = []
    signal.signal(signal.SIGTERM, lambda number, frame: ended.append(number))
    files = KernelFiles(options["root"], options["sys_root"])
    journal = Journal.open(options["journal"], wait_seconds=5.0)
    guardian = None
    if options.get("guardian", True):
        guardian = Guardian(
            options["journal"],
            options["root"],
            options["sys_root"],
            limit_seconds=options.get("limit_seconds", 5.0),
            cgroup=options.get("guardian_cgroup", ""),
        )
        guardian.start()
    enforcer = Enforcer(files, journal, "enforce", guardian=guardian)
    targets = present(files, options["targets"])
    keys = options.get("keys", ["rbps"])
    fixed = options.get("fixed")
    first = {target: (Limit(**(fixed or dict.fromkeys(keys, 5000 * MIB))), "driver") for target in targets}
    enforcer.reconcile(first, time.monotonic())
    status = guardian.status if guardian else None
    ready = {"guardian": status.pid if status else 0, "rss": status.resident_bytes if status else 0}
    ready |= {"moved": bool(status and status.moved), "note": status.note if status else ""}
    ready |= {"recovered": str(enforcer.recovered)}
    if options.get("status"):
        tell(options["status"], enforcer, guardian)
    print(json.dumps(ready), flush=True)
    while not ended:
        targets = present(files, options["targets"])
        enforcer.reconcile(first if fixed else wishes(targets, keys, rng), time.monotonic())
        if guardian:
            guardian.check()
        if options.get("status"):
            tell(options["status"], enforcer, guardian)
        time.sleep(options.get("period", 0.01) * rng.random())
    enforcer.close()
    if guardian:
        guardian.close()


def tell(path, enforcer, guardian):
    """Leave what the enforcer counted where the test can read it."""
    known = {"counters": dict(enforcer.counters), "suspended": enforcer.suspended}
    known |= {"conflicts": [line.path for line in enforcer.conflicts]}
    known |= {"guardian": guardian.status.pid if guardian else 0, "starts": guardian.status.starts if guardian else 0}
    known |= {"restores": guardian.status.restores if guardian else 0}
    new = Path(path + ".new")
    new.write_text(json.dumps(known))
    new.replace(path)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
