"""Reading a recording, up to its end or its tear."""

from __future__ import annotations

import errno
import os
import stat
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path as FilePath
from typing import Any, BinaryIO

import msgspec

from agent.errors import PrefetchdError
from agent.job_sample import JobSample
from agent.recording.frames import HEAD, PASSES, frames
from agent.recording.inputs import BUCKETS, Events, Flat, Path, unflatten
from agent.recording.outputs import restored
from agent.recording.recorder import VERSION
from agent.types import Capacity, DeviceInfo, DeviceView, Job, JobId, Medium
from agent.units import printable


class RecordingError(PrefetchdError):
    """A file that is no recording, or one of a later version."""


class _Head(msgspec.Struct):
    """What a head holds."""

    format: str
    version: int
    software: str
    started: float
    policy: str
    mode: str
    config: dict[str, Any]


class _Record(msgspec.Struct, array_like=True):
    """What a pass holds; `agent.recording` says what each is."""

    time: float
    wall: int
    names: list[tuple[str | int, ...]]
    ids: list[int]
    values: list[int | float | str | bool | None]
    gone: list[int]
    events: list[tuple[int, str, list[tuple[int | None, ...]]]]
    jobs: list[tuple[int, str, str, bool, float, str, str]] | None
    devices: list[tuple[str, str, str, tuple[float, float, float, float] | None]] | None


_RECORDS = msgspec.msgpack.Decoder(list[_Record])
_TEXTS = frozenset({"source", "grade", "cause", "iteration_source", "why", "mode", "policy"})
"""Names of values that are texts; so are the notes."""
_LARGEST = 2**80
"""Above every counter, also one of squares."""
_MOST_BUCKETS = 1024
_MOST_INFLATED = 128 * 2**20
"""Bytes that the passes of one frame may have before they are compressed: zlib makes a thousandth of zeros, so that a
frame of the largest size could ask for 16 GB."""
_LAST_WALL_MS = 2**48
"""In the year 10889; some systems have no calendar beyond."""


@dataclass(frozen=True, slots=True)
class Segment:
    """One run of the agent: software version, start (Unix seconds), policy, mode, configuration as a plain mapping."""

    software: str
    started: float
    policy: str
    mode: str
    config: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Moment:
    """One pass: what the core was given, and what it made of it.

    `job_outputs` holds by job the latest outputs by path, as `agent.recording.outputs` names them, in their own units;
    `fresh` are the jobs whose outputs are of this very pass.
    """

    segment: Segment
    time: float
    wall: float
    jobs: tuple[Job, ...]
    devices: Mapping[str, DeviceView]
    samples: Mapping[JobId, JobSample]
    job_outputs: Mapping[JobId, Mapping[Path, Any]]
    node_outputs: Mapping[Path, Any]
    fresh: frozenset[JobId]


def read(
    path: FilePath,
    progress: Callable[[int], object] = lambda _: None,
    complain: Callable[[str], object] = lambda _: None,
) -> Iterator[Moment]:
    """Every pass in the file, in order, but for those behind a bad frame up to the next start. Raises RecordingError.

    `progress` is told how many bytes have been read, `complain` in one sentence what could not be.
    """
    try:
        mode = path.stat().st_mode
        if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):  # a pipe would be waited for
            raise RecordingError(f"Recording {str(path)!r} is no regular file; give the path of a recording.")
        file = path.open("rb")
    except OSError as error:
        todo = "use sudo, as the agent that wrote it ran as root" if error.errno == errno.EACCES else "check the path"
        raise RecordingError(f"Recording {str(path)!r} cannot be read ({error.strerror}); {todo}.") from None
    with file:
        yield from _read(file, str(path), progress, complain)


def _read(
    file: BinaryIO, name: str, progress: Callable[[int], object], complain: Callable[[str], object]
) -> Iterator[Moment]:
    decoder: _Decoder | None = None
    lost: list[tuple[int, int]] = []
    for kind, contents, end in _readable(frames(file, lambda start, end: lost.append((start, end))), name):
        progress(end)
        try:
            if kind == HEAD:
                decoder = _Decoder(_segment(contents, name))
            elif kind == PASSES and decoder is not None:
                yield from decoder.passes(contents)
        except (zlib.error, msgspec.DecodeError, LookupError, TypeError, ValueError) as error:
            raise RecordingError(
                f"Recording {name!r} holds a frame that makes no sense ({error}); a broken program wrote it."
            ) from error
    if decoder is None:
        raise RecordingError(f"File {name!r} is no recording of prefetchd; `prefetchd record FILE` makes one.")
    for start, end in lost:
        complain(
            f"Recording {name!r} is damaged from byte {start:,} to {end:,} of {file.seek(0, os.SEEK_END):,}; "
            "what was recorded there is left out."
        )


def _readable(found: Iterator[tuple[Any, ...]], name: str) -> Iterator[tuple[Any, ...]]:
    """The frames; an OSError of the file system itself becomes a RecordingError, since it names no file."""
    try:
        yield from found
    except OSError as error:
        raise RecordingError(
            f"Recording {name!r} cannot be read ({error.strerror}); copy what is left of it to another disk."
        ) from None


def _segment(contents: bytes, name: str) -> Segment:
    head = msgspec.msgpack.decode(contents)
    if not isinstance(head, dict) or head.get("format") != "prefetchd":
        raise RecordingError(f"File {name!r} is no recording of prefetchd; `prefetchd record FILE` makes one.")
    version, software = head.get("version"), head.get("software")
    if version not in range(1, VERSION + 1):
        raise RecordingError(
            f"Recording {name!r} has version {version!r}, this program reads up to {VERSION}; use the one that "
            f"made it ({software if isinstance(software, str) and software.isprintable() and software else 'unknown'})."
        )
    told = msgspec.convert(head, _Head)
    if not 0 <= told.started * 1000 < _LAST_WALL_MS:
        raise ValueError(f"start {told.started}")
    return Segment(told.software, told.started, told.policy, told.mode, told.config)


@dataclass
class _Decoder:
    """The state of one segment."""

    segment: Segment
    names: list[Path] = field(default_factory=list)
    values: dict[tuple[str | int, ...], Flat] = field(default_factory=lambda: defaultdict(dict))
    inflate: Any = field(default_factory=zlib.decompressobj)
    time: float = 0.0
    wall_ms: int = 0
    jobs: tuple[Job, ...] = ()
    devices: tuple[DeviceInfo, ...] = ()

    def passes(self, contents: bytes) -> Iterator[Moment]:
        passes = self.inflate.decompress(contents, _MOST_INFLATED)
        if self.inflate.unconsumed_tail:
            raise ValueError(f"passes of more than {_MOST_INFLATED:,} bytes")
        for record in _RECORDS.decode(passes):
            yield self._moment(record)

    def _moment(self, record: _Record) -> Moment:
        if not self.time <= record.time < _LARGEST:
            raise ValueError(f"time {record.time} after {self.time}")
        self.time = record.time
        self.names += record.names
        self.wall_ms += record.wall
        if not 0 <= self.wall_ms < _LAST_WALL_MS:
            raise ValueError(f"time of day {self.wall_ms}")
        fresh = self._change(record.ids, record.values, record.gone)
        if record.jobs is not None:
            self.jobs = tuple(_job(*job) for job in record.jobs)
        if record.devices is not None:
            self.devices = tuple(_device(*device) for device in record.devices)
        node = {path: restored(path, value) for path, value in self.values["n",].items()}
        return Moment(
            segment=self.segment,
            time=record.time,
            wall=self.wall_ms / 1000,
            jobs=self.jobs,
            devices={
                info.device: DeviceView(info, node.get(("d", info.device, "unmanaged_ratio"), 0.0))
                for info in self.devices
            },
            samples=self._samples(record.events),
            job_outputs={
                job.id: {path: restored(path, value) for path, value in self.values["o", job.id].items()}
                for job in self.jobs
            },
            node_outputs=node,
            fresh=fresh,
        )

    def _change(self, ids: list[int], values: list[Any], gone: list[int]) -> frozenset[JobId]:
        """Apply what changed; returns the jobs whose outputs did."""
        fresh = set()
        for number, value in zip(ids, values, strict=True):
            group, path = _split(self.names[number])
            flat = self.values[group]
            old = flat.get(path)
            flat[path] = _sound(path, old + value if type(value) is int and type(old) is int else value)
            if group[0] == "o":
                fresh.add(int(group[1]))
        for number in gone:
            group, path = _split(self.names[number])
            self.values[group].pop(path, None)
        return frozenset(fresh)

    def _samples(self, events: list[Any]) -> dict[JobId, JobSample]:
        streams: dict[JobId, list[Events]] = defaultdict(list)
        for job, stream, iterations in events:
            streams[job].append(Events(stream, tuple(tuple(one) for one in iterations)))
        samples = {}
        for job in self.jobs:
            flat = dict(self.values.get(("i", job.id), {}))
            time_ns = flat.pop(("t",), None)
            if time_ns is not None:
                samples[job.id] = unflatten(job.id, time_ns, flat, streams.get(job.id, []))
        return samples


def _sound(path: Path, value: Any) -> Any:
    """The value, of the kind that its name asks for; ValueError else."""
    is_text = path[-1] in _TEXTS or path[0] == "note"
    if is_text != isinstance(value, str) or (not is_text and not -_LARGEST < value < _LARGEST):
        raise ValueError(f"{path} {str(value)[:40]!r}")
    if is_text:
        return printable(value)
    if path[-1] == BUCKETS and not 0 <= value <= _MOST_BUCKETS:
        raise ValueError(f"{value} buckets")
    return value


def _split(path: Path) -> tuple[tuple[str | int, ...], Path]:
    """(group, path inside the group)."""
    return (path[:1], path[1:]) if path[0] == "n" else (path[:2], path[2:])


def _device(device: str, name: str, medium: str, capacity: tuple[float, float, float, float] | None) -> DeviceInfo:
    if capacity is not None and not all(number > 0.0 for number in capacity):
        raise ValueError(f"capacity {capacity}")
    return DeviceInfo(device, printable(name), Medium(medium), Capacity(*capacity) if capacity else None)


def _job(job: int, name: str, path: str, training: bool, weight: float, namespace: str, pod: str) -> Job:
    if not 0.0 < weight < _LARGEST:
        raise ValueError(f"weight {weight}")
    return Job(job, printable(name), printable(path), training, weight, printable(namespace), printable(pod))
