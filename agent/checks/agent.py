"""What a running agent says of itself: probes, conflicts, notes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from agent.checks.finding import Finding, Result, note, ok, warning


def check(state: Mapping[str, Any] | None, *, runs: bool = False, kprobes: bool = True) -> Iterator[Finding]:
    """Judge what `/state` says, None where no agent answers; `runs`: one holds this node's lock all the same."""
    if state is None:
        fix = "Give the --address or --config that it was started with; its log says where it answers."
        if runs:
            yield warning("agent.answers", "an agent runs on this node, but does not answer at this address", fix)
        else:
            yield note("agent.answers", "no agent answers; start one with `prefetchd run`")
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
    lost = f", {probe['lost']} events lost" if probe.get("lost") else ""
    if probe.get("state") == "attached":
        return ok(name, f"attached{how}{lost}")
    if "module is not loaded" in str(probe.get("why")):
        evidence = f"{probe.get('state')}: {probe['why']}; it attaches by itself when that changes"
        return Finding(name, Result.NOTE, evidence, because="remote.nfs" if probe.get("name") == "nfs" else "")
    fix = "The checks under kernel.* and remote.* name what is missing."
    because = "kernel.kprobes" if probe.get("tier") == "tracepoint" and not kprobes else ""
    evidence = f"{probe.get('state')}{how}: {probe.get('why') or 'no reason given'}{lost}"
    return Finding(name, Result.WARNING, evidence, fix, detail=str(probe.get("detail") or ""), because=because)


def _conflicts(state: Mapping[str, Any]) -> Finding:
    count = int(state.get("conflicts") or 0)
    if not count:
        return ok("agent.conflicts", "nobody else changed a limit that the agent had written")
    fix = (
        "The log names the files (journalctl -u prefetchd | grep -i foreign); stop the other writer, or its rule here."
    )
    return warning("agent.conflicts", f"{count} time(s) somebody else changed a limit that the agent had written", fix)
