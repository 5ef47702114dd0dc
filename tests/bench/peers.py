"""What the block probe is compared with: bcc's own biolatency and biosnoop, run as they are."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.bench.load import CannotMeasureError

TOOLS = {"biolatency": ("biolatency-bpfcc", "3600", "1"), "biosnoop": ("biosnoop-bpfcc",)}
_READY = {"biolatency": b"Tracing", "biosnoop": b"TIME"}
"""What each prints once everything is attached."""

_START_SECONDS = 120.0
"""Compiling takes a second or two, on an emulated CPU a minute."""


class Tool:
    """One running tool: what its programs cost in the kernel, and its process outside."""

    def __init__(self, process: subprocess.Popen[bytes], programs: dict[int, str]) -> None:
        self.process = process
        self._programs = programs

    def run_statistics(self) -> dict[str, tuple[int, int]]:
        """By function: runs and ns, as far as kernel.bpf_stats_enabled was on."""
        found: dict[str, tuple[int, int]] = {}
        for entry in _programs():
            if name := self._programs.get(entry["id"]):
                count, ns = found.get(name, (0, 0))
                found[name] = count + entry.get("run_cnt", 0), ns + entry.get("run_time_ns", 0)
        return found

    def cpu_seconds(self) -> float:
        """CPU that the process has taken, user and system."""
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def rss_bytes(self) -> int:
        """Resident memory of the process."""
        status = Path(f"/proc/{self.process.pid}/status").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmRSS:"))


@contextlib.contextmanager
def running(name: str) -> Iterator[Tool]:
    """A tool while it traces; CannotMeasureError, in one sentence, where it does not start."""
    command, *arguments = TOOLS[name]
    if not (path := shutil.which(command, path=f"{os.environ.get('PATH', '')}:/usr/sbin")):
        raise CannotMeasureError(f"{command} is not installed: run `make setup-test`")
    before = {entry["id"] for entry in _programs()}
    with tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as errors:
        process = subprocess.Popen(
            [path, *arguments], stdout=output, stderr=errors, env=os.environ | {"PYTHONUNBUFFERED": "1"}
        )
        try:
            _wait(name, process, output.fileno(), errors.fileno())
            yield Tool(process, {entry["id"]: entry["name"] for entry in _programs() if entry["id"] not in before})
        finally:
            process.terminate()
            process.wait()


def _wait(name: str, process: subprocess.Popen[bytes], output: int, errors: int) -> None:
    """Until it says that it traces."""
    deadline = time.monotonic() + _START_SECONDS
    while _READY[name] not in os.pread(output, 4096, 0):
        if process.poll() is not None or time.monotonic() > deadline:
            said = os.pread(errors, 1 << 20, 0).decode(errors="replace").strip().splitlines()
            raise CannotMeasureError(f"bcc's {name} does not start on this kernel: {said[-1] if said else 'no reason'}")
        time.sleep(0.1)


def _programs() -> list[dict[str, Any]]:
    tool = shutil.which("bpftool", path=f"{os.environ.get('PATH', '')}:/usr/sbin")
    if tool is None:
        raise CannotMeasureError("bpftool is not installed: run `make setup-test`")
    done = subprocess.run([tool, "-j", "prog", "show"], capture_output=True, check=True)
    return [entry | {"name": entry.get("name", str(entry["id"]))} for entry in json.loads(done.stdout)]
