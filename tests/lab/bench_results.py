"""The benchmark's document: every run, what spoiled some, and per scenario and policy medians, spread, paired ratios.

`scenarios.NAME.POLICY` holds the medians over seeds (`wait_ms.mean`, `starvation_events`, …), the same keys below
`spread` as [lowest, highest], and `ratio_to_none` and `ratio_to_best_peer`: medians over seeds of ratios between runs
of one seed. All of that is made from `runs` again at each change. Pure, but for `load` and `save`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import msgspec

from agent.errors import UsageError, reason
from tests.lab.bench_plan import ALONE, CHOICES, OURS, PARAMETERS, Cell

Document = dict[str, Any]
Run = Mapping[str, Any]
FORMAT = 1
MAX_BYTES = 64 * 2**20
"""A longer result is none: one run takes about two kilobytes."""

_PLAIN = (
    *("starvation_events", "utilisation", "worst_utilisation", "samples_per_second", "iterations"),
    *("neighbour_bytes_per_second", "control_writes", "agent_cpu_seconds", "agent_cpu_ratio", "agent_resident_bytes"),
    *("bpf_seconds", "bpf_ratio"),
)


class _Guest(msgspec.Struct):
    kernel: str
    accelerator: str


class _Wait(msgspec.Struct):
    mean: float
    p50: float
    p99: float


class _Run(msgspec.Struct):
    """What the tables and the aggregates need of a run."""

    scenario: str
    policy: str
    seed: int
    seconds: float
    digest: str
    revision: str
    guest: _Guest
    wait_ms: _Wait
    starvation_events: int
    worst_job: str
    worst_utilisation: float
    neighbour_bytes_per_second: float
    utilisation: float | None = None
    samples_per_second: float | None = None
    iterations: float | None = None
    control_writes: float | None = None
    agent_cpu_seconds: float | None = None
    agent_cpu_ratio: float | None = None
    agent_resident_bytes: float | None = None
    bpf_seconds: float | None = None
    bpf_ratio: float | None = None

    def __post_init__(self) -> None:
        if self.policy not in CHOICES:
            raise ValueError(f"policy {self.policy!r} is unknown")


class _Machine(msgspec.Struct):
    cpu: str
    cpus: int


class _Whole(msgspec.Struct):
    """What a document must hold."""

    machine: _Machine
    policies: dict[str, str]
    runs: list[_Run]
    spoiled: list[dict[str, Any]]


def new_document(machine: Mapping[str, Any], seconds: float | None) -> Document:
    """Return a document without runs; `seconds` is the length given for all runs, None where the files say."""
    return {
        "format": FORMAT,
        "machine": dict(machine),
        "seconds": seconds,
        "policies": dict(PARAMETERS),
        "runs": [],
        "spoiled": [],
        "scenarios": {},
    }


def load(path: Path) -> Document:
    """Read a document; raises `UsageError` with one sentence."""
    try:
        if path.exists() and not path.is_file():  # a pipe would be waited for, a device may have no end
            raise UsageError(f"Result {str(path)!r} is no regular file; give the --json of a benchmark.")
        if path.exists() and path.stat().st_size > MAX_BYTES:
            raise UsageError(
                f"Result {str(path)!r} has more than {MAX_BYTES >> 20} MiB; give the --json of a benchmark."
            )
        document = json.loads(path.read_text(encoding="utf-8"))
    except RecursionError:
        raise UsageError(f"Result {str(path)!r} is nested too deeply; give the --json of a benchmark.") from None
    except (OSError, ValueError) as error:
        told = reason(error)
        raise UsageError(f"Result {str(path)!r} cannot be read ({told}); give the --json of a benchmark.") from None
    if not isinstance(document, dict) or document.get("format") != FORMAT:
        raise UsageError(f"Result {str(path)!r} is no benchmark of format {FORMAT}; choose another file.")
    try:
        msgspec.convert(document, _Whole)
    except msgspec.ValidationError as error:
        raise UsageError(f"Result {str(path)!r} is damaged ({error}); choose another file.") from None
    document["scenarios"] = aggregate(document["runs"])
    return document


def save(document: Document, path: Path) -> None:
    """Write a document with its aggregates made anew; the file is at any time the old one or the new one."""
    document["scenarios"] = aggregate(document["runs"])
    part = path.with_name(f"{path.name}.part")
    part.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    part.replace(path)


def missing(document: Document, cells: Iterable[Cell]) -> list[Cell]:
    """Return the runs still to make; refuses a document whose runs were made of other scenarios or lengths."""
    made = {(run["scenario"], run["policy"], run["seed"]): run for run in document["runs"]}
    left = []
    for cell in cells:
        run = made.get(cell.key)
        if run is None:
            left.append(cell)
        elif run["digest"] != cell.subject.digest:
            raise UsageError(
                f"The result holds {cell.subject.name!r} as another file or with runs of {run['seconds']:g} s, "
                f"not {cell.subject.scenario.duration_seconds:g} s; choose another --json."
            )
    return left


def run_record(cell: Cell, summary: Mapping[str, Any], **about: Any) -> dict[str, Any]:
    """Return what is kept of a run: its key, what `about` says of it, and the figures of the guest's summary."""
    seconds = cell.subject.scenario.duration_seconds
    agent = summary["agent"] or {}
    cpu, bpf = agent.get("cpu_seconds"), summary.get("bpf_seconds")
    users = [*summary["jobs"].values(), *summary["best_effort"].values()]
    return {
        "scenario": cell.subject.name,
        "policy": cell.policy,
        "seed": cell.seed,
        "seconds": seconds,
        "digest": cell.subject.digest,
        **about,
        "guest": summary["machine"],
        **{name: summary.get(name) for name in ("wait_ms", "worst_job", "wait_ms_by_second", *_PLAIN)},
        "control_writes": summary.get("control_writes", 0),
        "io_max_changes_seen": sum(max(0, len(user["io_max"]["changes"]) - 1) for user in users),
        "agent_cpu_seconds": cpu,
        "agent_cpu_ratio": None if cpu is None else round(cpu / seconds, 4),
        "agent_resident_bytes": agent.get("resident_bytes"),
        "bpf_ratio": None if bpf is None else round(bpf / seconds, 5),
        "jobs": {
            name: {key: job[key] for key in ("wait_ms", "starvation_events", "utilisation", "bytes_per_second")}
            for name, job in summary["jobs"].items()
        },
        "best_effort": {
            name: {key: other[key] for key in ("bytes_per_second", "read_ms")}
            for name, other in summary["best_effort"].items()
        },
    }


def aggregate(runs: Sequence[Run]) -> dict[str, Any]:
    """Return `scenarios`: by name and policy, in the order of `CHOICES`."""
    found: dict[str, Any] = {}
    for name in dict.fromkeys(run["scenario"] for run in runs):
        own = {
            policy: sorted((run for run in runs if (run["scenario"], run["policy"]) == (name, policy)), key=_seed)
            for policy in CHOICES
        }
        own = {policy: some for policy, some in own.items() if some}
        best = best_peer(own)
        found[name] = {policy: _figures(some) | _ratios(some, own, best) for policy, some in own.items()}
    return found


def _seed(run: Run) -> int:
    return int(run["seed"])


def best_peer(runs: Mapping[str, Sequence[Run]]) -> str | None:
    """Return the alternative, doing nothing included, with the lowest median wait; None where there is none."""
    waits = {policy: median(map(mean_wait, some)) for policy, some in runs.items() if policy not in (*OURS, ALONE)}
    return min(waits, key=lambda policy: waits[policy], default=None)


def mean_wait(run: Run) -> float:
    """Mean wait per iteration, ms."""
    return float(run["wait_ms"]["mean"])


def neighbours(run: Run) -> float:
    """What all best-effort neighbours got, bytes per second."""
    return float(run["neighbour_bytes_per_second"])


def _figures(runs: Sequence[Run]) -> dict[str, Any]:
    waits = {name: [float(run["wait_ms"][name]) for run in runs] for name in ("mean", "p50", "p99")}
    plain = {name: [run[name] for run in runs if run.get(name) is not None] for name in _PLAIN}
    return {
        "wait_ms": {name: _middle(values) for name, values in waits.items()},
        **{name: _middle(values) for name, values in plain.items()},
        "worst_job": min(runs, key=lambda run: float(run["worst_utilisation"]))["worst_job"],
        "seeds": [run["seed"] for run in runs],
        "spread": {
            "wait_ms": {name: [min(values), max(values)] for name, values in waits.items()},
            **{name: [min(values), max(values)] for name, values in plain.items() if values},
        },
    }


def _middle(values: Sequence[float]) -> float | None:
    return round(median(values), 5) if values else None


def _ratios(runs: Sequence[Run], own: Mapping[str, Sequence[Run]], best: str | None) -> dict[str, Any]:
    found: dict[str, Any] = {}
    if "none" in own:
        found["ratio_to_none"] = _paired(runs, own["none"])
    if best is not None:
        found["ratio_to_best_peer"] = {"peer": best, **_paired(runs, own[best])}
    return found


def _paired(runs: Sequence[Run], others: Sequence[Run]) -> dict[str, Any]:
    """Medians over the seeds that both have: of the ratios of wait and of neighbours' throughput, and their spread."""
    by_seed = {run["seed"]: run for run in others}
    pairs = [(run, by_seed[run["seed"]]) for run in runs if run["seed"] in by_seed]
    found: dict[str, Any] = {"seeds": [run["seed"] for run, _ in pairs]}
    readers: tuple[tuple[str, Callable[[Run], float]], ...] = (
        ("wait", mean_wait),
        ("neighbour_throughput", neighbours),
    )
    for name, read in readers:
        values = [value for one, other in pairs if (value := ratio(read(one), read(other))) is not None]
        found[name] = round(median(values), 4) if values else None
        found[f"{name}_spread"] = [round(min(values), 4), round(max(values), 4)] if values else None
    return found


def ratio(value: float, base: float) -> float | None:
    """Return value / base; 1 where both are zero, None where only the base is."""
    if base:
        return value / base
    return None if value else 1.0


def regressed(ours_ms: float, other_ms: float, reference: float) -> bool:
    """Whether a wait exceeds `reference` times the other's by more than 25 %, and by more than 0.3 ms (noise)."""
    expected = reference * other_ms
    return ours_ms > max(1.25 * expected, expected + 0.3)
