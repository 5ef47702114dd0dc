"""Raw map memory -> values. Pure: bytes in, values out; the layouts mirror the structs of the program files."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from bpf.samples import HISTOGRAM_BUCKETS, BlockCounters, BlockKey, FuseCounters, NfsCounters, ObjectCounters, Op

OPS: tuple[Op, Op] = ("read", "write")
_MINOR_BITS = 20

BLOCK_SLOT = np.dtype(
    [
        ("cgroup", "u8"),
        ("device", "u4"),
        ("op", "u4"),
        ("live", "u4"),
        ("epoch", "u4"),
        ("missed", "u8"),
        ("missed_bytes", "u8"),
        ("unused_start", "u8", (3,)),
        ("bytes", "u8"),
        ("latency_ns", "u8"),
        ("latency_us_squared", "u8"),
        ("throttle_ns", "u8"),
        ("queue_ns", "u8"),
        ("epoch_of_ends", "u4"),
        ("unused_end", "u4", (5,)),
        ("histogram", "u8", (HISTOGRAM_BUCKETS,)),
    ]
)
"""`struct slot_t` of block_slots.h."""

BLOCK_CONTROL = np.dtype(
    [
        ("generation", "u4"),
        ("only_listed", "u4"),
        ("lost_in_flight", "u8"),
        ("lost_slots", "u8"),
        ("address", "u8"),
    ]
)
"""`struct control_t` of block_slots.h."""

BLOCK_RECORD = np.dtype(
    [
        ("submitted", "u8"),
        ("queued", "u8"),
        ("issued", "u8"),
        ("parent", "u8"),
        ("slot", "u4"),
        ("epoch", "u4"),
        ("bytes", "u8"),
        ("parts", "i8"),
        ("unused", "u8"),
    ]
)
"""`struct record_t` of block_flight.h."""

BLOCK_TOLD = np.dtype([("requests", "u8"), ("bytes", "u8")])
"""What was last told of a slot."""

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

OBJECT_COUNTERS = np.dtype(
    [
        ("requests", "u8"),
        ("bytes", "u8"),
        ("first_byte_ns", "u8"),
        ("last_byte_ns", "u8"),
        ("last_byte_us_squared", "u8"),
        ("opened", "u8"),
        ("closed", "u8"),
        ("histogram", "u8", (HISTOGRAM_BUCKETS,)),
    ]
)
"""`struct object_counters_t` of object_store.c."""

FUSE_COUNTERS = np.dtype(
    [
        ("requests", "u8"),
        ("bytes", "u8"),
        ("total_ns", "u8"),
        ("total_us_squared", "u8"),
        ("histogram", "u8", (HISTOGRAM_BUCKETS,)),
    ]
)
"""`struct fuse_counters_t` of fuse.c."""

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


def _places(memory: Records) -> Records:
    """Where the memory is not 0. The kernel writes it meanwhile, and numpy refuses an array that changes: a copy."""
    return np.nonzero(memory.copy())[0]


def open_records(bios: Records, records: Records, slots: Records) -> Records:
    """Records of the bios that have not ended, each of a slot that still has the owner that it had.

    `bios` (uint64, shape (n,)) is 0 where a place is free; `records` has dtype BLOCK_RECORD and the same shape, `slots`
    dtype BLOCK_SLOT. Pieces of split bios are left out: their whole is there.
    """
    held = records[_places(bios)]
    held = held[(held["submitted"] != 0) & (held["parent"] == 0) & (held["slot"] < len(slots))]
    chosen: Records = held[held["epoch"] == slots["epoch"][held["slot"]]]
    return chosen


def places_taken(bios: Records, records: Records, stale_before_ns: int) -> int:
    """How many places cannot be given to another bio: the kernel's side takes over those of stale records."""
    held = records[_places(bios)]
    return int(held.size) - int(old_records(held, stale_before_ns).size)


def old_records(running: Records, before_ns: int) -> Records:
    """Those of `open_records` that are past blk-throttle and were submitted before a moment."""
    chosen: Records = running[(running["queued"] != 0) & (running["submitted"] < before_ns)]
    return chosen


def decode_block_slots(
    slots: Records, running: Records, over: Records, told: Records, *, throttle: bool
) -> dict[BlockKey, BlockCounters]:
    """Counters of the live slots of `slots` (dtype BLOCK_SLOT, shape (n,)).

    `running` are its `open_records`, and `over` those of them whose end was missed; they count as ended. `throttle`
    says whether this tier knows the wait in blk-throttle. `told` (dtype BLOCK_TOLD, same shape) is what was told of
    each slot before; it is brought up to date. A bio that was taken for ended may go on, or end while this is read and
    count twice, but no counter falls: that would look like one that began anew.
    """
    missed, missed_bytes = slots["missed"].copy(), slots["missed_bytes"].copy()
    np.add.at(missed, over["slot"], 1)
    np.add.at(missed_bytes, over["slot"], over["bytes"])
    in_flight = np.bincount(running["slot"], minlength=len(slots)) - np.bincount(over["slot"], minlength=len(slots))
    live = _places(slots["live"])
    chosen = slots[live]
    counted = {
        "requests": chosen["histogram"].sum(axis=1) + missed[live],
        "bytes": chosen["bytes"] + missed_bytes[live],
    }
    for name, now in counted.items():
        told[name][live] = np.maximum(told[name][live], now)
    columns = (
        *(chosen[name] for name in ("cgroup", "device", "op")),
        *(told[name][live] for name in counted),
        *(chosen[name] for name in ("latency_ns", "latency_us_squared")),
        in_flight[live],
        *(chosen[name] for name in ("histogram", "throttle_ns", "queue_ns")),
    )
    return {
        BlockKey(cgroup, device_name(device), OPS[op]): BlockCounters(
            requests=count,
            bytes=size,
            latency_ns=latency,
            latency_us_squared=squares,
            in_flight=running_now,
            histogram=tuple(histogram),
            throttle_ns=waited if throttle else None,
            queue_ns=queued,
            device_ns=max(0, latency - waited - queued),
        )
        for cgroup, device, op, count, size, latency, squares, running_now, histogram, waited, queued in zip(
            *(column.tolist() for column in columns), strict=True
        )
    }


def decode_nfs(value: bytes) -> NfsCounters:
    """Counters of one map value (dtype NFS_COUNTERS)."""
    return NfsCounters(**_fields(value, NFS_COUNTERS))


def decode_fuse(value: bytes) -> FuseCounters:
    """Counters of one map value (dtype FUSE_COUNTERS)."""
    return FuseCounters(**_fields(value, FUSE_COUNTERS))


def decode_object(value: bytes) -> ObjectCounters:
    """Counters of one map value (dtype OBJECT_COUNTERS)."""
    fields = _fields(value, OBJECT_COUNTERS)
    opened, closed = fields.pop("opened"), fields.pop("closed")
    return ObjectCounters(**fields, open_connections=max(0, opened - closed))


def _fields(value: bytes, dtype: np.dtype[Any]) -> dict[str, Any]:
    """One record by field name; the histogram as a tuple."""
    (row,) = _rows(np.frombuffer(value, dtype))
    fields = dict(zip(dtype.names or (), row, strict=True))
    return fields | {"histogram": tuple(fields["histogram"])}


def _rows(records: Records) -> list[tuple[Any, ...]]:
    """Records as tuples of Python numbers; sub-arrays become lists."""
    columns = [records[name].tolist() for name in records.dtype.names or ()]
    return list(zip(*columns, strict=True))
