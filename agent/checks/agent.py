"""What a running agent says of itself: probes, conflicts, notes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from agent.checks.finding import Finding, Result, note, ok, warning
from bpf.samples import NOT_LOADED

TRY_PROBES = "sudo prefetchd doctor --attach --all tries the probes of one that would be started"
"""Without a running agent nothing is known of its probes."""
SILENT_FIX = (
    "Wait where it has just begun (it compiles its probes first); else give the --address or --config that it was "
    "started with; its log says where it answers."
)
TABLES = ("nfs", "fuse", "page_cache", "object_store")
"""Probes that lose calls for want of room alone."""
HARMLESS = "a burst that is over does no harm; where the number grows"
REFUSALS = {
    "malformed": "the calls are wrong (see agent/hint.py)",
    "flooded": "call once per iteration, not more often",
    "too_many_streams": "use one name of a stream per loader",
    "unmanaged": "the sender runs outside the jobs' cgroups; compare its /proc/PID/cgroup with [[jobs]]",
    "unknown_sender": "the sender had ended before the agent looked, or runs in another process namespace",
}
"""Why a hint that came does not count, and what to do."""


def check(
    state: Mapping[str, Any] | None, *, runs: bool = False, kprobes: bool = True, silence: str = ""
) -> Iterator[Finding]:
    """Judge what `/state` says, None where no agent answers; `runs`: one holds this node's lock all the same.

    `silence` is why none answers.
    """
    if state is None:
        if runs:
            yield Finding("agent.answers", Result.WARNING, "an agent runs on this node, but does not answer at this "
                          "address", SILENT_FIX, detail=silence)  # fmt: skip
        else:
            yield note("agent.answers", "no agent answers; start one with `prefetchd run`", TRY_PROBES)
        return
    jobs = len(state.get("jobs", ()))
    evidence = f"policy {state.get('policy')} in mode {state.get('mode')}, {jobs} training job(s)"
    yield ok("agent.answers", evidence)
    for probe in state.get("probes", ()):
        yield probe_finding(probe, kprobes=kprobes)
    yield _conflicts(state)
    problem = (state.get("rearrange") or {}).get("problem")
    if problem:
        yield warning("agent.rearrange", f"cannot read ahead: {problem}", "See [rearrange] in the configuration.")
    problem = ((state.get("rearrange") or {}).get("defragment") or {}).get("problem")
    if problem:
        yield warning("agent.defragment", f"cannot make files contiguous: {problem}", "See [rearrange] in the "
                      "configuration.")  # fmt: skip
    for text in state.get("notes", ()):
        yield note("agent.note", str(text))


def probe_finding(probe: Mapping[str, Any], *, kprobes: bool) -> Finding:
    """What the status of one probe (name, state, why, detail, tier, lost) means on a kernel with or without kprobes."""
    name = f"probe.{probe.get('name')}"
    how = f" ({probe['tier']})" if probe.get("tier") else ""
    lost = f", {probe['lost']} {_lost(probe)}" if probe.get("lost") else ""
    if probe.get("state") == "attached":
        return _refused(probe) or ok(name, f"attached{how}{lost}")
    if NOT_LOADED in str(probe.get("why")):
        evidence = f"{probe.get('state')}: {probe['why']}; it attaches by itself when that changes"
        return Finding(name, Result.NOTE, evidence, because="remote.nfs" if probe.get("name") == "nfs" else "")
    because = "kernel.kprobes" if probe.get("tier") == "tracepoint" and not kprobes else ""
    checks = f"check {because} names" if because else "checks under kernel.* and remote.* name"
    fix = f"The {checks} what is missing."
    evidence = f"{probe.get('state')}{how}: {probe.get('why') or 'no reason given'}{lost}"
    return Finding(name, Result.WARNING, evidence, fix, detail=str(probe.get("detail") or ""), because=because)


def _lost(probe: Mapping[str, Any]) -> str:
    """What the lost events of a probe are, and whether that matters (bpf/*.c count them)."""
    if probe.get("name") == "block":
        what = "requests that found no room in a table, or whose end the kernel did not show, which have no latency"
    elif probe.get("name") in TABLES:
        what = "calls that found no room in a table"
    elif probe.get("name") == "links":
        return "looks that failed: until the next look what they would have told is unknown"
    else:
        return f"events lost: they came faster than the agent took them, {HARMLESS} the node is short of CPU"
    return f"events lost: {what}; {HARMLESS} see prefetchd_map_fill_ratio and narrow [[jobs]]"


def _refused(probe: Mapping[str, Any]) -> Finding | None:
    """A note where messages of jobs came and not one of them counts."""
    counts = dict(probe.get("counts") or {})
    refused = {name: counts[name] for name in REFUSALS if counts.get(name)}
    if not counts.get("received") or sum(refused.values()) < counts["received"]:
        return None
    told = ", ".join(f"{count} {name}" for name, count in refused.items())
    evidence = f"attached, but none of the {counts['received']} hints that came counts: {told}"
    fix = " ".join(f"{name}: {REFUSALS[name]}." for name in refused)
    return note(f"probe.{probe.get('name')}", evidence, fix)


def _conflicts(state: Mapping[str, Any]) -> Finding:
    count = int(state.get("conflicts") or 0)
    if not count:
        return ok("agent.conflicts", "nobody else changed a limit that the agent had written")
    fix = (
        "The log names the files (journalctl -u prefetchd | grep -i foreign); stop the other writer, or its rule here."
    )
    return warning("agent.conflicts", f"{count} time(s) somebody else changed a limit that the agent had written", fix)
