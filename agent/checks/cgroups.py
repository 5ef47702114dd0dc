"""Can limits be written where the jobs are: hierarchy, the `io` controller along each job's path, who else limits."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

from agent.checks.finding import Finding, failed, note, ok, unknown, warning
from agent.checks.host import Host
from agent.config import Config
from agent.jobs import PodLookup, no_pods, select_jobs
from agent.types import Job
from cgroup.errors import CgroupError, IoFileError
from cgroup.hierarchy import Hierarchy, detect_hierarchy
from cgroup.io_files import parse_cost_qos, parse_io_max, parse_io_weight
from cgroup.patterns import matches
from cgroup.tree import join, missing_delegation, walk

LISTED = 3
"""Cgroups named in one line of evidence; the rest are counted."""


@dataclass(frozen=True, slots=True)
class CgroupFacts:
    """What was seen.

    `jobs` are the cgroups that the rules select, `idle_rules` the patterns that select nothing now, `undelegated` maps
    a job's path to the ancestors that do not pass `io` on. `limits`, `latencies` and `weights` map a job's path to the
    lines that somebody set there; `cost` holds the devices on which io.cost is on; `weighed` says whether the agent is
    to steer any device by weights, `labels_unknown` whether rules ask for pod labels that cannot be known here.
    """

    hierarchy: Hierarchy
    root: str = "/sys/fs/cgroup"
    rules: int = 0
    idle_rules: tuple[str, ...] = ()
    jobs: tuple[Job, ...] = ()
    undelegated: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    limits: Mapping[str, str] = field(default_factory=dict)
    latencies: Mapping[str, str] = field(default_factory=dict)
    weights: Mapping[str, str] = field(default_factory=dict)
    cost: frozenset[str] = frozenset()
    enabling_allowed: bool = False
    weighed: bool = False
    labels_unknown: bool = False


def asks_for_labels(config: Config) -> bool:
    """Whether a rule selects by pod labels."""
    return any(rule.label for rule in config.jobs) or any(rule.label for rule in config.best_effort)


def gather(host: Host, config: Config, pods: PodLookup | None = None) -> CgroupFacts:
    """Walk the tree and read the io files of the jobs; writes nothing. `pods` is None where no pod is known."""
    prefix = "" if str(host.root) == "/" else str(host.root)
    hierarchy = detect_hierarchy(str(host.at("/proc/self/mountinfo")), prefix)
    patterns = [rule.cgroup for rule in config.jobs] + [rule.cgroup for rule in config.best_effort]
    root = config.cgroup_root or hierarchy.root
    if root is None:
        return CgroupFacts(hierarchy, rules=len(patterns), idle_rules=tuple(patterns))
    below = prefix + root
    jobs = select_jobs(walk(below), config, pods or no_pods)
    return CgroupFacts(
        hierarchy,
        root=root,
        rules=len(patterns),
        idle_rules=tuple(pattern for pattern in patterns if not any(matches(pattern, job.path) for job in jobs)),
        jobs=jobs,
        undelegated=_undelegated(below, jobs),
        limits=_set_lines(below, jobs, "io.max", lambda text: bool(parse_io_max(text))),
        latencies=_set_lines(below, jobs, "io.latency", lambda text: "target=" in text),
        weights=_set_lines(below, jobs, "io.weight", _has_weights)
        | _set_lines(below, jobs, "io.bfq.weight", _has_weights),
        cost=parse_cost_qos(_text(f"{below}/io.cost.qos")),
        enabling_allowed=config.enforcement.enable_io_controller,
        weighed=any("weight" in rule.actuator for rule in config.devices),
        labels_unknown=pods is None and asks_for_labels(config),
    )


def _undelegated(root: str, jobs: tuple[Job, ...]) -> dict[str, tuple[str, ...]]:
    """Job path -> ancestors whose subtree_control lacks io; a job that vanished meanwhile is left out."""
    found = {}
    for job in jobs:
        try:
            missing = missing_delegation(root, job.path)
        except (CgroupError, OSError):
            continue
        if missing:
            found[job.path] = missing
    return found


def _has_weights(text: str) -> bool:
    weights = parse_io_weight(text)
    return bool(weights.devices) or weights.default not in (None, 100)


def _set_lines(root: str, jobs: tuple[Job, ...], file: str, is_set: Callable[[str], bool]) -> dict[str, str]:
    """Job path -> the file's text on one line, where somebody set something."""
    found = {}
    for job in jobs:
        text = _text(f"{join(root, job.path)}/{file}")
        try:
            if text and is_set(text):
                found[job.path] = f"{file}: {' | '.join(text.splitlines())}"
        except IoFileError as error:
            found[job.path] = str(error)
    return found


def _text(path: str) -> str:
    try:
        with open(path, encoding="utf-8", errors="replace") as file:  # noqa: PTH123 - cgroup paths are texts
            return file.read()
    except OSError:
        return ""


def check(facts: CgroupFacts, *, agent_runs: bool) -> Iterator[Finding]:
    """Judge the facts; while an agent runs, limits on the jobs are probably its own."""
    yield _hierarchy(facts)
    yield from _rules(facts)
    if facts.hierarchy.problem is None:
        yield _delegation(facts)
        yield from _conflicts(facts, agent_runs=agent_runs)
        yield from _siblings(facts)


def _hierarchy(facts: CgroupFacts) -> Finding:
    found = facts.hierarchy
    if found.root is None and found.kind == "none":
        return failed("cgroup.hierarchy", found.problem or "", found.fix or "", "measuring")
    if found.problem:
        return failed("cgroup.hierarchy", found.problem, found.fix or "", "enforcing")
    return ok("cgroup.hierarchy", f"cgroup v2 at {facts.root} with the io controller")


def _rules(facts: CgroupFacts) -> Iterator[Finding]:
    if not facts.rules:
        fix = 'Add a rule: [[jobs]] with cgroup = "/prefetchd.slice/*", and start training with `prefetchd exec`.'
        yield warning("cgroup.jobs", "the configuration has no [[jobs]] rule: no cgroup is a training job", fix)
        return
    training = [job.path for job in facts.jobs if job.training]
    others = len(facts.jobs) - len(training)
    evidence = f"{len(training)} training job(s){_some(training)}, {others} best-effort cgroup(s)"
    if training:
        yield ok("cgroup.jobs", evidence)
    else:
        fix = f"Start a job, or compare the patterns with: find {facts.root} -type d"
        if facts.labels_unknown:
            evidence += "; labels of pods are not known here, so rules with a label match nothing"
            fix = f"Run the doctor in the agent's pod. {fix}"
        yield note("cgroup.jobs", f"{evidence}; rules without a match: {', '.join(facts.idle_rules)}", fix)


def _some(paths: list[str]) -> str:
    if not paths:
        return ""
    more = f" and {len(paths) - LISTED} more" if len(paths) > LISTED else ""
    return f": {', '.join(paths[:LISTED])}{more}"


def _delegation(facts: CgroupFacts) -> Finding:
    if not facts.jobs:
        return unknown("cgroup.delegation", "no job is there whose path could be checked")
    if not facts.undelegated:
        return ok("cgroup.delegation", f"`io` is passed on down to all {len(facts.jobs)} cgroups")
    ancestors = sorted({path for missing in facts.undelegated.values() for path in missing})
    files = [join(facts.root, path) + "/cgroup.subtree_control" for path in ancestors]
    if facts.enabling_allowed:
        evidence = f"the agent will add `io` to {', '.join(files[:LISTED])} (enable_io_controller is true)"
        return note("cgroup.delegation", evidence)
    evidence = f"`io` is not passed on to {len(facts.undelegated)} cgroup(s){_some(list(facts.undelegated))}"
    fix = "; ".join(f"echo +io > {file}" for file in files)
    return failed("cgroup.delegation", evidence, f"{fix} (or enable_io_controller = true under [enforcement])",
                  "enforcing")  # fmt: skip


def _conflicts(facts: CgroupFacts, *, agent_runs: bool) -> Iterator[Finding]:
    yield _foreign(
        "cgroup.io_max",
        {} if agent_runs else facts.limits,
        "io.max is set by somebody else; the agent leaves such lines alone",
        "Find who sets it (systemd: IOReadBandwidthMax, Slurm or Kubernetes plugins), or "
        "echo 'MAJ:MIN rbps=max wbps=max riops=max wiops=max' into the file.",
    )
    yield _foreign(
        "cgroup.io_latency",
        facts.latencies,
        "io.latency protects a cgroup and works against caps",
        "Take the target off: echo 'MAJ:MIN target=0' into io.latency.",
    )
    yield _foreign(
        "cgroup.io_weight",
        facts.weights,
        "weights are set; they act beside the agent's caps where io.cost or bfq is on",
        'Give them up, or let the agent set them: actuator = "io.weight" or "io.bfq.weight" under [[devices]].',
    )
    if facts.cost:
        evidence = f"io.cost is on for {', '.join(sorted(facts.cost))}: it shares by io.weight beside the agent's caps"
        fix = 'Set actuator = "io.weight" for these devices, or echo "MAJ:MIN enable=0" > io.cost.qos at the root.'
        yield note("cgroup.io_cost", evidence, fix)
    else:
        yield ok("cgroup.io_cost", "off")


def _siblings(facts: CgroupFacts) -> Iterator[Finding]:
    """Weights divide what the parent gets among its children: across two parents they say nothing."""
    parents = {_parent(job.path) for job in facts.jobs if job.training}
    apart = [job.path for job in facts.jobs if not job.training and parents - {_parent(job.path)}]
    if facts.weighed and apart:
        evidence = f"weights count among siblings, and some training is no sibling of best effort{_some(apart)}"
        fix = 'Start them below one parent, or set actuator = "io.max" under [[devices]].'
        yield warning("cgroup.siblings", evidence, fix)


def _parent(path: str) -> str:
    return path.rpartition("/")[0]


def _foreign(name: str, found: Mapping[str, str], meaning: str, fix: str) -> Finding:
    if not found:
        return ok(name, "not set on any job")
    path, text = next(iter(found.items()))
    more = f" (and on {len(found) - 1} more)" if len(found) > 1 else ""
    return warning(name, f"{meaning}: {path} has {text}{more}", fix)
