"""What labelled runs say of the diagnosis: a verdict per run, the confusion matrix, recall and precision. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from tests.lab.causes_runs import LABELS
from tests.lab.truth import Iteration

Result = Mapping[str, Any]

RECENT_SECONDS = 1.0
"""A job counts as starving until this long after the wait: the agent holds its diagnosis as long."""

ENOUGH_LOOKS = 3
"""A job that starves in fewer looks than this counts as one that does not starve."""

SMALL_PART = 0.10
"""A cause that is named in no more than this part of the looks at a job that does not starve is none."""


class Look(NamedTuple):
    """What the endpoint said of the subject: when (seconds of the scenario), cause and score."""

    time: float
    cause: str
    score: float


def starving_spans(iterations: Sequence[Iteration]) -> list[tuple[float, float]]:
    """Begin and end (s) of every wait before an empty queue that counts as starvation, by the job's own log."""
    return [(row.time_s, row.time_s + row.wait_ms / 1e3) for row in iterations if row.starved]


def judge(looks: Sequence[Look], spans: Sequence[tuple[float, float]]) -> tuple[str, dict[str, int], int]:
    """(verdict, how often each cause was named, looks while it starved).

    The verdict is what the agent says most often while the job starves, `none` included. Of a job that does not
    starve it is `none`, unless a cause is named in more than a small part of all looks.
    """
    starving = [
        look for look in looks if any(begin <= look.time and look.time - end <= RECENT_SECONDS for begin, end in spans)
    ]
    if len(starving) >= ENOUGH_LOOKS:
        named = Counter(look.cause for look in starving)
        return named.most_common(1)[0][0], dict(named), len(starving)
    named = Counter(look.cause for look in looks)
    causes = Counter({cause: count for cause, count in named.items() if cause != "none"})
    if sum(causes.values()) <= SMALL_PART * len(looks):
        return "none", dict(named), len(starving)
    return causes.most_common(1)[0][0], dict(named), len(starving)


def confusion(results: Sequence[Result]) -> dict[str, Counter[str]]:
    """By label, how many runs got which verdict."""
    table: dict[str, Counter[str]] = {label: Counter() for label in LABELS}
    for one in results:
        table[one["label"]][one["verdict"]] += 1
    return table


def recall(table: Mapping[str, Counter[str]], label: str) -> float | None:
    """Share of the runs with this label that were called so; None without runs."""
    total = sum(table[label].values())
    return table[label][label] / total if total else None


def precision(table: Mapping[str, Counter[str]], label: str) -> float | None:
    """Share of the runs called so that have this label; None where none was called so."""
    total = sum(row[label] for row in table.values())
    return table[label][label] / total if total else None


def lines(results: Sequence[Result]) -> list[str]:
    """The matrix as a Markdown table: a row per label, verdicts across, recall and precision at the end."""
    table = confusion(results)
    heads = [*(label.replace("_", " ") for label in LABELS), "recall", "precision"]
    rows = ["| made to be | " + " | ".join(heads) + " |", "|---|" + "---:|" * len(heads)]
    for label in LABELS:
        counts = [str(table[label][verdict] or "") for verdict in LABELS]
        rates = [_rate(recall(table, label)), _rate(precision(table, label))]
        rows.append(f"| `{label}` | " + " | ".join([*counts, *rates]) + " |")
    return rows


def _rate(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"
