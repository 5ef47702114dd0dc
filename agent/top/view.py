"""What the user looks at: order, filter, selection, and what each key does to them. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

Row = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class View:
    """`typed` is the filter being typed (None: nobody types); `inside`: one job is shown, from line `scroll` on."""

    order: str = "hurt"
    reverse: bool = False
    filter: str = ""
    typed: str | None = None
    selected: int | None = None
    inside: bool = False
    scroll: int = 0
    frozen: bool = False
    help: bool = False
    quit: bool = False


def waits_seen(row: Row) -> bool:
    """Whether the job's waits can be seen: a timer that stands in for its iterations shows none."""
    return row.get("iteration_source") != "timer"


def wait_seconds(row: Row) -> float | None:
    """The wait of an iteration or the one that goes on, whichever is longer; None where neither is known."""
    wait, blocked = row.get("wait_seconds"), row.get("blocked_seconds") or 0.0
    if wait is None:
        return float(blocked) if blocked else None
    return float(max(wait, blocked))


def known_loss(row: Row) -> float | None:
    """The part of an iteration that is spent waiting, 0..1; None where the wait is not known."""
    wait, compute = wait_seconds(row), row.get("compute_seconds") or 0.0
    if wait is None:
        return None
    return wait / (wait + compute) if wait + compute > 0 else 0.0


def lost_ratio(row: Row) -> float:
    """The same, where unknown counts as none."""
    return known_loss(row) or 0.0


def _number(row: Row, key: str, unknown: float) -> float:
    value = row.get(key)
    return unknown if value is None else float(value)


def _quota(row: Row) -> float:
    quotas = [one["quota_bytes_per_second"] for one in row.get("devices", ()) if one.get("quota_bytes_per_second")]
    return min(quotas, default=float("inf"))


ORDERS: Mapping[str, Callable[[Row], tuple[Any, ...]]] = {
    "hurt": lambda row: (-round(lost_ratio(row), 2), _number(row, "score", 101.0), row["job"]),
    "score": lambda row: (_number(row, "score", 101.0), row["job"]),
    "wait": lambda row: (-_number(row, "wait_seconds", 0.0), row["job"]),
    "queue": lambda row: (_number(row, "queue_depth", 1e9), row["job"]),
    "quota": lambda row: (_quota(row), row["job"]),
    "name": lambda row: (row["job"],),
}
"""Who comes first under each order: the one in more trouble, else the alphabet."""


def arranged(rows: Sequence[Row], view: View) -> list[Row]:
    """The rows to show, first the one in most trouble."""
    wanted = (view.filter if view.typed is None else view.typed).lower()
    shown = [row for row in rows if wanted in _searched(row)]
    return sorted(shown, key=ORDERS[view.order], reverse=view.reverse)


def _searched(row: Row) -> str:
    parts = (row.get("job"), row.get("namespace"), row.get("pod"), row.get("cause"), row.get("level"))
    return " ".join(str(part) for part in parts if part).lower()


def press(view: View, key: str, rows: Sequence[Row]) -> View:
    """The view after a key; `rows` are those shown, in their order."""
    if view.typed is not None:
        return _type(view, key)
    if view.help:
        return replace(view, help=False)
    action = _ACTIONS.get(key)
    return action(view, rows) if action else view


def _type(view: View, key: str) -> View:
    typed = view.typed or ""
    if key == "enter":
        return replace(view, filter=typed, typed=None, selected=None)
    if key == "escape":
        return replace(view, typed=None)
    if key == "backspace":
        return replace(view, typed=typed[:-1])
    return replace(view, typed=typed + key) if len(key) == 1 and key.isprintable() else view


def _move(step: int) -> Callable[[View, Sequence[Row]], View]:
    def move(view: View, rows: Sequence[Row]) -> View:
        if view.inside:
            return replace(view, scroll=max(0, view.scroll + step))
        ids = [row["id"] for row in rows]
        if not ids:
            return replace(view, selected=None)
        place = ids.index(view.selected) + step if view.selected in ids else (0 if step > 0 else len(ids) - 1)
        return replace(view, selected=ids[min(max(place, 0), len(ids) - 1)])

    return move


def _enter(view: View, rows: Sequence[Row]) -> View:
    ids = [row["id"] for row in rows]
    chosen = view.selected if view.selected in ids else next(iter(ids), None)
    return replace(view, selected=chosen, inside=chosen is not None, scroll=0)


def _back(view: View, rows: Sequence[Row]) -> View:
    del rows
    if view.inside:
        return replace(view, inside=False)
    return replace(view, filter="", selected=None)


def _next_order(view: View, rows: Sequence[Row]) -> View:
    del rows
    names = list(ORDERS)
    return replace(view, order=names[(names.index(view.order) + 1) % len(names)])


_ACTIONS: Mapping[str, Callable[[View, Sequence[Row]], View]] = {
    "q": lambda view, _: replace(view, quit=True),
    "s": _next_order,
    "r": lambda view, _: replace(view, reverse=not view.reverse),
    "/": lambda view, _: replace(view, typed=""),
    "f": lambda view, _: replace(view, frozen=not view.frozen),
    " ": lambda view, _: replace(view, frozen=not view.frozen),
    "?": lambda view, _: replace(view, help=True),
    "h": lambda view, _: replace(view, help=True),
    "up": _move(-1),
    "k": _move(-1),
    "down": _move(1),
    "j": _move(1),
    "enter": _enter,
    "escape": _back,
    "backspace": _back,
    "left": _back,
    "right": _enter,
}

HELP = (
    ("↑ ↓  or  k j", "choose a job; inside one, scroll"),
    ("Enter", "show the chosen job alone; Esc goes back"),
    ("s", f"next order: {', '.join(ORDERS)}"),
    ("r", "turn the order round"),
    ("/", "filter by job, pod, cause or level; Enter keeps, Esc drops it"),
    ("f or Space", "freeze; again: go on"),
    ("q", "quit"),
)
