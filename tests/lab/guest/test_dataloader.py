"""The DataLoader probe on a stock kernel and an emulated processor, against the trainers' own books.

There `next()` is mostly unpacking, and uprobes and pipes cost more of it, so stalls are held to 10 %.
"""

import uuid

import pytest

from bpf.dataloader import DataLoaderProbe
from bpf.loader import Loader
from bpf.samples import ProbeState
from tests.lab import groups
from tests.native.training import Trainer, Watch, depth_error, farm_of_trainers, find_hooks, train, wait_error

pytestmark = [
    pytest.mark.guest,
    pytest.mark.nightly,
    pytest.mark.timeout(900),
]  # minutes on an emulated CPU; native by day

STARVED = 0.25


@pytest.fixture(scope="module")
def farm():
    with farm_of_trainers() as process:
        yield process


@pytest.fixture(scope="module")
def loader():
    with Loader() as made:
        yield made


@pytest.fixture(scope="module", params=["hooks", "pipes"])
def probe(request, loader):
    made = DataLoaderProbe(loader, hooks=request.param == "hooks")
    assert made.status().state is not ProbeState.UNAVAILABLE, made.status().why
    yield made
    assert made.status().lost_events == 0
    made.close()


@pytest.fixture
def start(farm, probe, tmp_path):
    """Start trainers in cgroups of their own."""
    started, folders = [], []

    def begin(**plan):
        folder = groups.ROOT / f"test-{uuid.uuid4().hex[:8]}"
        folder.mkdir()
        folders.append(folder)
        started.append(Trainer(farm, folder, tmp_path / f"books-{len(started)}", **plan))
        return started[-1]

    if probe._hooks and not probe._libraries:
        find_hooks(probe, begin(batches=1))
    yield begin
    probe.manage([])
    for trainer in started:
        trainer.close()
    for folder in folders:
        groups.remove(folder)


PLANS = {
    "2 workers": {"workers": 2, "batches": 40, "load": 400, "compute": 100},
    "4 workers persistent": {"workers": 4, "batches": 30, "epochs": 2, "persistent": True, "load": 800, "compute": 80},
    "iterable": {"workers": 2, "batches": 30, "epochs": 2, "iterable": True, "load": 400, "compute": 100},
}


@pytest.mark.parametrize("name", PLANS)
def test_iterations_depth_and_stall(probe, start, name):
    for is_last in (False, True):
        trainer, watch = train(probe, start, **PLANS[name])
        books, seen = trainer.books(), watch.only()
        assert seen.last.iterations == len(books)
        assert seen.last.grade == ("U" if probe._hooks else "S2")
        depth, (wait, starved) = depth_error(seen.events, trainer.ready()), wait_error(seen, books)
        print(f"{name}: {len(books)} iterations, depth ±{depth:.3f}, stall {wait:+.1%}, starved {starved:.0%}")
        assert starved > STARVED, "this plan is meant to starve"
        if is_last or (depth <= 0.1 and abs(wait) <= 0.1):
            assert depth <= 0.1
            assert abs(wait) <= 0.1
            return


def test_no_workers(probe, start):
    trainer, watch = train(probe, start, workers=0, batches=20, epochs=2, load=200, compute=50)
    if not probe._hooks:
        assert watch.seen == {}
        return
    books, seen = trainer.books(), watch.only()
    assert seen.last.iterations == len(books)
    assert abs(wait_error(seen, books)[0]) <= 0.1


def test_job_below_a_managed_cgroup(probe, start):
    """The ancestor is found whatever the kernel's cgroup layout."""
    trainer = start(batches=10)
    probe.manage([groups.ROOT.stat().st_ino])
    watch = Watch(probe)
    watch.run(trainer)
    assert {seen.last.cgroup_id for seen in watch.seen.values()} == {groups.ROOT.stat().st_ino}
