"""Writing a recording while the agent runs."""

from __future__ import annotations

import fcntl
import logging
import os
import time
from collections.abc import Mapping
from pathlib import Path as FilePath
from typing import Any, BinaryIO

import msgspec

from agent.config import Config
from agent.errors import PrefetchdError
from agent.job_sample import JobSample
from agent.recording.frames import HEAD, frame, is_framed
from agent.recording.inputs import Flat, Path, flatten
from agent.recording.outputs import job_outputs, node_outputs
from agent.recording.writer import Writer
from agent.types import DeviceView, Job, JobId, JobReport, TickReport

log = logging.getLogger(__name__)

VERSION = 2
"""Versions 1 to this one are read."""
MAX_BYTES = 2 * 10**9
FLUSH_SECONDS = 1.0
"""Passes are gathered for this long, then written as one frame: what a crash can cost."""
OUTPUT_SECONDS = 1.0
"""Outputs of a job are written at the end of its iterations, and after this long without one."""

Group = tuple[str | int, ...]


def refuse_other_file(path: FilePath) -> None:
    """Raise PrefetchdError where a recorder would: the path cannot be written, or is a file that is no recording."""
    existed = path.exists()
    file, _ = _open(path)
    file.close()
    if not existed:
        path.resolve().unlink(missing_ok=True)  # what was made, not a link that leads there


def _open(path: FilePath) -> tuple[BinaryIO, int]:
    """The file, made where there is none, and its length. Raises PrefetchdError."""
    try:
        file = os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o640), "r+b")
        is_recording = is_framed(file)
        length = file.seek(0, os.SEEK_END)
    except OSError as error:
        raise PrefetchdError(
            f"Recording {str(path)!r} cannot be written ({error.strerror}); choose another path."
        ) from None
    if length and not is_recording:
        file.close()
        raise PrefetchdError(f"File {str(path)!r} exists and is no recording; choose another name.")
    if not _locked(file):
        file.close()
        raise PrefetchdError(f"Recording {str(path)!r} is being written by another agent; choose another path.")
    return file, length


def _locked(file: BinaryIO) -> bool:
    """Whether the file is ours until it is closed; also where its file system knows no locks."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        pass
    return True


class Recorder:
    """Appends to a recording. An error of the disk ends the recording, never the agent; `problem` then says why.

    Where the disk falls too far behind, passes are left out and counted in `missed`; what follows builds on the last
    one that was taken, so nothing else is lost.
    """

    def __init__(
        self, path: FilePath, config: Config, *, software: str = "", max_bytes: int = MAX_BYTES, policy: str = ""
    ) -> None:
        """Open the file, to go on at its end, torn or not: the head tells where. Raises PrefetchdError."""
        self.missed = 0
        self._path = path
        self._encoder = msgspec.msgpack.Encoder(enc_hook=_plain)
        self._state = _Deltas()
        self._jobs: tuple[Job, ...] | None = None
        self._devices: tuple[Any, ...] | None = None
        self._wall_ms = 0
        self._written_at: dict[JobId, float] = {}
        self._pending: list[bytes] = []
        self._missed_now = 0
        self._flushed_at: float | None = None
        self._writer = Writer(path, *_open(path), max_bytes)
        head = {
            "format": "prefetchd",
            "version": VERSION,
            "software": software,
            "started": time.time(),
            "policy": policy or config.policy,
            "mode": config.mode,
            "config": msgspec.to_builtins(config, enc_hook=float),
        }
        self._writer.start(frame(HEAD, self._encoder.encode(head)))

    @property
    def problem(self) -> str:
        """Why the recording has ended; "" while it goes on."""
        return self._writer.problem

    def add(self, report: TickReport, samples: Mapping[JobId, JobSample]) -> None:
        """Record one pass: the samples that the core was given and the report that came of it."""
        if self.problem or self._misses():
            return
        try:
            self._pending.append(self._encoder.encode(self._pass(report, samples)))
        except Exception as error:  # the agent goes on, whatever a recording stumbles over
            log.exception("pass %d cannot be recorded", report.ticks)
            self._writer.end(f"a pass cannot be written down ({error})")
            return
        if self._flushed_at is None:
            self._flushed_at = report.time
        if report.time - self._flushed_at >= FLUSH_SECONDS:
            self.flush()
            self._flushed_at = report.time

    def flush(self) -> None:
        """Hand over the passes gathered so far, to be written as one frame."""
        if self._pending and not self.problem:
            self._writer.put(self._pending)
            self._pending = []

    def close(self) -> None:
        """Write what is left; may be called twice."""
        self.flush()
        if self._missed_now:
            log.warning("recording %s: its last %d passes are missing", self._path, self._missed_now)
            self._missed_now = 0
        self._writer.close()

    def _misses(self) -> bool:
        """Whether this pass is left out since the disk is too far behind; the first and the last one is said."""
        if self._writer.is_full:
            if not self._missed_now:
                log.warning(
                    "recording %s: its disk is too slow; passes are left out until it has caught up", self._path
                )
            self._missed_now += 1
            self.missed += 1
            return True
        if self._missed_now:
            log.warning("recording %s goes on; %d passes before this one are missing", self._path, self._missed_now)
            self._missed_now = 0
        return False

    def _pass(self, report: TickReport, samples: Mapping[JobId, JobSample]) -> list[Any]:
        wall = round(report.wall_time * 1000)
        jobs = tuple(entry.job for entry in report.jobs.values())
        devices = tuple(_device(view) for view in report.devices.values())
        events = []
        present: set[Group] = {("n",)}
        self._state.refresh(("n",), node_outputs(report))
        for job, entry in report.jobs.items():
            if job in samples:
                present.add(("i", job))
                flat, streams = flatten(samples[job])
                flat["t",] = samples[job].time_ns
                self._state.refresh(("i", job), flat)
                events += [[job, one.stream, one.iterations] for one in streams]
            present.add(("o", job))
            if self._due(report, entry):
                self._state.refresh(("o", job), job_outputs(report, entry))
        self._state.keep_only(present)
        self._written_at = {job: at for job, at in self._written_at.items() if job in report.jobs}
        names, ids, values, gone = self._state.take()
        record = [report.time, wall - self._wall_ms, names, ids, values, gone, events,
                  None if jobs == self._jobs else [_job(job) for job in jobs],
                  None if devices == self._devices else devices]  # fmt: skip
        self._wall_ms, self._jobs, self._devices = wall, jobs, devices
        return record

    def _due(self, report: TickReport, entry: JobReport) -> bool:
        """Whether the job's outputs are to be written at this pass."""
        job = entry.job.id
        last = self._written_at.get(job)
        fresh = entry.signals is not None and entry.signals.new_iterations > 0
        if not fresh and last is not None and report.time - last < OUTPUT_SECONDS:
            return False
        self._written_at[job] = report.time
        return True


def _plain(value: Any) -> float | int:
    """Numbers of numpy, and those of types made from Python's own, as Python's own."""
    if isinstance(value, float):
        return float(value)
    return int(value.item() if hasattr(value, "item") else value)


def _job(job: Job) -> list[Any]:
    path = job.path.encode("utf-8", "backslashreplace").decode("utf-8")  # a cgroup's name need not be UTF-8
    return [job.id, job.name, path, job.training, job.weight, job.namespace, job.pod]


def _device(view: DeviceView) -> tuple[Any, ...]:
    capacity = view.info.capacity
    numbers = (capacity.rbps, capacity.wbps, capacity.riops, capacity.wiops) if capacity else None
    return view.info.device, view.info.name, str(view.info.medium), numbers


class _Deltas:
    """Remembers every value and tells what changed since it was last asked."""

    def __init__(self) -> None:
        self._ids: dict[Group, dict[Path, int]] = {}
        self._next_id = 0
        self._groups: dict[Group, Flat] = {}
        self._names: list[Path] = []
        self._changed: list[int] = []
        self._values: list[Any] = []
        self._gone: list[int] = []

    def refresh(self, group: Group, flat: Flat) -> None:
        """Replace the values of a group."""
        old = self._groups.get(group, {})
        for path, value in flat.items():
            before = old.get(path)
            if path in old and before == value and type(before) is type(value):
                continue
            self._changed.append(self._id(group, path))
            self._values.append(value - before if type(value) is int and type(before) is int else value)
        self._gone += [self._id(group, path) for path in old if path not in flat]
        self._groups[group] = flat

    def keep_only(self, present: set[Group]) -> None:
        """Drop the groups of jobs that are no more, and their ids: should one come back, it is named anew."""
        for group in [group for group in self._groups if group not in present]:
            self.refresh(group, {})
            del self._groups[group]
            self._ids.pop(group, None)

    def take(self) -> tuple[list[Path], list[int], list[Any], list[int]]:
        """(new names, ids that changed, their values, ids that are gone) since the last call."""
        taken = self._names, self._changed, self._values, self._gone
        self._names, self._changed, self._values, self._gone = [], [], [], []
        return taken

    def _id(self, group: Group, path: Path) -> int:
        ids = self._ids.setdefault(group, {})
        known = ids.get(path)
        if known is None:
            known = ids[path] = self._next_id
            self._next_id += 1
            self._names.append((*group, *path))
        return known
