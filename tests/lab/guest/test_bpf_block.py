"""The block probe on a stock kernel, every tier, against the workload's counts and clock and the kernel's io.stat."""

import contextlib
import json
import os
import subprocess
import time
from pathlib import Path

import pytest

from bpf.block import UNATTRIBUTED, BlockProbe
from bpf.loader import Loader
from bpf.samples import BlockKey, ProbeState
from cgroup.devices import Devices
from cgroup.mapped import passed_through, targets_of
from tests.lab.disks import mounted
from tests.lab.mapped import CACHE_BLOCK_BYTES, cache_reads, cached, disk_of, has_cache, mapped, partition, raid
from tests.native import workload

pytestmark = pytest.mark.guest

MIB = 1 << 20


@pytest.fixture(scope="module")
def loader():
    with Loader() as made:
        yield made


@pytest.fixture(
    scope="module",
    params=["fentry", *(pytest.param(tier, marks=pytest.mark.nightly) for tier in ("kprobe", "tracepoint"))],
)
def probe(request, loader):
    made = BlockProbe(loader, tiers=[request.param])
    assert made.status().tier == request.param, made.status().why
    yield made
    made.close()


@pytest.fixture
def watched(probe, cgroup):
    """A cgroup that the probe counts from now on."""
    probe.manage([])
    probe.manage([cgroup.stat().st_ino])
    return cgroup


def counters(probe, cgroup, device, op="read"):
    """What the probe knows once every bio has ended; None where it counted nothing."""
    deadline = time.monotonic() + 10
    while True:
        found = probe.read(time.monotonic_ns()).blocks.get(BlockKey(cgroup.stat().st_ino, device, op))
        if found is None or not found.in_flight or time.monotonic() > deadline:
            return found
        time.sleep(0.1)


def assert_latency_agrees(found, report):
    """With the process's own clock; on an emulated CPU the way to the block layer and back is long."""
    assert 0.5 < found.latency_ns / found.requests / report.mean_ns <= 1


def io_stat(cgroup, device):
    """The kernel's own account of a cgroup on a device: rbytes, wbytes, rios, wios."""
    for line in (cgroup / "io.stat").read_text().splitlines():
        number, *fields = line.split()
        if number == device:
            return {key: int(value) for key, value in (field.split("=") for field in fields)}
    return {}


def fio(cgroup, node, *options):
    """Run fio on a device inside a cgroup; totals of its JSON report."""
    command = ["fio", "--name=test", f"--filename={node}", "--direct=1", "--output-format=json", *options]
    done = subprocess.run(
        ["bash", "-c", 'echo $$ >"$0/cgroup.procs"; exec "$@"', cgroup, *command],
        capture_output=True,
        text=True,
        check=True,
    )
    (job,) = json.loads(done.stdout)["jobs"]
    return job


def test_the_full_tier_is_attached_without_being_asked(loader):
    made = BlockProbe(loader)
    assert (made.status().state, made.status().tier) == (ProbeState.ATTACHED, "fentry")
    made.close()


def test_direct_reads_agree_with_the_process_and_io_stat(probe, watched, ssd):
    report = workload.run(watched, "read", ssd.node, 256 << 10, 64)
    found = counters(probe, watched, ssd.number)
    assert found.bytes == report.bytes == io_stat(watched, ssd.number)["rbytes"]
    assert found.requests == report.calls == sum(found.histogram)
    assert_latency_agrees(found, report)
    assert found.latency_ns == found.queue_ns + found.device_ns + (found.throttle_ns or 0)


def test_a_throttled_job_keeps_its_reads_and_knows_its_wait(probe, watched, ssd):
    (watched / "io.max").write_text(f"{ssd.number} rbps={10 * MIB}")
    try:
        report = workload.run(watched, "read", ssd.node, MIB, 20)
    finally:
        (watched / "io.max").write_text(f"{ssd.number} rbps=max")
    found = counters(probe, watched, ssd.number)
    assert found.bytes == report.bytes
    if probe.status().tier == "tracepoint":
        assert found.throttle_ns is None
        return
    total_ns = sum(report.times_ns)
    assert total_ns > 1.5e9, "the cap must have been felt for this test to mean anything"
    assert found.latency_ns == pytest.approx(total_ns, rel=0.1)
    unthrottled_ns = found.queue_ns + found.device_ns
    assert found.throttle_ns == pytest.approx(total_ns - unthrottled_ns, rel=0.1)
    assert found.throttle_ns > 0.7 * total_ns


@pytest.mark.parametrize("engine", ["libaio", "io_uring"])
def test_asynchronous_engines(probe, watched, ssd, engine):
    job = fio(watched, ssd.node, f"--ioengine={engine}", "--rw=randrw", "--bs=16k", "--iodepth=16", "--size=24m")
    for op in ("read", "write"):
        found = counters(probe, watched, ssd.number, op)
        assert (found.bytes, found.requests) == (job[op]["io_bytes"], job[op]["total_ios"])


def test_merged_bios_count_one_by_one(probe, watched, hdd):
    options = ["--ioengine=libaio", "--rw=read", "--bs=4k", "--size=8m", "--iodepth=32"]
    options += ["--iodepth_batch_submit=32", "--iodepth_batch_complete_min=32"]  # submitted together, they merge
    before = requests_of(hdd)
    job = fio(watched, hdd.node, *options)
    found = counters(probe, watched, hdd.number)
    assert (found.bytes, found.requests) == (job["read"]["io_bytes"], job["read"]["total_ios"])
    assert requests_of(hdd) - before < found.requests / 2, "nothing was merged"


def test_split_bios_count_once(probe, watched, ssd):
    limit = Path(f"/sys/block/{ssd.name}/queue/max_sectors_kb")
    usual, before = limit.read_text(), requests_of(ssd)
    limit.write_text("64")
    try:
        report = workload.run(watched, "read", ssd.node, MIB, 16)
    finally:
        limit.write_text(usual)
    found = counters(probe, watched, ssd.number)
    assert (found.bytes, found.requests) == (report.bytes, report.calls)
    assert requests_of(ssd) - before >= 16 * report.calls, "nothing was split"
    assert_latency_agrees(found, report)


def requests_of(disk):
    """Read requests that the device has completed (Documentation/block/stat.rst)."""
    return int(Path(f"/sys/block/{disk.name}/stat").read_text().split()[0])


@pytest.mark.parametrize("kind", ["buffered", "mapped"])
def test_reads_through_the_page_cache(probe, watched, ssd, kind):
    with mounted(ssd) as folder:
        path = workload.make_file(folder / "data", 16 * MIB)
        Path("/proc/sys/vm/drop_caches").write_text("3")
        report = workload.run(watched, kind, path, 64 << 10, 256)
        found = counters(probe, watched, ssd.number)
    assert report.bytes == 16 * MIB
    assert found.bytes == io_stat(watched, ssd.number)["rbytes"] >= report.bytes
    assert found.bytes < 1.1 * report.bytes


def test_writeback_belongs_to_who_dirtied_the_pages(probe, watched, ssd):
    (watched.parent / "cgroup.subtree_control").write_text("+memory")  # without it the kernel does not know
    with mounted(ssd) as folder:
        workload.run(watched, "dirty", folder / "data", 64 << 10, 256)
        os.sync()
        found = counters(probe, watched, ssd.number, "write")
        truth = io_stat(watched, ssd.number)["wbytes"]
    assert truth >= 16 * MIB
    assert found.bytes == truth


def test_direct_writes(probe, watched, ssd):
    report = workload.run(watched, "write", ssd.node, 256 << 10, 32)
    found = counters(probe, watched, ssd.number, "write")
    assert (found.bytes, found.requests) == (report.bytes, report.calls)


def test_partitions_belong_to_their_disk(probe, watched, ssd):
    with partition(ssd, 1, MIB, 100 * MIB) as part:
        report = workload.run(watched, "read", part.node, MIB, 8)
    assert counters(probe, watched, ssd.number).bytes == report.bytes


@contextlib.contextmanager
def linear_map(disk):
    """A device-mapper device over two halves of a disk that are swapped."""
    half = 100 << 11
    table = f"0 {half} linear {disk.number} {half}\n{half} {half} linear {disk.number} 0\n"
    subprocess.run(["modprobe", "dm_mod"], check=True)
    subprocess.run(["dmsetup", "create", "swapped", "--noudevsync"], input=table, text=True, check=True)
    try:
        (name,) = (path for path in Path("/sys/block").glob("dm-*/dm/name") if path.read_text().strip() == "swapped")
        block = name.parents[1]
        yield Path("/dev") / block.name, (block / "dev").read_text().strip()
    finally:
        subprocess.run(["dmsetup", "remove", "--retry", "swapped"], check=True)


def test_a_mapped_device_counts_where_the_job_submitted(probe, watched, ssd):
    with linear_map(ssd) as (node, number):
        report = workload.run(watched, "read", node, MIB, 16, 92 * MIB)
        found = counters(probe, watched, number)
        assert (found.bytes, found.requests) == (report.bytes, report.calls)
        assert counters(probe, watched, ssd.number) is None
        assert_latency_agrees(found, report)


@pytest.mark.parametrize("level", [0, 1])
def test_a_software_raid_counts_once_where_the_job_submitted(probe, watched, ssd, level):
    """Striped bios are split over the members, mirrored writes go to both: the job asked once."""
    with raid(ssd, level) as array:
        written = workload.run(watched, "write", array.node, 256 << 10, 32)
        read = workload.run(watched, "read", array.node, 256 << 10, 64)
        for op, report in (("write", written), ("read", read)):
            found = counters(probe, watched, array.number, op)
            assert (found.bytes, found.requests) == (report.bytes, report.calls)
            assert found.in_flight == 0
            assert found.latency_ns <= sum(report.times_ns)
            assert counters(probe, watched, ssd.number, op) is None


def test_a_listed_member_counts_below_the_mapped_device(loader, probe, cgroup, ssd):
    members = BlockProbe(loader, devices=[ssd.number], tiers=[probe.status().tier])
    members.manage([cgroup.stat().st_ino])
    with linear_map(ssd) as (node, number):
        report = workload.run(cgroup, "read", node, MIB, 4, 92 * MIB)
        assert counters(members, cgroup, ssd.number).bytes == report.bytes
        assert counters(members, cgroup, number) is None
    members.close()


@contextlib.contextmanager
def joined_map(first, second):
    """A mapped device whose first 100 MiB lie on the one disk and the rest on the other."""
    half = 100 << 11
    table = f"0 {half} linear {first.number} 0\n{half} {half} linear {second.number} 0\n"
    with mapped("lab-joined", table) as name:
        yield disk_of(name)


def test_a_device_that_is_looked_through_counts_on_the_disks_below(probe, watched, ssd, hdd):
    """Also the wait at the cap of the disk below, which a job on the mapped device feels."""
    with joined_map(ssd, hdd) as joined:
        assert passed_through(joined.number, Devices()) == {joined.number}
        assert passed_through(joined.number, Devices(), named=[joined.number]) == set()
        before = workload.run(watched, "read", joined.node, MIB, 2)
        assert counters(probe, watched, joined.number).bytes == before.bytes
        probe.look_through([joined.number])
        (watched / "io.max").write_text(f"{ssd.number} rbps={10 * MIB}")
        try:
            report = workload.run(watched, "read", joined.node, MIB, 20, 90 * MIB)
        finally:
            (watched / "io.max").write_text(f"{ssd.number} rbps=max")
        assert counters(probe, watched, joined.number) is None
        fast, slow = (counters(probe, watched, disk.number) for disk in (ssd, hdd))
        assert (fast.bytes, slow.bytes) == (10 * MIB, 10 * MIB)
        assert fast.requests == slow.requests == 10
        assert fast.latency_ns + slow.latency_ns <= sum(report.times_ns)
        if probe.status().tier != "tracepoint":
            assert fast.throttle_ns > 0.5e9
            assert slow.throttle_ns < 0.05 * slow.latency_ns
        probe.look_through([])
        after = workload.run(watched, "read", joined.node, MIB, 2)
        assert counters(probe, watched, joined.number).bytes == after.bytes


def test_what_is_written_through_a_cache_counts_once_on_each_disk(probe, watched, ssd, hdd):
    """To the disk always, to the SSD where the block is there; what the mapper moves by itself is nobody's."""
    if not has_cache():
        pytest.skip("this kernel has no dm-cache (modprobe dm-cache dm-cache-smq)")
    with cached(hdd, ssd, 16 * MIB) as cache:
        passed = passed_through(cache.number, Devices())
        assert cache.number in passed
        probe.look_through(passed)
        for _ in range(20):
            workload.run(watched, "read", cache.node, CACHE_BLOCK_BYTES, 32)
            if cache_reads().promotions >= 32:
                break
        moved = counters(probe, watched, ssd.number, "write")
        report = workload.run(watched, "write", cache.node, CACHE_BLOCK_BYTES, 32)
        fast, slow = (counters(probe, watched, disk.number, "write") for disk in (ssd, hdd))
        truth = [io_stat(watched, disk.number)["wbytes"] for disk in (ssd, hdd)]
        probe.look_through([])
    assert moved is None
    assert truth == [report.bytes, report.bytes]
    assert (fast.bytes, fast.requests) == (report.bytes, report.calls)
    assert (slow.bytes, slow.requests) == (report.bytes, report.calls)


def test_a_plain_mapped_device_of_one_medium_is_not_looked_through(ssd):
    with linear_map(ssd) as (_, number):
        assert targets_of(number) == {"linear"}
        assert passed_through(number, Devices()) == set()


def test_descendants_count_for_the_pod(probe, watched, ssd):
    container = watched / "container"
    container.mkdir()
    report = workload.run(container, "read", ssd.node, 256 << 10, 8)
    assert counters(probe, watched, ssd.number).bytes == report.bytes
    container.rmdir()


@pytest.mark.parametrize("jobs", [200, pytest.param(10_000, marks=pytest.mark.nightly)])
def test_jobs_that_come_and_go_leave_nothing_behind(probe, cgroup, ssd, jobs):
    for at in range(jobs):
        folder = cgroup / str(at)
        folder.mkdir()
        probe.manage([folder.stat().st_ino])
        if at % (jobs // 5) == 0:
            workload.run(folder, "read", ssd.node, 4096, 2)
            assert counters(probe, folder, ssd.number).bytes == 8192
        folder.rmdir()
    probe.manage([])
    assert {key.cgroup_id for key in probe.read(time.monotonic_ns()).blocks} <= {UNATTRIBUTED}
    assert probe.losses()["slots_full"] == probe.losses()["in_flight_full"] == 0
    assert probe.status().map_fill_ratio < 0.01
