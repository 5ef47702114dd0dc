"""`prefetchd doctor`: every precondition as a named check with its result, the evidence and the exact fix."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import msgspec

from agent import kube
from agent.checks.agent import TRY_PROBES, probe_finding
from agent.checks.bundle import write_bundle
from agent.checks.cgroups import asks_for_labels
from agent.checks.finding import Finding, Result, as_json, matters, severity, unknown
from agent.checks.host import this_host
from agent.checks.kernel import has_kprobes
from agent.checks.run import run_checks
from agent.client import AgentUnreachable
from agent.commands import options
from agent.commands.terminal import colours_wanted, hanging, paint, text_columns
from agent.config import Config, Mode
from agent.jobs import PodLookup
from agent.snapshot import probe_row
from cgroup.hierarchy import detect_hierarchy

EPILOG = """\
examples:
  sudo prefetchd doctor
  sudo prefetchd doctor --attach --all
  prefetchd doctor --mode enforce --json | jq '.checks[] | select(.severity == "error")'
  sudo prefetchd doctor --bundle /tmp/prefetchd-support.tar.gz

exit status:
  0  nothing stops the mode (the configuration's, or --mode)
  2  the configuration cannot be used
  3  at least one check fails that the mode needs; with --strict, also on warnings
"""
MODES: tuple[Mode, ...] = ("observe", "dry-run", "enforce")
PODS_SECONDS = 5.0
"""For the first list of pods."""
COLOURS = {"error": "bold red", "warning": "yellow", "unknown": "magenta", "note": "cyan", "ok": "green"}
ORDER = tuple(COLOURS)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.description = "Check every precondition of this node and name the fix; nothing is changed."
    parser.epilog = EPILOG
    options.add_config(parser)
    parser.add_argument("--mode", choices=MODES, help="judge for this mode (default: the configuration's)")
    parser.add_argument("--json", action="store_true", help="one JSON object on standard output")
    parser.add_argument("--all", action="store_true", help="show what is in order as well")
    parser.add_argument("--attach", action="store_true", help="also load and attach every BPF program for a moment")
    parser.add_argument("--strict", action="store_true", help="warnings count as errors for the exit status")
    parser.add_argument(
        "--bundle", type=options.file_to_write, metavar="FILE", help="also write a support archive without secrets"
    )
    options.add_address(parser)


def main(args: argparse.Namespace) -> int:
    """Check, show, and say by the exit status whether the mode can work."""
    config = options.load_config(args)
    mode: Mode = args.mode or config.mode
    client = options.client(args)
    answer, silence = None, ""
    try:
        answer = client.state()
    except AgentUnreachable as why:
        silence = str(why)
    host = this_host()
    pods = known_pods(config)
    findings = run_checks(host, config, answer, pods, silence)
    if args.attach:
        findings = (
            *(_without_advice(one) for one in findings if not one.name.startswith("probe.")),
            *attached(config, kprobes=has_kprobes(host)),
        )
    if args.json:
        print(json.dumps(document(findings, mode), indent=1))
    else:
        show(findings, mode, everything=args.all)
    if args.bundle:
        members = write_bundle(args.bundle, findings, mode, config, client if answer is not None else None, pods)
        print(f"{args.bundle}: {len(members)} files; look through them before you pass it on", file=sys.stderr)
    return exit_status(findings, mode, strict=args.strict)


def known_pods(config: Config) -> PodLookup | None:
    """What the API server says of this node's pods; None where no rule asks, outside a pod, or without an answer."""
    watch = kube.from_environment() if asks_for_labels(config) else None
    if watch is None:
        return None
    watch.start()
    try:
        return watch if watch.wait(PODS_SECONDS) else None
    finally:
        watch.close()


def _without_advice(finding: Finding) -> Finding:
    """The finding, not advising to try the probes: that is being done."""
    return replace(finding, fix="") if finding.fix == TRY_PROBES else finding


def attached(config: Config, *, kprobes: bool) -> tuple[Finding, ...]:
    """Compile and attach every BPF program, ask it how it is, and take it off again: some seconds and 150 MB."""
    if os.geteuid() != 0:
        return (
            unknown("probe.attach", "BPF programs can be attached by root alone", "sudo prefetchd doctor --attach"),
        )
    from agent.commands.wiring import make_probes  # noqa: PLC0415 - brings the compiler
    from bpf.loader import Loader  # noqa: PLC0415

    without_socket = msgspec.structs.replace(config, hint=msgspec.structs.replace(config.hint, enabled=False))
    with Loader(cache=None) as loader, contextlib.ExitStack() as stack:
        probes = make_probes(without_socket, config.cgroup_root or detect_hierarchy().root or "/sys/fs/cgroup", loader)
        for probe in probes:
            stack.callback(probe.close)
        states = [probe.status() for probe in probes]
    return tuple(probe_finding(probe_row(one), kprobes=kprobes) for one in states)


def document(findings: Sequence[Finding], mode: Mode) -> Mapping[str, Any]:
    """What `--json` prints: the mode, what it and the others can do, and the checks."""
    return {
        "mode": mode,
        "can": {name: not any(matters(finding, name) for finding in findings) for name in MODES},
        "checks": as_json(findings, mode),
    }


def exit_status(findings: Sequence[Finding], mode: Mode, *, strict: bool) -> int:
    """3 where the mode cannot work, else 0."""
    bad = {"error", "warning"} if strict else {"error"}
    return 3 if any(severity(finding, mode) in bad for finding in findings) else 0


def show(findings: Sequence[Finding], mode: Mode, *, everything: bool) -> None:
    """Print the worst first, each with its fix, then what that means for this node.

    Unless `everything` is asked for, what has one cause is told once, with that cause, as bad as the worst of it.
    """
    colours, columns = colours_wanted(), text_columns()
    wide = max((len(finding.name) for finding in findings), default=0)
    rows = [_row(group, mode) for group in (((one,) for one in findings) if everything else _by_cause(findings))]
    for level, name, paragraphs in sorted(rows, key=lambda row: ORDER.index(row[0])):
        if level == "ok" and not everything:
            continue
        prefix = f"{paint(f'{level:7}', COLOURS[level], colours=colours)}  {name:{wide}}  "
        print(hanging(prefix, paragraphs, columns, wide + 11))
    print(summary(findings, [level for level, *_ in rows], mode, everything=everything))


def _by_cause(findings: Sequence[Finding]) -> Iterator[tuple[Finding, ...]]:
    """Each finding with those after it that are its consequences; none of them comes again."""
    causes = {one.name for one in findings if one.result is not Result.OK}
    for cause in findings:
        if cause.because not in causes:
            yield cause, *(one for one in findings if one.because == cause.name and cause.name in causes)


def _row(group: Sequence[Finding], mode: Mode) -> tuple[str, str, list[str]]:
    """(the worst level of a finding and its consequences, its name, what to say)."""
    cause, *rest = group
    level = min((severity(one, mode) for one in group), key=ORDER.index)
    paragraphs = [cause.evidence, *(f"{one.name}: {one.evidence}" for one in rest)]
    if cause.detail:
        paragraphs.append(f"said: {cause.detail}")
    if cause.fix:
        paragraphs.append(f"fix: {cause.fix}")
    return level, cause.name, paragraphs


def summary(findings: Sequence[Finding], levels: Sequence[str], mode: Mode, *, everything: bool) -> str:
    """`21 checks: 17 ok …` by the levels that are told, and what this node can do."""
    counts = ", ".join(f"{levels.count(level)} {level}" for level in reversed(ORDER) if level in levels)
    hidden = "" if everything or "ok" not in levels else " (--all shows what is ok)"
    return f"{len(levels)} checks: {counts}{hidden}\n{_able(findings, mode)}"


def _able(findings: Sequence[Finding], mode: Mode) -> str:
    """One sentence on what can work here, whatever the mode."""
    if any(matters(finding, "observe") for finding in findings):
        return "This node cannot be measured yet: mend the errors first."
    if any(matters(finding, "enforce") for finding in findings):
        how = "mend the errors first" if mode == "enforce" else "--mode enforce shows what stops them"
        return f"This node can be measured; limits cannot be enforced yet ({how})."
    return "This node can be measured, and limits can be enforced."
