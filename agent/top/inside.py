"""One job alone: everything the agent knows of it. Pure."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from rich.text import Text

from agent.top.canvas import Canvas
from agent.top.trace import Trace, bar, sparkline
from agent.top.view import Row, known_loss, waits_seen
from agent.units import duration, percent, queue, rate

BAR = 20


def job(row: Row, trace: Trace, canvas: Canvas, now: float) -> list[Text]:
    """The lines of one job, most telling first."""
    return [
        _title(row),
        Text(""),
        *_score(row, trace, canvas, now),
        Text(""),
        *_loop(row),
        *_cause(row),
        *(line for one in row["devices"] for line in _device(one, canvas)),
        *_links(row),
        *_decisions(row),
    ]


def _title(row: Row) -> Text:
    text = Text(str(row["job"]), "bold")
    for key in ("namespace", "pod"):
        if row[key]:
            text.append(f"  {key} {row[key]}", "none")
    return text.append(f"  weight {row['weight']:g}  {row['cgroup']}", "dim")


def _score(row: Row, trace: Trace, canvas: Canvas, now: float) -> list[Text]:
    known = row["score"] is not None and bool(row["confidence"])
    value = f"{row['score']:.0f} {row['level']}, confidence {percent(row['confidence'])}" if known else "not known yet"
    lines = [
        Text(f"score        {bar(row['score'] / 100 if known else None, BAR, ascii_only=canvas.ascii_only)} {value}")
    ]
    for name, part in row["parts"].items():
        told = "unknown" if part is None else f"{part:.0f}"
        filled = bar(None if part is None else part / 100, BAR, ascii_only=canvas.ascii_only)
        lines.append(Text(f"  {name:10} {filled} {told}"))
    line = sparkline(trace.cells(row["id"], now, min(60, canvas.width - 14)), ascii_only=canvas.ascii_only)
    return [*lines, Text(f"last minute  {line}")]


def _loop(row: Row) -> list[Text]:
    number = "?" if row["iterations"] is None else row["iterations"]
    starved = row["starvation_events"] or (0 if waits_seen(row) else "?")
    lines = [
        Text(
            f"iteration {number} ({row['iteration_source'] or '?'}): "
            f"compute {duration(row['compute_seconds'])}, wait {duration(row['wait_seconds'])}"
            f" ({percent(known_loss(row))} lost)"
        ),
        Text(
            f"queue {queue(row['queue_depth'], row['queue_capacity'])}{_in_order(row)}, next batch "
            f"{rate(row['next_batch_bytes']).removesuffix('/s')}, starved {starved} times"
        ),
    ]
    if row.get("batch_note"):
        lines.append(Text(f"it {row['batch_note']}", "yellow"))
    ratios = (
        ("cache hits", "cache_hit_ratio"),
        ("remote queueing", "remote_queueing_ratio"),
        ("workers on CPU", "cpu_ratio"),
    )
    told = [f"{name} {percent(row[key])}" for name, key in ratios if row[key] is not None]
    return [*lines, Text(", ".join(told))] if told else lines


def _in_order(row: Row) -> str:
    """How much of the queue the loop can take now, where that is known and less than is ready."""
    takeable, depth = row.get("queue_takeable"), row["queue_depth"]
    return "" if takeable is None or depth is None or takeable >= depth else f" ({takeable:.3g} in order)"


def _links(row: Row) -> list[Text]:
    """The way to each object store that the job talks to."""
    lines = [
        Text(
            f"{link['endpoint']}  {link['connections']} open, round trip {duration(link['round_trip_seconds'])}, "
            f"{link['retransmits']} sent again"
        )
        for link in row.get("links", ())
    ]
    return [Text(""), *lines] if lines else []


def _cause(row: Row) -> list[Text]:
    if row["cause"] in (None, "none"):
        return [Text(f"cause      {'none' if waits_seen(row) and row['cause'] else '?'}")]
    help_ = "" if row["actionable"] else " (local bandwidth cannot help)"
    evidence = ", ".join(f"{name} {value:.3g}" for name, value in row["evidence"].items())
    return [
        Text(f"cause      {row['cause']}, confidence {percent(row['cause_confidence'])}{help_}", "bold"),
        Text(f"  evidence {evidence}"),
        Text(f"  advice   {row['advice']}"),
    ]


def split(one: Row) -> Mapping[str, float | None] | None:
    """Parts of the request time: waiting in blk-throttle, in the scheduler's queue, in the device; None if unknown.

    Where the wait in blk-throttle is not known the other two are parts of what is left.
    """
    throttle, queueing = one["throttle_ratio"], one["queueing_ratio"]
    if throttle is None and queueing is None:
        return None
    rest = 1.0 - (throttle or 0.0)
    if queueing is None:
        return {"blk-throttle": throttle, "queue and device": rest}
    return {"blk-throttle": throttle, "queue": rest * queueing, "device": rest * (1.0 - queueing)}


def _device(one: Row, canvas: Canvas) -> list[Text]:
    latency, normal = duration(one["latency_seconds"]), duration(one["reference_seconds"])
    lines = [
        Text(""),
        Text(
            f"{one['device']} ({one['medium']})  reads {rate(one['read_bytes_per_second'])}, needs "
            f"{rate(one['need_bytes_per_second'])}, writes {rate(one['write_bytes_per_second'])}",
            "bold",
        ),
        Text(f"  latency  {latency}, normally {normal}{_variation(one)}"),
    ]
    for name, ratio in (split(one) or {}).items():
        lines.append(Text(f"    {name:16} {bar(ratio, BAR, ascii_only=canvas.ascii_only)} {percent(ratio)}"))
    return [*lines, Text(f"  limits   {_limits(one)}"), *_controller(one)]


def _variation(one: Row) -> str:
    return "" if one["latency_cv"] is None else f", variation {one['latency_cv']:.2g}"


def _limits(one: Row) -> str:
    if one["quota_bytes_per_second"] is not None:
        told = f"cap {rate(one['quota_bytes_per_second'])} ({one['quota_why'] or 'no reason given'})"
    else:
        told = "uncapped"
    if one["regular_ratio"] is not None:
        told += f"; entitled to {percent(one['regular_ratio'])}"
    if one["loan_ratio"]:
        told += f" + loan {percent(one['loan_ratio'])}"
        if one["loan_iterations_left"] is not None:
            told += f" for {one['loan_iterations_left']} more iterations"
    return told


def _controller(one: Row) -> list[Text]:
    terms = one["pid"]
    if not terms:
        return []
    parts = " ".join(f"{name[0].upper()} {terms[name]:+.3f}" for name in ("proportional", "integral", "derivative"))
    told = f"error {terms['error_points']:+.0f} points: {parts}, {100 * terms['output']:+.0f} % of the quota"
    return [Text(f"  PID      {told}")]


def _decisions(row: Row) -> list[Text]:
    rows: list[dict[str, Any]] = row.get("decisions") or []
    lines = [Text(""), Text("last decisions", "bold")] if rows else []
    for one in reversed(rows):
        clock = time.strftime("%H:%M:%S", time.localtime(one["since"]))
        score = "?" if one["score"] is None else f"{one['score']:.0f}"
        told = [f"score {score}", str(one["cause"] or "?")]
        for device in one["devices"]:
            cap = device["quota_bytes_per_second"]
            loan = f" + loan {percent(device['loan_ratio'])}" if device["loan_ratio"] else ""
            told.append(f"{device['device']} {'uncapped' if cap is None else 'cap ' + rate(cap)}{loan}")
        lines.append(Text(f"  {clock} {', '.join(told)}"))
    return lines
