"""Notice of disks that come and go: the kernel's own messages (netlink, KOBJECT_UEVENT), without udev.

Format: lib/kobject_uevent.c: `ACTION@DEVPATH`, then NUL-separated `KEY=value` texts.
"""

from __future__ import annotations

import errno
import socket
from dataclasses import dataclass

NETLINK_KOBJECT_UEVENT = 15
_KERNEL_GROUP = 1
_MESSAGE_BYTES = 16 * 1024
_OVERFLOW = b"change@\0ACTION=overflow\0SUBSYSTEM=block\0DEVTYPE=disk"


@dataclass(frozen=True, slots=True)
class DeviceChange:
    """A whole disk was added, removed or changed; `device` is its maj:min, `name` the kernel's."""

    action: str
    device: str
    name: str


def parse_uevent(message: bytes) -> DeviceChange | None:
    """Return the change of a whole disk that a message tells, or None for any other message. Never raises."""
    head, *fields = message.split(b"\0")
    if b"@" not in head:  # udev's own messages start with "libudev"
        return None
    values = dict(field.partition(b"=")[::2] for field in fields)
    text = {key.decode(errors="replace"): value.decode(errors="replace") for key, value in values.items()}
    if text.get("SUBSYSTEM") != "block" or text.get("DEVTYPE") != "disk":
        return None
    number = f"{text.get('MAJOR', '')}:{text.get('MINOR', '')}"
    return DeviceChange(text.get("ACTION", ""), number, text.get("DEVNAME", ""))


class DeviceWatch:
    """Receives the messages. They reach the first network namespace only, so a pod needs `hostNetwork`."""

    def __init__(self) -> None:
        self.degraded: str | None = None
        """Why there are no messages, or None; then devices are looked up again at every scan."""
        self._socket: socket.socket | None = None
        try:
            self._socket = socket.socket(socket.AF_NETLINK, socket.SOCK_DGRAM, NETLINK_KOBJECT_UEVENT)
            self._socket.settimeout(0)
            self._socket.bind((0, _KERNEL_GROUP))
        except OSError as error:
            self._degrade(error)

    def fileno(self) -> int:
        """Return the descriptor that becomes readable on a message, or -1."""
        return self._socket.fileno() if self._socket else -1

    def changes(self) -> tuple[DeviceChange, ...]:
        """Return what was told since the last call, without waiting. A lost message is an `overflow`."""
        found = []
        while message := self._receive():
            change = parse_uevent(message)
            if change is not None:
                found.append(change)
        return tuple(found)

    def _receive(self) -> bytes:
        if self._socket is None:
            return b""
        try:
            return self._socket.recv(_MESSAGE_BYTES)
        except BlockingIOError:
            return b""
        except OSError as error:
            if error.errno == errno.ENOBUFS:
                return _OVERFLOW
            self._degrade(error)
            return b""

    def close(self) -> None:
        """Stop receiving."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def _degrade(self, error: OSError) -> None:
        self.degraded = f"no messages about disks ({error.strerror}), looking at every scan instead"
        self.close()
