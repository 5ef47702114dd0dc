"""A job on a dm-cache, whose reads go to the disk with moving parts until their blocks have been moved to the SSD.

The mapped device has no medium of its own: what the job asks of it counts on the disks below, where it went. Ground
truth are the cgroup's own io.stat, the target's hits and misses (`dmsetup status`) and the disks' counters in sysfs.
"""

import contextlib
import json
import math
import re
import subprocess
import time
import urllib.request
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.lab import groups
from tests.lab.disks import mounted, mounted_again, write_file
from tests.lab.mapped import MIB, cache_reads, cached, has_cache
from tests.lab.media import BLOCK_ALONE, DEVICES, by_medium, count_weighed, plan_of
from tests.lab.rearrange_runs import drop_caches, running_agent, started, state
from tests.native import workload

pytestmark = [pytest.mark.guest, pytest.mark.nightly, pytest.mark.timeout(900)]

COLD, HOT, CONTENDED = 0, 1, 2
PHASES = [[24.0, 1.0], [38.0, 0.05], [36.0, 1.0]]
"""Seconds, and part of the reads that go to the file that is larger than the cache."""
STARTS = [sum(length for length, _ in PHASES[:phase]) for phase in range(len(PHASES) + 1)]
GREEDY_AT, ENFORCED_AT, CAPPED_AT = (STARTS[CONTENDED] + seconds for seconds in (1.0, 10.0, 20.0))
HOT_BYTES, CACHE_BYTES, COLD_BYTES = 16 * MIB, 96 * MIB, 1024 * MIB
WINDOW_SECONDS = 10.0
"""Time constant over which the agent weighs a job's bytes on its devices."""
CONFIG = (
    """
[[jobs]]
cgroup = "/train.slice/*"
[[best_effort]]
cgroup = "/batch.slice/*"
"""
    + DEVICES
    + """[enforcement]
kill_switch_file = "{switch}"
"""
    + BLOCK_ALONE
)
PLAN = plan_of(PHASES)


def io_stat(cgroup):
    """By `maj:min`: (bytes read, bios read, bytes written) of a cgroup, by the kernel's own account."""
    found = {}
    for line in (cgroup / "io.stat").read_text().splitlines():
        number, *fields = line.split()
        values = dict(field.split("=") for field in fields)
        if "rbytes" in values:
            found[number] = tuple(int(values[key]) for key in ("rbytes", "rios", "wbytes"))
    return found


def counted():
    """By (job, device name): bytes read, requests, bytes written, by the agent's metrics."""
    with urllib.request.urlopen("http://127.0.0.1:9753/metrics", timeout=10) as response:
        text = response.read().decode()
    found = {}
    names = ("io_bytes_total", "read", 0), ("io_latency_seconds_count", "read", 1), ("io_bytes_total", "write", 2)
    for name, op, place in names:
        for labels, value in re.findall(rf"^prefetchd_{name}{{(.*)}} (\S+)$", text, re.MULTILINE):
            words = dict(re.findall(r'(\w+)="([^"]*)"', labels))
            if words["op"] == op:
                found.setdefault((words["job"], words["device"]), [0, 0, 0])[place] = int(float(value))
    return found


@dataclass(frozen=True)
class Moment:
    """Everything that is counted, at one moment: of both cgroups, by the agent and the kernel, and below them."""

    counted: dict
    truth: dict
    cache: object
    ssd_written: int

    def reads(self, job, disk):
        """Bytes and requests by the agent, then the same by io.stat."""
        kernel = self.truth[job].get(disk.number, (0, 0, 0))
        return [*self.counted.get((job, disk.name), [0, 0, 0])[:2], *kernel[:2]]


@dataclass
class Look:
    at: float
    row: dict
    devices: list
    mode: str
    truth: dict
    greedy: dict
    limits: str


@dataclass
class Run:
    """What happened: looks twice a second, moments at the ends of phases, io.max of the reader after the agent."""

    ssd: object
    hdd: object
    cache_number: str = ""
    cache_name: str = ""
    looks: list = field(default_factory=list)
    moments: list = field(default_factory=list)
    left: str = "not looked at"
    log: str = ""

    def between(self, start, end):
        return [look for look in self.looks if start <= look.at < end]

    def take(self, cgroups):
        written = int(Path(f"/sys/block/{self.ssd.name}/stat").read_text().split()[6]) * 512
        truth = {name: io_stat(folder) for name, folder in cgroups.items()}
        self.moments.append(Moment(counted(), truth, cache_reads(), written))

    def growth(self, job, disk, first, last):
        """Bytes and requests by the agent, then by io.stat, between two moments."""
        before, after = (self.moments[k].reads(job, disk) for k in (first, last))
        return [late - early for early, late in zip(before, after, strict=True)]


@pytest.fixture(scope="module")
def seen(tmp_path_factory, ssd, hdd):
    if not has_cache():
        pytest.skip("this kernel has no dm-cache (modprobe dm-cache dm-cache-smq)")
    folder, run = tmp_path_factory.mktemp("dm-cache"), Run(ssd, hdd)
    switch = folder / "switch"
    switch.touch()
    (folder / "agent.toml").write_text(CONFIG.format(ssd=ssd.number, hdd=hdd.number, switch=switch))
    with mounted(hdd) as plain:
        for name, size in (("hot", HOT_BYTES), ("cold", COLD_BYTES)):
            write_file(plain / name, size)
    with (
        cached(hdd, ssd, CACHE_BYTES) as cache,
        mounted_again(cache) as data,
        groups.cgroups(["job"], ["scan"]) as both,
    ):
        run.cache_number, run.cache_name = cache.number, cache.name
        drop_caches()
        with running_agent(folder / "agent.toml", folder / "agent.log"):
            watch(run, data, both, cache, switch)
        run.left = groups.io_max(both["scan"])
    run.log = (folder / "agent.log").read_text()
    tell(run)
    return run


def watch(run, data, cgroups, cache, switch):
    """Let the job run through its phases; the reader joins in the last one, and is capped once the switch is gone."""
    job, scan = cgroups["job"], cgroups["scan"]
    workload.run(job, "read", cache.node, 64 << 10, 4)  # the agent meets the job and the mapped device
    time.sleep(3.0)
    run.take(cgroups)
    plan = PLAN | {"roots": [str(data / "hot"), str(data / "cold")], "root": str(data), "seed": 1}
    with started(plan, job, Path("/run/dm-cache.log")) as process, contextlib.ExitStack() as stack:
        began = time.monotonic()
        while process.poll() is None:
            time.sleep(0.5)
            at = time.monotonic() - began
            now = state()
            for row in now.get("jobs", ()):
                limits = groups.io_max(scan)
                run.looks.append(Look(at, row, now["devices"], now["mode"], io_stat(job), io_stat(scan), limits))
            if len(run.moments) == 1 and at >= STARTS[HOT]:
                run.take(cgroups)
            if len(run.moments) == 2 and at >= STARTS[CONTENDED]:
                run.take(cgroups)
                stack.enter_context(greedy(cache, scan))
            if at >= ENFORCED_AT:
                switch.unlink(missing_ok=True)
    settle(scan)
    run.take(cgroups)


def settle(cgroup):
    """Wait until what a killed reader had asked for has passed its cap, and has been counted."""
    for _ in range(20):
        before = io_stat(cgroup)
        time.sleep(2.0)
        if io_stat(cgroup) == before:
            return


@contextlib.contextmanager
def greedy(cache, cgroup):
    """A reader that keeps the disk's queue full, anywhere on the mapped device behind the job's files."""
    fio = ["fio", "--name=scan", f"--filename={cache.node}", "--direct=1", "--rw=randread", "--bs=64k"]
    fio += ["--ioengine=libaio", "--iodepth=8", "--offset=2g", "--size=1500m", "--time_based", "--runtime=600"]
    join = f'echo $$ >"{cgroup}/cgroup.procs" && exec "$@"'
    with subprocess.Popen(["sh", "-c", join, "sh", *fio, "--output=/dev/null"]) as process:
        try:
            yield
        finally:
            (cgroup / "cgroup.kill").write_text("1")
            process.wait()


def tell(run):
    for look in run.looks[::6]:
        here = [(one["device"], one["access_ratio"], one["quota_why"]) for one in look.row["devices"]]
        print(f"{look.at:.0f} s {look.mode}: score {look.row['score']}, {here}, {look.limits!r}")
    for moment in run.moments:
        print(moment)
    print("\n".join(line for line in run.log.splitlines() if "mapped" in line or "->" in line))


def part(run, number, start, end):
    """What the reader got from a disk between two times: (bytes, requests) a second."""
    looks = run.between(start, end)
    first, last = looks[0], looks[-1]
    before, after = (look.greedy.get(number, (0, 0, 0)) for look in (first, last))
    return tuple((after[k] - before[k]) / (last.at - first.at) for k in (0, 1))


def test_every_request_counts_once_on_the_disk_that_it_went_to(seen):
    """Before anything is enforced, while the job is alone: by the target's own hits and misses."""
    first, last = seen.moments[0].cache, seen.moments[2].cache
    assert {look.mode for look in seen.between(0, STARTS[CONTENDED])} == {"dry-run"}
    for disk, passed in ((seen.ssd, last.hits - first.hits), (seen.hdd, last.misses - first.misses)):
        requests = seen.growth("job", disk, 0, 2)[1]
        print(f"{disk.name}: {requests} requests of the job, {passed} by the target")
        assert requests == pytest.approx(passed, rel=0.02)
        assert requests > 500


@pytest.mark.parametrize("job", ["job", "scan"])
def test_the_counts_are_those_of_the_kernel_for_the_cgroup(seen, job):
    """To the byte, once all has ended, capped or not."""
    total = 0
    for disk in (seen.ssd, seen.hdd):
        size, requests, kernel_size, kernel_requests = seen.growth(job, disk, 0, -1)
        print(f"{job} on {disk.name}: {size} bytes, {requests} requests; {kernel_size}, {kernel_requests} in io.stat")
        assert (size, requests) == (kernel_size, kernel_requests)
        total += size
    upper = [moment.truth[job].get(seen.cache_number, (0,))[0] for moment in (seen.moments[0], seen.moments[-1])]
    assert total == upper[1] - upper[0], "what it asked of the mapped device"


def test_the_mapped_device_is_no_third_one(seen):
    names = {one["device"] for look in seen.looks for one in look.row["devices"]}
    assert names == {seen.ssd.name, seen.hdd.name}
    assert not {name for look in seen.looks for name in (one["device"] for one in look.devices)} & {seen.cache_name}
    assert {name for moment in seen.moments for _, name in moment.counted} == names


def test_what_the_cache_moves_is_no_job_s(seen):
    first, last = seen.moments[0], seen.moments[-1]
    moved = (last.cache.promotions - first.cache.promotions) * (64 << 10)
    written = last.ssd_written - first.ssd_written
    print(f"{moved / MIB:.0f} MiB moved to the SSD, {written / MIB:.0f} MiB written there")
    assert written >= moved > 8 * MIB
    assert all(counts[2] == 0 for counts in last.counted.values())
    assert sum(one["write_bytes_per_second"] for look in seen.looks for one in look.row["devices"]) == 0


def test_the_shares_of_the_media_follow_where_the_reads_went(seen):
    off = [(abs(share - truth), at, share, truth) for at, share, truth in shares(seen)]
    for error, at, share, truth in off[::10]:
        print(f"{at:.0f} s: {share:.0%} of the bytes on the disk, {truth:.0%} by io.stat ({error:.1%} off)")
    print(f"{max(off)[0]:.1%} off at most, {len(off)} looks")
    assert max(off)[0] < 0.05
    hot = [share for at, share, _ in shares(seen) if STARTS[CONTENDED] - 8 < at < STARTS[CONTENDED]]
    cold = [share for at, share, _ in shares(seen) if 15 < at < STARTS[HOT]]
    print(f"{min(cold):.0%} to {max(cold):.0%} cold, {min(hot):.0%} to {max(hot):.0%} once the hot part has moved")
    assert min(cold) > 0.8
    assert max(hot) < 0.3


def shares(seen):
    """(when, the agent's share of the disk with moving parts, the same by io.stat over the same window)."""
    fast = slow = 0.0
    for before, look in zip(seen.looks, seen.looks[1:], strict=False):
        fade = math.exp(-(look.at - before.at) / WINDOW_SECONDS)
        new = {
            d.number: look.truth.get(d.number, (0,))[0] - before.truth.get(d.number, (0,))[0]
            for d in (seen.ssd, seen.hdd)
        }
        fast, slow = fast * fade + new[seen.ssd.number], slow * fade + new[seen.hdd.number]
        here = by_medium(look.row)
        if look.at > 1.5 * WINDOW_SECONDS and "hdd" in here:
            yield look.at, here["hdd"]["access_ratio"], slow / (fast + slow)


def test_each_medium_has_a_pool_and_a_controller_and_the_merge_weighs_them(seen):
    for look in seen.looks[-20:]:
        pools = {one["medium"]: one["pool_capacity_ratio"] for one in look.devices if one["pool_capacity_ratio"]}
        assert pools == {"ssd": pytest.approx(0.15), "hdd": pytest.approx(0.15)}
        assert all(by_medium(look.row)[medium]["pid"] for medium in ("ssd", "hdd"))
    differing = count_weighed(look.row for look in seen.looks)
    print(f"{differing} looks at which the two controllers differed")
    assert differing >= 5


def test_a_greedy_reader_is_capped_on_the_disk_below(seen):
    capped = seen.between(CAPPED_AT, STARTS[-1] - 1.0)
    named = {line.split()[0] for look in seen.looks for line in look.limits.splitlines()}
    assert seen.hdd.number in named <= {seen.ssd.number, seen.hdd.number}
    free = part(seen, seen.hdd.number, GREEDY_AT + 2.0, ENFORCED_AT)
    held = part(seen, seen.hdd.number, CAPPED_AT, STARTS[-1] - 1.0)
    lines = [limits_on(look.limits, seen.hdd.number) for look in capped]
    allowed = [max(line[key] for line in lines) for key in ("rbps", "riops")]
    print(json.dumps({"free": free, "held": held, "allowed": allowed}))
    assert max(allowed) < math.inf
    assert held[0] < 1.15 * allowed[0]
    assert held[1] < 1.15 * allowed[1]
    assert held[0] < 0.7 * free[0]


def limits_on(text, number):
    """The limits of a device in io.max, infinite where there is none."""
    found = {"rbps": math.inf, "riops": math.inf}
    for line in text.splitlines():
        device, *fields = line.split()
        if device == number:
            found |= {key: float(value) for key, value in (one.split("=") for one in fields) if value != "max"}
    return found


def test_everything_is_restored(seen):
    assert seen.left == ""
