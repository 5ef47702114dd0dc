"""Making fragmented files contiguous on a disk with moving parts: what it gains, and what others wait meanwhile.

A victim reads a badly fragmented set around and around, another job reads contiguous shards of the same disk. First
both run without an agent; then under one that moves files, where it counts what the other waits while it does; at last
the victim runs without it again, as it did over a set of the same size that was written contiguous. `-k "ext4-1"`
chooses.
"""

import contextlib
import hashlib
import os
import statistics
import time
from pathlib import Path

import pytest

from tests.lab import groups
from tests.lab.disks import find_disk, mounted
from tests.lab.rearrange_data import FRAGMENT, FRAGMENTED, FRAGMENTED_BYTES, MIB, lay_out, pieces
from tests.lab.rearrange_runs import agent_of, drop_caches, rows_of, started, state

pytestmark = [pytest.mark.guest, pytest.mark.nightly, pytest.mark.timeout(1800)]

DISKS = {"ext4": "hdd0", "xfs": "hdd2"}
ALONE = {"ext4": (), "xfs": ("read_ahead = false",)}
"""On xfs reading ahead alone ends the victim's starvation before the files are moved, so there it is switched off."""
SETTLED_SECONDS = 6.0
SECONDS = 24.0
BESIDE_SECONDS = 66.0
"""Of what the other job waits without an agent, means of 18 s were anything from 1.5 to 7.0 ms."""
MOVING_SECONDS = 930.0
SHARE = 0.1
"""The default; a file of 128 pieces takes ten seconds and more. At 0.2 half of the set took up to 210 s."""
SHARDS = {"kind": "shards", "workers": 2, "queue": 4, "batch_bytes": 2 * MIB, "compute_seconds": 0.01}
VICTIM = SHARDS | {"memory_bytes": 32 * MIB}
OTHER = SHARDS | {"batch_bytes": MIB, "compute_seconds": 0.15}
AHEAD = {"memory_mib": 24}
"""The helper has 32 more for itself: with the job's they must not hold the whole set, or nobody waits for its seeks."""


@pytest.fixture(scope="module")
def data():
    """Gives a folder on the disk with a file system of that kind, made when it is first asked for."""
    with contextlib.ExitStack() as stack:
        mounts = {}

        def get(kind):
            if kind not in mounts:
                mounts[kind] = stack.enter_context(mounted(find_disk(DISKS[kind]), kind))
                for name in ("many", "mended"):
                    lay_out(mounts[kind], name)
            return mounts[kind]

        yield get


def fresh(mount, name):
    """A fragmented set in a folder of that name."""
    folder = lay_out(mount, "fragmented")
    return folder.rename(folder.with_name(name))


@contextlib.contextmanager
def jobs(seconds, **folders):
    """The jobs by name, each reading its folder; gives their logs."""
    drop_caches()
    with groups.cgroups(list(folders), []) as cgroups, contextlib.ExitStack() as stack:
        logs = {name: Path(f"/run/{name}-{time.monotonic_ns()}.log") for name in folders}
        for name, folder in folders.items():
            plan = (OTHER if name == "other" else VICTIM) | {"root": str(folder), "seed": 1, "seconds": seconds}
            stack.enter_context(started(plan, cgroups[name], logs[name]))
        yield logs


def waits_ms(log, since=0.0, until=1e18):
    """Mean wait of the iterations that began in between (monotonic seconds), without those at the job's start."""
    rows = rows_of(log)
    since = max(since, rows[0][0] + SETTLED_SECONDS)
    return 1e3 * statistics.fmean(waited for at, waited, _ in rows if since <= at < until)


def waited(seconds=SECONDS, **folders):
    """What each of these jobs waits per iteration (ms), reading at the same time."""
    with jobs(seconds, **folders) as logs:
        time.sleep(seconds + 3.0)
    return {name: waits_ms(log) for name, log in logs.items()}


def moving():
    """What /state says of the victim's files, {} where it says nothing."""
    rows = [row for row in state().get("jobs", ()) if row["cgroup"].endswith("victim")]
    return next((one["defragment"] for row in rows for one in row["devices"] if one["defragment"]), {})


def wait_until(condition, seconds, told=state):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, told()
        time.sleep(0.3)


@pytest.fixture(scope="module")
def before(request, data):
    """Waits without an agent, by kind of file system and seed."""
    found = {}
    here = [item.callspec.params for item in request.session.items if item.path == request.path]
    chosen = {(one["kind"], one["seed"]) for one in here if "seed" in one}
    for kind in sorted({kind for kind, _ in chosen}):
        mount = data(kind)
        contiguous = waited(victim=mount / "mended")["victim"]
        for seed in sorted(seed for one, seed in chosen if one == kind):
            folder = fresh(mount, f"set{seed}")
            beside = waited(BESIDE_SECONDS, victim=folder, other=mount / "many")
            found[kind, seed] = {"folder": folder, "contiguous": contiguous, **beside}
            print(f"{kind}, seed {seed}: {found[kind, seed]}", flush=True)
    return found


@pytest.mark.parametrize("kind", list(DISKS))
def test_killed_in_the_middle_every_file_is_whole(data, tmp_path, kind):
    """The agent dies by SIGKILL while a file is moved: mover and tool go, the job goes on, the files are the same."""
    folder = fresh(data(kind), "killed")
    before = checksums(folder)
    with (
        agent_of(tmp_path, find_disk(DISKS[kind]).number, "defragment = true", **AHEAD) as agent,
        jobs(90, victim=folder) as logs,
    ):
        wait_until(lambda: movers() & {"e4defrag", "xfs_fsr"}, 80, lambda: (moving(), state().get("rearrange")))
        agent.kill()
        agent.wait(10)
        wait_until(lambda: not movers(), 20, movers)
        rows = len(rows_of(logs["victim"]))
        wait_until(lambda: len(rows_of(logs["victim"])) > rows, 20)
    assert checksums(folder) == before
    assert sorted(path.name for path in folder.iterdir()) == [path.name for path in before]
    os.sync()


@pytest.mark.parametrize("seed", [1, 2, 3])
@pytest.mark.parametrize("kind", list(DISKS))
def test_fragmented_files_become_contiguous_and_nobody_else_waits(before, data, tmp_path, kind, seed):
    was = before[kind, seed]
    files = sorted(was["folder"].iterdir())
    sums = checksums(was["folder"])
    assert all(pieces(path) > FRAGMENTED_BYTES // FRAGMENT // 2 for path in files)
    lines = ("defragment = true", f"defragment_ratio = {SHARE}", *ALONE[kind])
    with (
        agent_of(tmp_path, find_disk(DISKS[kind]).number, *lines, **AHEAD),
        jobs(MOVING_SECONDS, victim=was["folder"], other=data(kind) / "many") as logs,
    ):
        wait_until(lambda: moving().get("running"), 60)
        began = time.monotonic()
        while time.monotonic() - began < MOVING_SECONDS - 30 and not moved_all():
            time.sleep(0.5)
        ended = time.monotonic()
        last = moving(), state()["rearrange"]["defragment"]
        other = waits_ms(logs["other"], began, ended)
    left = [pieces(path) for path in files]
    print(f"{kind}, seed {seed}: {ended - began:.0f} s, {last}, pieces {left}", flush=True)
    after = waited(victim=was["folder"])["victim"]
    print(f"{kind}, seed {seed}: other job {was['other']:.2f} -> {other:.2f} ms; fragmented {was['victim']:.1f} -> "
          f"{after:.1f} ms, contiguous {was['contiguous']:.1f} ms", flush=True)  # fmt: skip
    assert max(left) <= 2
    assert checksums(was["folder"]) == sums
    assert other <= max(1.1 * was["other"], was["other"] + 0.5)
    assert after <= 2.0 * was["contiguous"]
    assert after < 0.5 * was["victim"]


def moved_all():
    """Whether nothing is left that the mover could move."""
    now = moving()
    return now.get("moved_files", 0) >= FRAGMENTED or now.get("why") == "done"


def checksums(folder):
    """Content, identity and time of change of every file."""
    return {
        path: (hashlib.sha256(path.read_bytes()).hexdigest(), path.stat().st_ino, path.stat().st_mtime_ns)
        for path in sorted(folder.iterdir())
    }


def movers():
    """Processes of the mover and its tools, and whether its cgroup is there."""
    names = []
    for path in Path("/proc").glob("[0-9]*/comm"):
        with contextlib.suppress(OSError):
            names.append(path.read_text().strip())
    found = {"prefetchd-move", "e4defrag", "xfs_fsr"} & set(names)
    return found | ({"cgroup"} if (groups.ROOT / "prefetchd-rearrange-defragment").exists() else set())
