"""Keys from a terminal: raw bytes to names, and the terminal's mode put back at the end."""

from __future__ import annotations

import contextlib
import os
import select
import sys
import termios
import tty
from collections.abc import Iterator

SEQUENCES = {
    b"\x1b[A": "up",
    b"\x1b[B": "down",
    b"\x1b[C": "right",
    b"\x1b[D": "left",
    b"\x1bOA": "up",
    b"\x1bOB": "down",
    b"\x1bOC": "right",
    b"\x1bOD": "left",
    b"\x1b": "escape",
    b"\r": "enter",
    b"\n": "enter",
    b"\x7f": "backspace",
    b"\x08": "backspace",
    b"\x03": "q",
    b"\x04": "q",
}


def names(data: bytes) -> list[str]:
    r"""The keys in what was read; escape sequences that are not known are dropped.

    >>> names(b"s\x1b[A\r/")
    ['s', 'up', 'enter', '/']
    """
    found = []
    while data:
        sequence = next((one for one in sorted(SEQUENCES, key=len, reverse=True) if data.startswith(one)), None)
        if sequence == b"\x1b" and data[1:2] in (b"[", b"O"):
            end = next((i for i, byte in enumerate(data[2:], start=2) if 0x40 <= byte <= 0x7E), len(data))
            data = data[end + 1 :]
        elif sequence:
            found.append(SEQUENCES[sequence])
            data = data[len(sequence) :]
        else:
            text = data.decode(errors="ignore")[:1]
            found += [text] if text else []
            data = data[len(text.encode()) or 1 :]
    return found


@contextlib.contextmanager
def raw_terminal() -> Iterator[int]:
    """Deliver keys one by one without showing them; yields the descriptor."""
    descriptor = sys.stdin.fileno()
    before = termios.tcgetattr(descriptor)
    try:
        tty.setcbreak(descriptor)
        yield descriptor
    finally:
        termios.tcsetattr(descriptor, termios.TCSADRAIN, before)


def read_keys(descriptor: int, seconds: float) -> list[str]:
    """Keys pressed within `seconds`; returns at the first. The end of the input counts as `q`."""
    if not select.select([descriptor], [], [], seconds)[0]:
        return []
    data = os.read(descriptor, 256)
    return names(data) if data else ["q"]
