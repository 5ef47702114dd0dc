"""Files that operators write, such as configurations and passwords: none is read without an end or without a writer."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

MAX_BYTES = 4 * 2**20
"""A longer file is none that anybody wrote; a device node has no end."""


def read_small(path: Path) -> bytes:
    """All that the file holds. Raises OSError, also for more than `MAX_BYTES` and for a pipe that nobody writes to."""
    with open(path, "rb", buffering=0, opener=_open_at_once) as file:
        first = file.read(1)  # None where a writer is there that has not written yet
        if first == b"" and stat.S_ISFIFO(os.fstat(file.fileno()).st_mode):
            raise OSError(errno.ENXIO, "a pipe that nobody writes to", str(path))
        os.set_blocking(file.fileno(), True)
        data = first or b""
        while len(data) <= MAX_BYTES and (piece := file.read(MAX_BYTES)):
            data += piece
    if len(data) > MAX_BYTES:
        raise OSError(errno.EFBIG, f"more than {MAX_BYTES >> 20} MiB", str(path))
    return data


def _open_at_once(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NONBLOCK)
