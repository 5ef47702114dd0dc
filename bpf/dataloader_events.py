"""What the program of dataloader.c tells, as values. Pure: bytes in, values out."""

from __future__ import annotations

import struct
from enum import IntEnum
from typing import NamedTuple

EVENT = struct.Struct("=QQQQIIIIiHH24s")
"""`struct event_t` of dataloader_event.h."""

IN_WORKER = 1
IN_PIN_THREAD = 2

NO_TASK = -1


class Kind(IntEnum):
    """`enum kind_t` of dataloader_event.h."""

    WRITE = 1
    READ = 2
    POLL = 3
    CONTROL = 4
    NEXT_ENTER = 5
    NEXT_END = 6
    STEP = 7
    PROCESS = 8
    EXIT = 9
    CONTROL_READ = 10
    WAIT = 11
    WAIT_END = 12


class Event(NamedTuple):
    """Something a thread of a managed cgroup did: a whole message written or read, poll entered, a span.

    `time_ns` is its end, `start_ns` its start (CLOCK_MONOTONIC); of a message written, which is told before anybody can
    read it, both are the start; `pipe` the inode; `task` the number of the task that
    the message is about, or that a worker had in hand when it polled, else NO_TASK; `length` the message's in bytes;
    `head` what follows the task number in the pickle, or the class of loader that a span names.
    """

    time_ns: int
    start_ns: int
    pipe: int
    cgroup_id: int
    process: int
    thread: int
    parent: int
    length: int
    task: int
    kind: int
    flags: int
    head: bytes

    @property
    def in_main_thread(self) -> bool:
        """Whether the process's first thread did it."""
        return self.process == self.thread


def decode_event(record: bytes) -> Event:
    """One record of the ring buffer."""
    return Event(*EVENT.unpack(record))


_WORKER_MODULE = b"\x8c\x1etorch.utils.data._"  # of torch.utils.data._utils.worker, 30 characters


def is_own_object(head: bytes) -> bool:
    """Whether the pickle holds an object of torch.utils.data._utils.worker.

    In a result it says that the worker's iterable is exhausted, in a control message that persistent workers start
    another epoch.
    """
    return head.startswith(_WORKER_MODULE)


def is_single_process(head: bytes) -> bool:
    """Whether a span is that of a loader without workers."""
    return head.startswith(b"_SingleProcess")


class Sampling(IntEnum):
    """How a loader chooses its samples, as far as the first message of an epoch tells."""

    UNKNOWN = 0
    SEQUENTIAL = 1
    SHUFFLED = 2
    ITERABLE = 3


_MAX_STRIDE = 1024  # a sequential sampler hands every n-th sample to each of n ranks
_INTEGERS = {ord("K"): "<B", ord("M"): "<H", ord("J"): "<i"}


def sampling(head: bytes) -> Sampling:
    """What the first indices of task 0, `(0, [first, second, third, …])`, say; `None`s are those of an iterable.

    Sequential means that rank r of n gets r, r + n, r + 2 n.
    """
    if head.startswith((b"N", b"]\x94N", b"]\x94(N")):
        return Sampling.ITERABLE
    if not head.startswith(b"]\x94("):
        return Sampling.UNKNOWN
    first, at = _integer(head, 3)
    second, at = _integer(head, at)
    third, _ = _integer(head, at)
    if first is None or second is None:
        return Sampling.UNKNOWN
    stride = second - first
    regular = first < stride <= _MAX_STRIDE and third in {None, second + stride}
    return Sampling.SEQUENTIAL if regular else Sampling.SHUFFLED


def _integer(head: bytes, at: int) -> tuple[int | None, int]:
    layout = _INTEGERS.get(head[at]) if at < len(head) else None
    end = at + 1 + struct.calcsize(layout) if layout else at
    if layout is None or end > len(head):
        return None, at
    return int(struct.unpack_from(layout, head, at + 1)[0]), end
