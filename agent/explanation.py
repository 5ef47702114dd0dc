"""One job in words: why this score, why this cause, why this quota, and what was decided before. Pure.

Everything comes from the running agent's `/state`; nothing is judged anew here.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from agent.health import BLOCKED_SCORE
from agent.top.view import lost_ratio, waits_seen
from agent.units import amount, duration, percent, queue, rate

Row = Mapping[str, Any]

EVIDENCE: Mapping[str, Callable[[float], str]] = {
    "others_share": lambda value: f"others use {percent(value)} of the device",
    "busy_share": lambda value: f"the device is used to {percent(value)} of its capacity",
    "latency_times_normal": lambda value: f"a request takes {value:.1f} times as long as is normal for this job",
    "quota_achieved_ratio": lambda value: f"it gets {percent(value)} of its own cap",
    "throttle_ratio": lambda value: f"{percent(value)} of the request time is spent waiting at that cap",
    "cpu_ratio": lambda value: f"its workers are busy on a CPU for {percent(value)} of the time",
    "remote_queueing_ratio": lambda value: f"remote requests spend {percent(value)} of their time queueing",
    "remote_share": lambda value: f"{percent(value)} of its bytes come from remote storage",
    "packet_correlation": lambda value: f"queue and packet rate move together by {value:+.2f} (-1 opposed, +1 alike)",
    "iterations_since_start": lambda value: f"it has done {value:.0f} iterations since it started or resumed",
    "first_io_latency_seconds": lambda value: f"its first reads took {duration(value)} each",
    "first_io_times_steady": lambda value: f"that is {value:.1f} times its steady latency",
    "cache_hit_mean": lambda value: f"the page cache served {percent(value)} of its bytes",
    "cache_hit_variance": lambda value: f"that ratio {_steadiness(value)} (variance {value:.3f})",
}
NEVER_ZERO = ("latency_times_normal", "first_io_times_steady")
"""Zero says that it could not be measured."""
STEADY_VARIANCE = 0.01
"""As the diagnosis sees it."""
CAUSES = {
    "cold_start": "it has just started: caches are cold and the queue is not filled yet",
    "cache_thrash": "the page cache drops its data before it is read again",
    "remote_congestion": "the link or gateway to its remote storage is congested",
    "device_contention": "others use the device that it reads from",
    "self_throttled": "it waits at its own cap",
    "cpu_bound": "its workers lack CPU, not storage",
}
ENDS = {
    "no_gain": "it did not wait much less",
    "unused": "it used too little of what was read",
    "harm": "another job waited longer meanwhile",
    "nothing_to_read": "nothing was found to read",
    "nothing_to_move": "no file was found that can be moved",
    "helper_lost": "the helper ended or cannot run, see the log",
    "loop_idle": "the job stood still",
    "checked": "to see whether that is still needed",
    "done": "all is done",
    "mode": "the mode is not enforce",
}
"""Why reading ahead, or moving files, ended: `agent.rearrange_stop`, `agent.rearrange_pay`."""
WAITS_RATIO = 0.05
FED_POINTS = 75.0
"""From this queue part of the score on it is not the queue that the loop waits at."""
LEVELS = "healthy from 60, tight from 40, danger from 20, critical below; the target is 75"


def explain(row: Row, state: Row) -> Iterator[str]:
    """Lines of text; an indented one belongs to the heading above it."""
    yield headline(row)
    yield ""
    yield "Why this score"
    yield from (f"  {line}" for line in _score(row))
    yield ""
    yield "Why this cause"
    yield from (f"  {line}" for line in _cause(row))
    yield ""
    yield "Why this quota"
    yield from (f"  {line}" for line in _quota(row, state))
    yield from (f"  Note: {note}" for note in state.get("notes", ()))
    decisions = row.get("decisions") or []
    if decisions:
        yield ""
        yield f"Last {len(decisions)} decisions, newest first" if len(decisions) > 1 else "Last decision"
        yield from (f"  {_decision(one)}" for one in reversed(decisions))


def _steadiness(variance: float) -> str:
    return "is steady" if variance < STEADY_VARIANCE else "varies"


def headline(row: Row) -> str:
    """The job in one sentence."""
    where = f" (namespace {row['namespace']}, pod {row['pod']})" if row["pod"] else ""
    if row["score"] is None or not row["confidence"]:
        return f"{row['job']}{where}: no score yet; nothing could be measured so far."
    return f"{row['job']}{where}: score {row['score']:.0f}, {row['level']}. {_loop(row)}"


def _loop(row: Row) -> str:
    if row["iteration_source"] == "timer":
        return "Its iterations cannot be seen; a timer stands in for them (hints would show them)."
    blocked = row["blocked_seconds"] or 0.0
    if blocked > 1.0:
        return f"Its loop has been standing before an empty queue for {duration(blocked)}."
    wait, compute = row["wait_seconds"], row["compute_seconds"]
    if wait is None or compute is None:
        return "It has not finished an iteration yet."
    if wait < 0.001:
        return f"It computes {duration(compute)} per iteration and does not wait for data."
    lost = percent(lost_ratio(row))
    return f"It computes {duration(compute)} and waits {duration(wait)} per iteration: {lost} of its time is lost."


def _score(row: Row) -> Iterator[str]:
    if row["score"] is None or not row["confidence"]:
        return
    yield f"{row['score']:.0f} of 100 ({LEVELS}), confidence {percent(row['confidence'])}, from:"
    for name, part in row["parts"].items():
        told = "unknown" if part is None else f"{part:3.0f}"
        yield f"{name:9} {told}  {_part(name, row)}".rstrip()
    if row["blocked_seconds"]:
        why = "It stands before an empty queue" if row["iterations"] else "It waits for its first batch"
        bound = f"{BLOCKED_SCORE:.0f} is the most it can score"
        if row["score"] > BLOCKED_SCORE:
            bound = f"the longer, the fewer points, down to {BLOCKED_SCORE:.0f}"
        yield f"{why}: {bound}."


def _part(name: str, row: Row) -> str:
    """What a part was made from."""
    if name == "queue":
        return _queue(row)
    here = [one for one in row["devices"] if one["latency_seconds"] is not None]
    if name == "latency" and here:
        return "; ".join(
            f"{one['device']}: {duration(one['latency_seconds'])}, normally {duration(one['reference_seconds'])}"
            for one in here
        )
    if name == "variation" and here:
        known = [f"{one['device']}: {one['latency_cv']:.2f}" for one in here if one["latency_cv"] is not None]
        return f"deviation over mean of the latency {', '.join(known)}" if known else ""
    if name == "demand" and row["next_batch_bytes"] is not None:
        reads = sum(one["read_bytes_per_second"] for one in row["devices"])
        return f"the next batch takes {rate(row['next_batch_bytes']).removesuffix('/s')}; it reads {rate(reads)}"
    return ""


def _queue(row: Row) -> str:
    """How many batches are ready; where some of them cannot be taken yet, why the part is lower than that."""
    depth, takeable = row["queue_depth"], row.get("queue_takeable")  # an agent of an earlier version tells none
    told = f"{queue(depth, row['queue_capacity'])} batches are ready"
    if depth is None or takeable is None or round(takeable) >= depth:
        return told
    in_order = round(takeable)
    return f"{told}, {in_order} of them in order" if in_order else f"{told}, but the next one in order is missing"


def _cause(row: Row) -> Iterator[str]:
    cause = row["cause"]
    if cause is None:
        yield "not known yet"
        return
    if cause == "none" and lost_ratio(row) >= WAITS_RATIO:
        yield f"none of the known causes shows, although it waits: {_where_to_look(row)}"
    elif cause == "none" and not waits_seen(row):
        yield "not known: its waits cannot be seen"
    elif cause == "none":
        yield "none: nothing holds it up"
    else:
        yield f"{cause}: {CAUSES.get(cause, cause)} (confidence {percent(row['cause_confidence'])})"
    for name, value in row["evidence"].items():
        if name in NEVER_ZERO and not value:
            continue
        words = EVIDENCE.get(name)
        yield f"- {words(value) if words else f'{name} {value:.3g}'}"
    if row["advice"]:
        yield f"Advice: {row['advice']}."
    if not row["actionable"]:
        yield "No share of a local device can help, so its controller is frozen."
    starved = {name: count for name, count in row["starvation_by_cause"].items() if count}
    if starved:
        told = (
            f"{'once' if count == 1 else f'{count} times'} by {'no known cause' if name == 'none' else name}"
            for name, count in starved.items()
        )
        yield f"Starved so far: {', '.join(told)}."


def _where_to_look(row: Row) -> str:
    """Who keeps the loop waiting: not the workers, where their batches lie ready."""
    if (row["parts"].get("queue") or 0.0) >= FED_POINTS:
        return "batches are ready, so look at the training process itself (unpacking, pinning, its CPU)"
    return "look at what its workers do besides reading"


def _quota(row: Row, state: Row) -> Iterator[str]:
    if not row["devices"]:
        yield "It has not used any device that can be limited."
    if row.get("batch_note"):  # an agent of an earlier version tells none
        yield f"It {row['batch_note']} (read-ahead, or a hint that tells less than a batch reads)."
    for one in row["devices"]:
        yield f"{one['device']} ({one['medium']}): reads {rate(one['read_bytes_per_second'])}, {_needs(one)}"
        yield f"  {_cap(one, state)}"
        if one["regular_ratio"] is not None or one["loan_ratio"]:
            yield f"  {_entitled(one)}"
        if one.get("rearrange"):
            yield f"  {_rearranged(one['rearrange'])}"
        if one.get("defragment"):
            yield f"  {_mended(one['defragment'])}"
        if one["pid"]:
            terms = one["pid"]
            yield (
                f"  controller: {terms['error_points']:+.0f} points to go, change {100 * terms['output']:+.0f} % "
                f"(P {terms['proportional']:+.3f}, I {terms['integral']:+.3f}, D {terms['derivative']:+.3f})"
            )


def _rearranged(one: Row) -> str:
    """Reading ahead: a job that starves on a disk with moving parts gets what it reads next in the disk's own order."""
    if one["state"] == "would":
        return "in mode enforce the agent would read ahead for it"
    moved = amount(one["ahead_bytes"], "B")
    if one["state"] != "running":
        state = "does not read ahead for it" if one["state"] == "idle" else "stays from reading ahead for it"
        why = f" ({ENDS.get(one['why'], one['why'])})" if one["why"] else ""
        return f"the agent {state} now{why}; {moved} so far"
    told = [] if one["hit_ratio"] is None else [f"it uses {percent(one['hit_ratio'])} of that"]
    if one["gain_seconds"] is not None:
        more = "less" if one["gain_seconds"] >= 0 else "more"
        told.append(f"waits {duration(abs(one['gain_seconds']))} {more} per iteration")
    return ", ".join([f"the agent reads ahead for it, {moved} so far", *told])


def _mended(one: Row) -> str:
    """Badly fragmented files of a job that starves, moved to one place each."""
    moved = f"{one['moved_files']} of its fragmented files ({amount(one['moved_bytes'], 'B')}) were made contiguous"
    if one["running"]:
        return f"{moved} so far, {one['left_files']} are left"
    return f"{moved}; that goes on no more ({ENDS.get(one['why'], one['why'])})" if one["why"] else moved


def _needs(one: Row) -> str:
    need = one["need_bytes_per_second"]
    return "its need is not known yet" if need is None else f"needs {rate(need)} to keep its queue filled"


def _cap(one: Row, state: Row) -> str:
    if one["quota_bytes_per_second"] is not None:
        why = one["quota_why"] or "no reason given"
        seen = "" if state.get("mode") == "enforce" else f" (mode {state.get('mode')}: not written)"
        return f"capped at {rate(one['quota_bytes_per_second'])}{seen}: {why}"
    if one["gate_open"] is None:
        return (
            "uncapped: the device is observed only, as its capacity is not declared (prefetchd calibrate measures it) "
            "or this node cannot limit it (prefetchd doctor --mode enforce says why)"
        )
    if not one["gate_open"]:
        return "uncapped: nobody on the device starves for lack of its fair part"
    enforced = state.get("mode") == "enforce"
    if one["quota_ratio"] is not None and not enforced:
        share = percent(one["quota_ratio"])
        return f"uncapped in mode {state.get('mode')}; else it would get {share} of the device: {one['quota_why']}"
    others = "others are capped" if enforced else f"others would be capped if mode were not {state.get('mode')}"
    return f"uncapped: it is among those who starve, or takes no more than its part; {others}"


def _entitled(one: Row) -> str:
    told = [] if one["regular_ratio"] is None else [f"entitled to {percent(one['regular_ratio'])} of the device"]
    if one["loan_ratio"]:
        told.append(f"a loan of {percent(one['loan_ratio'])} from the pool{'' if told else ' runs out'}")
    text = " and ".join(told)
    if one["loan_ratio"]:
        if one["loan_iterations_left"] is not None:
            text += f" for {one['loan_iterations_left']} more iterations"
        if one["loan_seconds_left"]:
            text += f", {duration(one['loan_seconds_left'])} at least"
    return text


def _decision(one: Row) -> str:
    clock = time.strftime("%H:%M:%S", time.localtime(one["since"]))
    score = "no score" if one["score"] is None else f"score {one['score']:.0f}"
    if one["score"] is not None and one["iteration"] == 0:
        score += " (before its first batch)"
    spent = one["until"] - one["since"]
    reached = "to iteration" if spent >= 0.05 else "iteration"
    told = [f"{clock} {reached} {one['iteration']}: {score}", f"cause {one['cause']}"]
    told += [f"{device['device']} {_device_decision(device)}" for device in one["devices"]]
    return ", ".join(told) + (f" (held {duration(spent)})" if spent >= 0.05 else "")


def _device_decision(device: Row) -> str:
    cap = device["quota_bytes_per_second"]
    text = "uncapped" if cap is None else f"cap {rate(cap)} ({device['why'] or 'no reason given'})"
    if device["need_bytes_per_second"] is not None:
        text += f", need {rate(device['need_bytes_per_second'])}"
    return text + (f", loan {percent(device['loan_ratio'])}" if device["loan_ratio"] else "")
