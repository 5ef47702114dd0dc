"""A probe per mount over a made-up kernel: it attaches once the module is there, and not again and again after that."""

import types

import numpy as np
import pytest

from bpf.decode import NFS_COUNTERS
from bpf.fuse import FuseProbe
from bpf.loader import ProbeError, RefusedError
from bpf.nfs import NfsProbe
from bpf.reasons import NONE_TAKEN
from bpf.samples import NOT_LOADED, NfsKey, ProbeState

SECOND_NS = 10**9
SOME = NfsKey(7, "0:999", "read")


class Table(dict):
    """A map by its key's value, with the constructors of BCC's tables."""

    Key = staticmethod(lambda value: value)
    Leaf = staticmethod(lambda value: value)


class Program:
    def __init__(self):
        value = np.zeros(1, NFS_COUNTERS)
        value[0]["requests"] = 3
        key = types.SimpleNamespace(cgroup=7, device=999, op=0)
        lost = types.SimpleNamespace(value=5)
        self.maps = {
            "nfs_calls": Calls([(key, value.tobytes())]),
            "nfs_lost": {0: lost},
            "managed": Table(),
            "owners_generation": Table(),
        }
        self.attached, self.closed = [], False

    def map(self, name):
        return self.maps[name]

    def attach_tracepoint(self, name, function):
        self.attached.append((name, function))

    def close(self):
        self.closed = True


class Calls:
    """A map whose keys are structures."""

    def __init__(self, pairs):
        self.pairs = pairs

    def __iter__(self):
        return iter([key for key, _ in self.pairs])

    def __len__(self):
        return len(self.pairs)

    def items(self):
        return iter(self.pairs)

    def __delitem__(self, gone):
        self.pairs = [(key, value) for key, value in self.pairs if key is not gone]


class Loader:
    """A kernel that has the module or not, and whose compiler works or not."""

    def __init__(self, *, loaded, refusal=None):
        self.loaded, self.refusal = loaded, refusal
        self.programs, self.looks = [], 0

    def tracepoint_exists(self, _name):
        self.looks += 1
        return self.loaded

    def load(self, _source, macros, _shared):
        if self.refusal:
            raise self.refusal
        assert macros["MAX_SLOTS"]
        self.programs.append(Program())
        return self.programs[-1]


def test_it_attaches_once_the_module_is_there():
    loader = Loader(loaded=False)
    probe = NfsProbe(loader)
    probe.manage([7])
    assert probe.status().state is ProbeState.UNAVAILABLE
    assert probe.status().why == "tracepoints of nfs and sunrpc are missing: the module is not loaded"
    assert probe.read(0).nfs == {}
    loader.loaded = True
    assert probe.read(SECOND_NS).nfs == {}, "it looks only every few seconds"
    assert probe.read(5 * SECOND_NS).nfs[SOME].requests == 3
    (program,) = loader.programs
    assert program.map("managed") == {7: 1}, "what is to be counted was said before there was a program"
    status = probe.status()
    assert (status.state, status.tier, status.why, status.lost_events) == (ProbeState.ATTACHED, "tracepoint", "", 5)


def test_every_such_probe_says_so_where_its_module_is_not_loaded(tmp_path, monkeypatch):
    (tmp_path / "filesystems").write_text("\text4\n")
    monkeypatch.setattr("bpf.fuse.FILESYSTEMS", tmp_path / "filesystems")
    for kind in (NfsProbe, FuseProbe):
        assert kind(Loader(loaded=False)).status().why.endswith(f"missing: {NOT_LOADED}")


@pytest.mark.parametrize(
    ("refusal", "why", "detail"),
    [
        (RefusedError("cannot compile nfs.c: no"), NONE_TAKEN, "cannot compile nfs.c: no"),
        (ProbeError("no kernel headers for 6.1"), "no kernel headers for 6.1", ""),
    ],
)
def test_what_fails_although_the_module_is_there_is_not_tried_again(refusal, why, detail):
    loader = Loader(loaded=True, refusal=refusal)
    probe = NfsProbe(loader)
    looks = loader.looks
    assert probe.read(10 * SECOND_NS).nfs == {}
    assert loader.looks == looks
    status = probe.status()
    assert (status.state, status.why, status.detail) == (ProbeState.UNAVAILABLE, why, detail)


def test_counters_of_a_cgroup_that_is_no_longer_managed_go():
    loader = Loader(loaded=True)
    probe = NfsProbe(loader)
    probe.manage([7, 8])
    assert set(probe.read(0).nfs) == {SOME}
    probe.manage([8])
    assert probe.read(0).nfs == {}
    assert loader.programs[0].map("managed") == {8: 1}


def test_a_call_that_ends_after_its_cgroup_was_let_go_leaves_nothing():
    """The kernel makes the counters anew: a few with each job that ends would fill the map over weeks."""
    loader = Loader(loaded=True)
    probe = NfsProbe(loader)
    probe.manage([7, 8])
    calls = loader.programs[0].map("nfs_calls")
    late = list(calls.pairs)
    probe.manage([8])
    calls.pairs += late
    assert probe.read(0).nfs == {}
    assert len(calls) == 0


@pytest.fixture
def mounts(tmp_path, monkeypatch):
    """Write what is mounted under the number of the counters."""
    monkeypatch.setattr("bpf.mount_probe.MOUNTINFO", tmp_path / "mountinfo")

    def write(*lines):
        (tmp_path / "mountinfo").write_bytes(b"".join(b"91 24 0:999 / " + line + b"\n" for line in lines))

    return write


def test_a_number_that_went_to_another_mount_counts_for_that_from_then_on(mounts):
    mounts(b"/mnt rw - nfs4 filer:/old rw")
    probe = NfsProbe(Loader(loaded=True))
    probe.manage([7])
    assert set(probe.read(0).nfs) == {NfsKey(7, "filer:/old", "read")}
    mounts()
    assert set(probe.read(6 * SECOND_NS).nfs) == {NfsKey(7, "filer:/old", "read")}
    mounts(b"/mnt rw - nfs4 filer:/new rw")
    assert probe.read(12 * SECOND_NS).nfs == {}, "what was counted was the old one's"
    probe._program.maps["nfs_calls"].pairs += Program().maps["nfs_calls"].pairs
    assert set(probe.read(13 * SECOND_NS).nfs) == {NfsKey(7, "filer:/new", "read")}


def test_a_mount_keeps_its_name_while_it_has_it_besides_others(mounts):
    """Two exports of one file system have one number."""
    mounts(b"/mnt rw - nfs4 filer:/a rw")
    probe = NfsProbe(Loader(loaded=True))
    probe.manage([7])
    probe.read(0)
    mounts(b"/mnt rw - nfs4 filer:/a rw", b"/sub rw - nfs4 filer:/a/sub rw")
    assert set(probe.read(6 * SECOND_NS).nfs) == {NfsKey(7, "filer:/a", "read")}


def test_mount_points_may_be_called_by_any_bytes(mounts):
    mounts(b"/home/\xff\xfe\rodd rw - fuse sshfs rw", b"/mnt\rodd rw - nfs4 filer:/a rw")
    probe = NfsProbe(Loader(loaded=True))
    probe.manage([7])
    assert set(probe.read(0).nfs) == {NfsKey(7, "filer:/a", "read")}


def test_what_is_closed_stays_closed():
    loader = Loader(loaded=True)
    probe = NfsProbe(loader)
    probe.close()
    probe.close()
    assert probe.read(10 * SECOND_NS).nfs == {}
    assert [program.closed for program in loader.programs] == [True]
    assert (probe.status().state, probe.status().why) == (ProbeState.UNAVAILABLE, "closed")
