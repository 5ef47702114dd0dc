"""From what is wanted and what is there to the least list of writes. Pure.

Why writes are few (measured on Debian 6.1 with NVMe and a seek-time disk): a write to io.max costs 41 us on an idle
cgroup and about 1 ms with bios queued, and one at the wrong moment of a slice lets a burst through (`cgroup.slices`).
So numbers are rounded, small changes left out and raises rationed; cuts are not.

Limits only ever tighten what an administrator had set before: the smaller of the two is what gets written.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from cgroup.lines import DEFAULT_WEIGHT, IO_MAX, WEIGHT_FILES, Line, Values, restorable

Verdict = Literal["write", "release", "unchanged", "rate_limited", "conflict"]


@dataclass(frozen=True, slots=True)
class Rules:
    """How sparing to be.

    `small_change_ratio`: relative change of a number below which it is left as it is. `raises_per_second`: per cgroup,
    over all its devices; raises of one reconcile count as one. `significant_bits`: numbers keep this many leading bits,
    rounded down (8: at most 0.8 % less). `least_bps`, `least_iops`: no limit below this, whatever was asked for, since
    blk-throttle could hold a single large bio for minutes.
    """

    small_change_ratio: float = 0.03
    raises_per_second: float = 2.0
    significant_bits: int = 8
    least_bps: int = 64 * 1024
    least_iops: int = 4


@dataclass(frozen=True, slots=True)
class LineState:
    """A line under our control: what was there before us, and what we wrote last (all keys of the line).

    `was` is what a predecessor left unless its last write was made (`wrote`); None where that is known.
    """

    prior: Values
    wrote: Values
    generation: tuple[int, int] = (0, 0)
    was: Values | None = None


@dataclass(frozen=True, slots=True)
class PlanState:
    """What the planner remembers: lines under control, and per cgroup id the times (s) of the last raises."""

    lines: Mapping[Line, LineState] = field(default_factory=dict)
    raises: Mapping[int, tuple[float, ...]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Write:
    """One line and what to do with it.

    `before` is the whole line as it was read, `after` the keys to change (empty where nothing is written). `verdict`:
    `write` a limit; `release` to what was there before us; `unchanged`; `rate_limited`, later; `conflict`, somebody
    else changed the line, then `after` releases what in it is still ours.
    """

    line: Line
    before: Values
    after: Values
    why: str
    verdict: Verdict
    raises: bool = False


def plan(
    desired: Mapping[Line, tuple[Values, str]],
    actual: Mapping[Line, Values],
    state: PlanState,
    now: float,
    rules: Rules | None = None,
) -> list[Write]:
    """Return what to do, cuts first.

    `desired` gives keys and the reason; a line under control that it does not name is released. Lines missing from
    `actual` are left out: they could not be read. `now` in seconds, monotonic.
    """
    rules = rules or Rules()
    free = {line.cgroup_id: _may_raise(state.raises.get(line.cgroup_id, ()), now, rules) for line in actual}
    writes = []
    for line, before in actual.items():
        managed = state.lines.get(line)
        if managed is not None and any(before.get(key) != managed.wrote[key] for key in managed.wrote):
            writes.append(_conflict(line, before, managed))
        elif line in desired:
            wanted, why = desired[line]
            prior = managed.prior if managed else before
            goal = _goal(line, prior, wanted, rules)
            writes.append(_towards(line, before, goal, why, rules, may_raise=free[line.cgroup_id]))
        elif managed is not None:
            writes.append(_release(line, before, managed, may_raise=free[line.cgroup_id]))
    return sorted(writes, key=lambda write: write.raises)


def _may_raise(times: tuple[float, ...], now: float, rules: Rules) -> bool:
    """Times in the future come from a clock that jumped back; they do not count."""
    window = raise_window_seconds(rules)
    recent = {time for time in times if now - window < time <= now}
    return len(recent) < rules.raises_per_second * window


def raise_window_seconds(rules: Rules) -> float:
    """Return for how long a raise counts: a second, or longer where less than one a second is allowed."""
    return max(1.0, 1.0 / rules.raises_per_second)


def with_raise(
    raises: Mapping[int, tuple[float, ...]], write: Write, now: float, rules: Rules
) -> Mapping[int, tuple[float, ...]]:
    """Return the times of raises with this write's, if it is one; those that count no more are left out."""
    if not write.raises:
        return raises
    since = now - raise_window_seconds(rules)
    kept = {cgroup: times for cgroup, times in raises.items() if since < times[-1] <= now}
    recent = (time for time in kept.get(write.line.cgroup_id, ()) if since < time <= now)
    return {**kept, write.line.cgroup_id: (*recent, now)}


def _conflict(line: Line, before: Values, managed: LineState) -> Write:
    after = restorable(before, managed.prior, (managed.wrote,))
    return Write(line, before, after, "somebody else changed this line", "conflict")


def _release(line: Line, before: Values, managed: LineState, *, may_raise: bool) -> Write:
    why = "no longer wanted"
    after = restorable(before, managed.prior, (managed.wrote,))
    if after and not may_raise:
        return Write(line, before, {}, why, "rate_limited")
    return Write(line, before, after, why, "release", raises=bool(after))


def _towards(line: Line, before: Values, goal: Values, why: str, rules: Rules, *, may_raise: bool) -> Write:
    """Write what differs by enough. Where raises must wait, the cuts in the same line do not."""
    changes = {key: value for key, value in goal.items() if value != before.get(key)}
    if not any(_significant(before.get(key), value, rules) for key, value in changes.items()):
        return Write(line, before, {}, why, "unchanged")
    raised = {key for key, value in changes.items() if _rank(line, value) > _rank(line, before.get(key))}
    if raised and not may_raise:
        cuts = {key: value for key, value in changes.items() if key not in raised}
        if not any(_significant(before.get(key), value, rules) for key, value in cuts.items()):
            return Write(line, before, {}, why, "rate_limited")
        return Write(line, before, cuts, why, "write")
    return Write(line, before, changes, why, "write", raises=bool(raised))


def _significant(old: int | None, new: int | None, rules: Rules) -> bool:
    if old is None or new is None or old == 0:
        return old != new
    return abs(new - old) / old >= rules.small_change_ratio


def _rank(line: Line, value: int | None) -> float:
    """Order values by how much they let through."""
    if value is not None:
        return value
    return DEFAULT_WEIGHT if line.file in WEIGHT_FILES else float("inf")


def _goal(line: Line, prior: Values, wanted: Values, rules: Rules) -> dict[str, int | None]:
    if line.file != IO_MAX:
        return {key: prior.get(key) if value is None else value for key, value in wanted.items()}
    return {key: _tighter(prior.get(key), round_limit(key, value, rules)) for key, value in wanted.items()}


def _tighter(one: int | None, other: int | None) -> int | None:
    limits = [limit for limit in (one, other) if limit is not None]
    return min(limits) if limits else None


def round_limit(key: str, value: int | None, rules: Rules) -> int | None:
    """Return a limit with few leading bits, so that a limit that trembles stays the same text.

    >>> round_limit("rbps", 10_485_761, Rules()), round_limit("riops", 4001, Rules())
    (10485760, 4000)
    """
    if value is None:
        return None
    least = rules.least_bps if key.endswith("bps") else rules.least_iops
    shift = max(0, value.bit_length() - rules.significant_bits)
    rounded = max(least, value >> shift << shift)
    # The kernel keeps 64 bits for bytes and 32 for requests, and prints the greatest number as `max`.
    return None if rounded >= (2**64 - 1 if key.endswith("bps") else 2**32 - 1) else rounded
