"""Which cgroups are training jobs, which are best effort, and what they are called.

The first rule that matches a cgroup decides, training rules before best-effort ones. The outermost matching cgroup is
the job, and what lies below it belongs to it; but none is best effort that holds a training job, since its cap would
hold that back. Cgroups that hold the node itself, or the agent's own processes, are never taken, whatever the pattern
says.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace

from agent.config import BestEffortRule, Config, JobRule
from agent.types import Job, JobId
from agent.units import printable
from cgroup.patterns import matches
from cgroup.pods import ExecRef, PodRef, SlurmRef, identify, protected
from cgroup.tree import Cgroup, ancestors

log = logging.getLogger(__name__)

WEIGHT_ANNOTATION = "prefetchd.io/weight"
CLASS_ANNOTATION = "prefetchd.io/class"


@dataclass(frozen=True, slots=True)
class PodInfo:
    """What the API server knows of a pod."""

    name: str
    namespace: str
    labels: Mapping[str, str] = field(default_factory=dict)
    annotations: Mapping[str, str] = field(default_factory=dict)


PodLookup = Callable[[str], PodInfo | None]
"""Pod UID -> what is known of it; None where nothing is."""


def no_pods(uid: str) -> PodInfo | None:
    """The look-up of a node without Kubernetes."""
    del uid
    return None


def select_jobs(cgroups: Iterable[Cgroup], config: Config, pods: PodLookup = no_pods) -> tuple[Job, ...]:
    """Every job and best-effort cgroup among `cgroups`, outermost first; names are made unique."""
    training: dict[str, Job] = {}
    best_effort: list[Job] = []
    own = _own_cgroups(config)
    for cgroup in sorted(cgroups, key=lambda one: (one.path.count("/"), one.path)):
        job = _match(cgroup, config, pods) if training.keys().isdisjoint(ancestors(cgroup.path)) else None
        if job is None:
            continue
        reason = "it is the agent's own" if cgroup.path in own else protected(cgroup.path)
        if reason:
            log.debug("%s matches a rule but is left alone: %s", cgroup.path, reason)
        elif job.training:
            training[job.path] = job
        else:
            best_effort.append(job)
    holding = {above for path in training for above in ancestors(path)}
    beside = _outermost(job for job in best_effort if job.path not in holding)
    return _unique(sorted([*training.values(), *beside], key=lambda job: (job.path.count("/"), job.path)))


def _own_cgroups(config: Config) -> frozenset[str]:
    """Those of the helpers, which limit themselves, and of the guardian, which must never wait."""
    guardian = "/" + config.enforcement.guardian_cgroup.strip("/")
    return frozenset({guardian, config.rearrange.cgroup_path, config.rearrange.defragment_cgroup_path})


def _outermost(jobs: Iterable[Job]) -> list[Job]:
    """Those that lie below no other; an outer one comes before what lies below it."""
    taken: dict[str, Job] = {}
    for job in jobs:
        if taken.keys().isdisjoint(ancestors(job.path)):
            taken[job.path] = job
    return list(taken.values())


def _match(cgroup: Cgroup, config: Config, pods: PodLookup) -> Job | None:
    owner = identify(cgroup.path)
    pod = pods(owner.uid) if isinstance(owner, PodRef) else None
    rules: tuple[JobRule | BestEffortRule, ...] = (*config.jobs, *config.best_effort)
    for rule in rules:
        if matches(rule.cgroup, cgroup.path) and _label_matches(rule.label, pod):
            return _describe(cgroup, rule, pod)
    return None


def _label_matches(wanted: str, pod: PodInfo | None) -> bool:
    """`key=value`, or `key` alone for any value; a rule with a label matches no cgroup whose labels are unknown."""
    if not wanted:
        return True
    key, equals, value = wanted.partition("=")
    if pod is None or key not in pod.labels:
        return False
    return not equals or pod.labels[key] == value


def _describe(cgroup: Cgroup, rule: JobRule | BestEffortRule, pod: PodInfo | None) -> Job:
    training = isinstance(rule, JobRule)
    weight = rule.weight if isinstance(rule, JobRule) else 100.0
    if pod:
        training = pod.annotations.get(CLASS_ANNOTATION, "training" if training else "best-effort") == "training"
        weight = _weight(pod.annotations.get(WEIGHT_ANNOTATION, ""), weight)
    return Job(
        id=cgroup.id,
        name=printable(rule.name or _name(cgroup.path, pod)),
        path=cgroup.path,
        training=training,
        weight=weight,
        namespace=pod.namespace if pod else "",
        pod=pod.name if pod else "",
    )


def _weight(text: str, default: float) -> float:
    try:
        weight = float(text) if text else default
    except ValueError:
        weight = -1.0
    if not 1.0 <= weight <= 10000.0:
        log.warning("annotation %s=%r is no weight from 1 to 10000; using %g", WEIGHT_ANNOTATION, text, default)
        return default
    return weight


def _name(path: str, pod: PodInfo | None) -> str:
    owner = identify(path)
    if pod:
        return pod.name
    if isinstance(owner, PodRef):
        return owner.uid
    if isinstance(owner, SlurmRef):
        return f"slurm-{owner.job}"
    if isinstance(owner, ExecRef):
        return owner.name
    last = path.rsplit("/", 1)[-1]
    return last.removesuffix(".slice").removesuffix(".scope").removesuffix(".service")


def _unique(jobs: list[Job]) -> tuple[Job, ...]:
    """Two series may not carry the same labels: the second of a name becomes `name-2`, or the next that is free."""
    seen: Counter[tuple[str, str, str]] = Counter()
    taken: set[tuple[str, str, str]] = set()
    result = []
    for job in jobs:
        key = wanted = (job.name, job.namespace, job.pod)
        while key in taken:
            seen[wanted] += 1
            key = (f"{job.name}-{seen[wanted] + 1}", job.namespace, job.pod)
        taken.add(key)
        result.append(job if key == wanted else replace(job, name=key[0]))
    return tuple(result)


def by_id(jobs: Iterable[Job]) -> dict[JobId, Job]:
    """Jobs by the id of their cgroup."""
    return {job.id: job for job in jobs}
