"""Processes in cgroups that do known IO and time it themselves: the ground truth of the probe tests.

`python tests/native/workload.py read|write …` is the process; `start` runs it inside a cgroup and gives its report.
"""

import array
import contextlib
import ctypes
import fcntl
import json
import mmap
import os
import resource
import struct
import subprocess
import sys
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path

HUGE_PAGE = 2 << 20
FS_IOC_FIEMAP = 0xC020660B


@dataclass(frozen=True)
class Report:
    """What one process did: calls, bytes, and the time of each call in ns.

    `fetched` is what the kernel read from disks for it since it joined its cgroup, in bytes, by its own account of the
    process. More than `bytes` where pages of the program or blocks of the file system had been dropped from memory.
    """

    calls: int
    bytes: int
    times_ns: list[int]
    fetched: int = 0

    @property
    def mean_ns(self):
        return sum(self.times_ns) / len(self.times_ns)


def start(cgroup, *arguments, **options):
    """Run the workload inside a cgroup folder; it waits there for `finish`, so that several start together."""
    process = subprocess.Popen(
        [sys.executable, __file__, str(cgroup), *map(str, arguments)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        **options,
    )
    assert process.stdout.readline() == "ready\n"
    return process


def finish(*processes):
    """Let the processes go at once, wait for them, and give their reports."""
    for process in processes:
        process.stdin.write("go\n")
        process.stdin.flush()
    reports = []
    for process in processes:
        output = process.stdout.read()
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        fetched = fetched_bytes(process.pid)
        process.communicate(timeout=300)
        assert process.returncode == 0, f"workload ended with {process.returncode}"
        report = json.loads(output)
        reports.append(Report(**report | {"fetched": fetched - report["fetched"]}))
    return reports


def fetched_bytes(pid):
    """What was read from disks for a process, by `read_bytes` of /proc/PID/io: counted as each bio is submitted."""
    fields = dict(line.split(": ") for line in Path(f"/proc/{pid}/io").read_text().splitlines())
    return int(fields["read_bytes"])


def run(cgroup, *arguments, **options):
    """Run one workload to its end and give its report."""
    return finish(start(cgroup, *arguments, **options))[0]


def make_file(path, size, *, fill=True):
    """A file of `size` bytes with its blocks allocated, on the disk and out of the page cache."""
    with path.open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, size)
        while fill and file.tell() < size:
            file.write(os.urandom(min(1 << 20, size - file.tell())))
        file.flush()
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, size, os.POSIX_FADV_DONTNEED)
    return path


def extent_starts(path):
    """Logical byte offsets at which a new extent of the file starts (FIEMAP, Documentation/filesystems/fiemap.rst)."""
    header, extent, most = struct.Struct("=QQLLLL"), struct.Struct("=QQQQQLLLL"), 4096
    buffer = array.array("B", bytes(header.size + most * extent.size))
    header.pack_into(buffer, 0, 0, 2**64 - 1, 1, 0, most, 0)
    with path.open("rb") as file:
        fcntl.ioctl(file, FS_IOC_FIEMAP, buffer)
    mapped = header.unpack_from(buffer)[3]
    return [extent.unpack_from(buffer, header.size + i * extent.size)[0] for i in range(mapped)]


def bios_of_direct_reads(path, block, calls, first=0):
    """How many bios direct reads of `block` bytes one after another need: one per extent that each touches.

    True for up to 1 MiB: a bio holds 256 pages wherever they are (BIO_MAX_VECS), and ends where an extent does.
    """
    assert block <= 1 << 20
    starts, total = extent_starts(path), 0
    for call in range(calls):
        low, high = first + call * block, first + (call + 1) * block
        total += 1 + sum(low < at < high for at in starts)
    return total


def whole_device(path):
    """`maj:min` of the whole disk below the file system of a path, from sysfs; None where there is no block device."""
    dev = path.stat().st_dev
    node = Path(f"/sys/dev/block/{os.major(dev)}:{os.minor(dev)}")
    if not node.exists():
        return None
    node = node.resolve()
    return ((node.parent if (node / "partition").exists() else node) / "dev").read_text().strip()


def contiguous_buffer(size):
    """A page-aligned buffer, touched, of huge pages where the kernel has any."""
    length = -(-size // HUGE_PAGE) * HUGE_PAGE
    region = mmap.mmap(-1, length + HUGE_PAGE)
    region.madvise(mmap.MADV_HUGEPAGE)
    start = -ctypes.addressof(ctypes.c_char.from_buffer(region)) % HUGE_PAGE
    view = memoryview(region)[start : start + size]
    view[:] = b"\1" * size
    return view


def scattered_buffer(size):
    """A buffer of small pages, touched from both ends so that neighbours in it are not neighbours in memory."""
    region = mmap.mmap(-1, size)
    region.madvise(mmap.MADV_NOHUGEPAGE)
    pages = range(0, size, mmap.PAGESIZE)
    for low, high in zip(pages, reversed(pages), strict=True):
        region[low] = region[high] = 1
    return memoryview(region)


def _timed(call, times):
    begun = time.perf_counter_ns()
    done = call()
    times.append(time.perf_counter_ns() - begun)
    return done


def _direct(path, block, calls, first, *, flags=os.O_RDONLY, move=os.preadv, allocate=contiguous_buffer):
    buffer, times, moved = allocate(block), [], 0
    file = os.open(path, flags | os.O_DIRECT)
    _ready()
    for call in range(calls):
        moved += _timed(lambda at=first + call * block: move(file, [buffer], at), times)
    os.close(file)
    return Report(calls, moved, times)


def _buffered(path, block, calls, first):
    times, moved = [], 0
    file = os.open(path, os.O_RDONLY)
    _ready()
    for call in range(calls):
        moved += len(_timed(lambda at=first + call * block: os.pread(file, block, at), times))
    os.close(file)
    return Report(calls, moved, times)


def _mapped(path, block, calls, first):
    times, moved = [], 0
    with Path(path).open("rb") as file:
        view = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
    _ready()
    for call in range(calls):
        moved += len(_timed(lambda at=first + call * block: view[at : at + block], times))
    return Report(calls, moved, times)


def _mapped_apart(path, block, calls, first):
    """Each block has a mapping of its own, so that a fault maps no more than its page around itself."""
    times, moved = [], 0
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # each mapping holds a descriptor
    with Path(path).open("rb") as file:
        places = range(first, first + calls * block, block)
        views = [mmap.mmap(file.fileno(), mmap.PAGESIZE, prot=mmap.PROT_READ, offset=at) for at in places]
    for view in views:
        view.madvise(mmap.MADV_RANDOM)
    _ready()
    for view in views:
        moved += len(_timed(lambda view=view: view[:1], times))
    return Report(calls, moved, times)


def _write_back(path, block, calls, first):
    """Dirty the page cache and leave it: the kernel writes it back later, for whom the file's first writer was."""
    times, moved = [], 0
    file = os.open(path, os.O_WRONLY | os.O_CREAT, 0o600)
    _ready()
    for call in range(calls):
        moved += _timed(lambda at=first + call * block: os.pwrite(file, b"\2" * block, at), times)
    os.close(file)
    return Report(calls, moved, times)


KINDS = {
    "read": _direct,
    "scattered": partial(_direct, allocate=scattered_buffer),
    "write": partial(_direct, flags=os.O_WRONLY, move=os.pwritev),
    "buffered": _buffered,
    "mapped": _mapped,
    "apart": _mapped_apart,
    "dirty": _write_back,
}


def _come_first():
    """Real-time priority: a process's clock must not count its own wait for a CPU."""
    with contextlib.suppress(PermissionError):  # a container may lack the right
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))


def _ready():
    print("ready", flush=True)
    sys.stdin.readline()


def main(cgroup, kind, path, *numbers):
    """Join the cgroup, do the IO: block size, calls and, where it is not 0, the first byte."""
    fetched = fetched_bytes("self")
    Path(cgroup, "cgroup.procs").write_text(str(os.getpid()))
    _come_first()
    block, calls, first = [*map(int, numbers), 0][:3]
    print(json.dumps(vars(KINDS[kind](path, block, calls, first)) | {"fetched": fetched}))


if __name__ == "__main__":
    main(*sys.argv[1:])
