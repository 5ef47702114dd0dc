"""What /state tells of a job that uses two media: rows by medium, and how its controllers' outputs were merged."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from agent.pid import DEAD_ZONE, OUTPUT_LIMIT
from agent.smoothing import clip

Row = Mapping[str, Any]


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
