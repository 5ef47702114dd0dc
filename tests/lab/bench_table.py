"""The benchmark as Markdown: a matrix of all policies, what the default policy costs and gains, the goals. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tests.lab.bench_plan import ALONE, CHOICES, OURS
from tests.lab.bench_results import Document, best_peer

MIB = 1 << 20
DEFAULT = "adaptive"
NOISE_MS = 0.3
"""Waits that differ by less are equal."""
WANTED_LESS = {
    **dict.fromkeys(("ssd-greedy", "ssd-writer", "hdd-greedy"), 0.95),
    **dict.fromkeys(("ssd-flood", "ssd-cold", "ssd-thrash"), 0.70),
}
"""By scenario: how much less than without control the default policy is meant to wait."""
WANTED_BETTER, WANTED_SCENARIOS = 0.25, 0.5
MOST_WORSE, LEAST_NEIGHBOUR = 0.05, 0.85


@dataclass(frozen=True)
class Goal:
    """One line that the default policy is held to, and what was measured."""

    text: str
    met: bool
    measured: str


def lines(document: Document) -> list[str]:
    """The tables of a document, the goals, and what the figures rest on."""
    return [
        *matrix_lines(document),
        "",
        *default_lines(document),
        "",
        *(f"* {'met' if goal.met else '**missed**'}: {goal.text}: {goal.measured}" for goal in goals(document)),
        "",
        foundation(document),
    ]


def foundation(document: Document) -> str:
    """What was run on what, in a sentence or two."""
    runs, machine = document["runs"], document["machine"]
    lengths = sorted({run["seconds"] for run in runs})
    guests = sorted({f"{run['guest']['kernel']} ({run['guest']['accelerator']})" for run in runs})
    spoiled = len(document["spoiled"])
    return (
        f"{len(runs)} runs of {', '.join(f'{length:g}' for length in lengths)} s; guest: {', '.join(guests)}, "
        f"host: {machine['cpus']} CPUs, {machine['cpu']}; {spoiled} spoiled and repeated; "
        f"source {', '.join(sorted({run['revision'] or '?' for run in runs}))}."
    )


def matrix_lines(document: Document) -> list[str]:
    """Every scenario and policy: mean wait per iteration (ms) / starvation events / what neighbours got (MiB/s)."""
    scenarios = document["scenarios"]
    policies = [policy for policy in CHOICES if any(policy in own for own in scenarios.values())]
    rows = [["scenario (seeds)", *policies]]
    for name, own in scenarios.items():
        seeds = max(len(figures["seeds"]) for figures in own.values())
        rows.append([f"{name} ({seeds})", *(_cell(own, policy) for policy in policies)])
    return _table(rows)


def _cell(own: Mapping[str, Any], policy: str) -> str:
    if policy not in own:
        return "-"
    figures = own[policy]
    text = f"{wait_text(figures['wait_ms']['mean'])} / {figures['starvation_events']:.0f}"
    if any(other["neighbour_bytes_per_second"] for other in own.values()):
        text += f" / {figures['neighbour_bytes_per_second'] / MIB:.0f}" if policy != ALONE else ""
    if policy == ALONE:
        return text
    lowest = min(other["wait_ms"]["mean"] for one, other in own.items() if one != ALONE)
    return f"**{text}**" if figures["wait_ms"]["mean"] <= lowest + NOISE_MS else text


def wait_text(milliseconds: float) -> str:
    """A wait with the digits that mean something."""
    return f"{milliseconds:.0f}" if milliseconds >= 99.5 else f"{milliseconds:.{1 if milliseconds >= 9.95 else 2}f}"


def default_lines(document: Document) -> list[str]:
    """The default policy by scenario: against doing nothing, against the best peer, and what it cost."""
    rows = [
        [
            *("scenario", "wait against none", "best peer", "wait against it", "neighbours against it"),
            *("p99 ms", "worst job", "writes", "agent, cores", "BPF, cores"),
        ]
    ]
    for name, figures in _default(document):
        none, best = figures.get("ratio_to_none") or {}, figures.get("ratio_to_best_peer") or {}
        shared = bool(figures["neighbour_bytes_per_second"])
        rows.append(
            [
                name,
                _change(none.get("wait"), none.get("wait_spread")),
                best.get("peer", "-"),
                _change(best.get("wait"), best.get("wait_spread")),
                _change(best.get("neighbour_throughput"), None) if shared else "-",
                f"{figures['wait_ms']['p99']:.0f}",
                f"{figures['worst_utilisation']:.2f} {figures['worst_job']}",
                _number(figures["control_writes"], "{:.0f}"),
                _number(figures["agent_cpu_ratio"], "{:.3f}"),
                _number(figures["bpf_ratio"], "{:.4f}"),
            ]
        )
    return _table(rows)


def _default(document: Document) -> Iterator[tuple[str, Mapping[str, Any]]]:
    for name, own in document["scenarios"].items():
        if DEFAULT in own:
            yield name, own[DEFAULT]


def _change(ratio: float | None, spread: Sequence[float] | None) -> str:
    """A ratio as a change in percent, with the range over seeds where there are several."""
    if ratio is None:
        return "-"
    text = f"{100 * (ratio - 1):+.0f} %"
    if spread and spread[0] != spread[1]:
        text += f" ({100 * (spread[0] - 1):+.0f} … {100 * (spread[1] - 1):+.0f})"
    return text


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else form.format(value)


def _table(rows: Sequence[Sequence[str]]) -> list[str]:
    head, *body = rows
    return [_row(head), _row(["---", *["---:"] * (len(head) - 1)]), *map(_row, body)]


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def goals(document: Document) -> list[Goal]:
    """What the default policy is held to, scenario by scenario where a scenario is named."""
    found = list(_against_none(document))
    compared = [(name, *pair) for name, own in document["scenarios"].items() if (pair := _pair(document, name, own))]
    if not compared:
        return found
    return [*found, _never_worse(compared), _often_better(compared), _neighbours(compared)]


def _against_none(document: Document) -> Iterator[Goal]:
    for name, figures in _default(document):
        ratio = (figures.get("ratio_to_none") or {}).get("wait")
        if name in WANTED_LESS and ratio is not None:
            wanted = WANTED_LESS[name]
            yield Goal(f"{name}: at least {wanted:.0%} less wait than none", 1 - ratio >= wanted, f"{1 - ratio:.1%}")


def _pair(document: Document, name: str, own: Mapping[str, Any]) -> tuple[Mapping[str, Any], Mapping[str, Any]] | None:
    """The default policy's and the best peer's figures of a scenario, where both are there."""
    runs = {
        policy: [run for run in document["runs"] if (run["scenario"], run["policy"]) == (name, policy)]
        for policy in own
    }
    best = best_peer(runs)
    return (own[DEFAULT], own[best]) if DEFAULT in own and best is not None and best not in OURS else None


Compared = Sequence[tuple[str, Mapping[str, Any], Mapping[str, Any]]]


def _never_worse(compared: Compared) -> Goal:
    worse = []
    for name, ours, best in compared:
        ratio = ours["ratio_to_best_peer"]["wait"]
        apart = ours["wait_ms"]["mean"] - best["wait_ms"]["mean"]
        if (ratio is None or ratio > 1 + MOST_WORSE) and apart > NOISE_MS:
            worse.append(f"{name} ({apart:+.2f} ms)")
    text = f"nowhere more than {MOST_WORSE:.0%} or {NOISE_MS} ms above the best peer's wait"
    return Goal(text, not worse, ", ".join(worse) or f"on none of {len(compared)} scenarios")


def _often_better(compared: Compared) -> Goal:
    better = [name for name, ours, _ in compared if (ours["ratio_to_best_peer"]["wait"] or 1) <= 1 - WANTED_BETTER]
    text = f"at least {WANTED_BETTER:.0%} below the best peer's wait on half of the scenarios"
    met = len(better) >= WANTED_SCENARIOS * len(compared)
    return Goal(text, met, f"{len(better)} of {len(compared)}{': ' if better else ''}{', '.join(better)}")


def _neighbours(compared: Compared) -> Goal:
    short = []
    for name, ours, best in compared:
        ratio = ours["ratio_to_best_peer"]["neighbour_throughput"]
        if best["neighbour_bytes_per_second"] and (ratio or 0.0) < LEAST_NEIGHBOUR:
            short.append(f"{name} ({100 * ((ratio or 0.0) - 1):+.0f} %)")
    text = f"neighbours get at least {LEAST_NEIGHBOUR:.0%} of what the best peer leaves them"
    return Goal(text, not short, ", ".join(short) or "everywhere")
