"""Raw map memory -> values. Pure: bytes in, values out; the layouts mirror the structs of the program files."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from bpf.samples import HISTOGRAM_BUCKETS, BlockCounters, BlockKey, NfsCounters, Op

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
        ("missed", "u8"),
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
    ]
)
"""`struct control_t` of block.c."""

NFS_COUNTERS = np.dtype(
    [
        ("requests", "u8"),
        ("bytes", "u8"),
        ("backlog_ns", "u8"),
        ("round_trip_ns", "u8"),
        ("total_ns", "u8"),
        ("total_us_squared", "u8"),
        ("histogram", "u8", (HISTOGRAM_BUCKETS,)),
    ]
)
"""`struct nfs_counters_t` of nfs.c."""

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


def decode_block_slots(slots: Records, reaped: Records, *, throttle: bool) -> dict[BlockKey, BlockCounters]:
    """Counters of the live slots of `slots` (dtype BLOCK_SLOT, shape (n,)).

    `reaped` (int64, shape (n, 2)) holds requests and bytes of ends that were missed and found by user space;
    `throttle` says whether this tier knows the wait in blk-throttle.
    """
    live = np.nonzero(slots["live"])[0]
    chosen, found = slots[live], reaped[live].astype(np.uint64)
    chosen["requests"] += found[:, 0]
    chosen["bytes"] += found[:, 1]
    return {
        BlockKey(cgroup, device_name(device), OPS[op]): BlockCounters(
            requests=requests,
            bytes=size,
            latency_ns=latency,
            latency_us_squared=squares,
            in_flight=max(0, started - requests),
            histogram=tuple(histogram),
            throttle_ns=throttle_ns if throttle else None,
            queue_ns=queue_ns,
            device_ns=device_ns,
        )
        for (
            cgroup,
            device,
            op,
            _live,
            _epoch,
            started,
            requests,
            _missed,
            size,
            latency,
            squares,
            throttle_ns,
            queue_ns,
            device_ns,
            histogram,
        ) in _rows(chosen)
    }


def decode_nfs(value: bytes) -> NfsCounters:
    """Counters of one map value (dtype NFS_COUNTERS)."""
    (row,) = _rows(np.frombuffer(value, NFS_COUNTERS))
    fields: dict[str, Any] = dict(zip(NFS_COUNTERS.names or (), row, strict=True))
    return NfsCounters(**fields | {"histogram": tuple(fields["histogram"])})


def _rows(records: Records) -> list[tuple[Any, ...]]:
    """Records as tuples of Python numbers; sub-arrays become lists."""
    columns = [records[name].tolist() for name in records.dtype.names or ()]
    return list(zip(*columns, strict=True))
