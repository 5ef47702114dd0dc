"""Recordings: exact inputs, small files, readable up to any tear, and replays that decide the same."""

import errno
import io
import json
import os
import random
import subprocess
import sys
import tempfile
import threading
import time
import zlib
from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agent import recording
from agent.commands.replay import _difference, _line
from agent.config import ByteRate, Config, DeviceRule, HealthSection
from agent.errors import PrefetchdError
from agent.job_sample import IoCounts, JobSample
from agent.recording import Recorder, RecordingError, read, refuse_other_file
from agent.recording import reader as recording_reader
from agent.recording.frames import HEAD, PASSES, frame, frames
from agent.recording.inputs import flatten, unflatten
from agent.recording.outputs import SCALES
from agent.recording.replay import Difference, Tally, compare, replay, with_rules
from agent.report.gather import gather
from agent.report.page import render
from agent.snapshot import snapshot
from agent.types import Capacity
from bpf.samples import (
    BlockCounters,
    BlockKey,
    CacheCounters,
    FuseCounters,
    FuseKey,
    IterationEvent,
    NfsCounters,
    NfsKey,
    ObjectCounters,
    ObjectKey,
    StreamCounters,
    WorkerTime,
)
from tests.unit.agent.made_reports import record_twice, story

BIG = st.integers(0, 2**63 - 1)
MAYBE = st.none() | BIG
HISTOGRAM = st.just(()) | st.lists(st.integers(0, 1000), min_size=32, max_size=32).map(tuple)
BATCHES = st.none() | st.integers(0, 64)
EVENT = st.builds(IterationEvent, BIG, MAYBE, BATCHES, BATCHES)


def job_streams(job, name):
    small = st.none() | st.integers(0, 99)
    return st.builds(
        StreamCounters, st.just(job), st.just(name), st.sampled_from(["hint", "dataloader"]), st.booleans(), BIG,
        small, small, MAYBE, MAYBE, MAYBE, BIG, st.lists(EVENT, max_size=4).map(tuple), st.sampled_from(["hint", "U"]),
        MAYBE, st.integers(0, 99), BATCHES,
    )  # fmt: skip


@st.composite
def job_samples(draw, job=7):
    """Any counters a job may have."""
    op = st.sampled_from(["read", "write"])
    blocks = draw(st.dictionaries(
        st.builds(BlockKey, st.just(job), st.sampled_from(["259:0", "8:0"]), op),
        st.builds(BlockCounters, BIG, BIG, BIG, BIG, st.integers(0, 99), HISTOGRAM, MAYBE, MAYBE, MAYBE), max_size=3,
    ))  # fmt: skip
    nfs = draw(st.dictionaries(
        st.builds(NfsKey, st.just(job), st.sampled_from(["srv:/a", "srv:/b c"]), op),
        st.builds(NfsCounters, BIG, MAYBE, BIG, BIG, BIG, BIG, HISTOGRAM), max_size=2,
    ))  # fmt: skip
    objects = draw(st.dictionaries(
        st.builds(ObjectKey, st.just(job), st.just("10.0.0.1:443")),
        st.builds(ObjectCounters, BIG, BIG, BIG, BIG, BIG, st.integers(0, 99), HISTOGRAM), max_size=1,
    ))  # fmt: skip
    fuse = draw(st.dictionaries(
        st.builds(FuseKey, st.just(job), st.just("/mnt/s3"), st.sampled_from(["read", "write", "other"])),
        st.builds(FuseCounters, BIG, BIG, BIG, BIG, HISTOGRAM), max_size=2,
    ))  # fmt: skip
    names = draw(st.lists(st.sampled_from(["1/0", "1/1", "rank 2"]), unique=True))
    streams = tuple(draw(job_streams(job, name)) for name in names)
    return JobSample(
        job=job, time_ns=draw(BIG), blocks=blocks, streams=streams, nfs=nfs, objects=objects,
        cache=draw(st.none() | st.builds(CacheCounters, BIG, BIG)),
        workers=draw(st.none() | st.builds(WorkerTime, BIG, BIG, BIG, BIG, BIG, BIG, BIG)),
        io_stat=draw(st.dictionaries(st.just("8:0"), st.builds(IoCounts, BIG, BIG, BIG, BIG))),
        pressure_some_seconds=draw(st.none() | st.floats(0, 1e9)), nic_packets=draw(MAYBE),
        fuse=fuse,
    )  # fmt: skip


@given(job_samples())
def test_any_sample_survives_flattening(sample):
    flat, events = flatten(sample)
    assert unflatten(sample.job, sample.time_ns, flat, events) == sample


@pytest.fixture(scope="module")
def told():
    """The story of a node: reports and samples."""
    return list(story(40.0))


@pytest.fixture(scope="module")
def file(told, tmp_path_factory):
    path = tmp_path_factory.mktemp("recording") / "node.rec"
    record(path, told)
    return path


def record(path, told, **options):
    recorder = Recorder(path, options.pop("config", Config()), software="1.2.3", **options)
    for report, samples in told:
        recorder.add(report, samples)
    recorder.close()
    recorder.close()
    return recorder


def test_inputs_come_back_exactly(told, file):
    moments = list(read(file))
    assert len(moments) == len(told)
    for moment, (report, samples) in zip(moments, told, strict=True):
        assert moment.time == report.time
        assert moment.wall == pytest.approx(report.wall_time, abs=0.0006)
        assert moment.jobs == tuple(entry.job for entry in report.jobs.values())
        assert moment.samples == samples
        assert {name: view.info for name, view in moment.devices.items()} == {
            name: view.info for name, view in report.devices.items()
        }
    assert moments[0].segment.software == "1.2.3"
    assert moments[0].segment.config["policy"] == "adaptive"


REPORT, _ = next(iter(story(10.0)))


@settings(max_examples=30, deadline=None)
@given(st.lists(job_samples(), min_size=1, max_size=6))
def test_any_row_of_samples_comes_back_exactly(row):
    entry = REPORT.jobs[11]._replace(job=replace(REPORT.jobs[11].job, id=7))
    made = [(replace(REPORT, time=float(i), jobs={7: entry}), {7: sample}) for i, sample in enumerate(row)]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "x.rec"
        record(path, made)
        assert [moment.samples[7] for moment in read(path)] == row


def test_outputs_come_back_rounded(told, file):
    for moment, (report, _) in zip(read(file), told, strict=True):
        for job in moment.fresh:
            entry, outputs = report.jobs[job], moment.job_outputs[job]
            if entry.health is not None:
                assert outputs["score",] == pytest.approx(entry.health.score, abs=0.051)
                assert outputs["cause",] == entry.diagnosis.cause
            for device, here in entry.signals.devices.items():
                quota = report.decision.quotas.get((job, device))
                assert outputs.get(("d", device, "quota_ratio")) == (
                    pytest.approx(quota.share, abs=1e-4) if quota else None
                )
                if here.latency_seconds is not None:
                    assert outputs["d", device, "latency_seconds"] == pytest.approx(here.latency_seconds, abs=1e-6)
        assert moment.node_outputs["mode",] == report.mode


def test_outputs_of_a_job_are_written_at_its_iterations(told, file):
    fresh = [moment for moment in read(file) if 11 in moment.fresh]
    iterations = told[-1][0].jobs[11].signals.iterations
    assert iterations / 2 < len(fresh) < len(told)


def test_a_kibibyte_an_iteration_is_plenty(told, file):
    iterations = sum(e.signals.iterations for e in told[-1][0].jobs.values() if e.job.training)
    assert file.stat().st_size / iterations < 200


def test_torn_at_any_byte_it_is_read_up_to_the_tear(told, tmp_path):
    path = tmp_path / "short.rec"
    record(path, told[:35])
    whole = path.read_bytes()
    ends = [end for _, _, end in frames(io.BytesIO(whole))]
    complete = [moment.time for moment in read(path)]
    assert len(ends) >= 4
    for cut in range(len(whole)):
        good = [end for _, _, end in frames(io.BytesIO(whole[:cut]))]
        assert good == [end for end in ends if end <= cut]
    for cut in [
        *range(ends[0], len(whole), 41),
        *ends,
        *(end - 1 for end in ends[1:]),
        *(end + 1 for end in ends[:-1]),
    ]:
        path.write_bytes(whole[:cut])
        times = [moment.time for moment in read(path)]
        assert times == complete[: len(times)]
        assert (len(times) == 35) == (cut == len(whole))


def test_a_flipped_byte_ends_the_reading_there(told, tmp_path):
    path = tmp_path / "short.rec"
    record(path, told[:35])
    whole = path.read_bytes()
    complete = [moment.time for moment in read(path)]
    first = next(end for _, _, end in frames(io.BytesIO(whole)))
    for place in random.Random(7).sample(range(first, len(whole)), 40):
        path.write_bytes(whole[:place] + bytes((whole[place] ^ 0x40,)) + whole[place + 1 :])
        times = [moment.time for moment in read(path)]
        assert times == complete[: len(times)]
        assert len(times) < 35


def test_a_torn_recording_is_continued_behind_its_last_good_frame(told, tmp_path):
    path = tmp_path / "torn.rec"
    record(path, told[:30])
    whole = path.read_bytes()
    path.write_bytes(whole[:-3])
    before = len(list(read(path)))
    record(path, told[30:60], config=Config(policy="paper"))
    moments = list(read(path))
    assert len(moments) == before + 30
    assert [moment.samples for moment in moments[before:]] == [samples for _, samples in told[30:60]]
    assert [moments[0].segment.policy, moments[-1].segment.policy] == ["adaptive", "paper"]
    with path.open("rb") as opened:
        assert [end for _, _, end in frames(opened)][-1] == path.stat().st_size


def test_a_recording_has_one_writer(told, tmp_path):
    """Two agents, each with a state directory of its own, would write over each other's frames."""
    path = tmp_path / "x.rec"
    first = Recorder(path, Config())
    with pytest.raises(PrefetchdError, match=f"Recording '{path}' is being written by another agent; choose another"):
        Recorder(path, Config())
    for report, samples in told[:10]:
        first.add(report, samples)
    first.close()
    record(path, told[10:20])
    assert len(list(read(path))) == 20


def test_a_long_recording_is_continued_without_being_read(told, tmp_path, monkeypatch):
    path = tmp_path / "long.rec"
    record(path, told[:30])
    checked, check = [], zlib.crc32
    monkeypatch.setattr(zlib, "crc32", lambda data: checked.append(len(data)) or check(data))
    refuse_other_file(path)
    Recorder(path, Config()).close()
    assert len(checked) <= 3, "one frame each time it is opened, and the new head"


def test_passes_that_would_fill_the_memory_are_refused(told, tmp_path, monkeypatch):
    path = tmp_path / "bomb.rec"
    record(path, told[:20])
    assert len(list(read(path))) == 20
    monkeypatch.setattr(recording_reader, "_MOST_INFLATED", 2000)
    with pytest.raises(RecordingError, match=r"makes no sense .passes of more than 2,000 bytes"):
        list(read(path))


def test_what_was_recorded_after_a_damage_is_found_and_kept(told, tmp_path):
    """Wherever a bit flips in the first run: its passes up to there, all of the second, and a third goes on behind."""
    path = tmp_path / "damaged.rec"
    record(path, told[:30])
    first = path.stat().st_size
    record(path, told[30:60], config=Config(policy="paper"))
    whole = path.read_bytes()
    second = [moment.time for moment in read(path)][30:]
    for place in random.Random(5).sample(range(first), 40):
        path.write_bytes(whole[:place] + bytes((whole[place] ^ 0x04,)) + whole[place + 1 :])
        complaints = []
        times = [moment.time for moment in read(path, complain=complaints.append)]
        assert times[-30:] == second
        assert len(times) < 60
        assert len(complaints) == 1
        assert f"to {first:,} of {len(whole):,}; what was recorded there is left out." in complaints[0]
    damaged = path.read_bytes()
    before = len(list(read(path)))
    record(path, told[60:70])
    assert path.read_bytes()[: len(damaged)] == damaged
    assert len(list(read(path))) == before + 10


def test_a_sound_recording_is_not_complained_of(file):
    complaints = []
    assert list(read(file, complain=complaints.append))
    assert complaints == []


@pytest.mark.parametrize("gap", [0, 1, 2**20 - 9, 2**20, 2**20 + 1, 3 * 2**20])
def test_a_head_is_found_wherever_it_lies(told, tmp_path, gap):
    path = tmp_path / "far.rec"
    record(path, told[:3])
    rest = path.read_bytes()
    path.write_bytes(rest[:-1] + bytes(gap) + rest)
    complaints = []
    assert len(list(read(path, complain=complaints.append))) >= 3
    assert complaints


NONSENSE = (None, -1, 2**63, 1e308, float("nan"), float("inf"), "", "x", [], [[]], {}, True, b"\xff", "a\nb")


def spoiled(value, chance):
    """The value with one part, however deep, that is something else."""
    if isinstance(value, list | dict) and value and chance.random() < 0.9:
        place = chance.choice(list(value) if isinstance(value, dict) else range(len(value)))
        changed = value.copy()
        changed[place] = spoiled(value[place], chance)
        return changed
    return chance.choice(NONSENSE)


def test_frames_of_a_broken_program_are_a_sentence_not_a_defect(told, tmp_path):
    """The CRC is right and what it covers makes no sense: whatever is read of it can be replayed and drawn."""
    path = tmp_path / "foreign.rec"
    record(path, told[:12])
    (_, head, _), *rest = frames(io.BytesIO(path.read_bytes()))
    head = msgspec.msgpack.decode(head)
    inflate = zlib.decompressobj()
    passes = [one for _, contents, _ in rest for one in msgspec.msgpack.decode(inflate.decompress(contents))]
    refused = []
    for seed in range(400):
        chance = random.Random(seed)
        is_head = chance.random() < 0.2
        contents = zlib.compress(msgspec.msgpack.encode(passes if is_head else spoiled(passes, chance)))
        begin = spoiled(head, chance) if is_head else head
        path.write_bytes(frame(HEAD, msgspec.msgpack.encode(begin)) + frame(PASSES, contents))
        try:
            compare(replay(read(path)), keep=1)
            render(gather(read(path)), "foreign", 4)
        except PrefetchdError as error:
            refused.append(str(error))
    assert len(refused) > 200
    assert not [sentence for sentence in refused if "\n" in sentence]


def test_a_disk_that_fails_is_told_of_the_recording():
    """The memory of a process is a regular file whose first page cannot be read."""
    with pytest.raises(RecordingError, match=r"Recording '/proc/self/mem' cannot be read \(Input/output error\); copy"):
        list(read(Path("/proc/self/mem")))


def test_a_pipe_is_refused_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(RecordingError, match="pipe' is no regular file; give the path of a recording"):
        list(read(tmp_path / "pipe"))


def test_a_full_disk_ends_the_recording_not_the_agent(told, tmp_path, caplog):
    recorder = Recorder(tmp_path / "x.rec", Config())

    class Full:
        closed = False

        def write(self, data):
            raise OSError(errno.ENOSPC, "No space left on device")

        def close(self):
            if not self.closed:
                self.closed = True
                self.write(b"what is left in the buffer")

    recorder._writer._file.close()
    recorder._writer._file = Full()
    for report, samples in told[:30]:
        recorder.add(report, samples)
    recorder.close()
    assert recorder.problem == "No space left on device"
    assert caplog.text.count("has ended") == 1


class Slow:
    """A file on a disk that takes nothing until it is let."""

    def __init__(self, file):
        self._file, self.may = file, threading.Event()

    def write(self, data):
        self.may.wait()
        return self._file.write(data)

    def __getattr__(self, name):
        return getattr(self._file, name)


@pytest.fixture
def slow(tmp_path):
    """A recorder, and its file, which hangs until it is let."""
    recorder = Recorder(tmp_path / "x.rec", Config())
    file = recorder._writer._file = Slow(recorder._writer._file)
    yield recorder, file
    file.may.set()
    recorder.close()


def test_a_slow_disk_holds_up_no_pass_and_what_is_left_out_is_counted(told, slow, tmp_path, monkeypatch, caplog):
    recorder, file = slow
    monkeypatch.setattr("agent.recording.writer.MOST_WAITING_BYTES", 4000)
    began = time.monotonic()
    for report, samples in told[:60]:
        recorder.add(report, samples)
    assert time.monotonic() - began < 2
    kept = 60 - recorder.missed
    assert 0 < kept < 60
    file.may.set()
    while recorder._writer.is_full:
        time.sleep(0.01)
    for report, samples in told[60:70]:
        recorder.add(report, samples)
    recorder.close()
    wanted = [*told[:kept], *told[60:70]]
    for moment, (report, samples) in zip(read(tmp_path / "x.rec"), wanted, strict=True):
        assert moment.time == report.time
        assert {job: one.io_stat for job, one in moment.samples.items()} == {
            job: one.io_stat for job, one in samples.items()
        }
    warnings = [record.message for record in caplog.records]
    assert len(warnings) == 2
    assert "too slow" in warnings[0]
    assert f"{60 - kept} passes before this one are missing" in warnings[1]


def test_a_disk_that_hangs_at_the_end_is_not_waited_for_for_ever(told, slow, monkeypatch, caplog):
    recorder, _ = slow
    monkeypatch.setattr("agent.recording.writer.CLOSE_SECONDS", 0.2)
    for report, samples in told[:30]:
        recorder.add(report, samples)
    recorder.close()
    recorder.close()
    assert recorder.problem.startswith("the disk did not take its last 0.")
    assert caplog.text.count("has ended") == 1


def test_it_ends_at_its_limit(told, tmp_path):
    recorder = record(tmp_path / "x.rec", told, max_bytes=6000)
    assert "limit" in recorder.problem
    assert (tmp_path / "x.rec").stat().st_size <= 6000
    assert len(list(read(tmp_path / "x.rec"))) > 10


def test_a_value_nobody_expected_ends_the_recording_not_the_agent(told, tmp_path, caplog):
    report, samples = told[50]
    recorder = Recorder(tmp_path / "x.rec", Config())
    recorder.add(replace(report, mode=object()), samples)
    recorder.add(report, samples)
    recorder.close()
    assert "cannot be written down" in recorder.problem
    assert "cannot be recorded" in caplog.text


def test_a_cgroup_whose_name_is_no_utf8_is_recorded(told, tmp_path):
    report, samples = told[50]
    (number, entry), *_ = report.jobs.items()
    odd = entry._replace(job=replace(entry.job, path="/train/\udcff\udc80"))
    record(tmp_path / "x.rec", [(replace(report, jobs={**report.jobs, number: odd}), samples)])
    (moment,) = read(tmp_path / "x.rec")
    assert "/train/\\udcff\\udc80" in [job.path for job in moment.jobs]


def test_jobs_that_come_and_go_are_forgotten_and_told_apart(told, tmp_path):
    row, sizes = told[50:90], []
    (number, entry), *_ = row[0][0].jobs.items()
    recorder = Recorder(tmp_path / "x.rec", Config())
    for place, (report, samples) in enumerate(row):
        job = number if place % 4 == 0 else 1000 + place  # one comes back again and again
        sample = replace(samples[number], job=job)
        recorder.add(replace(report, jobs={job: entry._replace(job=replace(entry.job, id=job))}), {job: sample})
        sizes.append(sum(map(len, recorder._state._ids.values())))
        assert set(recorder._written_at) == {job}
    recorder.close()
    assert max(sizes) < 2 * sizes[0]
    moments = list(read(tmp_path / "x.rec"))
    assert [[job.id for job in moment.jobs] for moment in moments][:5] == [
        [number],
        [1051 - 50],
        [1002],
        [1003],
        [number],
    ]
    for moment, (_, samples) in zip(moments, row, strict=True):
        (job,) = moment.samples
        assert moment.samples[job].io_stat == samples[number].io_stat
        assert moment.samples[job].cache == samples[number].cache
        assert [one.iterations for one in moment.samples[job].streams] == [
            one.iterations for one in samples[number].streams
        ]


def test_capacities_as_the_configuration_gives_them(told, tmp_path):
    report, samples = told[50]
    view = report.devices["259:0"]
    rate = ByteRate.parse("1.2 GB")
    capacity = Capacity(rate, float("inf"), float("inf"), float("inf"))
    devices = {"259:0": replace(view, info=replace(view.info, capacity=capacity))}
    record(tmp_path / "x.rec", [(replace(report, devices=devices), samples)])
    (moment,) = read(tmp_path / "x.rec")
    assert moment.devices["259:0"].info.capacity == capacity
    row = snapshot(replace(report, devices=devices))["devices"][0]
    assert (row["read_bytes_per_second"], row["write_bytes_per_second"]) == (1.2e9, None)
    assert "Infinity" not in json.dumps(snapshot(replace(report, devices=devices)))


def test_numbers_of_numpy_are_taken(told, tmp_path):
    report, samples = told[50]
    odd = replace(samples[11], nic_packets=np.int64(5), pressure_some_seconds=np.float64(0.5))
    record(tmp_path / "x.rec", [(report, samples | {11: odd})])
    (moment,) = read(tmp_path / "x.rec")
    assert moment.samples[11] == odd


@pytest.mark.parametrize(
    ("contents", "words"),
    [
        (b"", "is no recording"),
        (b"hello, this is a text file of some length", "is no recording"),
        (frame(PASSES, b"x"), "is no recording"),
        (frame(HEAD, msgspec.msgpack.encode({"format": "other"})), "is no recording"),
        (
            frame(HEAD, msgspec.msgpack.encode({"format": "prefetchd", "version": 99, "software": "9"})),
            "has version 99",
        ),
        (frame(HEAD, b"\xc1"), "makes no sense"),
    ],
)
def test_what_is_no_recording_is_refused_in_a_sentence(tmp_path, contents, words):
    path = tmp_path / "x"
    path.write_bytes(contents)
    with pytest.raises(RecordingError, match=words):
        list(read(path))
    with pytest.raises(RecordingError, match="cannot be read"):
        list(read(tmp_path / "missing"))


def test_a_broken_frame_with_a_good_checksum_is_refused(told, tmp_path):
    path = tmp_path / "x.rec"
    record(path, told[:5])
    with path.open("ab") as opened:
        opened.write(frame(PASSES, b"rubbish"))
    with pytest.raises(RecordingError, match="makes no sense"):
        list(read(path))


def test_another_file_is_never_overwritten(tmp_path):
    path = tmp_path / "notes.txt"
    path.write_text("important")
    with pytest.raises(PrefetchdError, match="is no recording"):
        Recorder(path, Config())
    assert path.read_text() == "important"
    with pytest.raises(PrefetchdError, match="cannot be written"):
        Recorder(tmp_path / "no/such/folder/x", Config())


def test_a_link_to_where_the_recording_is_to_be_stays(tmp_path):
    (tmp_path / "large").mkdir()
    link, target = tmp_path / "x.rec", tmp_path / "large" / "x.rec"
    link.symlink_to(target)
    refuse_other_file(link)
    assert link.is_symlink()
    assert not target.exists()
    Recorder(link, Config()).close()
    assert target.stat().st_size > 0


def test_every_scale_is_used_for_a_name_in_the_module():
    assert all(scale > 0 for scale in SCALES.values())
    assert recording.__doc__.count("`") > 10


def test_replay_with_its_own_configuration_decides_the_same(file):
    result = compare(replay(read(file)))
    assert result.passes == 400
    assert result.differences == []
    assert set(result.names.values()) == {"resnet50", "bert-large", "clip"}
    assert all(
        result.recorded[job].summary()["causes"] == result.replayed[job].summary()["causes"] for job in result.names
    )


def test_replay_with_another_policy_differs_and_says_where(file):
    result = compare(replay(read(file), policy="paper"), keep=7)
    assert len(result.differences) == 7
    assert result.differing["cap"] > 100
    assert {one.device for one in result.differences} <= {"259:0", ""}


def test_replay_with_other_weights_differs_in_score(file):
    config = Config(health=HealthSection(queue_weight=1.0, latency_weight=0.0, variation_weight=0.0, demand_weight=0.0))
    assert compare(replay(read(file), config)).differing["score"] > 10


def test_replay_takes_capacities_of_another_configuration(file):
    moment = next(iter(read(file)))
    rule = DeviceRule(device="/dev/nvme0n1", medium="hdd", read_bytes_per_second=5e6)
    changed = with_rules(moment.devices, [rule])["259:0"].info
    assert (changed.medium, changed.capacity.rbps) == ("hdd", 5e6)
    assert with_rules(moment.devices, [DeviceRule(device="259:0", medium="hdd")])["259:0"].info.medium == "hdd"
    assert with_rules(moment.devices, [DeviceRule(device="sdz", medium="hdd")]) == dict(moment.devices)


def test_a_new_segment_starts_the_core_afresh(told, tmp_path):
    path = tmp_path / "two.rec"
    record(path, told)
    record(path, told)
    result = compare(replay(read(path)))
    assert result.passes == 800
    assert result.differences == []


@pytest.mark.parametrize("shift", [0.0, 100.0])
def test_runs_of_one_name_are_told_apart_and_none_is_lost(told, tmp_path, shift):
    path = tmp_path / "restarted.rec"
    record_twice(path, told[:50], shift, 1011)
    done = run("replay", path)
    count = sum(one.training for one in gather(read(path)).jobs.values())
    assert f", {count} training job(s) in {count + 1} runs\n" in done.stdout, done.stdout
    heads = [line.split("  recorded")[0] for line in done.stdout.splitlines() if "  recorded" in line]
    assert len(set(heads)) == len(heads) == count + 1
    document = json.loads(run("replay", path, "--json").stdout)
    assert sorted(one["id"] for one in document["jobs"].values() if one["job"] == "resnet50") == [11, 1011]
    assert document["tolerances"] == {"score_points": 1.0, "cap_ratio": 0.02}


def test_names_in_a_recording_steer_no_terminal(told, tmp_path):
    evil = "\x1b]0;evil\x07\x1b[2J"
    path = tmp_path / "evil.rec"
    row = []
    for report, samples in told[:20]:
        jobs = {number: one._replace(job=replace(one.job, name=f"{one.job.name}{evil}", path=evil, pod=evil))
                for number, one in report.jobs.items()}  # fmt: skip
        devices = {number: replace(view, info=replace(view.info, name=evil)) for number, view in report.devices.items()}
        row.append((replace(report, jobs=jobs, devices=devices, notes=(evil,)), samples))
    record(path, row)
    for arguments in ((), ("--policy", "paper")):
        done = run("replay", path, *arguments)
        assert done.returncode == 0, done.stderr
        assert "resnet50" in done.stdout
        assert "\x1b" not in done.stdout
    moment = list(read(path))[-1]
    texts = [*moment.jobs[0].pod, moment.jobs[0].path, moment.node_outputs["note", 0]]
    assert all(text.isprintable() for text in texts)


def test_a_device_that_was_in_no_list_is_told_by_its_number():
    tally, view = Tally(), {"cause": "none", "score": 50.0, "iterations": 1}
    tally.add(view | {"devices": {"8:16": {"quota": 0.5, "loan": 0.0}}})
    assert "8:16 capped 100 % of the time at 50 % on average" in _line(tally.summary(), {})
    change = Difference(0.0, "a", 1, "8:16", "cap", None, 0.5)
    assert "a on 8:16: cap none -> 50 %" in _difference(change, {}, "a")


def test_a_recording_of_root_is_read_with_sudo(monkeypatch, tmp_path):
    def refused(*_):
        raise PermissionError(13, "Permission denied")

    path = tmp_path / "node.rec"
    path.touch()
    monkeypatch.setattr(Path, "open", refused)
    with pytest.raises(RecordingError) as told:
        next(read(path))
    assert str(told.value) == (
        f"Recording '{path}' cannot be read (Permission denied); use sudo, as the agent that wrote it ran as root."
    )


def test_tenths_of_a_second_never_run_back():
    changes = (Difference(wall, "a", 1, "", "score", 50.0, 60.0) for wall in (59.94, 59.96, 60.04))
    assert [_difference(change, {}, "a").split()[0][-4:] for change in changes] == ["59.9", "59.9", "00.0"]


def run(*arguments):
    command = [sys.executable, "-m", "agent", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)


def test_a_lowest_score_of_a_start_is_told_as_such():
    tally, view = Tally(), {"cause": "none", "devices": {}}
    tally.add(view | {"score": 0.0, "iterations": 0})
    tally.add(view | {"score": 90.0, "iterations": 1})
    assert _line(tally.summary(), {}) == "score 45 (lowest 0, before its first batch)"
    later = Tally()
    later.add(view | {"score": 30.0, "iterations": 0})
    later.add(view | {"score": 10.0, "iterations": 9})
    assert _line(later.summary(), {}) == "score 20 (lowest 10)"


def test_replay_without_capacity_says_that_nothing_could_be_capped(told, tmp_path):
    path = tmp_path / "bare.rec"
    record(path, [(replace(report, devices=_without_capacity(report.devices)), samples) for report, samples in told])
    bare = run("replay", path, "--policy", "paper")
    assert "the capacity of no device was known, or the node could not limit it." in bare.stdout
    assert "Replay with --config FILE that declares it" in bare.stdout
    config = tmp_path / "c.toml"
    config.write_text('[[devices]]\ndevice = "/dev/nvme0n1"\nread_bytes_per_second = "120 MB"\n')
    declared = run("replay", path, "--policy", "paper", "--config", config)
    assert "No policy" not in declared.stdout
    assert "nvme0n1: cap none ->" in declared.stdout
    assert json.loads(run("replay", path, "--json").stdout)["capacity_known"] is False


def _without_capacity(devices):
    return {device: replace(view, info=replace(view.info, capacity=None)) for device, view in devices.items()}


def test_command_replay(file, tmp_path):
    same = run("replay", file, "--check")
    assert same.returncode == 0, same.stderr
    assert "nothing differs (scores within 1 point, caps within 2 %, the same causes and loans)" in same.stdout
    assert "No policy" not in same.stdout
    other = run("replay", file, "--policy", "paper", "--check", "--list", "3")
    assert other.returncode == 4
    assert "resnet50 on nvme0n1: cap none ->" in other.stdout
    document = json.loads(run("replay", file, "--policy", "paper", "--json").stdout)
    assert document["jobs"]["resnet50"]["replayed"]["capped_ratio"]["259:0"] > 0.5
    config = tmp_path / "c.toml"
    config.write_text('policy = "adaptive"\n')
    assert run("replay", file, "--config", config, "--check").returncode == 0
    missing = run("replay", tmp_path / "missing.rec")
    assert (missing.returncode, missing.stderr.count("\n")) == (1, 1)
    assert run("replay", file, "--list", "-1").returncode == 2
