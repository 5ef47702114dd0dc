"""The DataLoader probe on real PyTorch training loops, against the books that these keep themselves.

Every value is compared with what the trainer and its workers write down themselves (trainer_torch.py). Counts are exact
at once; a machine that has other work to do disturbs times and depths, so these may be tried again.
"""

import contextlib
import importlib.util
import statistics
import subprocess
import sys
import time

import pytest

from bpf.dataloader import MAX_EVENTS_PER_READ, RING_FULL, TOO_MANY, DataLoaderProbe, Limits
from bpf.dataloader_events import decode_event
from bpf.dataloader_libraries import UNUSED_NS
from bpf.samples import ProbeState
from tests.native.conftest import missing
from tests.native.processes import wait_until
from tests.native.training import (
    Trainer,
    Watch,
    depth_error,
    farm_of_trainers,
    find_hooks,
    lateness_ns,
    long_waits,
    train,
    wait_error,
)

pytestmark = pytest.mark.native

STARVED = 0.25
LATE_NS = 3_000_000


@pytest.fixture(scope="module")
def farm():
    if importlib.util.find_spec("torch") is None:
        missing("PyTorch is not installed: pip install -e .[torch]")
    with farm_of_trainers() as process:
        yield process


@pytest.fixture(scope="module", params=["hooks", "pipes"])
def any_probe(request, loader):
    made = DataLoaderProbe(loader, hooks=request.param == "hooks")
    assert made.status().state is not ProbeState.UNAVAILABLE, made.status().why
    yield made
    assert made.status().lost_events == 0
    made.close()


@pytest.fixture
def probe(any_probe):
    yield any_probe
    any_probe.manage([])


@pytest.fixture
def hooks(any_probe):
    return any_probe._hooks


@pytest.fixture
def start(farm, probe, hooks, make_cgroup, tmp_path):
    """Start trainers, in one cgroup each unless one is given; the hooks are in place before the first one trains."""
    started = []

    def begin(cgroup=None, **plan):
        started.append(Trainer(farm, cgroup or make_cgroup(), tmp_path / f"books-{len(started)}", **plan))
        return started[-1]

    if hooks and not probe._libraries:
        find_hooks(probe, begin(batches=1))
    yield begin
    for trainer in started:
        trainer.close()


PLANS = {
    "2 workers": {"workers": 2, "prefetch": 2, "batches": 80},
    "4 workers uneven": {"workers": 4, "prefetch": 4, "batches": 100, "load": 60, "uneven": True},
    "prefetch 4": {"workers": 2, "prefetch": 4, "batches": 80},
    "iterable": {"workers": 2, "batches": 80, "epochs": 2, "iterable": True},
    "iterable persistent": {"workers": 4, "batches": 80, "epochs": 2, "iterable": True, "persistent": True, "load": 60},
    "persistent": {"workers": 2, "batches": 60, "epochs": 3, "persistent": True, "uneven": True},
    "any order": {"workers": 4, "batches": 80, "load": 60, "uneven": True, "in_order": False},
    "large batches": {"workers": 2, "batches": 60, "batch": 600, "load": 30, "start": "spawn", "pool": True},
}


@pytest.mark.parametrize("name", PLANS)
def test_iterations_depth_and_stall(probe, hooks, start, name):
    for is_last in (False, True):
        trainer, watch = train(probe, start, **PLANS[name])
        books, seen = trainer.books(), watch.only()
        assert seen.last.iterations == len(seen.events) == len(books)
        assert seen.last.epoch == PLANS[name].get("epochs", 1)
        assert seen.last.capacity == PLANS[name]["workers"] * PLANS[name].get("prefetch", 2)
        assert seen.last.grade == ("U" if hooks else "S2")
        depth, (wait, starved) = depth_error(seen.events, trainer.ready()), wait_error(seen, books)
        late_ns = lateness_ns(seen.events, books)
        print(f"{name}: {len(books)} iterations, depth ±{depth:.3f}, stall {wait:+.1%}, starved {starved:.0%}")
        assert starved > STARVED, "this plan is meant to starve"
        if is_last or (depth <= 0.1 and abs(wait) <= 0.05 and late_ns <= LATE_NS):
            assert depth <= 0.1
            assert abs(wait) <= 0.05
            assert late_ns <= LATE_NS
            return


def test_a_loop_that_lacks_the_next_batch_starves_whatever_is_ready_behind_it(probe, hooks, start):
    """Workers of uneven speed finish out of order; PyTorch delivers in order."""
    plan = {"workers": 4, "prefetch": 4, "batches": 120, "load": 60, "uneven": True, "compute": 8}
    for is_last in (False, True):
        trainer, watch = train(probe, start, **plan)
        books, seen = trainer.books(), watch.only()
        hidden = sum(event.takeable == 0 < event.depth for event in seen.events)
        waited, starved = long_waits(seen)
        print(f"{hidden} of {len(books)} times others were ready; {starved:.2f} of {waited:.2f} s judged to starve")
        assert wait_error(seen, books)[1] > STARVED
        assert hidden > 0.2 * len(books)
        if is_last or starved >= 0.9 * waited:
            assert starved >= 0.9 * waited
            return


def test_a_loop_that_is_fed_does_not_starve(probe, start):
    """The workers are twice as fast as the loop, and as uneven; only the first batches of an epoch are waited for."""
    plan = {"workers": 4, "prefetch": 4, "batches": 100, "load": 40, "uneven": True, "compute": 20}
    for is_last in (False, True):
        trainer, watch = train(probe, start, **plan)
        seen = watch.only()
        first = sum(got - asked for _, asked, got in trainer.books()[: plan["workers"]]) / 1e9
        waited, starved = long_waits(seen)
        print(f"{starved:.2f} of {waited:.2f} s judged to starve, {first:.2f} s for the first batches")
        if is_last or starved <= first:
            assert starved <= first
            later = [event.takeable for event in seen.events[20:-16]]
            assert statistics.median(later) >= 12
            return


def test_pin_memory_thread(probe, hooks, start):
    """It reads ahead for the loop: the pipes show the last batches late, and only the waits for it (grade S1).

    These are less than all of `next()`, and those of the first moments, before they are asked for, are missing.
    """
    for is_last in (False, True):
        trainer, watch = train(probe, start, batches=60, epochs=2, pinned=True)
        books, seen = trainer.books(), watch.only()
        assert seen.last.iterations == len(books)
        assert seen.last.grade == ("U" if hooks else "S1")
        depth, (wait, _) = depth_error(seen.events, trainer.ready()), wait_error(seen, books)
        print(f"pinned: depth ±{depth:.3f}, stall {wait:+.1%}")
        lowest = -0.05 if hooks else -0.4
        if is_last or (depth <= 0.15 and lowest <= wait <= 0.05):
            assert depth <= (0.15 if hooks else 0.3)
            assert lowest <= wait <= 0.05
            return


def test_no_workers(probe, hooks, start):
    trainer, watch = train(probe, start, workers=0, batches=40, epochs=2)
    if not hooks:
        assert watch.seen == {}
        return
    books, seen = trainer.books(), watch.only()
    assert seen.last.iterations == len(books)
    assert seen.last.depth is seen.last.capacity is None
    assert abs(wait_error(seen, books)[0]) <= 0.05


@pytest.mark.parametrize("workers", [2, 0])
def test_validation_is_told_from_training(probe, hooks, start, workers):
    plan = {"validation_batches": 8, "validation_workers": workers, "shuffle": True}
    trainer, watch = train(probe, start, workers=2, batches=40, epochs=3, **plan)
    training = [seen.last for seen in watch.seen.values() if not seen.last.validation]
    assert [stream.iterations for stream in training] == [120]
    if hooks or workers:
        validation = [seen.last for seen in watch.seen.values() if seen.last.validation]
        assert [(stream.iterations, stream.epoch) for stream in validation] == [(24, 3)]
        assert len(trainer.books("validation")) == 24


def test_loop_broken_off_early(probe, start):
    for persistent in (False, True):
        trainer, watch = train(probe, start, batches=40, epochs=3, break_after=20, persistent=persistent)
        assert watch.only().last.iterations == len(trainer.books()) == 60


def test_loader_consumed_by_a_thread(probe, start):
    """Cadence and depth hold; whose loop waits cannot be known."""
    trainer, watch = train(probe, start, batches=50, in_thread=True)
    seen = watch.only().last
    assert (seen.iterations, seen.wait_ns, seen.grade) == (len(trainer.books()), None, "")


def test_ranks_of_one_job(probe, start, make_cgroup):
    job = make_cgroup()
    ranks = [start(make_cgroup(parent=job), batches=40, load=load) for load in (20, 40)]
    stranger = start(batches=10)
    probe.manage([job.stat().st_ino])
    watch = Watch(probe)
    watch.run(*ranks, stranger)
    assert [seen.last.iterations for seen in watch.seen.values()] == [40, 40]
    assert {seen.last.cgroup_id for seen in watch.seen.values()} == {job.stat().st_ino}
    assert len({name.partition("/")[0] for name in watch.seen}) == 2


def test_restarted_trainer_is_another_stream(probe, start, make_cgroup):
    job = make_cgroup()
    probe.manage([job.stat().st_ino])
    watch = Watch(probe)
    for batches in (20, 30):
        trainer = start(job, batches=batches)
        watch.run(trainer)
        trainer.close()
    watch.until(lambda: not watch.read())
    assert sorted(seen.last.iterations for seen in watch.seen.values()) == [20, 30]


def test_late_attach(probe, start):
    """From the middle of an epoch: iterations from then on, depth as soon as it can be known."""
    trainer = start(batches=150, epochs=2, workers=2, prefetch=2)
    trainer.say()
    wait_until(lambda: trainer.has_ready(60), said="it does not train")
    probe.manage([trainer.cgroup_id])
    attached, watch = time.monotonic_ns(), Watch(probe)
    watch.finish(trainer)
    books, seen = trainer.books(), watch.only()
    later = [book for book in books if book[2] > attached]
    assert 100 < len(later) < len(books), "attached too early or too late to say anything"
    assert abs(seen.last.iterations - len(later)) <= 4
    assert seen.last.capacity == 4
    assert depth_error(seen.events[-100:], trainer.ready(), taken=len(books) - 100) <= 0.15


def test_waiting_is_seen_while_it_lasts(probe, start):
    trainer = start(batches=2, load=3000, workers=1)
    probe.manage([trainer.cgroup_id])
    watch = Watch(probe)
    trainer.say()
    watch.until(lambda: any(seen.last.iterations for seen in watch.seen.values()))
    watch.until(lambda: watch.only().last.waiting_since_ns is not None)
    since = watch.only().last.waiting_since_ns
    watch.finish(trainer)
    _, asked, _ = trainer.books()[1]
    assert abs(since - asked) < 50_000_000
    assert watch.only().last.waiting_since_ns is None


def test_nothing_is_traced_while_nobody_is_managed(probe, start):
    trainer = start(batches=5)
    watch = Watch(probe)
    probe.manage([])
    watch.run(trainer)
    assert watch.seen == {}
    assert not any(target.startswith("tracepoint:") for target in probe._program.attached)


def test_what_was_told_of_a_cgroup_let_go_is_dropped(probe, start):
    """It may lie in the ring still, and would make a stream that nobody manages."""
    gone, managed = start(batches=200), start(batches=1)
    probe.manage([gone.cgroup_id])
    gone.say()
    wait_until(lambda: gone.has_ready(20), said="it does not train")
    probe.manage([managed.cgroup_id])
    watch = Watch(probe)
    watch.run(managed)
    assert {seen.last.cgroup_id for seen in watch.seen.values()} == {managed.cgroup_id}
    assert watch.only().last.iterations == 1


def test_lost_events_are_counted_and_survived(loader, start, probe):
    """A ring for 50 events in a loop that makes more between two reads."""
    small = DataLoaderProbe(loader, hooks=False, limits=Limits(ring_pages=1))
    try:
        trainer, watch = train(small, start, batches=60, load=4, compute=1)
        assert small.status().lost_events > 0
        assert watch.only().last.iterations <= len(trainer.books())
    finally:
        small.close()


def test_hooks_on_a_library_that_nobody_has_are_gone_from_the_kernel(probe, hooks, start):
    """They held it, and with it the file system of a container that had ended."""
    start(batches=1)
    assert len(probe._program._bpf.uprobe_fds) == (3 if hooks else 0)
    for now_ns in (1, 1 + UNUSED_NS):
        probe._libraries.release_unused(lambda _: False, now_ns)
    assert probe._program._bpf.uprobe_fds == {}
    assert len(probe._libraries) == 0


CROWD = """
import subprocess, sys
open(f"{sys.argv[1]}/cgroup.procs", "w").write("0")
for _ in range(100):
    subprocess.run(["/bin/true"])
print("done", flush=True)
sys.stdin.read()
"""
TALKER = """
import os, pickle, struct, sys
open(f"{sys.argv[1]}/cgroup.procs", "w").write("0")
message = pickle.dumps((7, [1, 2, 3]))
message = struct.pack(">i", len(message)) + message
inward, outward = os.pipe()
for _ in range(int(sys.argv[2])):
    os.write(outward, message)
    os.read(inward, 65536)
print("done", flush=True)
sys.stdin.read()
"""


@contextlib.contextmanager
def running(program, cgroup, *arguments):
    """A process in the cgroup that has done what its program says, and still lives."""
    command = [sys.executable, "-c", program, cgroup, *map(str, arguments)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout.readline() == b"done\n"
        yield process
        process.stdin.close()


def test_processes_that_come_and_go_are_not_remembered(loader, make_cgroup):
    """A batch job starts more of them than are looked into, for weeks."""
    cgroup, probe = make_cgroup(), DataLoaderProbe(loader)
    probe.manage([cgroup.stat().st_ino])
    with running(CROWD, cgroup):
        probe.read(time.monotonic_ns())
        assert len(probe._candidates) <= 2
    probe.close()


def test_nobody_is_known_once_nobody_is_managed(loader, make_cgroup):
    """A number that is used again would pass for a process that was told of."""
    cgroup, probe = make_cgroup(), DataLoaderProbe(loader)
    probe.manage([cgroup.stat().st_ino])
    with running(CROWD, cgroup):
        probe.read(time.monotonic_ns())
        assert len(probe._program.map("processes")) > 0
        probe.manage([])
        assert len(probe._program.map("processes")) == 0
        assert not probe._candidates
    probe.close()


def test_a_job_that_floods_leaves_room_for_others(loader, make_cgroup):
    cgroup = make_cgroup()
    probe = DataLoaderProbe(loader, limits=Limits(events_per_second=10_000_000, job_events_per_second=100))
    probe.manage([cgroup.stat().st_ino])
    with running(TALKER, cgroup, 12_000):
        probe.read(time.monotonic_ns())
    assert int(probe._dropped[RING_FULL]) == 0
    assert int(probe._dropped[TOO_MANY]) > 8_000
    probe.close()


def test_a_read_has_an_end_however_much_is_told(loader, make_cgroup, monkeypatch):
    """The ring may be filled as fast as it is read."""
    cgroup, seen = make_cgroup(), []
    plenty = Limits(ring_pages=1024, events_per_second=10_000_000, job_events_per_second=10_000_000)
    probe = DataLoaderProbe(loader, hooks=False, limits=plenty)
    probe.manage([cgroup.stat().st_ino])
    monkeypatch.setattr("bpf.dataloader.decode_event", lambda record: seen.append(1) or decode_event(record))
    with running(TALKER, cgroup, MAX_EVENTS_PER_READ + 1000):
        probe.read(time.monotonic_ns())
        assert len(seen) == MAX_EVENTS_PER_READ
        probe.read(time.monotonic_ns())
        assert MAX_EVENTS_PER_READ + 1000 <= len(seen) < 2 * MAX_EVENTS_PER_READ
    probe.close()
