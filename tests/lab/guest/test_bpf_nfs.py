"""The NFS probe in the guest, against the client's own mountstats and the workload's bytes."""

import time
from pathlib import Path

import pytest

from bpf.loader import Loader
from bpf.nfs import NfsProbe
from bpf.samples import NfsKey, ProbeState
from tests.lab.nfs import EXPORT, served
from tests.lab.undo import undo
from tests.native import workload

pytestmark = pytest.mark.guest

MIB = 1 << 20
ROUND_TRIP_MS = 5


@pytest.fixture(scope="module")
def loader():
    with Loader() as made:
        yield made


def mountstats(mount):
    """Per operation of a mount: ops, …, at 5 to 7 queue, rtt and execute in ms (net/sunrpc/stats.c)."""
    _, _, mine = Path("/proc/self/mountstats").read_text().partition(f" mounted on {mount} with")
    mine = mine.partition("\ndevice ")[0]
    found = {}
    for line in mine.splitlines():
        name, colon, rest = line.strip().partition(":")
        if colon and name in {"READ", "WRITE"}:
            found[name.lower()] = [int(value) for value in rest.split()]
        elif name == "bytes":
            found["server_bytes"] = [int(value) for value in rest.split()][4:6]
    return found


def source_of(mount):
    return next(
        line.split()[0] for line in Path("/proc/self/mounts").read_text().splitlines() if line.split()[1] == str(mount)
    )


@pytest.mark.parametrize("version", ["3", "4.2"])
def test_calls_agree_with_mountstats(loader, cgroup, version):
    with served(round_trip_ms=ROUND_TRIP_MS, version=version) as mount:
        probe = NfsProbe(loader)
        assert probe.status().state is ProbeState.ATTACHED, probe.status().why
        probe.manage([cgroup.stat().st_ino])
        workload.make_file(EXPORT / "data", 8 * MIB)
        before = mountstats(mount)
        read = workload.run(cgroup, "buffered", mount / "data", 128 << 10, 64)
        written = workload.run(cgroup, "write", mount / "data", 128 << 10, 16)
        after, found = mountstats(mount), probe.read(time.monotonic_ns()).nfs
        source = source_of(mount)
        probe.close()
    for at, (op, report) in enumerate((("read", read), ("write", written))):
        counters = found[NfsKey(cgroup.stat().st_ino, source, op)]
        delta = [new - old for new, old in zip(after[op], before[op], strict=True)]
        ops, queue_ms, rtt_ms, execute_ms = delta[0], *delta[5:8]
        assert counters.requests == ops == sum(counters.histogram)
        assert counters.bytes == report.bytes == after["server_bytes"][at] - before["server_bytes"][at]
        for ours_ns, theirs_ms in (
            (counters.backlog_ns, queue_ms),
            (counters.round_trip_ns, rtt_ms),
            (counters.total_ns, execute_ms),
        ):
            assert ours_ns / 1e6 == pytest.approx(theirs_ms, rel=0.05, abs=ops)
        assert counters.round_trip_ns / counters.requests >= ROUND_TRIP_MS * 1e6


def test_waiting_in_the_client_shows_as_backlog(loader, cgroup):
    """Readahead sends many calls at once; on a slow link the later ones wait for the earlier."""
    with served(bytes_per_second=10e6, version="4.2") as mount:
        probe = NfsProbe(loader)
        probe.manage([cgroup.stat().st_ino])
        workload.make_file(EXPORT / "data", 8 * MIB)
        report = workload.run(cgroup, "buffered", mount / "data", 128 << 10, 64)
        (counters,) = probe.read(time.monotonic_ns()).nfs.values()
        probe.close()
    assert counters.bytes == report.bytes
    assert counters.total_ns >= counters.backlog_ns + counters.round_trip_ns - 2_000 * counters.requests
    assert counters.total_ns / counters.requests > 128e3 / 10e6 * 1e9 * 0.5


def test_the_module_may_be_loaded_later(loader, cgroup):
    undo("modprobe", "-r", "nfsv3", "nfsv4", "nfs")
    probe = NfsProbe(loader)
    probe.manage([cgroup.stat().st_ino])
    assert probe.status().state is ProbeState.UNAVAILABLE
    assert "not loaded" in probe.status().why
    assert probe.read(0).nfs == {}
    with served() as mount:
        workload.make_file(EXPORT / "data", MIB)
        assert probe.read(1).nfs == {}, "it looks only every few seconds"
        probe.read(time.monotonic_ns())
        assert probe.status().state is ProbeState.ATTACHED, probe.status().why
        report = workload.run(cgroup, "buffered", mount / "data", 128 << 10, 8)
        (counters,) = probe.read(time.monotonic_ns()).nfs.values()
        assert counters.bytes == report.bytes
        probe.close()


def test_other_cgroups_leave_no_trace(loader, cgroup):
    with served() as mount:
        probe = NfsProbe(loader)
        workload.make_file(EXPORT / "data", MIB)
        workload.run(cgroup, "buffered", mount / "data", 128 << 10, 8)
        assert probe.read(time.monotonic_ns()).nfs == {}
        probe.close()
