"""The kernel's file change notifications, of which the standard library has no binding. See inotify(7)."""

from __future__ import annotations

import ctypes
import os
import struct
from dataclasses import dataclass

IN_CREATE = 0x00000100
IN_DELETE = 0x00000200
IN_MOVED = 0x000000C0
IN_Q_OVERFLOW = 0x00004000
IN_IGNORED = 0x00008000
IN_ONLYDIR = 0x01000000

_HEADER = struct.Struct("iIII")  # struct inotify_event: wd, mask, cookie, len
_READ_BYTES = 64 * 1024


@dataclass(frozen=True, slots=True)
class Event:
    """One notification: the watch it came from (-1 on overflow) and its mask."""

    watch: int
    mask: int


class Inotify:
    """A notification queue; `fileno()` becomes readable when something changed."""

    def __init__(self) -> None:
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._fd = self._call("inotify_init1", os.O_NONBLOCK | os.O_CLOEXEC)

    def _call(self, name: str, *arguments: object, path: str = "") -> int:
        result = int(getattr(self._libc, name)(*arguments))
        if result < 0:
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number), path or name)
        return result

    def fileno(self) -> int:
        """Return the descriptor to wait on."""
        return self._fd

    def add(self, path: str, mask: int) -> int:
        """Watch a folder; return the watch's number. Raises OSError with the path."""
        raw = ctypes.c_char_p(os.fsencode(path))
        return self._call("inotify_add_watch", self._fd, raw, ctypes.c_uint32(mask), path=path)

    def read(self) -> list[Event]:
        """Return what is queued, without waiting."""
        events: list[Event] = []
        while chunk := self._chunk():
            position = 0
            while position < len(chunk):
                watch, mask, _cookie, length = _HEADER.unpack_from(chunk, position)
                events.append(Event(watch, mask))
                position += _HEADER.size + length
        return events

    def _chunk(self) -> bytes:
        try:
            return os.read(self._fd, _READ_BYTES)
        except BlockingIOError:
            return b""

    def close(self) -> None:
        """Give the descriptor back."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
