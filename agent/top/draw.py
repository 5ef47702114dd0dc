"""The frame of `top`: lines of styled text, none wider than the terminal. Pure."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from rich.text import Text

from agent.top import inside
from agent.top.canvas import Canvas
from agent.top.trace import ASCII_FOR, Trace, bar, sparkline
from agent.top.view import HELP, Row, View, arranged, known_loss, wait_seconds, waits_seen
from agent.units import duration, percent, queue, rate, tight
from bpf.samples import NOT_LOADED

LEVEL_STYLES = {"healthy": "green", "tight": "yellow", "danger": "red", "critical": "bold red"}
LEVEL_MARKS = {"healthy": "", "tight": "-", "danger": "!", "critical": "!!"}
"""Levels are told without colour as well."""
CAUSES = {
    "none": "",
    "cold_start": "cold start",
    "cache_thrash": "thrash",
    "remote_congestion": "remote",
    "device_contention": "contention",
    "self_throttled": "own cap",
    "cpu_bound": "CPU",
}
KEYS = "Enter look inside  s order  / filter  f freeze  ? keys  q quit"
KEYS_INSIDE = "Esc back  up/down scroll  f freeze  ? keys  q quit"
PROBLEM_STYLE = "bold yellow"
STARVING_RATIO = 0.05
"""From this part of an iteration lost to waiting a job is called starving in the head line."""


@dataclass(frozen=True, slots=True)
class Frame:
    """What is on the screen, at most as many lines as it has; `scroll` is where the body really starts."""

    lines: list[Text]
    scroll: int = 0


def draw(state: Mapping[str, Any], view: View, trace: Trace, canvas: Canvas, problem: str = "") -> Frame:
    """The whole frame; `problem` says why the state is old."""
    rows = arranged(state.get("jobs", ()), view)
    head = [_head(state, view, canvas)]
    if problem:
        head.append(Text(problem, PROBLEM_STYLE))
    foot = _foot(state, view, canvas)
    room = canvas.height - len(head) - len(foot)
    if view.help:
        body = _help()
    elif view.inside and (chosen := next((row for row in rows if row["id"] == view.selected), None)):
        body = inside.job(chosen, trace, canvas, float(state.get("time") or 0.0))
    else:
        body = _overview(state, rows, view, trace, replace(canvas, height=room))
    scroll = min(view.scroll, max(len(body) - room, 0)) if view.inside and not view.help else 0
    lines = head + body[scroll : scroll + max(room, 0)]
    lines += [Text("")] * (canvas.height - len(lines) - len(foot) if canvas.keys else 0)
    lines += foot
    for line in lines:
        line.truncate(canvas.width, overflow="ellipsis")
        if canvas.ascii_only:
            line.plain = line.plain.translate(ASCII_FOR)
    return Frame(lines, scroll)


def _head(state: Mapping[str, Any], view: View, canvas: Canvas) -> Text:
    jobs = state.get("jobs", ())
    starving, told = _starving(jobs)
    clock = time.strftime("%H:%M:%S", time.localtime(float(state.get("time") or 0.0)))
    left = Text.assemble(
        ("prefetchd", "bold"),
        f" {state.get('mode', '?')}/{state.get('policy', '?')}  {len(jobs)} job{'' if len(jobs) == 1 else 's'}, ",
        (told, "bold red" if starving else "green"),
    )
    if canvas.keys:
        left.append(f"  by {view.order}{' reversed' if view.reverse else ''}")
        if view.filter:
            left.append(f"  only {view.filter!r}", "cyan")
        if view.frozen:
            left.append("  FROZEN", "reverse")
    gap = canvas.width - left.cell_len - len(clock)
    return left.append(" " * gap + clock) if gap > 0 else left


def _starving(jobs: Sequence[Row]) -> tuple[int, str]:
    """How many jobs are known to starve, and that in words, with those of which it is not known."""
    losses = [known_loss(row) for row in jobs]
    starving, unknown = sum((loss or 0.0) >= STARVING_RATIO for loss in losses), losses.count(None)
    if unknown == len(jobs) and jobs:
        return 0, "? starving"
    return starving, f"{starving} starving" + (f", {unknown} unknown" if unknown else "")


def _foot(state: Mapping[str, Any], view: View, canvas: Canvas) -> list[Text]:
    lines = [
        Text(f"probe {probe['name']} {probe['state']}: {probe['why'] or probe['tier'] or 'no reason given'}", "yellow")
        for probe in state.get("probes", ())
        if probe["state"] != "attached" and NOT_LOADED not in (probe["why"] or "")
    ]
    lines += [Text(f"note: {text}", "cyan") for text in state.get("notes", ())]
    lines = lines[:4]
    if not canvas.keys:
        return lines
    if view.typed is not None:
        return [*lines, Text(f"filter: {view.typed}_", "bold")]
    return [*lines, Text(KEYS_INSIDE if view.inside else KEYS, "dim")]


def _help() -> list[Text]:
    wide = max(len(key) for key, _ in HELP) + 3
    lines = [Text.assemble((f"{key:{wide}}", "bold"), meaning) for key, meaning in HELP]
    marks = ", ".join(f"{mark} {level}" for level, mark in LEVEL_MARKS.items() if mark)
    return [
        Text(""),
        *lines,
        Text(""),
        Text(f"SCORE 0..100: {marks}; no mark: healthy, 60 and above"),
        Text("WAIT per iteration; QUEUE ready/capacity; DELAY latency without blk-throttle"),
        Text("QUOTA the cap in force; LOAN elastic share / iterations left, the parts of POOL LENT"),
        Text("LIMITS on: somebody starves, others are capped; never: no capacity declared, or no way to cap"),
    ]


def _overview(state: Mapping[str, Any], rows: Sequence[Row], view: View, trace: Trace, canvas: Canvas) -> list[Text]:
    lines = _devices(state.get("devices", ()), canvas)
    lines += _neighbours(state.get("neighbours", ()))
    lines.append(_titles(canvas))
    if not rows:
        why = (
            "no job matches the filter"
            if view.filter or view.typed
            else "no training job; see [[jobs]] in the configuration"
        )
        return [*lines, Text(why, "dim")]
    space = max(canvas.height - len(lines), 1)
    shown = rows if len(rows) <= space else _around_chosen(rows, view, max(space - 1, 1))
    now = float(state.get("time") or 0.0)
    lines += [_job(row, trace, canvas, now, chosen=row["id"] == view.selected) for row in shown]
    if len(rows) > len(shown):
        lines.append(Text(f"… {len(rows) - len(shown)} more", "dim"))
    return lines


def _around_chosen(rows: Sequence[Row], view: View, count: int) -> Sequence[Row]:
    """`count` of the rows, from the top or as far down as it takes to have the chosen job in sight."""
    place = next((i for i, row in enumerate(rows) if row["id"] == view.selected), 0)
    first = max(0, place - count + 1)
    return rows[first : first + count]


def _devices(devices: Sequence[Row], canvas: Canvas) -> list[Text]:
    if not devices:
        return []
    lines = [Text(f"{'DEVICE':10} {'MEDIUM':6} {'CAPACITY':>9}  {'IN USE':17}  {'POOL LENT':12}  LIMITS", "bold")]
    for one in devices:
        used = used_ratio(one)
        pool = f"{tight(percent(one['pool_lent_ratio']))} of {tight(percent(one['pool_capacity_ratio']))}"
        gate = {True: "on", False: "off", None: "never"}[one["gate_open"]]
        line = Text(f"{_clip(one['device'], 10):10} {one['medium']:6} {rate(one['read_bytes_per_second']):>9}  ")
        if used is None:
            moved = one["used_read_bytes_per_second"] + one["used_write_bytes_per_second"]
            line.append(f"{rate(moved):17}")
        else:
            line.append(bar(used, 12, ascii_only=canvas.ascii_only), "red" if used > 0.9 else "green")
            line.append(f" {tight(percent(used)):>4}")
        known = one["pool_capacity_ratio"] is not None
        line.append(f"  {pool if known else '':12}  ")
        lines.append(line.append(gate, "yellow" if one["gate_open"] else ""))
    return lines


def used_ratio(device: Row) -> float | None:
    """What part of the device is in use, unmanaged traffic included; None where its capacity is unknown."""
    reads, writes = device["read_bytes_per_second"], device["write_bytes_per_second"]
    if not reads:
        return None
    used = float(device["used_read_bytes_per_second"] / reads)
    if writes:
        used += float(device["used_write_bytes_per_second"] / writes)
    return used + float(device["unmanaged_ratio"] or 0.0)


def _neighbours(neighbours: Sequence[Row]) -> list[Text]:
    told = []
    for one in neighbours:
        moved = sum(one["read_bytes_per_second"].values()) + sum(one["write_bytes_per_second"].values())
        caps = [cap for cap in one["quota_bytes_per_second"].values() if cap is not None]
        told.append(f"{one['name']} {rate(moved)}" + (f" (cap {rate(min(caps))})" if caps else ""))
    return [Text(f"best effort: {', '.join(told)}")] if told else []


def _widths(canvas: Canvas) -> tuple[int, int]:
    """Columns of the job's name and of the picture of its last minute; all else is fixed."""
    spare = max(canvas.width - 80, 0)
    return 11 + min(spare // 2, 25), 10 + min(spare - spare // 2, 30)


def _titles(canvas: Canvas) -> Text:
    name, line = _widths(canvas)
    minute = "LAST MINUTE" if line > 10 else "MINUTE"
    return Text(
        f"{'JOB':{name}} {'SCORE':11} {minute:{line}} {'WAIT':>6} {'QUEUE':>5} {'DELAY':>6}"
        f" {'CAUSE':10} {'QUOTA':>7} {'LOAN':>6}",
        "bold",
    )


def _job(row: Row, trace: Trace, canvas: Canvas, now: float, *, chosen: bool) -> Text:
    name, line = _widths(canvas)
    style = LEVEL_STYLES.get(row["level"] or "", "")
    text = Text(f"{_clip(row['job'], name):{name}} ")
    text.append(score(row, canvas, 5), style)
    cells = trace.cells(row["id"], now, line)
    text.append(f" {sparkline(cells, ascii_only=canvas.ascii_only):{line}} ", style)
    text.append(f"{_fit(duration(wait_seconds(row)), 6)} {_fit(queue(row['queue_depth'], row['queue_capacity']), 5)} ")
    text.append(f"{_fit(duration(_latency(row)), 6)} {_clip(_told_cause(row), 10):10} ")
    text.append(f"{_fit(_quota(row), 7)} {_fit(_loan(row), 6)}")
    if chosen:
        text.stylize("reverse")
    return text


def score(row: Row, canvas: Canvas, width: int) -> str:
    """The score as a bar, a number and a mark for its level."""
    if row["score"] is None or not row.get("confidence", 1.0):  # with nothing known it is the controller's target
        return f"{'':{width}}   ?  "
    mark = LEVEL_MARKS.get(row["level"], "")
    return f"{bar(row['score'] / 100, width, ascii_only=canvas.ascii_only)} {row['score']:3.0f}{mark:2}"


def _told_cause(row: Row) -> str:
    cause = row["cause"] or "?"
    return "?" if cause == "none" and not waits_seen(row) else CAUSES.get(cause, cause)


def _latency(row: Row) -> float | None:
    """That of the worst device."""
    return max((one["latency_seconds"] for one in row["devices"] if one["latency_seconds"] is not None), default=None)


def _quota(row: Row) -> str:
    caps = [one["quota_bytes_per_second"] for one in row["devices"] if one["quota_bytes_per_second"] is not None]
    return rate(min(caps)).removesuffix("B/s") + "/s" if caps else "-"


def _loan(row: Row) -> str:
    loans = [one for one in row["devices"] if one["loan_ratio"]]
    if not loans:
        return "-"
    largest = max(loans, key=lambda one: one["loan_ratio"])
    left = largest["loan_iterations_left"]
    return f"{100 * largest['loan_ratio']:.0f}%" + ("" if left is None else f"/{left}")


def _clip(text: str, width: int) -> str:
    return text if len(text) <= width else text[: width - 1] + "…"


def _fit(text: str, width: int) -> str:
    """Right-aligned, without spaces, cut to the column."""
    return f"{_clip(tight(text), width):>{width}}"
