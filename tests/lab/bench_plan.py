"""What a benchmark runs, and in which order. Pure, but for reading the plan and scenario files."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import msgspec

from agent.errors import UsageError
from agent.simulate.scenario import Scenario, load_scenario
from agent.toml_text import convert, parse_toml, read_text
from tests.lab.devices import Device, devices_of
from tests.lab.peers import JOB_WEIGHT, NEIGHBOUR_CAP_RATIO, NEIGHBOUR_WEIGHT, PEERS, QOS_LATENCY_US

SCENARIOS = Path(__file__).with_name("scenarios")
SHIPPED = Path(__file__).with_name("bench.toml")
OURS = ("paper", "adaptive")
POLICIES = (*PEERS, *OURS)
ALONE = "alone"
"""No policy: the training jobs of a scenario without its neighbours. What they wait then, nothing that is done to
neighbours can take from them."""
CHOICES = (ALONE, *POLICIES)
PARAMETERS = {
    ALONE: "no policy: the scenario without its best-effort neighbours, nothing is set",
    "none": "nothing is set",
    "static": "io.max: every user of a device an equal part of its rbps, wbps (and riops, wiops of an SSD)",
    "nbcap": f"io.max: every best-effort neighbour {NEIGHBOUR_CAP_RATIO:.0%} of its device, training uncapped",
    "bfq": "scheduler bfq, low_latency=0, all else default; io.bfq.weight equal (100) for jobs and neighbours",
    "bfqw": f"bfq as above; io.bfq.weight {JOB_WEIGHT} for jobs, {NEIGHBOUR_WEIGHT} for neighbours",
    "iocost": (
        "io.cost, linear model measured on the device (8 sequential readers of 1 MiB, 16 sequential and 16 random of "
        f"4 KiB), QoS p95 {QOS_LATENCY_US[False] // 1000} ms (rotational {QOS_LATENCY_US[True] // 1000} ms), "
        "min=80 max=120; io.weight equal (100)"
    ),
    "iocostw": f"io.cost as above; io.weight {JOB_WEIGHT} for jobs, {NEIGHBOUR_WEIGHT} for neighbours",
    "paper": 'the shipped agent, enforce, policy = "paper"; devices and cgroups configured, all else default',
    "adaptive": "the shipped agent, enforce; devices and cgroups configured, all else default",
}
"""What each policy sets, written into every result."""


@dataclass(frozen=True)
class Subject:
    """A scenario to run: its file, what it says (already cut to the run's length), and a digest of it."""

    path: Path
    scenario: Scenario
    digest: str

    @property
    def name(self) -> str:
        return self.scenario.name


@dataclass(frozen=True)
class Cell:
    """One run to make."""

    subject: Subject
    policy: str
    seed: int

    @property
    def key(self) -> tuple[str, str, int]:
        """What tells a run from others of the same result."""
        return self.subject.name, self.policy, self.seed


Seed = Annotated[int, msgspec.Meta(ge=0)]


class _Entry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    scenario: str
    policies: tuple[str, ...]
    seeds: Annotated[tuple[Seed, ...], msgspec.Meta(min_length=1)]


class _Plan(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    run: Annotated[tuple[_Entry, ...], msgspec.Meta(min_length=1)]


def find_scenario(name: str) -> Path:
    """Return the file of a scenario, given by path or as the name of a shipped one."""
    shipped = SCENARIOS / f"{name}.toml"
    try:
        is_shipped, is_file = shipped.is_file(), Path(name).is_file()
    except OSError:  # such as a name that is too long
        is_shipped = is_file = False
    if is_shipped:
        return shipped
    if not is_file:
        raise UsageError(f"Scenario {name!r} is neither a file nor shipped; see {SCENARIOS.name}/README.md for names.")
    return Path(name).resolve()


def load_subject(name: str, seconds: float | None) -> Subject:
    """Read a scenario and let it end after `seconds` (None: as the file says)."""
    path = find_scenario(name)
    scenario = load_scenario(path)
    if seconds is not None:
        scenario = msgspec.structs.replace(scenario, duration_seconds=seconds)
    matters = (scenario.duration_seconds, scenario.devices, scenario.jobs, scenario.best_effort)
    return Subject(path, scenario, hashlib.sha256(repr(matters).encode()).hexdigest()[:12])


def matrix(
    scenarios: Iterable[str], policies: Sequence[str], seeds: Sequence[int], seconds: float | None
) -> list[Cell]:
    """Return every policy on every scenario with every seed, in the order of `in_order`."""
    check_policies(policies)
    subjects = [load_subject(name, seconds) for name in scenarios]
    return in_order(Cell(subject, policy, seed) for subject in subjects for policy in policies for seed in seeds)


def load_plan(path: Path, seconds: float | None, seeds: Sequence[int] | None = None) -> list[Cell]:
    """Read a plan, a TOML list `[[run]]` of scenario, policies and seeds; `seeds` stand in for the plan's own."""
    source = f"Plan {str(path)!r}"
    document = parse_toml(read_text(path, "Plan", UsageError), source, UsageError)
    cells = []
    for entry in convert(document, _Plan, source, UsageError, None).run:
        check_policies(entry.policies)
        subject = load_subject(entry.scenario, seconds)
        cells += [Cell(subject, policy, seed) for policy in entry.policies for seed in seeds or entry.seeds]
    return in_order(cells)


def check_policies(names: Sequence[str]) -> None:
    """Refuse a policy that does not exist, and an empty list."""
    unknown = [name for name in names if name not in CHOICES]
    if unknown or not names:
        raise UsageError(
            f"Policy {', '.join(map(repr, unknown)) or '(none given)'} is unknown; use some of {', '.join(CHOICES)}."
        )


def in_order(cells: Iterable[Cell]) -> list[Cell]:
    """Seed by seed, then scenario by scenario, so that a drift of the machine meets all policies of a pair alike and
    an interruption leaves every pair with its first seeds. Each seed begins with another policy. `ALONE` is left out
    where there are no neighbours: that is `none`."""
    result: list[Cell] = []
    left = [cell for cell in dict.fromkeys(cells) if cell.policy != ALONE or cell.subject.scenario.best_effort]
    seeds = sorted({cell.seed for cell in left})
    for place, seed in enumerate(seeds):
        for name in dict.fromkeys(cell.subject.name for cell in left):
            group = [cell for cell in left if cell.seed == seed and cell.subject.name == name]
            turn = place % len(group) if group else 0
            result += group[turn:] + group[:turn]
    return result


def machines(subjects: Iterable[Subject]) -> dict[str, tuple[Device, ...]]:
    """Return the disks of the guest that each scenario (by name) runs in.

    Scenarios share a guest where no two of their disks have one name and different properties.
    """
    pools: list[dict[str, Device]] = []
    places: dict[str, dict[str, Device]] = {}
    for subject in subjects:
        own = {device.name: device for device in devices_of(subject.scenario)}
        pool = next((pool for pool in pools if all(pool.get(name, disk) == disk for name, disk in own.items())), None)
        if pool is None:
            pool = {}
            pools.append(pool)
        pool.update(own)
        places[subject.name] = pool
    return {name: tuple(pool.values()) for name, pool in places.items()}
