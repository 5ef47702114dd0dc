"""The mover on real file systems of this machine's kernel: what it makes contiguous, what it leaves, how it ends."""

import contextlib
import hashlib
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from agent import rearrange_move
from agent.rearrange_defragment import Leave, pieces
from agent.rearrange_facts import mounts_of
from agent.rearrange_files import extents_of, look_at, name_of
from agent.rearrange_move import Move, Stopped, find_tool
from agent.rearrange_process import MoverProcess, Target
from tests.native.conftest import cgroup_mount, missing
from tests.native.processes import wait_for_end, wait_until

pytestmark = pytest.mark.native

MIB = 1 << 20
CHUNK = 64 << 10
FILE_BYTES = 2 * MIB
PROJECT = Path(__file__).parents[2]
MEMORY_BYTES = 48 * MIB
LARGEST = 16 * MIB
MAKE = {
    "ext4": ["mkfs.ext4", "-q", "-F"],
    "xfs": ["mkfs.xfs", "-q", "-f", "-m", "reflink=1"],
}
JOB = """
import os, sys, time
open(sys.argv[1] + "/cgroup.procs", "w").write(str(os.getpid()))
print("ready", flush=True)
paths = sys.argv[2:]
while True:
    for path in paths:
        descriptor = os.open(path, os.O_RDONLY)
        time.sleep(0.4)
        os.close(descriptor)
    time.sleep(1.0)
"""
AGENT = """
import sys, time
sys.path.insert(0, sys.argv[1])
from agent.rearrange_process import MoverProcess, Target
mover = MoverProcess(sys.argv[2], sys.argv[3], 48 << 20, needs_limits=False)
assert mover.start(), mover.problem
print(mover.pid, flush=True)
target = Target(1, sys.argv[4], {sys.argv[5]: 1e9}, {sys.argv[5]: 1e9})
while mover.serve([target], time.monotonic()):
    time.sleep(0.02)
"""


@pytest.fixture(scope="module", params=["ext4", "xfs"])
def disk(request, tmp_path_factory):
    """A file system of that kind, in a file that lies in memory; (its folder, its kind)."""
    kind = request.param
    if os.geteuid():
        missing("a file system can only be made and mounted by root")
    if shutil.which(MAKE[kind][0]) is None or not find_tool(kind):
        missing(f"{MAKE[kind][0]} or the tool that moves files on {kind} is not installed")
    folder = tmp_path_factory.mktemp(kind)
    mount = folder / "mount"
    image = Path(f"/dev/shm/prefetchd-test-{os.getpid()}-{kind}")
    mount.mkdir()
    with image.open("wb") as file:
        file.truncate(400 * MIB)
    subprocess.run([*MAKE[kind], str(image)], check=True, capture_output=True)
    done = subprocess.run(["mount", "-o", "loop", str(image), str(mount)], check=False, capture_output=True, text=True)
    if done.returncode:
        image.unlink()
        missing(f"a loop device cannot be mounted here: {done.stderr.strip()}")
    yield mount, kind
    image.unlink()
    wait_until(lambda: is_unmounted(mount), said=f"{mount} stays busy")  # a tool that was killed may still hold it


def is_unmounted(mount):
    return subprocess.run(["umount", str(mount)], check=False, capture_output=True).returncode == 0


@pytest.fixture
def folder(disk):
    made = disk[0] / f"set-{time.monotonic_ns()}"
    made.mkdir()
    yield made
    subprocess.run(["chattr", "-R", "-i", "-a", str(made)], check=False, capture_output=True)
    shutil.rmtree(made)


def fragmented(folder, count=2, size=FILE_BYTES, age=3600):
    """Files whose chunks lie anywhere among those of the others."""
    paths = [folder / f"shard {k}" for k in range(count)]
    with contextlib.ExitStack() as stack:
        files = [stack.enter_context(path.open("wb")) for path in paths]
        room = [(file, start) for file in files for start in range(0, size, CHUNK)]
        random.Random(5).shuffle(room)
        for file, start in room:
            os.posix_fallocate(file.fileno(), start, CHUNK)
        for file in files:
            file.write(os.urandom(size))
            file.flush()
            os.fsync(file.fileno())
    for path in paths:
        os.utime(path, (time.time() - age,) * 2)
        assert count_of(path) > size // CHUNK // 2
    return paths


def count_of(path):
    with path.open("rb") as file:
        return pieces(extents_of(file.fileno(), path.stat().st_size)[0])


def sums(paths):
    """Content, identity and times of files."""
    return [
        (hashlib.sha256(path.read_bytes()).hexdigest(), path.stat().st_ino, path.stat().st_mtime_ns) for path in paths
    ]


def move(path, mover=None, largest=LARGEST):
    made = mover or Move(largest)
    made.bytes_per_second = made.requests_per_second = 1e9
    status = path.stat()
    return made.carry_out(str(path), (status.st_dev, status.st_ino), mounts_of("self"))


def test_a_fragmented_file_becomes_contiguous_and_stays_what_it_is(folder):
    path, other = fragmented(folder)
    before = sums([path, other])
    assert move(path) == FILE_BYTES
    assert count_of(path) <= 2
    assert count_of(other) > FILE_BYTES // CHUNK // 2
    assert sums([path, other]) == before
    assert sorted(folder.iterdir()) == [path, other]
    assert move(path) == 0, "it lies well now"


def test_the_rights_of_the_unit_are_enough_for_somebody_elses_file(disk, folder):
    path, _ = fragmented(folder)
    os.chown(path, 1234, 1234)
    lines = (PROJECT / "packaging" / "systemd" / "prefetchd.service").read_text().splitlines()
    lists = [line.split("=")[1].split() for line in lines if line.startswith("CapabilityBoundingSet=")]
    rights = ",".join(["-all", *(f"+{name.removeprefix('CAP_').lower()}" for names in lists for name in names)])
    confined = ["setpriv", f"--bounding-set={rights}", "--inh-caps=-all", "--no-new-privs"]
    subprocess.run([*confined, find_tool(disk[1]), "-v", str(path)], check=True, capture_output=True, timeout=60)
    assert count_of(path) <= 2
    assert path.stat().st_uid == 1234


def test_a_file_with_two_names_is_moved_once_for_both(folder):
    path, _ = fragmented(folder)
    os.link(path, folder / "second")
    before = sums([path, folder / "second"])
    assert move(folder / "second") == FILE_BYTES
    assert count_of(path) <= 2
    assert sums([path, folder / "second"]) == before


def make_immutable(path):
    subprocess.run(["chattr", "+i", str(path)], check=True)


def make_append_only(path):
    subprocess.run(["chattr", "+a", str(path)], check=True)


def make_sparse(path):
    with path.open("r+b") as file:
        file.truncate(FILE_BYTES + MIB)
    os.utime(path, (time.time() - 3600,) * 2)


def make_unwritten(path):
    with path.open("r+b") as file:
        os.posix_fallocate(file.fileno(), FILE_BYTES, MIB)
        os.fsync(file.fileno())
    os.utime(path, (time.time() - 3600,) * 2)


def make_recent(path):
    os.utime(path)


def replace_by_another(path):
    path.rename(path.with_name("old"))
    path.write_bytes(b"new")


def replace_by_link(path):
    path.rename(path.with_name("old"))
    path.symlink_to(path.with_name("old"))


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (make_immutable, Leave.IMMUTABLE), (make_append_only, Leave.IMMUTABLE), (make_sparse, Leave.SPARSE),
        (make_unwritten, Leave.UNWRITTEN), (make_recent, Leave.RECENT), (replace_by_another, Leave.VANISHED),
        (replace_by_link, Leave.VANISHED), (Path.unlink, Leave.VANISHED),
    ],
)  # fmt: skip
def test_what_cannot_be_moved_is_left_with_its_reason(folder, change, why):
    path, other = fragmented(folder)
    status = path.stat()
    change(path)
    left = path.with_name("old") if path.with_name("old").exists() else path
    before = sums([other, left]) if left.exists() else []
    mover = Move(LARGEST)
    assert mover.carry_out(str(path), (status.st_dev, status.st_ino), mounts_of("self")) == why
    assert (sums([other, left]) if left.exists() else []) == before


@pytest.mark.parametrize(("mode", "why"), [("rb", Leave.OPEN), ("r+b", Leave.WRITABLE)])
def test_a_file_that_somebody_has_open_waits(folder, mode, why):
    path, _ = fragmented(folder)
    with path.open(mode):
        assert move(path) == why
    assert move(path) == FILE_BYTES


@pytest.mark.parametrize("mode", [0o400, 0o644])
def test_a_file_of_somebody_else_that_bears_the_name_of_the_tools_own_stays(disk, folder, mode):
    path, other = fragmented(folder)
    theirs = folder / f"{path.name}.defrag"
    theirs.touch()
    theirs.chmod(mode)
    before = sums([path, other, theirs])
    assert move(path) == (Leave.FAILED if disk[1] == "ext4" else FILE_BYTES)  # e4defrag alone uses that name
    assert sums([path, other, theirs]) == before
    assert sorted(folder.iterdir()) == [path, theirs, other]


def test_a_descriptor_that_leads_to_another_file_by_now_gives_no_name(tmp_path):
    """A job opens and closes all the time: the name of one file must not be taken for that of another."""
    first, second = tmp_path / "first", tmp_path / "second"
    first.write_bytes(b"1")
    second.write_bytes(b"2")
    with first.open("rb") as file:
        number = file.fileno()
        (seen,) = (one for one in look_at(os.getpid()).files if one.descriptor == number)
        assert name_of(seen) == str(first)
        other = os.open(second, os.O_RDONLY)
        os.dup2(other, number)
        os.close(other)
        assert name_of(seen) == ""
    assert name_of(seen) == "", "closed"


def test_a_file_that_is_mapped_is_open(folder):
    path, _ = fragmented(folder)
    code = "import mmap, os, sys; f = os.open(sys.argv[1], os.O_RDONLY); m = mmap.mmap(f, 0, prot=1); os.close(f)"
    code += "; print(flush=True); input()"
    with subprocess.Popen([sys.executable, "-c", code, str(path)], stdin=-1, stdout=-1) as process:
        process.stdout.readline()
        assert move(path) == Leave.OPEN
        process.communicate(b"\n")


@pytest.mark.parametrize("disk", ["xfs"], indirect=True)  # ext4 has no reflinks
@pytest.mark.usefixtures("disk")
def test_a_shared_file_is_left(folder):
    path, _ = fragmented(folder)
    subprocess.run(["cp", "--reflink=always", str(path), str(folder / "clone")], check=True)
    assert move(path) == Leave.SHARED


def test_a_file_that_is_larger_than_the_memory_lets_is_left(folder):
    path, _ = fragmented(folder)
    assert move(path, largest=FILE_BYTES - 1) == Leave.TOO_LARGE


@pytest.mark.parametrize(("name", "on_ext4"), [("e" * 248, FILE_BYTES), ("é" * 125, Leave.LONG_NAME)])
def test_a_name_that_leaves_no_room_for_the_tools_own_is_left(disk, folder, name, on_ext4):
    path = fragmented(folder)[0].rename(folder / name)
    assert move(path) == (on_ext4 if disk[1] == "ext4" else FILE_BYTES)


def test_a_full_file_system_is_left(disk, folder):
    path, _ = fragmented(folder)
    space = os.statvfs(disk[0])
    filler = folder / "filler"
    with filler.open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, space.f_bavail * space.f_frsize - 12 * MIB)
    assert move(path) == Leave.NO_SPACE
    filler.unlink()
    deadline = time.monotonic() + 60  # xfs gives the room back a moment later
    while (found := move(path)) == Leave.NO_SPACE and time.monotonic() < deadline:
        time.sleep(0.2)
    assert found == FILE_BYTES


def test_a_read_only_mount_is_left(disk, folder):
    path, _ = fragmented(folder)
    subprocess.run(["mount", "-o", "remount,ro,bind", str(disk[0])], check=True)
    try:
        assert move(path) == Leave.READ_ONLY
    finally:
        subprocess.run(["mount", "-o", "remount,rw,bind", str(disk[0])], check=True)


def test_without_the_tool_nothing_is_moved(folder, tmp_path):
    path, _ = fragmented(folder)
    assert move(path, Move(LARGEST, [str(tmp_path)])) == Leave.NO_TOOL


@pytest.mark.parametrize(("script", "why"), [("exit 1", Leave.FAILED), ("exit 0", Leave.NOT_BETTER)])
def test_a_tool_that_does_not_do_it(disk, folder, tmp_path, script, why):
    path, _ = fragmented(folder)
    tool = tmp_path / Path(find_tool(disk[1])).name
    tool.write_text(f"#!/bin/sh\n{script}\n")
    tool.chmod(0o755)
    assert move(path, Move(LARGEST, [str(tmp_path)])) == why
    assert count_of(path) > 2


def test_what_an_ended_tool_leaves_is_removed(disk, folder, tmp_path):
    """Killed between making its second file and removing the name, each leaves an empty one."""
    path, _ = fragmented(folder)
    before = sums([path])
    tool = tmp_path / Path(find_tool(disk[1])).name
    second = {"ext4": 'umask 0277\n: >"$2.defrag"', "xfs": ': >".fsr$$"'}[disk[1]]
    tool.write_text(f'#!/bin/sh\n: >".fsr$$.theirs"\n{second}\n: >"$0.ran"\nexec /bin/sleep 60\n')
    tool.chmod(0o755)
    mover = Move(LARGEST, [str(tmp_path)])

    def stop_once_it_ran():
        wait_until(Path(f"{tool}.ran").exists)
        mover.stop()

    stopper = threading.Thread(target=stop_once_it_ran)
    stopper.start()
    with pytest.raises(Stopped):
        move(path, mover)
    stopper.join()
    (other,) = folder.glob(".fsr*.theirs")
    other.unlink()
    assert sorted(one.name for one in folder.iterdir()) == ["shard 0", "shard 1"]
    assert sums([path]) == before


@pytest.mark.parametrize(("size", "mode", "age"), [(1, 0o644, 0), (0, 0o664, 0), (0, 0o644, 60)])
def test_what_cannot_be_the_tools_stays(folder, size, mode, age):
    theirs = folder / ".fsr1"
    theirs.write_bytes(b"x" * size)
    theirs.chmod(mode)
    pinned = os.open(folder, os.O_RDONLY)
    try:
        rearrange_move._remove_leftover(pinned, ".fsr1", time.time() - 10 + age)
    finally:
        os.close(pinned)
    assert theirs.stat().st_size == size


@pytest.mark.parametrize(("mover", "status"), [(os.getpid(), 0), (1, 1)])
def test_a_tool_whose_mover_has_ended_meanwhile_does_not_begin(mover, status):
    done = subprocess.run(["true"], check=False, preexec_fn=lambda: rearrange_move._die_with(mover))
    assert done.returncode == status


@pytest.mark.parametrize("disk", ["ext4"], indirect=True)  # xfs_fsr reads around the cache
def test_it_warms_no_faster_than_it_may(disk, folder):
    path, _ = fragmented(folder)
    descriptor = os.open(path, os.O_RDONLY)
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(descriptor)
    mover = Move(LARGEST)
    mover.bytes_per_second, mover.requests_per_second = 1e9, 20.0
    was = count_of(path)
    status, began = path.stat(), time.monotonic()
    assert mover.carry_out(str(path), (status.st_dev, status.st_ino), mounts_of("self")) == FILE_BYTES
    assert time.monotonic() - began >= 0.9 * (was - 2) / 20.0


# ---- the whole process


@pytest.fixture
def job(make_cgroup):
    """A process in a cgroup of its own that opens files in turn, and closes them."""
    started = []

    def begin(paths):
        cgroup = make_cgroup()
        command = [sys.executable, "-c", JOB, str(cgroup), *map(str, paths)]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        started.append(process)
        assert process.stdout.readline() == "ready\n"
        return "/" + str(cgroup.relative_to(cgroup_mount()))

    yield begin
    for process in started:
        process.kill()
        process.communicate()


def device_of(path):
    """The loop device itself: `Devices` refuses it, so a test names it by its number."""
    number = path.stat().st_dev
    return f"{os.major(number)}:{os.minor(number)}"


@pytest.fixture
def accepts_loops(monkeypatch, tmp_path):
    """Children start from the project with one change: a loop device stands for a disk."""
    sources = tmp_path / "sources"
    shutil.copytree(PROJECT / "agent", sources / "agent")
    shutil.copytree(PROJECT / "cgroup", sources / "cgroup")
    (sources / "bpf").symlink_to(PROJECT / "bpf")
    places = sources / "agent" / "rearrange_places.py"
    text = places.read_text()
    assert "self._devices[number] = _stack_of(" in text
    places.write_text(text.replace("self._devices[number] = _stack_of(", "self._devices[number] = frozenset(("))
    places.write_text(
        places.read_text().replace('os.minor(number)}")\n        return', 'os.minor(number)}",))\n        return')
    )
    monkeypatch.setattr("cgroup.child._SOURCE", str(sources))
    return sources


def serve(mover, path, device, seconds, until):
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and not until():
        assert mover.serve([Target(1, path, {device: 1e9}, {device: 1e9})], time.monotonic()), mover.problem
        time.sleep(0.02)


def test_the_files_of_a_job_are_moved_one_after_the_other(folder, job, accepts_loops):
    paths = fragmented(folder, count=4)
    before = sums(paths)
    plain = folder / "plain"
    plain.write_bytes(os.urandom(MIB))
    mover = MoverProcess(str(cgroup_mount()), f"/prefetchd-move-{os.getpid()}", MEMORY_BYTES, needs_limits=False)
    assert mover.start(), mover.problem
    try:
        path, device = job([*paths, plain]), device_of(folder)
        serve(mover, path, device, 120, lambda: 1 in mover.told and mover.told[1].files == 4)
        assert (mover.told[1].files, mover.told[1].bytes) == (4, 4 * FILE_BYTES)
        serve(mover, path, device, 60, lambda: mover.told[1].left_files == 0 and not mover.skips)
        assert (mover.told[1].left_files, mover.skips) == (0, {})
        assert all(count_of(one) <= 2 for one in paths)
        assert sums(paths) == before
    finally:
        mover.close()
    assert not mover.folder.exists()


@pytest.mark.parametrize("victim", ["agent", "mover"])
def test_killed_in_the_middle_it_leaves_every_file_whole(folder, job, accepts_loops, victim):
    paths = fragmented(folder, count=6, size=8 * MIB)
    before = sums(paths)
    root, own = str(cgroup_mount()), f"/prefetchd-move-kill-{os.getpid()}"
    command = [sys.executable, "-c", AGENT, str(accepts_loops), root, own, job(paths), device_of(folder)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as agent:
        try:
            pid = int(agent.stdout.readline())
            deadline = time.monotonic() + 60
            while not (tools := tools_of(pid)):
                assert time.monotonic() < deadline, "nothing is moved"
            os.kill(agent.pid if victim == "agent" else pid, signal.SIGKILL)
            for one in (pid, *tools):
                wait_for_end(one)
            agent.wait(30)
        finally:
            agent.kill()
    if victim == "mover":  # what is left of its cgroup goes when the agent ends or starts anew
        MoverProcess(root, own, MEMORY_BYTES, needs_limits=False).close()
    assert not Path(root + own).exists()
    assert sums(paths) == before
    assert sorted(folder.iterdir()) == paths


def tools_of(pid):
    """Processes that the mover has started."""
    with contextlib.suppress(OSError):
        return [
            int(one) for task in Path(f"/proc/{pid}/task").iterdir() for one in (task / "children").read_text().split()
        ]
    return []
