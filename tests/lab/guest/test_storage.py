"""The disks behave: io.max caps real reads, the disk with moving parts pays for seeks."""

import subprocess
import time

import pytest

from tests.lab.trainer import trainer_program
from tests.lab.truth import read_truth

pytestmark = pytest.mark.guest
MIB = 1 << 20


def read_rate(path, disk, *, seconds=3.0, random=0, cgroup=None, workers=4, read_size=256 << 10):
    """Bytes per second that direct readers get from a disk."""
    log = path / "reads.log"
    options = {"path": disk.node, "span": 1 << 30, "log": log, "workers": workers, "queue": workers * 2}
    options |= {"random": random, "read-size": read_size, "batch-reads": 1, "stop-ms": round(seconds * 1e3)}
    options |= {"cgroup": cgroup} if cgroup else {}
    words = [word for name, value in options.items() for word in (f"--{name}", str(value))]
    began = time.monotonic()
    subprocess.run([str(trainer_program()), *words], check=True)
    return read_truth(log).end["bytes"] / (time.monotonic() - began)


def test_ssd_gives_what_it_promises(tmp_path, ssd):
    rate = read_rate(tmp_path, ssd, workers=16, seconds=4)
    print(f"SSD reads {rate / MIB:.1f} MiB/s of 120")
    assert 0.85 * 120 * MIB < rate < 1.1 * 120 * MIB


def test_io_max_caps_real_reads(tmp_path, ssd, cgroup):
    cap = 10 * MIB
    free = read_rate(tmp_path, ssd, cgroup=cgroup)
    (cgroup / "io.max").write_text(f"{ssd.number} rbps={cap}")
    capped = read_rate(tmp_path, ssd, cgroup=cgroup, seconds=5)
    (cgroup / "io.max").write_text(f"{ssd.number} rbps=max")
    print(f"free {free / MIB:.1f} MiB/s, capped {capped / MIB:.1f} MiB/s: {capped / cap:.2f} of the cap")
    assert free > 5 * cap
    assert 0.8 * cap < capped < 1.2 * cap


def test_disk_with_moving_parts_pays_for_seeks(tmp_path, hdd):
    sequential = read_rate(tmp_path, hdd, workers=1)
    scattered = read_rate(tmp_path, hdd, workers=1, random=1)
    queued = read_rate(tmp_path, hdd, workers=16, random=1)
    print(f"HDD sequential {sequential / MIB:.0f}, random {scattered / MIB:.0f}, queued {queued / MIB:.0f} MiB/s")
    assert sequential > 3 * scattered
    assert queued > 1.2 * scattered
