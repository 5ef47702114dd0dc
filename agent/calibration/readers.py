"""How to measure: one round of one kind of IO, by fio where it is installed, else by threads of our own."""

from __future__ import annotations

import json
import mmap
import os
import random
import shutil
import subprocess
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, Protocol

from agent.errors import PrefetchdError

KIB, MIB = 1 << 10, 1 << 20


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of IO: direction, piece in bytes, pieces in flight, and whether they follow each other."""

    name: str
    op: Literal["read", "write"]
    piece: int
    depth: int
    sequential: bool


class Reader(Protocol):
    """Something that can do IO and say how much it did."""

    name: str

    def run(self, descriptor: int, size: int, kind: Kind, seconds: float) -> float:
        """Bytes per second over a round on the open file or device of `size` bytes. Raises PrefetchdError."""


def choose_reader(wanted: str) -> Reader:
    """The reader called `fio`, `own` or `auto`; raises PrefetchdError where fio is wanted and missing."""
    if wanted == "own":
        return OwnReader()
    if shutil.which("fio"):
        return FioReader()
    if wanted == "fio":
        raise PrefetchdError("fio is not installed; run: apt-get install fio, or use --reader own.")
    return OwnReader()


class FioReader:
    """fio with asynchronous IO; it opens our file through /proc, since the file has no name."""

    name = "fio"

    def run(self, descriptor: int, size: int, kind: Kind, seconds: float) -> float:
        mode = kind.op if kind.sequential else f"rand{kind.op}"
        command = [
            "fio", "--name=calibrate", f"--filename=/proc/{os.getpid()}/fd/{descriptor}", f"--size={size}",
            f"--rw={mode}", f"--bs={kind.piece}", f"--iodepth={kind.depth}", "--ioengine=libaio", "--direct=1",
            f"--runtime={seconds:g}", "--ramp_time=0.3", "--randrepeat=0", "--refill_buffers", "--norandommap",
            "--time_based", "--invalidate=0", "--output-format=json", "--thread",
        ]  # fmt: skip
        # --thread: a job that is a process of its own is not ended with fio, and would go on for its time.
        command += ["--readonly"] if kind.op == "read" else []
        if shutil.which("setpriv"):  # should we be killed, fio ends with us
            command = ["setpriv", "--pdeathsig", "KILL", *command]
        done = subprocess.run(command, capture_output=True, text=True, check=False, cwd="/tmp")  # noqa: S108 - fio's state
        try:
            told = json.loads(done.stdout[done.stdout.index("{") :])
            return float(told["jobs"][0][kind.op]["bw_bytes"])
        except (ValueError, KeyError, IndexError):
            why = (done.stderr or done.stdout).strip().splitlines()
            raise PrefetchdError(
                f"fio cannot measure ({why[-1] if why else f'status {done.returncode}'}); try --reader own."
            ) from None


class OwnReader:
    """Threads that each keep one request in flight. Python costs some 10 µs a request: fast drives need fio."""

    name = "prefetchd's own reader"

    def run(self, descriptor: int, size: int, kind: Kind, seconds: float) -> float:
        state = _Round(descriptor, size, kind)
        threads = [threading.Thread(target=state.work, daemon=True) for _ in range(kind.depth)]
        begun = time.monotonic()
        for thread in threads:
            thread.start()
        try:
            state.stopped.wait(seconds)
        finally:
            state.stopped.set()
            for thread in threads:
                thread.join()
        if state.error is not None:
            raise PrefetchdError(f"The device cannot be measured ({state.error.strerror}).") from state.error
        return state.bytes / (time.monotonic() - begun)


class _Round:
    """What the threads of one round share."""

    def __init__(self, descriptor: int, size: int, kind: Kind) -> None:
        self.stopped = threading.Event()
        self.bytes = 0
        self.error: OSError | None = None
        self._descriptor, self._kind = descriptor, kind
        self._pieces = size // kind.piece
        self._next = random.randrange(self._pieces)  # noqa: S311 - no secret
        self._lock = threading.Lock()

    def _offset(self) -> int:
        if not self._kind.sequential:
            return random.randrange(self._pieces) * self._kind.piece  # noqa: S311 - no secret
        with self._lock:
            self._next = (self._next + 1) % self._pieces
            return self._next * self._kind.piece

    def work(self) -> None:
        buffer = mmap.mmap(-1, self._kind.piece)  # page-aligned, as direct IO wants it
        buffer.write(os.urandom(self._kind.piece))
        transfer: Callable[..., int] = os.preadv if self._kind.op == "read" else os.pwritev
        try:
            while not self.stopped.is_set():
                moved = transfer(self._descriptor, [buffer], self._offset())
                with self._lock:
                    self.bytes += moved
        except OSError as error:
            self.error = error
            self.stopped.set()
        finally:
            buffer.close()
