"""Frames go to the disk in a thread of their own: where it is slow, or hangs, the recording waits and nothing else."""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import BinaryIO

import msgspec

from agent.recording.frames import PASSES, frame

log = logging.getLogger(__name__)

MOST_WAITING_BYTES = 32 * 2**20
"""Passes that wait for the disk, uncompressed: minutes of a node with a dozen jobs."""
CLOSE_SECONDS = 10.0


class Writer:
    """Owns the file. An error of the disk ends the recording, never the agent; `problem` then says why."""

    def __init__(self, path: Path, file: BinaryIO, length: int, max_bytes: int) -> None:
        """Go on at the end of the file, which is `length` bytes long."""
        self.problem = ""
        self.bytes = length
        self._path = path
        self._file = file
        self._max_bytes = max_bytes
        self._deflate = zlib.compressobj(9)
        self._encoder = msgspec.msgpack.Encoder()
        self._waiting: queue.SimpleQueue[Sequence[bytes] | None] = queue.SimpleQueue()
        self._waiting_bytes = 0
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="recording", daemon=True)

    def start(self, head: bytes) -> None:
        """Write the first frame, and from now on what is `put`."""
        self._write(head)
        self._thread.start()

    @property
    def is_full(self) -> bool:
        """Whether the disk is so far behind that nothing more may wait for it."""
        return self._waiting_bytes > MOST_WAITING_BYTES

    def put(self, passes: Sequence[bytes]) -> None:
        """Take encoded passes, to write them as one frame."""
        self._count(sum(map(len, passes)))
        self._waiting.put(passes)

    def close(self) -> None:
        """Write what waits, as far as the disk takes it in CLOSE_SECONDS; may be called twice."""
        self._waiting.put(None)
        self._thread.join(CLOSE_SECONDS)
        if self._thread.is_alive() and not self.problem:
            self.end(f"the disk did not take its last {self._waiting_bytes / 1e6:,.1f} MB in {CLOSE_SECONDS:g} s")

    def end(self, why: str) -> None:
        """Write nothing more."""
        self.problem = why
        log.error("recording %s has ended: %s", self._path, why)

    def _count(self, size: int) -> None:
        with self._lock:
            self._waiting_bytes += size

    def _run(self) -> None:
        while (passes := self._waiting.get()) is not None:
            if not self.problem:
                self._write(self._frame(passes))
            self._count(-sum(map(len, passes)))
        with contextlib.suppress(OSError):  # it tries once more to write what did not fit
            self._file.close()

    def _frame(self, passes: Sequence[bytes]) -> bytes:
        contents = self._deflate.compress(self._encoder.encode([msgspec.Raw(one) for one in passes]))
        return frame(PASSES, contents + self._deflate.flush(zlib.Z_SYNC_FLUSH))

    def _write(self, data: bytes) -> None:
        if self.bytes + len(data) > self._max_bytes:
            self.end(f"it has reached its limit of {self._max_bytes / 1e6:,.0f} MB")
            return
        try:
            self._file.write(data)
            self._file.flush()
            self.bytes += len(data)
        except OSError as error:
            self.end(error.strerror or str(error))
