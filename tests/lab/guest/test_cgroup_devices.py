"""Which devices honour io.max on a stock kernel, and what the kernel's own trees say of them."""

import contextlib
import re
import select
import subprocess
import time
from pathlib import Path

import pytest

from cgroup.actuators import detect
from cgroup.devices import Devices
from cgroup.errors import DeviceRefused
from cgroup.files import KernelFiles
from cgroup.hierarchy import detect_hierarchy
from cgroup.hotplug import DeviceWatch
from cgroup.lines import Line
from cgroup.mounts import Mounts
from cgroup.stacks import enforcement_targets
from cgroup.tree import cgroup_id, missing_delegation, walk
from cgroup.watch import TreeWatch
from tests.contract.nodes import number_of, power_down, power_up
from tests.lab.mapped import mapped, partition
from tests.lab.undo import undo

pytestmark = pytest.mark.guest
MIB = 1 << 20
CAP = 8 * MIB


@pytest.fixture
def disks():
    names = ["stack0", "stack1"]
    with contextlib.ExitStack() as stack:
        for name in names:
            stack.callback(power_down, name)
            power_up(name, size_mib=256)
        yield [disk_name(number_of(name)) for name in names]


def disk_name(number):
    return Path(f"/sys/dev/block/{number}").resolve().name


def read_rate(cgroup, node, *, seconds=3.0):
    """Bytes per second of a direct reader in a cgroup, by its own clock: it starts slowly on an emulated CPU."""
    command = ["dd", f"if=/dev/{node}", "of=/dev/null", "bs=256k", "iflag=direct"]
    enter = ["sh", "-c", 'echo 0 >"$0/cgroup.procs"; exec "$@"', str(cgroup)]
    done = subprocess.run(
        [*enter, "timeout", "-s", "INT", str(seconds), *command], capture_output=True, text=True, check=False
    )
    size, took = re.search(r"^(\d+) bytes .*copied, (\S+) s", done.stderr, re.MULTILINE).groups()
    return int(size) / float(took)


def capped(cgroup, device, node):
    """Return the rates free and with a cap on a device, in bytes per second."""
    free = read_rate(cgroup, node, seconds=1.0)
    (cgroup / "io.max").write_text(f"{device} rbps={CAP}")
    limited = read_rate(cgroup, node)
    (cgroup / "io.max").write_text(f"{device} rbps=max")
    print(f"{node}, cap on {device}: {free / MIB:.0f} MiB/s free, {limited / CAP:.2f} of the cap")
    return free, limited


def test_a_limit_on_a_mapped_device_is_honoured_there(cgroup, disks):
    table = f"0 {128 * 2048} linear /dev/{disks[0]} 0\n{128 * 2048} {128 * 2048} linear /dev/{disks[1]} 0\n"
    with mapped("lab-linear", table) as name:
        device = Devices().resolve("/dev/mapper/lab-linear")
        assert (device.kind, device.name, len(device.members)) == ("dm", name, 2)
        (target,) = enforcement_targets(device)
        assert target.device == device.device
        free, limited = capped(cgroup, target.device, name)
        assert free > 3 * CAP
        assert 0.7 * CAP < limited < 1.3 * CAP
        with pytest.raises(DeviceRefused, match="joins 2 devices"):
            enforcement_targets(device, {d.device: d for d in Devices().all()}, on_members=True)


def test_a_limit_on_the_member_is_honoured_for_io_that_comes_through_the_stack(cgroup, disks):
    with mapped("lab-single", f"0 {256 * 2048} linear /dev/{disks[0]} 0\n") as name:
        device = Devices().resolve(name)
        (target,) = enforcement_targets(device, {d.device: d for d in Devices().all()}, on_members=True)
        assert target.device == Devices().resolve(disks[0]).device
        _, limited = capped(cgroup, target.device, name)
        assert 0.7 * CAP < limited < 1.3 * CAP


def test_io_counts_once_at_each_layer(cgroup, disks):
    """Limits on both layers do not add up: the tighter one holds."""
    with mapped("lab-both", f"0 {256 * 2048} linear /dev/{disks[0]} 0\n") as name:
        upper, lower = Devices().resolve(name).device, Devices().resolve(disks[0]).device
        (cgroup / "io.max").write_text(f"{upper} rbps={CAP}")
        (cgroup / "io.max").write_text(f"{lower} rbps={2 * CAP}")
        rate = read_rate(cgroup, name)
        print(f"cap on dm {CAP}, twice that on its disk: {rate / CAP:.2f} of the cap")
        assert 0.6 * CAP < rate < 1.3 * CAP


def test_a_partition_is_refused_by_the_kernel_and_resolved_to_its_disk(cgroup, ssd):
    with partition(ssd, 1, MIB, 32 * MIB) as part:
        with pytest.raises(OSError, match="No such device"):
            (cgroup / "io.max").write_text(f"{part.number} rbps={CAP}")
        assert Devices().resolve(part.number).device == ssd.number
        assert Devices().resolve(str(part.node)).device == ssd.number


def test_the_labs_disks_are_what_they_are(ssd, hdd):
    solid, spinning = Devices().resolve(str(ssd.node)), Devices().resolve(str(hdd.node))
    print(solid, spinning)
    assert (solid.medium, solid.device, spinning.medium, spinning.device) == ("ssd", ssd.number, "hdd", hdd.number)
    assert {solid.device, spinning.device} <= {device.device for device in Devices().all()}
    links = [link for link in Path("/dev/disk/by-id").glob("*") if link.resolve() == ssd.node]
    assert all(Devices().resolve(str(link)).device == ssd.number for link in links)


def test_paths_on_a_mounted_disk(ssd, tmp_path):
    subprocess.run(["mkfs.ext4", "-q", "-F", str(ssd.node), "64M"], check=True)
    folder = Path("/run/mounted disk")
    folder.mkdir()
    subprocess.run(["mount", str(ssd.node), str(folder)], check=True)
    try:
        (folder / "deep").mkdir()
        assert Mounts(Devices()).resolve(str(folder / "deep")).device == ssd.number
    finally:
        undo("umount", folder)
        folder.rmdir()
        subprocess.run(["wipefs", "-q", "-a", str(ssd.node)], check=True)
    with pytest.raises(DeviceRefused):
        Mounts(Devices()).resolve("/run")


def test_a_pulled_disk_is_told(disks):
    watch = DeviceWatch()
    assert watch.degraded is None
    number = Devices().resolve(disks[1]).device
    power_down("stack1")
    told = until(watch, lambda change: (change.action, change.device) == ("remove", number))
    power_up("stack1")
    told += until(watch, lambda change: change.action == "add")
    print(told)
    watch.close()


def until(watch, wanted, seconds=30.0):
    """Take in changes until one is as wanted; fail where none is."""
    deadline = time.monotonic() + seconds
    seen = []
    while time.monotonic() < deadline:
        select.select([watch], [], [], 0.5)
        seen += watch.changes()
        if any(wanted(change) for change in seen):
            return seen
    raise AssertionError(f"not told: {seen}")


def test_the_tree_of_this_kernel():
    found = detect_hierarchy()
    assert (found.kind, found.root, found.problem) == ("v2", "/sys/fs/cgroup", None)
    assert {"/"} <= {cgroup.path for cgroup in walk("/sys/fs/cgroup")}


def test_the_kernel_notifies_of_cgroups(cgroup):
    watch = TreeWatch()
    watch.changes(0.0)
    assert watch.degraded is None
    job = cgroup / "job"
    job.mkdir()
    assert select.select([watch], [], [], 5.0)[0] == [watch]
    path = f"/{cgroup.name}/job"
    assert [(c.kind, c.cgroup.path, c.cgroup.id) for c in watch.changes(0.1)] == [("created", path, job.stat().st_ino)]
    assert missing_delegation("/sys/fs/cgroup", path) == (f"/{cgroup.name}",)
    old = cgroup_id("/sys/fs/cgroup", path)
    job.rmdir()
    job.mkdir()
    kinds = [change.kind for change in watch.changes(0.2)]
    assert kinds == ["removed", "created"]
    assert cgroup_id("/sys/fs/cgroup", path) != old, "the kernel never gives an id twice"
    job.rmdir()
    assert [change.kind for change in watch.changes(0.3)] == ["removed"]
    watch.close()


def test_weights_are_written_as_the_kernel_wants_them(cgroup, hdd):
    """io.weight with io.cost on, io.bfq.weight under bfq: per device, and back to the default."""
    root = Path("/sys/fs/cgroup")
    subprocess.run(["modprobe", "bfq"], check=True)
    before = hdd.scheduler.read_text()
    try:
        hdd.scheduler.write_text("bfq")
        (root / "io.cost.qos").write_text(f"{hdd.number} enable=1")
        available = detect(hdd.number)
        assert available == {"io.max", "io.weight", "io.bfq.weight"}
        for file in ("io.weight", "io.bfq.weight"):
            line = Line(cgroup.stat().st_ino, f"/{cgroup.name}", hdd.number, file)
            assert KernelFiles().read(line) == {"weight": None}
            KernelFiles().write(line, {"weight": 321})
            assert KernelFiles().read(line) == {"weight": 321}
            KernelFiles().write(line, {"weight": None})
            assert KernelFiles().read(line) == {"weight": None}
    finally:
        (root / "io.cost.qos").write_text(f"{hdd.number} enable=0")
        hdd.scheduler.write_text(before.partition("[")[2].partition("]")[0])
    assert "io.weight" not in detect(hdd.number)
