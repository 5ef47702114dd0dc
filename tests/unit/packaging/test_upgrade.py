"""Upgrades: what an earlier version wrote is read by this one, and what a later one wrote is refused in a sentence.

The files in `fixtures` were written by the programs of their time and are never made again: `journal.v1` (beside the
tests of the journal), `journal.v2` (before the head named the cgroup root), `recording.v1` (before it was told what a
loop can take of its queue), `recording.v2`.
"""

import json
import os
import subprocess
import sys
import zlib
from pathlib import Path

import msgspec
import pytest

from agent.recording import read, recorder
from agent.recording.frames import HEAD, frame, frames
from bpf.samples import IterationEvent
from cgroup import journal
from cgroup.journal import Entry, Journal, read_journal
from cgroup.lines import Line
from tests.unit.packaging.support import SOURCE

FIXTURES = Path(__file__).parent / "fixtures"
JOURNALS = {
    1: SOURCE / "tests" / "unit" / "cgroup" / "fixtures" / "journal.v1",
    2: FIXTURES / "journal.v2",
}
RECORDINGS = {1: FIXTURES / "recording.v1", 2: FIXTURES / "recording.v2"}
FREE = dict.fromkeys(("rbps", "wbps", "riops", "wiops"))


def run(*arguments):
    command = [sys.executable, "-m", "agent", *map(str, arguments)]
    return subprocess.run(command, cwd=SOURCE, capture_output=True, text=True, check=False, timeout=60)


def test_every_version_so_far_has_a_file():
    assert sorted(JOURNALS) == list(range(1, journal.VERSION + 1))
    assert sorted(RECORDINGS) == list(range(1, recorder.VERSION + 1))
    heads = [json.loads(path.read_bytes().split(b"\n")[0].split(b" ", 1)[1]) for path in JOURNALS.values()]
    assert [head["version"] for head in heads] == list(JOURNALS)
    for version, path in RECORDINGS.items():
        with path.open("rb") as file:
            kind, contents, _ = next(frames(file))
        assert (kind, msgspec.msgpack.decode(contents)["version"]) == (HEAD, version)


def test_journal_of_version_two():
    state = read_journal(str(JOURNALS[2]))
    job = Line(4711, "/train.slice/j1", "259:300", "io.max")
    scan = Line(4713, "/batch.slice/scan", "8:0", "io.weight")
    prior = {**FREE, "wiops": 40}
    assert state.entries == {
        job: Entry(job, prior, {**prior, "rbps": 2097152}, {**prior, "rbps": 1048576}),
        scan: Entry(scan, {"weight": 100}, {"weight": 100}, {"weight": 20}),
    }
    assert (state.damaged, state.torn) == (0, False)


@pytest.mark.parametrize("version", JOURNALS)
def test_the_next_agent_goes_on_with_an_old_journal(version, tmp_path):
    path = tmp_path / "journal"
    path.write_bytes(JOURNALS[version].read_bytes())
    before = read_journal(str(path)).entries
    assert before
    new = Line(1, "/new", "8:0", "io.max")
    owner = Journal.open(str(path))
    owner.record([Entry(new, FREE, FREE, {**FREE, "rbps": 7})])
    owner.close()
    after = read_journal(str(path)).entries
    assert after == {**before, new: after[new]}
    assert f'"version":{journal.VERSION}'.encode() in path.read_bytes()


@pytest.mark.parametrize("version", JOURNALS)
def test_restore_undoes_what_an_earlier_version_wrote(version, tmp_path):
    """The file as that version wrote it, with the ids of two cgroups that are here."""
    root, state = tmp_path / "cgroup", tmp_path / "state"
    state.mkdir()
    ids = {}
    for number, name in {4711: "j1", 4713: "scan"}.items():
        (root / name).mkdir(parents=True)
        ids[number] = (root / name).stat().st_ino
    (root / "cgroup.procs").touch()
    (root / "j1" / "io.max").write_text("259:300 rbps=1048576 wbps=max riops=max wiops=40\n")
    (root / "scan" / "io.weight").write_text("default 100\n8:0 20\n")
    (state / "journal").write_bytes(with_ids(JOURNALS[version].read_bytes(), ids))
    done = run("restore", "--state-directory", state, "--cgroup-root", root, "--json")
    assert done.returncode == 0, done.stdout + done.stderr
    assert (root / "j1" / "io.max").read_text() == "259:300 rbps=max\n"  # wiops=40 was there before us
    assert len(json.loads(done.stdout)["restored"]) == version
    assert read_journal(str(state / "journal")).entries == {}


def with_ids(text, ids):
    """Records with other cgroup ids, and the checksums that belong to them."""
    bodies = [json.loads(line.split(b" ", 1)[1]) for line in text.splitlines()]
    changed = [{**body, "id": ids.get(body["id"], 1)} if "id" in body else body for body in bodies]
    lines = [json.dumps(body, separators=(",", ":")).encode() for body in changed]
    return b"".join(b"%08x %s\n" % (zlib.crc32(line), line) for line in lines)


def test_recording_of_version_one():
    moments = list(read(RECORDINGS[1]))
    last = moments[-1]
    assert (len(moments), last.segment.software, last.segment.policy) == (10, "0.1.0", "adaptive")
    assert [job.name for job in last.jobs] == ["resnet50", "bert-large", "clip"]
    assert last.devices["259:0"].info.capacity.rbps == 125829120
    ((_, block),) = last.samples[11].blocks.items()
    assert (block.requests, block.bytes, block.latency_ns) == (141, 37199065, 1210174675)
    assert sum(block.histogram) == block.requests
    (stream,) = last.samples[11].streams
    assert stream.recent[0].time_ns == 948000000
    assert (stream.takeable, stream.recent[0].takeable) == (None, None)
    outputs = last.job_outputs[11]
    assert (outputs["score",], outputs["cause",]) == (49.2, "device_contention")
    assert outputs["d", "259:0", "read_bytes_per_second"] == 43863000.0
    assert last.node_outputs["d", "259:0", "pool_lent_ratio"] == 0.144


def test_recording_of_version_two():
    last = list(read(RECORDINGS[2]))[-1]
    (stream,) = last.samples[11].streams
    assert (stream.depth, stream.takeable, stream.capacity) == (2, 0, 8)
    assert stream.recent == (IterationEvent(1510000000, 0, 2, 0),)
    outputs = last.job_outputs[11]
    assert (outputs["queue_depth",], outputs["queue_takeable",], outputs["score",]) == (2.0, 0.0, 55.3)


PASSES = {1: "10 passes over 900 ms, 3 training job(s)", 2: "16 passes over 1.5 s, 2 training job(s)"}


@pytest.mark.parametrize("version", RECORDINGS)
def test_commands_take_a_recording_of_any_version(version, tmp_path):
    replayed = run("replay", RECORDINGS[version])
    assert replayed.returncode == 0, replayed.stderr
    assert PASSES[version] in replayed.stdout
    page = run("report", RECORDINGS[version], "--output", tmp_path / "page.html")
    assert page.returncode == 0, page.stderr
    assert "resnet50" in (tmp_path / "page.html").read_text()


def test_a_later_version_is_refused_in_a_sentence(tmp_path):
    head = {"format": "prefetchd", "version": recorder.VERSION + 1, "software": "9.9.9"}
    (tmp_path / "later.rec").write_bytes(frame(HEAD, msgspec.msgpack.encode(head)))
    replayed = run("replay", tmp_path / "later.rec")
    assert (replayed.returncode, replayed.stdout, replayed.stderr.count("\n")) == (1, "", 1)
    assert f"has version {recorder.VERSION + 1}" in replayed.stderr
    assert "9.9.9" in replayed.stderr


@pytest.mark.skipif(os.geteuid() != 0, reason="`prefetchd restore` needs root")
def test_a_later_journal_is_refused_in_a_sentence_and_kept(tmp_path):
    body = b'{"type":"head","version":%d}' % (journal.VERSION + 1)
    written = b"%08x %s\n" % (zlib.crc32(body), body)
    (tmp_path / "journal").write_bytes(written)
    done = run("restore", "--state-directory", tmp_path)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (1, "", 1)
    assert f"newer prefetchd (its version is {journal.VERSION + 1}" in done.stderr
    assert (tmp_path / "journal").read_bytes() == written
