"""The numbers that a PyTorch DataLoader has sent its workers and they have not taken yet. Pure.

Each message on an index pipe is a length (4 bytes, big endian; multiprocessing/connection.py) and a pickle of
(task, [numbers]). The pickle is never loaded: the bytes come from somebody else's process and the agent is root. Only
the opcodes that such a tuple is made of (Lib/pickletools.py) are read; anything else is no index message.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import NamedTuple

LONGEST_MESSAGE = 1 << 20

_FIXED = {0x80: 1, 0x95: 8, 0x71: 1, 0x72: 4, 0x94: 0}  # PROTO, FRAME, BINPUT, LONG_BINPUT, MEMOIZE: no value
_INTS = {0x4B: "<B", 0x4D: "<H", 0x4A: "<i"}  # BININT1, BININT2, BININT
_LONG1 = 0x8A
_PICKLE = b"\x80"
_MARK, _EMPTY_LIST, _APPEND, _APPENDS, _TUPLE2, _STOP = b"(]ae\x86."

Stack = list["int | list[int] | None"]
"""Values; None is a mark."""


class Task(NamedTuple):
    """A batch that a worker will make: its number, and those of its samples in the order in which they are read."""

    task: int
    numbers: tuple[int, ...]


def tasks_in(data: bytes) -> Iterator[Task]:
    """The tasks in what a pipe holds; of the first one the length may have been read already."""
    at = 0
    if data[:1] == _PICKLE:
        found, at = _parse(data, 0)
        if found is not None:
            yield found
    while at + 4 < len(data):
        length = int(struct.unpack_from(">I", data, at)[0])
        if not 0 < length <= LONGEST_MESSAGE:
            return
        found = parse_task(data[at + 4 : at + 4 + length])
        if found is not None:
            yield found
        at += 4 + length


def parse_task(pickle: bytes) -> Task | None:
    """(task, [numbers]) or (task, number); None for every other pickle, cut-off ones included."""
    return _parse(pickle, 0)[0]


def _parse(data: bytes, at: int) -> tuple[Task | None, int]:
    """The task in the pickle that begins there, and where it ends; the end of the data where that cannot be told."""
    stack: Stack = []
    try:
        while data[at] != _STOP:
            at += _step(data, at, stack)
    except (IndexError, struct.error, ValueError):
        return None, len(data)
    match stack:
        case [int(task), int(number)]:
            return Task(task, (number,)), at + 1
        case [int(task), list(numbers)]:
            return Task(task, tuple(numbers)), at + 1
    return None, at + 1


def _step(pickle: bytes, at: int, stack: Stack) -> int:
    """Read one opcode and return its length. Raises ValueError where it belongs to no index message."""
    code = pickle[at]
    if code in _FIXED:
        return 1 + _FIXED[code]
    if code in _INTS:
        stack.append(int(struct.unpack_from(_INTS[code], pickle, at + 1)[0]))
        return 1 + struct.calcsize(_INTS[code])
    if code == _LONG1:
        size = pickle[at + 1]
        stack.append(int.from_bytes(pickle[at + 2 : at + 2 + size], "little", signed=True))
        return 2 + size
    _apply(code, stack)
    return 1


def _apply(code: int, stack: Stack) -> None:
    """Carry out an opcode without an argument.

    The one list stands behind the task, and a mark behind the list: looking for it in a stack of thousands of them,
    which anybody can write, would take minutes.
    """
    if code == _MARK and len(stack) == 2:
        stack.append(None)
    elif code == _EMPTY_LIST and len(stack) == 1:
        stack.append([])
    elif code == _APPEND:
        _extend(stack, len(stack) - 1)
    elif code == _APPENDS:
        mark = len(stack) - 1 - stack[::-1].index(None)
        del stack[mark]
        _extend(stack, mark)
    elif code != _TUPLE2 or len(stack) != 2:
        raise ValueError(code)


def _extend(stack: Stack, start: int) -> None:
    """Move what stands from `start` on into the list below it."""
    target = stack[start - 1]
    values = stack[start:]
    if start < 1 or not isinstance(target, list):
        raise ValueError(start)
    for value in values:
        if not isinstance(value, int):
            raise ValueError(value)  # noqa: TRY004 - one error for all that is no index message
        target.append(value)
    del stack[start:]
