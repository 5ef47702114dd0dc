"""The trainer program: built once into the cache, and its arguments for a job or a neighbour of a scenario."""

from __future__ import annotations

import hashlib
import os
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from agent.simulate.scenario import Job, Neighbour, Scenario
from tests.lab.cache import cache_folder
from tests.lab.errors import LabBroken

SOURCE = Path(__file__).with_name("trainer.c")
TORCH = Path(__file__).with_name("trainer_torch.py")
_FLAGS = ("-O2", "-pthread", "-Wall", "-Wextra")
_NEIGHBOUR_BATCH_READS = 8


@dataclass(frozen=True)
class Extent:
    """Where a job's data lies: `length` bytes from `offset` of a device node or file."""

    path: Path
    offset: int
    length: int


def trainer_program() -> Path:
    """Return the compiled trainer, built from its source where the cache has no build of this very text."""
    name = f"trainer-{hashlib.sha256(SOURCE.read_bytes()).hexdigest()[:12]}"
    built = cache_folder() / name
    if built.exists():
        return built
    if not os.access(built.parent, os.W_OK) or os.statvfs(built.parent).f_flag & os.ST_RDONLY:
        built = Path(tempfile.gettempdir()) / name
    part = built.with_suffix(f".{os.getpid()}")
    done = subprocess.run(["cc", *_FLAGS, str(SOURCE), "-o", str(part)], check=False, capture_output=True, text=True)
    if done.returncode:
        raise LabBroken(f"`cc` could not build {SOURCE.name}:\n{done.stderr.strip()}")
    part.rename(built)
    return built


def job_arguments(job: Job, scenario: Scenario, extents: Mapping[str, Extent]) -> list[str]:
    """Return the trainer's arguments for a training job; `extents` has its data by device name."""
    stop = scenario.duration_seconds if job.stop_seconds is None else job.stop_seconds
    numbers = {
        **_place(extents[job.device]),
        "read-size": job.read_size,
        "batch-reads": job.batch_reads,
        "workers": job.workers,
        "queue": job.queue_batches,
        "compute-us": round(job.compute_ms * 1e3),
        "prepare-cpu-us": round(job.prepare_cpu_ms * 1e3),
        "cold-batches": job.cold_batches,
        "cold-factor": job.cold_factor,
        "start-ms": round(job.start_seconds * 1e3),
        "stop-ms": round(min(stop, scenario.duration_seconds) * 1e3),
        "random": int(job.pattern == "random"),
        "buffered": int(job.access == "filesystem"),
        "hints": int(job.hints),
    }
    if job.burst:
        numbers |= {"burst-every": job.burst.every, "burst-length": job.burst.length, "burst-factor": job.burst.factor}
    arguments = _options(numbers)
    if job.slow_device:
        slow = {f"slow-{name}": value for name, value in _place(extents[job.slow_device]).items()}
        arguments += _options({**slow, "slow-permille": round(job.slow_ratio * 1000)})
    return arguments + [word for at in job.restarts_seconds for word in ("--restart-ms", str(round(at * 1e3)))]


def neighbour_arguments(other: Neighbour, scenario: Scenario, extents: Mapping[str, Extent]) -> list[str]:
    """Return the trainer's arguments for a neighbour: no compute, every thread always reading or writing."""
    stop = scenario.duration_seconds if other.stop_seconds is None else other.stop_seconds
    return _options(
        {
            **_place(extents[other.device]),
            "read-size": other.read_size,
            "batch-reads": _NEIGHBOUR_BATCH_READS,
            "workers": other.threads,
            "queue": other.threads + _NEIGHBOUR_BATCH_READS,
            "start-ms": round(other.start_seconds * 1e3),
            "stop-ms": round(min(stop, scenario.duration_seconds) * 1e3),
            "random": int(other.pattern == "random"),
            "write": int(other.kind == "writer"),
        }
    )


def _place(extent: Extent) -> dict[str, object]:
    return {"path": extent.path, "offset": extent.offset, "span": extent.length}


def _options(values: Mapping[str, object]) -> list[str]:
    words: Sequence[tuple[str, str]] = [(f"--{name}", str(value)) for name, value in values.items()]
    return [word for pair in words for word in pair]
