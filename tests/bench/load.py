"""The load of the benchmark and the scratch cgroups that it runs in."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

MIB = 1 << 20
_FILE_BYTES = 256 * MIB
_START_SECONDS = 60.0
_SERIAL = itertools.count()


class CannotMeasureError(RuntimeError):
    """This machine lacks what the benchmark needs; one sentence."""


@dataclass(frozen=True)
class Load:
    """Random direct reads of 4 KiB by fio, with many in flight, from a file or a device, inside a cgroup."""

    cgroup: Path
    target: Path
    seconds: float
    depth: int = 32
    jobs: int = 2

    def command(self, seconds: float) -> list[str]:
        """What runs so long, inside the cgroup."""
        fio = [
            *("fio", "--name=load", f"--filename={self.target}", "--direct=1", "--rw=randread", "--bs=4k"),
            *("--ioengine=libaio", f"--iodepth={self.depth}", f"--numjobs={self.jobs}", "--group_reporting"),
            *("--time_based", f"--runtime={seconds}", "--output-format=json"),
        ]
        return ["sh", "-c", 'echo $$ >"$0/cgroup.procs" && exec "$@"', str(self.cgroup), *fio]

    @contextlib.contextmanager
    def running(self, seconds: float) -> Iterator[Callable[[], int]]:
        """The load for at most so long; gives a function that counts the bytes that its processes have asked for."""
        process = subprocess.Popen(self.command(seconds), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        try:
            deadline = time.monotonic() + _START_SECONDS
            while self.bytes_read() < 16 * MIB:  # more than it takes to load fio itself
                if process.poll() is not None or time.monotonic() > deadline:
                    raise CannotMeasureError("fio does not start, or the kernel does not count its reads")
                time.sleep(0.1)
            yield self.bytes_read
        finally:
            process.terminate()
            process.communicate()

    def bytes_read(self) -> int:
        """Bytes that the processes in the cgroup have asked the block layer for (proc_pid_io(5))."""
        total = 0
        for pid in (self.cgroup / "cgroup.procs").read_text().split():
            with contextlib.suppress(OSError):
                lines = Path(f"/proc/{pid}/io").read_text().splitlines()
                total += next((int(line.split()[1]) for line in lines if line.startswith("read_bytes:")), 0)
        return total

    def run(self) -> tuple[int, float]:
        """Reads done, and reads per second."""
        try:
            done = subprocess.run(self.command(self.seconds), capture_output=True, text=True, check=True)
        except FileNotFoundError as error:
            raise CannotMeasureError("fio is not installed: run `make setup-test`") from error
        except subprocess.CalledProcessError as error:
            raise CannotMeasureError(f"fio failed: {error.stderr.strip() or error.stdout.strip()}") from error
        report = json.loads(done.stdout)["jobs"][0]["read"]
        return int(report["total_ios"]), float(report["iops"])


@contextlib.contextmanager
def scratch_file(folder: Path | None) -> Iterator[Path]:
    """A file of real data on a disk, removed after."""
    with tempfile.TemporaryDirectory(prefix="prefetchd-bench-", dir=folder) as place:
        path = Path(place) / "data"
        with path.open("wb") as file:
            for _ in range(_FILE_BYTES // MIB):
                file.write(os.urandom(MIB))
            file.flush()
            os.fsync(file.fileno())
        yield path


@contextlib.contextmanager
def null_block() -> Iterator[Path]:
    """A block device that does nothing, as fast as the block layer is (Documentation/block/null_blk.rst)."""
    had = Path("/sys/module/null_blk").exists()
    done = subprocess.run(["modprobe", "null_blk", "nr_devices=1"], capture_output=True, text=True, check=False)
    if done.returncode or not Path("/dev/nullb0").exists():
        raise CannotMeasureError(f"this kernel has no null_blk: {done.stderr.strip() or 'no /dev/nullb0'}")
    try:
        yield Path("/dev/nullb0")
    finally:
        if not had:
            subprocess.run(["modprobe", "-r", "null_blk"], capture_output=True, check=False)


@contextlib.contextmanager
def scratch_cgroups(count: int) -> Iterator[list[Path]]:
    """Cgroups below the root of cgroup v2, removed after."""
    mounts = (line.split() for line in Path("/proc/self/mounts").read_text().splitlines())
    root = next((Path(fields[1]) for fields in mounts if fields[2] == "cgroup2"), None)
    if root is None or os.geteuid():
        raise CannotMeasureError("it needs root and a mounted cgroup v2 hierarchy")
    number = next(_SERIAL)
    folders = [root / f"prefetchd-bench-{os.getpid()}-{number}-{at}" for at in range(count)]
    try:
        for folder in folders:
            folder.mkdir()
        yield folders
    finally:
        for folder in folders:
            with contextlib.suppress(OSError):
                folder.rmdir()
