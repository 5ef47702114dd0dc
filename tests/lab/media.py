"""A job that uses two media, and what /state tells of it: rows by medium, how its controllers' outputs were merged."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from agent.pid import DEAD_ZONE, OUTPUT_LIMIT
from agent.smoothing import clip
from tests.lab.rearrange_data import MIB
from tests.lab.rearrange_job import READ_BYTES

Row = Mapping[str, Any]
DEVICES = """[[devices]]
device = "{ssd}"
read_bytes_per_second = "120 MB"
read_requests_per_second = 4000
[[devices]]
device = "{hdd}"
read_bytes_per_second = "9 MB"
read_requests_per_second = 120
"""
"""Of the configuration: what the two disks do, in reads of `READ_BYTES`."""
BLOCK_ALONE = """[rearrange]
enabled = false
[probes]
nfs = false
object_store = false
fuse = false
page_cache = false
dataloader = false
workers = false
"""
"""Of the configuration: no other probe than that of the block layer."""
BATCH = 12


def plan_of(phases: Sequence[Sequence[float]]) -> dict[str, Any]:
    """A job whose reads go now to the one file, now to the other: [seconds, part that goes to the second one]."""
    return {
        "kind": "tiers", "phases": phases, "workers": 4, "queue": 8, "batch": BATCH, "batch_bytes": BATCH * READ_BYTES,
        "direct": True, "compute_seconds": 0.05, "seconds": sum(length for length, _ in phases),
        "memory_bytes": 256 * MIB,
    }  # fmt: skip


def by_medium(row: Row) -> dict[str, Row]:
    """The rows of a job's devices."""
    return {one["medium"]: one for one in row["devices"]}


def own_output(terms: Mapping[str, float]) -> float:
    """What a controller of one medium says by itself."""
    if abs(terms["error_points"]) < DEAD_ZONE:
        return 0.0
    return clip(terms["proportional"] + terms["integral"] + terms["derivative"], -OUTPUT_LIMIT, OUTPUT_LIMIT)


def count_weighed(rows: Iterable[Row]) -> int:
    """Hold every merged output to the controllers' own, weighed by the bytes on each medium (paper, section 4).

    Gives the number of rows whose two controllers differed: only they show anything.
    """
    differing = 0
    for row in rows:
        here = by_medium(row)
        if len(here) < 2 or not all(one["pid"] for one in here.values()):
            continue
        shares = {medium: one["access_ratio"] for medium, one in here.items()}
        own = {medium: own_output(one["pid"]) for medium, one in here.items()}
        expected = sum(own[medium] * shares[medium] for medium in here) / sum(shares.values())
        outputs = [one["pid"]["output"] for one in here.values()]
        assert all(abs(output - expected) < 1e-3 for output in outputs), row
        differing += abs(own["ssd"] - own["hdd"]) > 0.01
    return differing
