"""A training job with a real PyTorch `DataLoader`: takes `trainer.c`'s options as far as it can, logs what that logs.

It imports PyTorch first, which takes long on an emulated CPU, says `ready` on standard output, and reads from standard
input when the scenario's time 0 is (CLOCK_MONOTONIC, ns). It tells the agent nothing: that has the kernel's view alone.
"""

from __future__ import annotations

import argparse
import ctypes
import mmap
import os
import random
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch.utils import data

RESTART_PAUSE_SECONDS = 1.0
_FOREVER = 1 << 40
_SLOTS = 4
"""Counters of a worker: reads, bytes, microseconds, longest read in microseconds."""


class Reads(data.Dataset[torch.Tensor]):
    """A sample is one read, of a large batch several; workers count into `counters`, `_SLOTS` for each."""

    def __init__(self, options: argparse.Namespace, counters: Any, seed: int) -> None:
        self.options = options
        self.counters = counters
        self.seed = seed
        self.file = -1

    def __len__(self) -> int:
        return _FOREVER

    def __getitem__(self, index: int) -> torch.Tensor:
        if self.file < 0:
            self._open()
        options = self.options
        cold = index // options.batch_reads < options.cold_batches
        for part in range(options.cold_factor if cold else 1):
            blocks = options.span // options.read_size
            block = self.random.randrange(blocks) if options.random else (index + part) % blocks
            self._read(options.offset + block * options.read_size)
        return torch.zeros(16)

    def _open(self) -> None:
        info = data.get_worker_info()
        self.place = _SLOTS * (info.id if info else 0)
        self.random = random.Random(self.seed * 1000 + self.place)
        flags = 0 if self.options.buffered else os.O_DIRECT
        self.file = os.open(self.options.path, os.O_RDONLY | os.O_CLOEXEC | flags)
        self.buffer = mmap.mmap(-1, self.options.read_size)  # page-aligned, as direct reads want it

    def _read(self, offset: int) -> None:
        began = time.monotonic_ns()
        done = os.preadv(self.file, [self.buffer], offset)
        spent = (time.monotonic_ns() - began) // 1000
        if done != self.options.read_size:
            raise OSError(f"{self.options.path}: {done} of {self.options.read_size} bytes at {offset}")
        counters, place = self.counters, self.place
        counters[place] += 1
        counters[place + 1] += done
        counters[place + 2] += spent
        counters[place + 3] = max(counters[place + 3], spent)


def loader_of(options: argparse.Namespace, counters: Any, seed: int) -> data.DataLoader[torch.Tensor]:
    """Return the loader of one life: batches of `batch_reads`, `queue` of them under way or ready."""
    return data.DataLoader(
        Reads(options, counters, seed),
        batch_size=options.batch_reads,
        sampler=range(_FOREVER),
        num_workers=options.workers,
        prefetch_factor=max(1, options.queue // options.workers),
    )


def ready_batches(iterator: Any) -> int:
    """Return how many batches are produced and not taken, by the loader's own queues."""
    waiting = int(iterator._worker_result_queue.qsize())
    return waiting + sum(len(entry) == 2 for entry in iterator._task_info.values())


def live(options: argparse.Namespace, life: int, end_ns: int, counters: Any, log: Any) -> None:
    """Train from now to `end_ns`; a batch that comes later was not taken, and its wait ends there."""
    iterator: Any = iter(loader_of(options, counters, options.seed * 100 + life))
    model = torch.nn.Linear(16, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-9)
    pace = random.Random(options.seed * 31 + life)
    while (asked := time.monotonic_ns()) < end_ns:
        depth = ready_batches(iterator)
        batch = next(iterator)
        got = min(time.monotonic_ns(), end_ns)
        taken = int(got < end_ns)
        begun, waited = (asked - options.zero_ns) / 1e9, (got - asked) / 1e6
        log.write(f"{begun:.4f} {waited:.3f} {depth} {life} {taken} {sum(counters[1::_SLOTS])}\n")
        optimizer.zero_grad()
        model(batch).sum().backward()
        optimizer.step()
        step_ns = options.compute_us * pace.randrange(950, 1050)
        time.sleep(max(0.0, (got + step_ns - time.monotonic_ns()) / 1e9))
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # the loader's own handler takes a killed worker for a failure
    for worker in iterator._workers:
        worker.kill()
    os._exit(0)  # nothing is left to be shut down, and the loader would try for seconds


def run(options: argparse.Namespace) -> int:
    """Live every life in a process of its own, as a job that is started anew would."""
    from multiprocessing.sharedctypes import RawArray  # noqa: PLC0415 - after PyTorch, which sets multiprocessing up

    counters = RawArray(ctypes.c_uint64, _SLOTS * options.workers)
    torch.set_num_threads(1)
    torch.optim.SGD(torch.nn.Linear(1, 1).parameters(), lr=1.0).step()  # brings in what is imported late
    print("ready", flush=True)
    options.zero_ns = int(sys.stdin.readline())
    ends = [*options.restart_ms, options.stop_ms]
    failed = 0
    with options.log.open("w", buffering=1) as log:
        log.write("# time_s wait_ms depth_before life taken bytes_total\n")
        _sleep_until(options.zero_ns + options.start_ms * 1_000_000)
        for life, end_ms in enumerate(ends):
            if life:
                time.sleep(RESTART_PAUSE_SECONDS)
            failed |= _in_child(
                options, life, options.zero_ns + min(end_ms, options.stop_ms) * 1_000_000, counters, log
            )
        log.write(_end_line(counters, len(ends)))
    return failed


def _in_child(options: argparse.Namespace, life: int, end_ns: int, counters: Any, log: Any) -> int:
    child = os.fork()
    if child:
        return int(os.waitpid(child, 0)[1] != 0)
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: nobody trains on when the job is ended
    try:
        live(options, life, end_ns, counters, log)
    finally:
        os._exit(1)


def _end_line(counters: Any, lives: int) -> str:
    reads, moved, spent = (sum(counters[place::_SLOTS]) for place in range(3))
    mean = spent / 1e3 / reads if reads else 0.0
    longest = max(counters[3::_SLOTS]) / 1e3
    return f"# end reads={reads} bytes={moved} read_ms_mean={mean:.3f} read_ms_max={longest:.3f} lives={lives}\n"


def _sleep_until(ns: int) -> None:
    time.sleep(max(0.0, (ns - time.monotonic_ns()) / 1e9))


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Read the options; those of `trainer.c` that have no meaning here are read and let be."""
    parser = argparse.ArgumentParser(prog="trainer_torch.py", description="Train with a real DataLoader.")
    for name in ("path", "log", "cgroup"):
        parser.add_argument(f"--{name}", type=Path, required=name != "cgroup")
    defaults = {"read-size": 256 << 10, "batch-reads": 8, "workers": 4, "queue": 8, "cold-factor": 1, "stop-ms": 40000}
    names = ("offset", "span", "compute-us", "cold-batches", "start-ms", "seed", "random", "buffered", *defaults)
    for name in (*names, "prepare-cpu-us", "hints"):
        parser.add_argument(f"--{name}", type=int, default=defaults.get(name, 0))
    parser.add_argument("--restart-ms", type=int, action="append", default=[])
    return parser.parse_args(argv)


def main(argv: Sequence[str]) -> int:
    options = parse(argv)
    if options.cgroup:
        (options.cgroup / "cgroup.procs").write_text(str(os.getpid()))
    return run(options)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
