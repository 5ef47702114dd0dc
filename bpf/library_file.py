"""Opening a copy of a library in a thread of its own: what it lies on may never answer, as FUSE with a hung server."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Collection, Mapping
from pathlib import Path

from bpf.elf import ElfError, find_symbols
from bpf.regular_file import open_regular

WAIT_SECONDS = 0.1
"""From a disk it takes a few milliseconds."""

_LARGEST_BYTES = 1 << 32
_MOST_PENDING = 32
"""Threads that wait for storage, perhaps for ever."""
_pending = threading.BoundedSemaphore(_MOST_PENDING)


class LibraryFile:
    """The open file of a library, and the whole names of its symbols by their beginnings.

    `descriptor` is -1 until it is open, and again once it is closed; `error` says why it cannot be used.
    """

    def __init__(self, path: Path, prefixes: Collection[str]) -> None:
        """Wait for it WAIT_SECONDS at most; see `is_pending`."""
        self.descriptor = -1
        self.symbols: Mapping[str, str] = {}
        self.error = ""
        self._path = path
        self._prefixes = prefixes
        self._is_done = self._is_closed = False
        self._lock = threading.Lock()
        if not _pending.acquire(blocking=False):
            self._is_done, self.error = True, f"{_MOST_PENDING} libraries wait for their storage already"
            return
        thread = threading.Thread(target=self._run, name="library", daemon=True)
        thread.start()
        thread.join(WAIT_SECONDS)

    @property
    def is_pending(self) -> bool:
        """Whether its storage has not answered yet."""
        return not self._is_done

    def close(self) -> None:
        """Close the file, or have it closed as soon as it is there; harmless when repeated."""
        with self._lock:
            self._is_closed = True
            if self._is_done:
                self._drop()

    def _run(self) -> None:
        try:
            self._open()
        except (ElfError, OSError) as error:
            self.error = str(error)
        finally:
            _pending.release()
            with self._lock:
                self._is_done = True
                if self._is_closed or self.error:
                    self._drop()

    def _open(self) -> None:
        self.descriptor = file = open_regular(self._path)
        if os.fstat(file).st_size > _LARGEST_BYTES:
            raise OSError(errno.EFBIG, "many gigabytes are no library", str(self._path))
        self.symbols = find_symbols(lambda at, size: os.pread(file, size, at), self._prefixes)

    def _drop(self) -> None:
        if self.descriptor >= 0:
            os.close(self.descriptor)
        self.descriptor = -1
