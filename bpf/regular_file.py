"""Opening a file whose path others choose, at any time: only where a regular file stands, and without waiting."""

from __future__ import annotations

import errno
import os
import stat

_FLAGS = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK


class NotRegular(OSError):  # noqa: N818 - says what is there
    """Something else than a regular file stands there."""


def open_regular(path: str | os.PathLike[str], more: int = 0) -> int:
    """A descriptor for reading; `more` are flags of open(2) for finding the file. Raises NotRegular, OSError.

    Nothing else is ever opened: to open a device, or a pipe whose writer waits for a reader, does something. Of a file
    on which somebody has a lease (fcntl(2)) this is an error at once, where it would wait for most of a minute.
    """
    place = os.open(path, os.O_PATH | os.O_CLOEXEC | more)
    try:
        if not stat.S_ISREG(os.fstat(place).st_mode):
            raise NotRegular(errno.EINVAL, "not a regular file", os.fspath(path))
        return os.open(f"/proc/self/fd/{place}", _FLAGS)
    finally:
        os.close(place)
