"""Raw map memory -> values. Pure: bytes in, values out; the layouts mirror the structs of the program files."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from bpf.samples import HISTOGRAM_BUCKETS, BlockCounters, BlockKey, Op

OPS: tuple[Op, Op] = ("read", "write")
_MINOR_BITS = 20

BLOCK_SLOT = np.dtype(
    [
        ("cgroup", "u8"),
        ("device", "u4"),
        ("op", "u4"),
        ("live", "u4"),
        ("epoch", "u4"),
        ("started", "u8"),
        ("requests", "u8"),
        ("abandoned", "u8"),
        ("bytes", "u8"),
        ("latency_ns", "u8"),
        ("latency_us_squared", "u8"),
        ("throttle_ns", "u8"),
        ("queue_ns", "u8"),
        ("device_ns", "u8"),
        ("histogram", "u8", (HISTOGRAM_BUCKETS,)),
    ]
)
"""`struct slot_t` of block.c."""

BLOCK_CONTROL = np.dtype(
    [
        ("generation", "u4"),
        ("only_listed", "u4"),
        ("lost_in_flight", "u8"),
        ("lost_slots", "u8"),
        ("lost_walks", "u8"),
    ]
)
"""`struct control_t` of block.c."""

Records = npt.NDArray[Any]


def device_name(dev: int) -> str:
    """`maj:min` of the kernel's internal dev_t (include/linux/kdev_t.h: 12 bits of major, 20 of minor)."""
    return f"{dev >> _MINOR_BITS}:{dev & ((1 << _MINOR_BITS) - 1)}"


def device_number(name: str) -> int:
    """The kernel's internal dev_t of `maj:min`; ValueError where it is not of that form."""
    major, colon, minor = name.partition(":")
    if not colon or not major.isdecimal() or not minor.isdecimal():
        raise ValueError(f"device {name!r} is not of the form major:minor")
    return int(major) << _MINOR_BITS | int(minor)


def decode_block_slots(slots: Records, *, splits: bool, throttle: bool) -> dict[BlockKey, BlockCounters]:
    """Counters of the live slots of `slots` (dtype BLOCK_SLOT, shape (n,)).

    `throttle` and `splits` say whether throttle time, and queue and device time, are known in this tier.
    """
    live = slots[slots["live"] != 0]
    return {
        BlockKey(cgroup, device_name(device), OPS[op]): BlockCounters(
            requests=requests,
            bytes=size,
            latency_ns=latency,
            latency_us_squared=squares,
            in_flight=max(0, started - requests - abandoned),
            histogram=tuple(histogram),
            throttle_ns=throttle_ns if throttle else None,
            queue_ns=queue_ns if splits else None,
            device_ns=device_ns if splits else None,
        )
        for (
            cgroup,
            device,
            op,
            _live,
            _epoch,
            started,
            requests,
            abandoned,
            size,
            latency,
            squares,
            throttle_ns,
            queue_ns,
            device_ns,
            histogram,
        ) in _rows(live)
    }


def _rows(records: Records) -> list[tuple[Any, ...]]:
    """Records as tuples of Python numbers; sub-arrays become lists."""
    columns = [records[name].tolist() for name in records.dtype.names or ()]
    return list(zip(*columns, strict=True))
