"""How the node's counters are split by job, and what unmanaged cgroups are said to use."""

import itertools
from dataclasses import replace

from agent.config import Config, DeviceRule
from agent.named_devices import NamedDevices
from agent.node import (
    JobLinks,
    LocalNode,
    NicPackets,
    UnmanagedTraffic,
    links_by_job,
    preferred_streams,
    split_by_job,
)
from agent.types import Capacity, DeviceInfo, Job, Medium
from bpf.samples import BlockCounters, BlockKey, CacheCounters, LinkState, ObjectKey, Sample, StreamCounters
from cgroup.devices import Devices
from cgroup.errors import DeviceRefused
from cgroup.hotplug import DeviceChange
from cgroup.mounts import Mounts
from cgroup.tree import Cgroup
from tests.unit.cgroup.hosts import Host

DISK = "259:0"
MIB = 1 << 20
JOBS = {1: Job(1, "a", "/a", training=True), 2: Job(2, "b", "/b", training=True)}


def block(count):
    return BlockCounters(count // 4096, count, 0, 0, 0, (0,) * 32)


def stream(job, source="hint"):
    return StreamCounters(job, f"{source}/0", source, False, 1, 1, 8, 0, None, None, 1)


def test_split_by_job_leaves_strangers_out():
    blocks = {BlockKey(1, DISK, "read"): block(4096), BlockKey(9, DISK, "read"): block(8192)}
    sample = Sample(5, blocks, (stream(1), stream(2), stream(9)), cache={2: CacheCounters(10, 1)})
    parts = split_by_job(sample, JOBS)
    assert set(parts) == {1, 2}
    assert list(parts[1].blocks) == [BlockKey(1, DISK, "read")]
    assert parts[2].blocks == {}
    assert parts[2].cache == CacheCounters(10, 1)
    assert [len(part.streams) for part in parts.values()] == [1, 1]
    assert parts[1].time_ns == 5


def test_a_socket_belongs_to_the_innermost_job_above_its_cgroup():
    """A pod's containers are below it; a system service, and a cgroup that is gone, are nobody's."""
    tree = [Cgroup(1, "/a"), Cgroup(11, "/a/c1"), Cgroup(12, "/a/c2/deep"), Cgroup(2, "/b"), Cgroup(5, "/ab")]
    links = {
        ObjectKey(11, "192.0.2.1:443"): LinkState(1, 100, 1),
        ObjectKey(12, "192.0.2.1:443"): LinkState(3, 500, 2),
        ObjectKey(1, "192.0.2.2:443"): LinkState(0, None, 7),
        ObjectKey(5, "192.0.2.1:443"): LinkState(9, 1, 9),
        ObjectKey(99, "192.0.2.1:443"): LinkState(9, 1, 9),
    }
    assert links_by_job(links, tree, JOBS.values()) == {
        ObjectKey(1, "192.0.2.1:443"): LinkState(4, 400, 3),
        ObjectKey(1, "192.0.2.2:443"): LinkState(0, None, 7),
    }


def test_links_are_divided_again_only_where_something_changed():
    here, passes = JobLinks(), []

    def tree():
        passes.append(1)
        yield Cgroup(1, "/a")

    def links(retransmits):
        return {ObjectKey(1, "192.0.2.1:443"): LinkState(1, 100, retransmits)}

    for told in (links(1), links(1), links(2), links(2)):
        assert here.of(told, tree(), JOBS.values()) == told
    assert len(passes) == 2
    here.forget()
    assert here.of(links(2), iter(()), JOBS.values()) == {}


def test_connections_that_are_unknown_in_one_container_are_unknown_of_the_job():
    """Not so what was sent again: a counter that went back would look like one that began anew."""
    tree = [Cgroup(1, "/a"), Cgroup(11, "/a/c1"), Cgroup(12, "/a/c2")]
    links = {
        ObjectKey(11, "192.0.2.1:443"): LinkState(1, 100, 1),
        ObjectKey(12, "192.0.2.1:443"): LinkState(None, None, 2),
    }
    assert links_by_job(links, tree, JOBS.values()) == {ObjectKey(1, "192.0.2.1:443"): LinkState(None, None, 3)}


def test_a_hint_is_believed_before_an_inference():
    hint, inferred = stream(1), stream(1, "dataloader")
    assert preferred_streams([inferred, hint]) == (hint,)
    assert preferred_streams([inferred]) == (inferred,)
    validates = replace(hint, validation=True)
    assert preferred_streams([inferred, validates]) == (inferred, validates), "nobody tells of its training"
    assert preferred_streams([inferred, validates, hint]) == (validates, hint)


def unmanaged(*steps):
    """Shares after (disk read bytes, our read bytes) once a second, with a device of 100 MiB/s."""
    traffic = UnmanagedTraffic()
    devices = {DISK: DeviceInfo(DISK, "nvme0n1", Medium.SSD, Capacity(100 * MIB, 100 * MIB, 1e5, 1e5))}
    shares = {}
    for second, (total, ours) in enumerate(steps):
        shares = traffic.update(second * 10**9, {DISK: (total, 0)}, {DISK: {(1, "read"): ours}}, devices)
    return shares.get(DISK, 0.0)


def test_unmanaged_is_what_the_jobs_did_not_do():
    assert unmanaged(*[(second * 50 * MIB, second * 50 * MIB) for second in range(20)]) == 0.0
    share = unmanaged(*[(second * 50 * MIB, second * 20 * MIB) for second in range(20)])
    assert abs(share - 0.3) < 0.001


def test_a_job_that_is_gone_does_not_make_traffic_negative():
    assert unmanaged((0, 0), (50 * MIB, 50 * MIB), (100 * MIB, 10 * MIB)) >= 0.0


def test_devices_that_are_refused_are_left_out_with_a_reason(caplog):
    class Refusing(Mounts):
        def resolve(self, spec, medium=None):
            raise DeviceRefused(f"{spec} is a loop device")

    rules = [DeviceRule(device="/dev/loop0")]
    named = NamedDevices(rules, Refusing(Devices()), "/sys/fs/cgroup")
    assert [named.at(second * 10**9) for second in (0, 10, 20)] == [{}, {}, {}]
    assert "'/dev/loop0'" in caplog.text
    assert "loop device" in caplog.text
    assert len(caplog.records) == 1, "it is said once"


def test_a_device_that_no_rule_may_name_is_told_by_its_name(tmp_path, monkeypatch, caplog):
    host = Host(tmp_path)
    host.add("loop1", "7:1")
    devices = Devices(str(host.sys), str(host.dev))
    monkeypatch.setattr("agent.node.Devices", lambda: devices)
    node = LocalNode(str(tmp_path), Config(), [], NamedDevices([], Mounts(devices), str(tmp_path)))
    sample = Sample(0, {BlockKey(1, "7:1", "read"): block(4096), BlockKey(1, "7:2", "read"): block(4096)})
    with caplog.at_level("INFO"):
        views = node.devices(sample, {})
    assert {view.info.name for view in views.values()} == {"loop1", "7:2"}
    assert "device loop1 (7:1) is observed only: loop1 is refused: a loop device" in caplog.text
    node.close()


def test_a_device_that_cannot_be_steered_is_observed_only(tmp_path, caplog):
    (name, *_) = (device.device for device in Devices().all())
    rules = [DeviceRule(device=name, read_bytes_per_second=1e9)]
    found = NamedDevices(rules, Mounts(Devices()), str(tmp_path)).known
    assert found[name].capacity is None
    assert "observed only" in caplog.text


def test_a_limit_never_reaches_a_disk_that_took_the_number_over(tmp_path):
    """The disk that was named is pulled, another gets its number; then it comes back under another one."""
    host, root = Host(tmp_path), tmp_path / "cgroup"
    root.mkdir()
    (root / "cgroup.controllers").write_text("io\n")
    host.add("sdb", "8:16")
    host.link("disk/by-id/data", "sdb")
    rules = [DeviceRule(device="/dev/disk/by-id/data", read_bytes_per_second=1e9)]
    news = []
    named = NamedDevices(rules, Mounts(Devices(str(host.sys), str(host.dev))), str(root), news=lambda: news)
    node = LocalNode(str(root), Config(), [], named)

    def limited(second):
        devices = node.devices(Sample(second * 10**9), {})
        return [device for device, view in devices.items() if view.info.capacity is not None]

    assert limited(0) == ["8:16"]
    (host.dev / "disk/by-id/data").unlink()
    assert limited(10) == []
    host.add("sdc", "8:32")
    host.link("disk/by-id/data", "sdc")
    assert limited(19) == []
    assert limited(20) == ["8:32"]
    (host.dev / "disk/by-id/data").unlink()
    news[:] = [DeviceChange("change", "8:32", "sdc")]
    assert limited(21) == ["8:32"], "no disk came or went"
    news[:] = [DeviceChange("remove", "8:32", "sdc")]
    assert limited(22) == []
    node.close()


def test_packets_are_read_once_a_second_and_drawn_on_between():
    reads = []

    def read():
        reads.append(1)
        return {"eth0": 1000 * len(reads), "eth1": 0}

    packets = NicPackets(read)
    seen = [packets.at(tick * 100_000_000) for tick in range(31)]
    assert len(reads) == 4
    steps = [after - before for before, after in itertools.pairwise(seen[11:])]
    assert {99, 100, 101} >= set(steps)


def test_without_netlink_packets_are_unknown():
    def refuse():
        raise PermissionError(1, "Operation not permitted")

    assert NicPackets(refuse).at(0) is None
