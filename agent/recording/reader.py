"""Reading a recording, up to its end or its tear."""

from __future__ import annotations

import os
import stat
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from math import isfinite
from pathlib import Path as FilePath
from typing import Any, BinaryIO

import msgspec

from agent.errors import PrefetchdError
from agent.job_sample import JobSample
from agent.recording.frames import HEAD, PASSES, frames
from agent.recording.inputs import Events, Flat, Path, unflatten
from agent.recording.outputs import restored
from agent.recording.recorder import VERSION
from agent.types import Capacity, DeviceInfo, DeviceView, Job, JobId, Medium


class RecordingError(PrefetchdError):
    """A file that is no recording, or one of a later version."""


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
        raise RecordingError(f"Recording {str(path)!r} cannot be read ({error.strerror}); check the path.") from None
    with file:
        yield from _read(file, str(path), progress, complain)


def _read(
    file: BinaryIO, name: str, progress: Callable[[int], object], complain: Callable[[str], object]
) -> Iterator[Moment]:
    decoder: _Decoder | None = None
    lost: list[tuple[int, int]] = []
    for kind, contents, end in frames(file, lambda start, end: lost.append((start, end))):
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


def _segment(contents: bytes, name: str) -> Segment:
    head = msgspec.msgpack.decode(contents)
    if not isinstance(head, dict) or head.get("format") != "prefetchd":
        raise RecordingError(f"File {name!r} is no recording of prefetchd; `prefetchd record FILE` makes one.")
    if head["version"] not in range(1, VERSION + 1):
        raise RecordingError(
            f"Recording {name!r} has version {head['version']}, this program reads up to {VERSION}; use the one that "
            f"made it ({head['software'] or 'unknown'})."
        )
    return Segment(head["software"], head["started"], head["policy"], head["mode"], head["config"])


@dataclass
class _Decoder:
    """The state of one segment."""

    segment: Segment
    names: list[Path] = field(default_factory=list)
    values: dict[tuple[str | int, ...], Flat] = field(default_factory=lambda: defaultdict(dict))
    inflate: Any = field(default_factory=zlib.decompressobj)
    wall_ms: int = 0
    jobs: tuple[Job, ...] = ()
    devices: tuple[DeviceInfo, ...] = ()

    def passes(self, contents: bytes) -> Iterator[Moment]:
        for record in msgspec.msgpack.decode(self.inflate.decompress(contents)):
            yield self._moment(record)

    def _moment(self, record: list[Any]) -> Moment:
        time, wall, names, ids, values, gone, events, jobs, devices = record
        if not isfinite(time):
            raise ValueError(f"time {time}")
        self.names += [tuple(name) for name in names]
        self.wall_ms += wall
        fresh = self._change(ids, values, gone)
        if jobs is not None:
            self.jobs = tuple(Job(*job) for job in jobs)
        if devices is not None:
            self.devices = tuple(_device(*device) for device in devices)
        node = {path: restored(path, value) for path, value in self.values["n",].items()}
        return Moment(
            segment=self.segment,
            time=time,
            wall=self.wall_ms / 1000,
            jobs=self.jobs,
            devices={
                info.device: DeviceView(info, node.get(("d", info.device, "unmanaged_ratio"), 0.0))
                for info in self.devices
            },
            samples=self._samples(events),
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
            flat[path] = old + value if type(value) is int and type(old) is int else value
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


def _split(path: Path) -> tuple[tuple[str | int, ...], Path]:
    """(group, path inside the group)."""
    return (path[:1], path[1:]) if path[0] == "n" else (path[:2], path[2:])


def _device(device: str, name: str, medium: str, capacity: list[float] | None) -> DeviceInfo:
    return DeviceInfo(device, name, Medium(medium), Capacity(*capacity) if capacity else None)
