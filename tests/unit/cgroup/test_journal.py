import errno
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cgroup import journal as journal_module
from cgroup.enforce import Enforcer
from cgroup.errors import JournalBusy, JournalError, JournalFull
from cgroup.journal import Entry, Journal, read_journal, replay
from cgroup.journal_lock import take_tree
from cgroup.lines import Limit, Line, line_of
from cgroup.restore import recover, restore_entries
from tests.contract.nodes import FakeNode
from tests.unit.cgroup.fuzzing import variants

MIB = 1 << 20
FREE = dict.fromkeys(("rbps", "wbps", "riops", "wiops"))
FIXTURES = Path(__file__).parent / "fixtures"


def entry(number, rbps, was=None, prior=None):
    line = Line(number, f"/j{number}", "8:0", "io.max")
    return Entry(line, {**FREE, "rbps": prior}, {**FREE, "rbps": was}, {**FREE, "rbps": rbps})


@pytest.fixture
def path(tmp_path):
    return str(tmp_path / "state" / "journal")


@pytest.fixture
def journal(path):
    journal = Journal.open(path)
    yield journal
    journal.close()


def test_what_is_recorded_is_read_again(path, journal):
    journal.record([entry(1, 5), entry(2, 6, prior=9)])
    journal.record([entry(1, 7, was=5)])
    journal.forget([entry(2, 6).line])
    assert read_journal(path).entries == {entry(1, 7).line: entry(1, 7, was=5)}
    assert dict(journal.entries) == dict(read_journal(path).entries)


def test_a_missing_or_empty_file_says_nothing(path, tmp_path):
    assert read_journal(path).entries == {}
    (tmp_path / "empty").write_bytes(b"")
    assert read_journal(str(tmp_path / "empty")) == replay(b"")


def test_the_record_is_durable_before_the_write(path, journal, monkeypatch):
    synced = []
    monkeypatch.setattr(
        journal_module.os, "fsync", lambda file: synced.append(str(Path(f"/proc/self/fd/{file}").readlink()))
    )
    journal.record([entry(1, 5)])
    assert synced == [path + ".new", str(Path(path).parent), path]
    journal.record([entry(1, 6, was=5)])
    assert synced[3:] == [path]


def test_the_folder_and_the_files_are_for_root_alone(path, journal):
    journal.record([entry(1, 5)])
    assert Path(path).stat().st_mode & 0o777 == 0o600
    assert Path(path).parent.stat().st_mode & 0o777 == 0o700


def test_nothing_is_left_when_everything_is_forgotten(path, journal):
    journal.record([entry(1, 5)])
    journal.forget([entry(1, 5).line])
    assert Path(path).read_bytes() == b""
    journal.record([entry(2, 5)])
    assert list(read_journal(path).entries) == [entry(2, 5).line]


def test_the_file_stays_small(path, journal, monkeypatch):
    monkeypatch.setattr(journal_module.os, "fsync", lambda file: None)
    for step in range(5000):
        journal.record([entry(step % 3, step + 1)])
    assert len(Path(path).read_bytes()) < 400_000
    assert sorted(e.wrote["rbps"] for e in read_journal(path).entries.values()) == [4998, 4999, 5000]


def test_the_successor_reads_and_rewrites(path, journal):
    journal.record([entry(1, 5)])
    journal.close()
    successor = Journal.open(path)
    assert list(successor.entries.values()) == [entry(1, 5)]
    successor.record([entry(2, 6)])
    assert set(read_journal(path).entries) == {entry(1, 5).line, entry(2, 6).line}
    successor.close()


def test_records_of_an_earlier_boot_are_void(path, tmp_path):
    (tmp_path / "boot1").write_text("one\n")
    (tmp_path / "boot2").write_text("two\n")
    first = Journal.open(path, boot_id_path=str(tmp_path / "boot1"))
    first.record([entry(1, 5)])
    first.close()
    assert Journal.open(path, boot_id_path=str(tmp_path / "boot1")).entries
    assert not Journal.open(path, boot_id_path=str(tmp_path / "boot2")).entries


def test_version_one_is_still_read():
    state = replay((FIXTURES / "journal.v1").read_bytes())
    (old,) = state.entries.values()
    assert old == Entry(
        Line(4711, "/train.slice/j1", "259:300", "io.max"),
        {**FREE, "wiops": 40},
        {"rbps": 1048576, "wbps": None, "riops": None, "wiops": 40},
        {"rbps": 1048576, "wbps": None, "riops": None, "wiops": 40},
    )
    assert (state.damaged, state.torn) == (0, False)


def test_a_newer_version_is_refused(path, journal):
    journal.record([entry(1, 5)])
    head = journal_module._encode({"type": "head", "version": 3, "boot": ""})
    Path(path).write_bytes(head)
    with pytest.raises(JournalError, match="newer prefetchd"):
        read_journal(path)
    journal.close()
    with pytest.raises(JournalError, match="version is 3"):
        Journal.open(path)


def test_only_one_process_owns_it(path, journal):
    program = (
        "import sys; from cgroup.journal import Journal; from cgroup.errors import JournalBusy\n"
        "try: Journal.open(sys.argv[1], wait_seconds=0.1)\n"
        "except JournalBusy as error: print(error)"
    )
    done = subprocess.run([sys.executable, "-c", program, path], capture_output=True, text=True, check=True)
    assert f"pid {os.getpid()}" in done.stdout


def test_another_cgroup_root_is_refused_and_nothing_forgotten(path, tmp_path):
    """From within another cgroup namespace every cgroup would look gone."""
    here, there = tmp_path / "here", tmp_path / "there"
    here.mkdir()
    there.mkdir()
    first = Journal.open(path, str(here))
    first.record([entry(1, 5)])
    first.close()
    with pytest.raises(
        JournalError, match=r"another root .*that of .*/there is \d+\): restore in the cgroup namespace"
    ):
        Journal.open(path, str(there))
    again = Journal.open(path, str(here))
    assert list(again.entries) == [entry(1, 5).line]
    again.forget([entry(1, 5).line])
    again.close()
    Journal.open(path, str(there)).close()


def test_a_pipe_in_its_place_is_refused_at_once(path, tmp_path):
    (tmp_path / "state").mkdir()
    os.mkfifo(path)
    with pytest.raises(JournalError, match=r"journal is not a regular file, so it is no journal: move it away"):
        Journal.open(path)


def test_a_removed_folder_is_made_again_with_the_lock(path, journal):
    journal.record([entry(1, 5)])
    shutil.rmtree(Path(path).parent)
    journal.record([entry(2, 6)])
    assert list(read_journal(path).entries) == [entry(1, 5).line, entry(2, 6).line]
    ask = f"from cgroup.journal import Journal; Journal.open({path!r})"
    second = subprocess.run([sys.executable, "-c", ask], capture_output=True, text=True, check=False)
    assert "JournalBusy: another prefetchd" in second.stderr


def test_who_took_the_lock_over_keeps_it(path, journal):
    """The folder was removed, and a second agent started before the first one wrote again."""
    journal.record([entry(1, 5)])
    shutil.rmtree(Path(path).parent)
    ask = f"from cgroup.journal import Journal; held = Journal.open({path!r}); print('held', flush=True); input()"
    with subprocess.Popen([sys.executable, "-c", ask], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as second:
        assert second.stdout.readline() == b"held\n"
        with pytest.raises(JournalBusy):
            journal.record([entry(2, 6)])
        second.communicate(b"\n")
    journal.record([entry(2, 6)])
    assert len(read_journal(path).entries) == 2


def test_a_tree_has_one_enforcing_agent_whatever_journal_it_uses(tmp_path):
    held = take_tree(str(tmp_path))
    with pytest.raises(JournalBusy, match="another prefetchd enforces below"):
        take_tree(str(tmp_path))
    os.close(held)
    os.close(take_tree(str(tmp_path)))


def test_a_lock_is_not_a_link_to_somewhere(tmp_path):
    (tmp_path / "target").write_text("precious")
    (tmp_path / "journal.lock").symlink_to(tmp_path / "target")
    with pytest.raises(JournalError):
        Journal.open(str(tmp_path / "journal"))
    assert (tmp_path / "target").read_text() == "precious"


def broken_truncate(file, size):
    raise OSError(errno.EIO, os.strerror(errno.EIO))


class TestNoRoom:
    def full(self, monkeypatch, number=errno.ENOSPC, short=False):
        """From now on, writes find no room (or room for a part)."""
        real = os.write

        def write(file, data):
            if short:
                return real(file, data[: len(data) // 2])
            raise OSError(number, os.strerror(number))

        monkeypatch.setattr(journal_module.os, "write", write)

    @pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
    def test_a_full_disk_is_its_own_error(self, journal, monkeypatch, number):
        self.full(monkeypatch, number)
        with pytest.raises(JournalFull, match="nothing is enforced"):
            journal.record([entry(1, 5)])
        assert journal.entries == {}

    def test_other_troubles_are_errors_too(self, journal, monkeypatch):
        self.full(monkeypatch, errno.EIO)
        with pytest.raises(JournalError, match="Input/output error"):
            journal.record([entry(1, 5)])

    @pytest.mark.parametrize("short", [False, True])
    def test_what_was_recorded_stays_and_no_torn_record_with_it(self, path, journal, monkeypatch, short):
        journal.record([entry(1, 5)])
        with monkeypatch.context() as patch:
            self.full(patch, short=short)
            with pytest.raises(JournalFull):
                journal.record([entry(1, 6, was=5), entry(2, 9)])
        assert list(journal.entries.values()) == [entry(1, 5)]
        state = read_journal(path)
        assert (list(state.entries.values()), state.damaged, state.torn) == ([entry(1, 5)], 0, False)
        journal.probe()
        journal.record([entry(2, 9)])
        assert len(read_journal(path).entries) == 2

    @pytest.mark.parametrize("method", ["record", "probe"])
    def test_a_file_system_that_became_read_only_is_an_error_too(self, journal, monkeypatch, method):
        """Then not even what was torn can be cut off."""
        journal.record([entry(1, 5)])

        def refuse(*_):
            raise OSError(errno.EROFS, os.strerror(errno.EROFS))

        for name in ("write", "ftruncate", "posix_fallocate"):
            monkeypatch.setattr(journal_module.os, name, refuse)
        arguments = [[entry(1, 6, was=5)]] if method == "record" else []
        with pytest.raises(JournalError, match="Read-only file system"):
            getattr(journal, method)(*arguments)
        assert list(journal.entries.values()) == [entry(1, 5)]

    def test_what_could_not_be_cut_off_does_not_spoil_the_next_record(self, path, journal, monkeypatch):
        journal.record([entry(1, 5)])
        with monkeypatch.context() as patch:
            self.full(patch, short=True)
            patch.setattr(journal_module.os, "ftruncate", broken_truncate)
            with pytest.raises(JournalError):
                journal.record([entry(2, 9)])
        journal.record([entry(3, 7)])
        assert list(read_journal(path).entries.values()) == [entry(1, 5), entry(3, 7)]

    def test_forgetting_needs_no_room(self, path, journal, monkeypatch):
        journal.record([entry(1, 5), entry(2, 6)])
        self.full(monkeypatch)
        journal.forget([entry(1, 5).line])
        journal.forget([entry(2, 6).line])
        assert journal.entries == {}
        assert read_journal(path).entries == {}

    def record_many(self, journal):
        for number in range(1000):
            journal.record([entry(number, 5)])

    def test_a_real_file_system_without_room(self, tmp_path):
        mount = tmp_path / "tiny"
        mount.mkdir()
        done = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=16k", "tiny", str(mount)], check=False)
        if done.returncode:
            pytest.skip("mounting a tmpfs needs root")
        try:
            journal = Journal.open(str(mount / "journal"))
            with pytest.raises(JournalFull):
                self.record_many(journal)
            assert 0 < len(journal.entries) == len(read_journal(journal.path).entries) < 1000
            journal.forget(list(journal.entries))
            journal.record([entry(1, 5)])
            with pytest.raises(JournalFull):
                journal.probe()
            assert len(read_journal(journal.path).entries) == 1
            journal.close()
        finally:
            subprocess.run(["umount", str(mount)], check=True)


class TestTorn:
    """A journal cut at every byte: the tree at that moment is always put back to what was there before."""

    def history(self, tmp_path):
        """Run an enforcer; give the node, the journal's bytes and the writes with the number of records before each."""
        node = FakeNode()
        targets = [node.make(name) for name in "ab"]
        node.meddle(targets[1], rbps=9 * MIB, wiops=3)
        journal = Journal.open(str(tmp_path / "journal"))
        enforcer = Enforcer(node.files, journal, "enforce")
        node.files.writes.clear()
        writes = []
        node.files.before_write = lambda line: writes.append(Path(journal.path).stat().st_size)
        for step, mib in enumerate((8, 4, 6, 3, 5)):
            wanted = {targets[0]: (Limit(rbps=mib * MIB, riops=100 * mib), "")}
            if step != 2:
                wanted[targets[1]] = (Limit(rbps=mib * MIB), "")
            enforcer.reconcile(wanted, step * 2.0)
        data = Path(journal.path).read_bytes()
        journal.close()
        return node, targets, data, list(zip(writes, node.files.writes, strict=True))

    def test_every_byte_offset(self, tmp_path):
        node, targets, data, writes = self.history(tmp_path)
        assert len(writes) > 8
        node.files.before_write = None
        for cut in range(len(data) + 1):
            # A write needs its record whole; a record that follows was begun when the writes before it were done.
            sizes = [size for size, _ in writes]
            fewest, most = sum(size < cut for size in sizes), sum(size <= cut for size in sizes)
            for made in range(fewest, most + 1):
                self._set(node, targets, [write for _, write in writes[:made]])
                entries = list(replay(data[:cut]).entries.values())
                report = restore_entries(node.files, entries, lambda _: None)
                assert not report.errors
                assert not report.foreign
                assert node.limits(targets[0]) == {}, (cut, made)
                assert node.limits(targets[1]) == {"rbps": 9 * MIB, "wiops": 3}, (cut, made)

    def _set(self, node, targets, writes):
        for target, before in ((targets[0], {}), (targets[1], {"rbps": 9 * MIB, "wiops": 3})):
            node.files.write(line_of(target), {**FREE, **before})
        for line, changes in writes:
            node.files.write(line, changes)

    def test_a_torn_record_is_told_from_a_damaged_one(self, path, journal):
        journal.record([entry(1, 5)])
        journal.record([entry(1, 6, was=5)])
        data = Path(path).read_bytes()
        assert replay(data[:-20]).torn
        assert replay(data[:-20]).entries[entry(1, 5).line] == entry(1, 5)
        damaged = data.replace(b'"rbps":5', b'"rbps":4', 1)
        state = replay(damaged)
        assert (state.damaged, state.torn) == (1, False)
        assert state.entries[entry(1, 5).line].wrote["rbps"] == 6

    def test_a_torn_file_is_continued(self, path, journal):
        journal.record([entry(1, 5)])
        journal.record([entry(2, 6)])
        journal.close()
        data = Path(path).read_bytes()
        Path(path).write_bytes(data[:-7])
        successor = Journal.open(path)
        successor.record([entry(3, 7)])
        state = read_journal(path)
        assert {e.line.cgroup_id for e in state.entries.values()} == {1, 3}
        assert (state.damaged, state.torn) == (0, False)
        successor.close()


@given(st.lists(st.tuples(st.integers(1, 3), st.integers(1, 9), st.booleans()), max_size=12), st.integers(0, 3000))
def test_a_prefix_replays_to_the_state_at_some_moment(steps, cut):
    states, data, entries = [{}], b"", {}
    for number, rbps, forget in steps:
        record = entry(number, rbps)
        if forget:
            entries.pop(record.line, None)
            data += journal_module._encode(journal_module._done_record(record.line))
        else:
            entries[record.line] = record
            data += journal_module._encode(journal_module._set_record(record))
        states.append(dict(entries))
    assert dict(replay(data[:cut]).entries) in states
    assert dict(replay(data).entries) == states[-1]


@pytest.mark.parametrize("count", [3_000, pytest.param(100_000, marks=pytest.mark.nightly)])
def test_fuzz(count):
    seeds = [(FIXTURES / "journal.v1").read_text()]
    seeds.append((journal_module._encode(journal_module._set_record(entry(1, 5))) * 2).decode())
    records = 0
    for text in variants(seeds, count):
        try:
            records += len(replay(text.encode(errors="surrogatepass")).entries)
        except JournalError:
            continue
    assert records > 0


def test_records_with_a_right_checksum_and_strange_content_are_left_out():
    strange = [
        {"type": "set"},
        {"type": "set", "id": "x", "path": "/", "device": "8:0", "file": "io.max"},
        {
            "type": "set",
            "id": 1,
            "path": "/",
            "device": "8:0",
            "file": "memory.max",
            "prior": {},
            "was": {},
            "wrote": {},
        },
        {"type": "set", "id": 1, "path": "/", "device": "8:0", "file": "io.max", "prior": 5, "was": 5, "wrote": 5},
        {"type": "set", "id": 1, "path": "/", "device": "8:0", "file": "io.max", "prior": "?", "wrote": "?"},
        {"type": "done"},
        {"type": "news"},
        {},
    ]
    for record in strange:
        assert replay(journal_module._encode(record)).entries == {}


def test_recover_keeps_what_could_not_be_restored(tmp_path):
    node = FakeNode()
    target = node.make("a")
    journal = Journal.open(str(tmp_path / "journal"))
    Enforcer(node.files, journal, "enforce").reconcile({target: (Limit(rbps=MIB), "")}, 0.0)
    node.files.fail["write"] = [PermissionError(1, "Operation not permitted")]
    report = recover(node.files, journal)
    assert (len(report.errors), report.failed) == (1, (line_of(target),))
    assert len(journal.entries) == 1
    assert len(recover(node.files, journal).restored) == 1
    assert (node.limits(target), len(journal.entries)) == ({}, 0)
    journal.close()


def test_busy_is_a_journal_error():
    assert issubclass(JournalBusy, JournalError)
    assert issubclass(JournalFull, JournalError)
