"""The helper that reads ahead, on this machine's own disk: what it brings in, what it leaves out, how it ends."""

import hashlib
import json
import mmap
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from agent.rearrange import files
from agent.rearrange.asker import GIVE_WAY_SECONDS, POLL_SECONDS, Ahead, Asker, Order, give_way
from agent.rearrange.asker import Target as HelperTarget
from agent.rearrange.helper import LEASE_SECONDS
from agent.rearrange.process import HelperProcess, MoverProcess, Target
from agent.rearrange.window import Extent, Piece, Skip
from cgroup.devices import Devices
from tests.native import workload
from tests.native.conftest import cgroup_mount
from tests.native.processes import wait_for_end, wait_until

pytestmark = pytest.mark.native

MIB = 1 << 20
PROJECT = Path(__file__).parents[2]
MEMORY_BYTES = 48 * MIB
OPENER = """
import json, os, sys, time
open(sys.argv[1] + "/cgroup.procs", "w").write(str(os.getpid()))
plan = json.loads(sys.argv[2])
held = []
for path, flags, read in plan:
    held.append(os.open(path, flags))
    os.posix_fadvise(held[-1], 0, 0, os.POSIX_FADV_RANDOM)  # the kernel reads nothing ahead besides
    done = 0
    while done < read:
        done += len(os.read(held[-1], min(1 << 20, read - done)))
print("ready", flush=True)
for line in sys.stdin:
    os.read(held[0], int(line))
    print("done", flush=True)
"""
AGENT = """
import sys, time
sys.path.insert(0, sys.argv[1])
from agent.rearrange.process import HelperProcess, MoverProcess, Target
helper = HelperProcess(sys.argv[2], sys.argv[3], 48 << 20, needs_limits=False)
assert helper.start(), helper.problem
print(helper.pid, flush=True)
target = Target(1, sys.argv[4], {sys.argv[5]: 1e9})
while helper.serve([target], time.monotonic()):
    time.sleep(0.02)
"""


@pytest.fixture
def folder(disk_folder):
    made = disk_folder / f"ahead-{time.monotonic_ns()}"
    made.mkdir()
    return made


@pytest.fixture
def device(folder):
    status = folder.stat()
    return Devices().resolve(f"{os.major(status.st_dev)}:{os.minor(status.st_dev)}").device


@pytest.fixture
def helper(make_cgroup):
    make_cgroup()  # skips where there is no cgroup v2
    made = HelperProcess(str(cgroup_mount()), f"/prefetchd-ahead-{os.getpid()}", MEMORY_BYTES, needs_limits=False)
    assert made.start(), made.problem
    yield made
    made.close()
    assert not made.folder.exists()


@pytest.fixture
def opener(make_cgroup):
    """A process in a cgroup of its own that opens files and reads on when it is told to."""
    started = []

    def begin(*plan):
        cgroup = make_cgroup()
        command = [sys.executable, "-c", OPENER, str(cgroup), json.dumps([[str(path), *rest] for path, *rest in plan])]
        pipe, null = subprocess.PIPE, subprocess.DEVNULL  # a file for messages would be one that is open for writing
        process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=null, text=True)
        started.append(process)
        assert process.stdout.readline() == "ready\n"
        return process, cgroup

    yield begin
    for process in started:
        process.kill()
        process.communicate()


def evict(path):
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(descriptor)


def cold_file(path, size):
    workload.make_file(path, size)
    evict(path)
    return path


def cached_bytes(path, offset=0, length=None):
    descriptor = os.open(path, os.O_RDONLY)
    length = length or os.fstat(descriptor).st_size - offset
    missing = files.missing_bytes(descriptor, offset, length)
    os.close(descriptor)
    return length - missing


class Arrivals:
    """The pages at a file's beginning that were in the cache at one look or another.

    A kernel that reclaims idle pages unasked (DAMON) may take single ones away between two looks.
    """

    def __init__(self, path, length):
        self.path, self.length, self.seen = path, length, set()

    def bytes(self):
        """How much was seen, after another look."""
        self.seen |= cached_set(self.path, self.length)
        return len(self.seen) * mmap.PAGESIZE


def cached_set(path, length):
    with path.open("rb") as file:
        return {place for place, there in enumerate(files.cached_pages(file.fileno(), 0, length)) if there}


def serve(helper, cgroup, device, seconds=30.0, until=lambda: False, rate=1e9):
    target = Target(1, "/" + str(cgroup.relative_to(cgroup_mount())), {device: rate})
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and not until():
        assert helper.serve([target], time.monotonic())
        time.sleep(0.02)


def told(helper):
    return helper.told.get(1)


def test_the_rest_of_an_open_file_comes_in_as_it_is_read(helper, opener, folder, device):
    path = cold_file(folder / "shard", 32 * MIB)
    process, cgroup = opener((path, os.O_RDONLY, MIB))
    begun, more = Arrivals(path, 9 * MIB), Arrivals(path, 16 * MIB)
    serve(helper, cgroup, device, until=lambda: begun.bytes() == 9 * MIB)
    assert begun.bytes() == 9 * MIB
    assert cached_bytes(path, 12 * MIB) == 0, "no more than a worker's window"
    process.stdin.write(f"{7 * MIB}\n")
    process.stdin.flush()
    process.stdout.readline()
    serve(helper, cgroup, device, until=lambda: more.bytes() == 16 * MIB)
    assert more.bytes() == 16 * MIB
    serve(helper, cgroup, device, 0.3)
    assert 14 * MIB <= told(helper).ahead <= 16 * MIB
    assert told(helper).ahead_of == {device: told(helper).ahead}
    assert told(helper).used == 7 * MIB
    assert told(helper).unused == 0


def test_no_faster_than_it_may(helper, opener, folder, device):
    path = cold_file(folder / "shard", 32 * MIB)
    _, cgroup = opener((path, os.O_RDONLY, 4096))
    began = time.monotonic()
    serve(helper, cgroup, device, until=lambda: told(helper) and told(helper).ahead >= 7 * MIB, rate=8 * MIB)
    assert told(helper).ahead >= 7 * MIB
    assert time.monotonic() - began > 0.6


def seconds_of(call, *arguments):
    began = time.monotonic()
    call(*arguments)
    return time.monotonic() - began


def test_while_the_disk_has_much_in_hand_it_asks_for_little(folder, monkeypatch):
    path = cold_file(folder / "shard", 2 * MIB)
    status = path.stat()
    target = HelperTarget(1, "", frozenset({"8:0"}), 1e9, 8)
    monkeypatch.setattr(files, "in_flight", lambda device: {"8:0": 8}[device])
    pieces = tuple(Piece(at, (status.st_dev, status.st_ino), at, MIB) for at in (0, MIB))
    asker, began = Asker(target, Ahead()), time.monotonic()
    asker.put(Order(pieces, {pieces[0].file: str(path)}, {pieces[0].file: target.devices}))
    while asker.ahead.bytes < 2 * MIB:
        assert time.monotonic() < began + 60
        time.sleep(0.001)
    assert time.monotonic() - began >= 2 * GIVE_WAY_SECONDS
    asker.close()
    for in_flight in (9, 0):
        able = target._replace(in_flight=in_flight)
        assert min(seconds_of(give_way, able) for _ in range(5)) < POLL_SECONDS


def test_what_a_disk_has_in_hand(folder, device):
    path = cold_file(folder / "shard", 32 * MIB)
    assert files.in_flight("0:0") == 0
    most = 0
    for _ in range(20):
        evict(path)
        with path.open("rb") as file:
            for at in range(0, 32 * MIB, MIB):
                files.ask_for(file.fileno(), at, MIB)
                most = max(most, files.in_flight(device))
        if most:
            break
    assert 0 < most < 10_000


def test_what_is_left_out_is_counted_with_its_reason(helper, opener, folder, device):
    plain = cold_file(folder / "plain", MIB)
    writable = cold_file(folder / "writable", MIB)
    direct = cold_file(folder / "direct", MIB)
    sparse = folder / "sparse"
    with sparse.open("wb") as file:
        file.write(os.urandom(MIB))
        file.truncate(4 * MIB)
    evict(sparse)
    unwritten = folder / "unwritten"
    with unwritten.open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, MIB)
    evict(unwritten)
    _, cgroup = opener(
        (plain, os.O_RDONLY, 0),
        (writable, os.O_RDWR, 0),
        (direct, os.O_RDONLY | os.O_DIRECT, 0),
        (sparse, os.O_RDONLY, 0),
        (unwritten, os.O_RDONLY, 0),
    )
    brought = Arrivals(plain, MIB)
    done = lambda: brought.bytes() == MIB and told(helper) and told(helper).ahead >= 2 * MIB  # noqa: E731
    serve(helper, cgroup, device, until=done)
    serve(helper, cgroup, device, 0.3)
    assert helper.skips == {Skip.WRITABLE: 1, Skip.DIRECT: 1, Skip.SPARSE: 1, Skip.UNWRITTEN: 1}
    assert told(helper).ahead == 2 * MIB
    assert brought.bytes() == MIB
    assert [cached_bytes(path) for path in (writable, direct, unwritten)] == [0, 0, 0]


def test_a_file_that_was_deleted_while_open_is_still_the_right_one(helper, opener, folder, device):
    path = cold_file(folder / "gone", 4 * MIB)
    _, cgroup = opener((path, os.O_RDONLY, 0))
    path.unlink()
    workload.make_file(path, 4 * MIB)
    evict(path)
    serve(helper, cgroup, device, until=lambda: told(helper) and told(helper).ahead >= 4 * MIB)
    assert told(helper).ahead == 4 * MIB
    assert cached_bytes(path) == 0, "the new file of that name was not meant"


def test_a_reader_that_stands_still_wins_nothing(helper, opener, folder, device):
    path = cold_file(folder / "shard", 32 * MIB)
    _, cgroup = opener((path, os.O_RDONLY, MIB))
    serve(helper, cgroup, device, 40, until=lambda: helper.skips.get(Skip.UNUSED))
    assert (told(helper).unused, told(helper).outstanding) == (8 * MIB, 0)
    before = told(helper).ahead
    serve(helper, cgroup, device, 1)
    assert told(helper).ahead == before, "it is not asked for again"


def small_files(folder, count):
    for number in range(count):
        part = folder / f"class{number % 4}"
        part.mkdir(exist_ok=True)
        cold_file(part / f"img{number:04d}", 64 * 1024)
    os.sync()


def test_what_a_loader_sends_its_workers_is_read_ahead(helper, make_cgroup, folder, device, tmp_path):
    """The number of a sample stands for a file once workers were seen to open what the numbers in their hands name."""
    small_files(folder, 400)
    cgroup = make_cgroup()
    plan = {
        "kind": "numbered", "root": str(folder), "cgroup": str(cgroup), "log": str(tmp_path / "log"), "seed": 1,
        "workers": 2, "queue": 12, "batch": 4, "batch_bytes": 4 * 65536, "compute_seconds": 0.02, "seconds": 60,
        "pause_seconds": 0.02,
    }  # fmt: skip
    job = subprocess.Popen([sys.executable, "-m", "tests.lab.rearrange_job", json.dumps(plan)], cwd=PROJECT)
    try:
        serve(helper, cgroup, device, 40, until=lambda: told(helper) and told(helper).used > 8 * MIB)
        assert job.poll() is None
        assert told(helper).used > 8 * MIB
        assert told(helper).unused == 0
        assert Skip.UNPREDICTABLE not in helper.skips
    finally:
        job.terminate()
        job.wait()


def checksums(folder):
    """Content and times of every file."""
    return {
        path: (hashlib.sha256(path.read_bytes()).hexdigest(), path.stat().st_mtime_ns, path.stat().st_ctime_ns)
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


@pytest.mark.parametrize("victim", ["agent", "helper"])
def test_killed_in_the_middle_it_leaves_nothing_behind(opener, folder, device, victim):
    paths = [cold_file(folder / f"shard{k}", 16 * MIB) for k in range(4)]
    before = checksums(folder)
    for path in paths:
        evict(path)
    _, job = opener(*((path, os.O_RDONLY, 4096) for path in paths))
    root, own = str(cgroup_mount()), f"/prefetchd-ahead-kill-{os.getpid()}"
    relative = "/" + str(job.relative_to(root))
    command = [sys.executable, "-c", AGENT, str(PROJECT), root, own, relative, device]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as agent:
        try:
            pid = int(agent.stdout.readline())
            wait_until(lambda: any(cached_bytes(path, MIB) for path in paths), said="nothing was read ahead")
            os.kill(agent.pid if victim == "agent" else pid, signal.SIGKILL)
            wait_for_end(pid)
            agent.wait(30)
        finally:
            agent.kill()
    if victim == "helper":  # what is left of its cgroup goes when the agent ends or starts anew
        HelperProcess(root, own, MEMORY_BYTES, needs_limits=False).close()
    assert not Path(root + own).exists()
    assert checksums(folder) == before


@pytest.mark.parametrize("kind", [HelperProcess, MoverProcess])
def test_an_agent_that_is_gone_before_it_is_ready_leaves_no_cgroup(make_cgroup, kind):
    make_cgroup()  # skips where there is no cgroup v2
    folder = cgroup_mount() / f"prefetchd-gone-{os.getpid()}"
    folder.mkdir()
    settings = {"folder": str(folder), "root": str(cgroup_mount()), "budget_bytes": MIB, "memory_bytes": MEMORY_BYTES}
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        ours.close()
        program = f"import sys; from {kind.module} import main; main(sys.argv[1:])"
        command = [sys.executable, "-c", program, str(theirs.fileno()), json.dumps(settings)]
        done = subprocess.run(command, cwd=PROJECT, pass_fds=[theirs.fileno()], check=False, timeout=30,
                              capture_output=True, text=True)  # fmt: skip
    assert not folder.exists()
    assert done.returncode == 0
    assert done.stderr == ""


def test_an_agent_that_stands_still_has_nothing_more_read(opener, folder, device):
    """Of what the job reads afterwards only that comes into the cache."""
    path = cold_file(folder / "shard", 64 * MIB)
    process, job = opener((path, os.O_RDONLY, 4096))
    root, own = str(cgroup_mount()), f"/prefetchd-ahead-stop-{os.getpid()}"
    command = [sys.executable, "-c", AGENT, str(PROJECT), root, own, "/" + str(job.relative_to(root)), device]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as agent:
        try:
            pid = int(agent.stdout.readline())
            wait_until(lambda: cached_bytes(path) > MIB, said="nothing was read ahead")
            os.kill(agent.pid, signal.SIGSTOP)
            time.sleep(LEASE_SECONDS + 0.5)
            asked = cached_set(path, 64 * MIB)
            assert MIB < len(asked) * mmap.PAGESIZE < 32 * MIB, "all was read ahead"
            process.stdin.write(f"{8 * MIB}\n")
            process.stdin.flush()
            process.stdout.readline()
            time.sleep(1)
            fresh = cached_set(path, 64 * MIB) - asked
            assert all(page * mmap.PAGESIZE <= 4096 + 8 * MIB for page in fresh)
        finally:
            agent.kill()
        wait_for_end(pid)
    assert not Path(root + own).exists()


def heard(helper, target, seconds=10.0):
    """What it served until it was gone; the helper's problem then."""
    deadline = time.monotonic() + seconds
    while helper.serve([target], time.monotonic()):
        assert time.monotonic() < deadline, "it is never gone"
        time.sleep(0.02)
    return helper.problem


def test_a_helper_that_is_killed_is_said_with_the_reason(helper):
    os.kill(helper.pid, signal.SIGKILL)
    assert "SIGKILL; see the kernel's log" in heard(helper, Target(1, "/nowhere", {}))
    assert not helper.is_lost, "so that the next one may be started"
    assert helper.start()
    assert helper.problem == ""


def test_one_that_does_not_end_holds_nobody_up_and_leaves_no_cgroup(helper):
    """As one that waits for the disk; the next one starts once it is gone."""
    pid = helper.pid
    os.kill(pid, signal.SIGSTOP)
    assert seconds_of(helper.end) < 0.5
    assert helper.pid == 0
    assert not helper.start()
    assert f"the last helper, process {pid}, has not ended yet" in helper.problem
    wait_until(lambda: not helper.folder.exists(), said="its cgroup is still there")
    wait_until(helper.start, said="no other one starts")
    os.kill(helper.pid, signal.SIGSTOP)
    helper.close()
    assert not helper.folder.exists()


def test_a_helper_that_fails_says_what_failed(helper):
    helper._child.socket.send(b"{}")
    assert "the helper failed (KeyError('targets'))" in heard(helper, Target(1, "/nowhere", {}))


@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize("kind", [HelperProcess, MoverProcess])
def test_a_cgroup_that_somebody_else_is_in_is_left_as_it_is(make_cgroup, kind, inside):
    cgroup = make_cgroup()
    where = make_cgroup(cgroup) if inside else cgroup
    with subprocess.Popen(["sleep", "60"]) as process:
        (where / "cgroup.procs").write_text(str(process.pid))
        path = f"/{cgroup.relative_to(cgroup_mount())}"
        made = kind(str(cgroup_mount()), path, MEMORY_BYTES, needs_limits=False)
        try:
            began = time.monotonic()
            assert not made.start()
            assert time.monotonic() - began < 1.0, "the loop of the agent waits"
            assert f"{path} holds processes of somebody else, such as {process.pid}" in made.problem
            assert made.pid == 0
        finally:
            made.close()
            process.kill()
    assert cgroup.is_dir()


def test_without_limits_it_does_not_run(make_cgroup):
    """Where the cgroup cannot be bounded (here: a v2 hierarchy without controllers) nothing is read ahead."""
    folder = make_cgroup()
    name = "/" + str(folder.relative_to(cgroup_mount())) + "/ahead"
    helper = HelperProcess(str(cgroup_mount()), name, MEMORY_BYTES)
    if (folder / "memory.max").exists() and (folder / "io.max").exists():
        pytest.skip("this host enables memory and io everywhere")
    assert not helper.start()
    assert "enable `memory` and `io`" in helper.problem
    assert not helper.folder.exists()


@pytest.mark.parametrize(
    ("flags", "why"),
    [
        (0, None), (1, None), (0x1000, None), (0x2, Skip.UNMAPPED), (0x4, Skip.UNMAPPED), (0x208, Skip.ENCRYPTED),
        (0x80, Skip.ENCRYPTED), (0x800, Skip.UNWRITTEN), (0x2001, Skip.SHARED),
    ],
)  # fmt: skip
def test_extents_that_cannot_be_used(folder, monkeypatch, flags, why):
    """Flags of include/uapi/linux/fiemap.h, as file systems with compression, encryption and reflinks set them."""
    monkeypatch.setattr(files, "_ask_extents", lambda descriptor, start, length: [(0, 5 * MIB, MIB, flags | 1)])
    descriptor = os.open(cold_file(folder / "file", MIB), os.O_RDONLY)
    found, skips = files.extents_of(descriptor, MIB)
    os.close(descriptor)
    assert found == (() if why else (Extent(0, 5 * MIB, MIB),))
    assert skips == ({why} if why else set())


def test_extents_are_those_of_the_disk(folder):
    path = cold_file(folder / "file", 8 * MIB)
    descriptor = os.open(path, os.O_RDONLY)
    found, skips = files.extents_of(descriptor, 8 * MIB)
    os.close(descriptor)
    assert (sum(one.length for one in found), skips) == (8 * MIB, set())
    shown = subprocess.run(["filefrag", "-v", "-b1024", path], capture_output=True, text=True, check=True).stdout
    first = next(line for line in shown.splitlines() if line.strip().startswith("0:"))
    assert found[0].physical == int(first.split(":")[2].split("..")[0]) * 1024
