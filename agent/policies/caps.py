"""How a cap moves: the first one does not bite, later ones step, raises are rare, small changes are not worth a write.

blk-throttle over-admits when its limits are rewritten often (47 % at 10 Hz, 1 % at 2 Hz, policy prototype), so raises
wait; cuts do not, since somebody starves.
"""

from __future__ import annotations

from dataclasses import dataclass

from agent.policies.base import PolicySettings


@dataclass(frozen=True, slots=True)
class Cap:
    """A cap in force, as a share of the device, and when it last changed (monotonic seconds)."""

    share: float
    changed_at: float


def bounded(target: float, settings: PolicySettings) -> float | None:
    """The target between floor and ceiling; None at the ceiling: a cap that high is only a cost."""
    if not settings.switches.bounds:
        return target
    if target >= settings.ceiling:
        return None
    return max(settings.floor, target)


def follow(
    old: Cap | None, target: float, used: float, now: float, settings: PolicySettings, *, at_once: bool = False
) -> Cap:
    """The cap after this step on its way to `target`.

    The first cap is what is used now, if that is more (lower for a flood: `agent.policies.contention.FIRST_CUT`). Then
    at most 20 % down per `step_seconds` and 20 % up per `raise_seconds`; with `at_once` (best effort) cuts are not
    limited and raises only in their pace.
    """
    limited = settings.switches.bounds and not at_once
    gentle = settings.switches.gentle_writes
    if old is None:
        return Cap(max(used, target) if limited else target, now)
    if target == old.share or (gentle and abs(target - old.share) < settings.suppress * old.share):
        return old
    since = now - old.changed_at
    if target > old.share:
        if gentle and since < settings.raise_seconds:
            return old
        return Cap(min(target, old.share * (1.0 + settings.step_limit)) if limited else target, now)
    if not limited:
        return Cap(target, now)
    lowest = old.share * (1.0 - settings.step_limit) ** min(1.0, since / settings.step_seconds)
    share = max(target, lowest)
    return old if gentle and share > old.share * (1.0 - settings.suppress) else Cap(share, now)
