"""Whose cgroup is it: pods, containers, systemd units, Slurm jobs and `prefetchd exec`, told from the path alone. Pure.

Layouts: kubelet (pkg/kubelet/cm), the systemd and cgroupfs drivers of containerd, CRI-O and Docker, Slurm's cgroup/v2
and cgroup/v1 plugins. A pod is known by its UID: a restarted container is the same job under a new cgroup id.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

Qos = Literal["guaranteed", "burstable", "besteffort"]

EXEC_PARENT = "/prefetchd.slice"
"""Where `prefetchd exec` makes its cgroups."""

_UID = r"[0-9a-f]{8}[-_]?[0-9a-f]{4}[-_]?[0-9a-f]{4}[-_]?[0-9a-f]{4}[-_]?[0-9a-f]{12}"
_ID = r"[0-9a-f]{64}"
# The part after the slice is what containerd leaves when it runs the cgroupfs driver under a systemd-driver kubelet.
_POD_SLICE = re.compile(
    rf"(?:.*-)?kubepods(?:-(?P<qos>burstable|besteffort))?-pod(?P<uid>{_UID})\.slice(?::(?P<kind>[\w-]+):(?P<id>{_ID}))?"
)
_POD_FOLDER = re.compile(rf"pod(?P<uid>{_UID})")
_QOS_ROOT = re.compile(r"(?:.*-)?kubepods(?:-(?:burstable|besteffort))?\.slice|kubepods")
_CONTAINER = re.compile(rf"(?:(?P<kind>cri-containerd|crio|docker|nerdctl|libpod)-)?(?P<id>{_ID})(?:\.scope)?")
_SLURM_ROOT = re.compile(r"slurm(?:_.+)?|(?:.+_)?slurmstepd\.scope")
_UNIT = re.compile(r".+\.(?:service|scope|slice)")
_RUNTIMES = {
    "cri-containerd": "containerd",
    "crio": "cri-o",
    "docker": "docker",
    "nerdctl": "containerd",
    "libpod": "podman",
}

_SYSTEM_SLICES = frozenset(
    ("system.slice", "user.slice", "machine.slice", "kubelet.slice", "runtime.slice", "init.scope")
)
_NODE_SERVICES = re.compile(
    r"(kubelet|containerd|crio|docker|cri-docker|slurmd|sshd?|dbus(-broker)?|prefetchd|systemd-.+)\.(service|socket)"
)


@dataclass(frozen=True, slots=True)
class PodRef:
    """A Kubernetes pod or one of its containers.

    `uid` is as the API server prints it (a static pod's has no dashes); `container_id` is None for the pod's own
    cgroup and for helpers of the runtime.
    """

    uid: str
    container_id: str | None
    runtime: str | None
    qos: Qos

    @property
    def key(self) -> str:
        """The same for every container and every restart of the pod."""
        return f"pod:{self.uid}"


@dataclass(frozen=True, slots=True)
class ContainerRef:
    """A container outside Kubernetes."""

    container_id: str
    runtime: str | None

    @property
    def key(self) -> str:
        """The container's id."""
        return f"container:{self.container_id}"


@dataclass(frozen=True, slots=True)
class SlurmRef:
    """A Slurm job, or a step of it (`step` is None for the job's own cgroup; `batch`, `extern`, or a number)."""

    job: str
    step: str | None

    @property
    def key(self) -> str:
        """The same for every step of the job."""
        return f"slurm:{self.job}"


@dataclass(frozen=True, slots=True)
class ExecRef:
    """A command started by `prefetchd exec`."""

    name: str

    @property
    def key(self) -> str:
        """The name given on the command line."""
        return f"exec:{self.name}"


@dataclass(frozen=True, slots=True)
class UnitRef:
    """A systemd unit: a service, scope or slice."""

    unit: str

    @property
    def key(self) -> str:
        """The unit's name."""
        return f"unit:{self.unit}"


Owner = PodRef | ContainerRef | SlurmRef | ExecRef | UnitRef


def identify(path: str) -> Owner | None:
    """Return whose cgroup the path (relative to the root, `/a/b`) is, or None.

    Folders that a container or a unit made below its own cgroup belong to it.
    """
    parts = tuple(part for part in path.split("/") if part)
    return _pod(parts) or _slurm(parts) or _exec(parts) or _container(parts) or _unit(parts)


def _pod(parts: tuple[str, ...]) -> PodRef | None:
    for index, part in enumerate(parts):
        match = _POD_SLICE.fullmatch(part)
        if match and match["id"]:
            return PodRef(_uid(match["uid"]), match["id"], _RUNTIMES.get(match["kind"]), _qos(match["qos"]))
        folder = _POD_FOLDER.fullmatch(part) if _under_kubepods(parts[:index]) else None
        if match or folder:
            uid = (match or folder)["uid"]  # type: ignore[index]
            qos = match["qos"] if match else parts[index - 1]
            return _with_container(_uid(uid), _qos(qos), parts[index + 1 :])
    return None


def _under_kubepods(parents: tuple[str, ...]) -> bool:
    """The cgroupfs driver: `kubepods/pod<uid>` or `kubepods/<qos>/pod<uid>`, wherever the kubelet's root is."""
    return "kubepods" in parents[-2:]


def _with_container(uid: str, qos: Qos, below: tuple[str, ...]) -> PodRef:
    match = _CONTAINER.fullmatch(below[0]) if below else None
    if match is None:
        return PodRef(uid, None, None, qos)
    return PodRef(uid, match["id"], _RUNTIMES.get(match["kind"] or ""), qos)


def _uid(text: str) -> str:
    """Dashes nest slices, so the systemd driver writes underscores; a static pod has a hash without either."""
    return text.replace("_", "-")


def _qos(text: str | None) -> Qos:
    if text == "burstable":
        return "burstable"
    return "besteffort" if text == "besteffort" else "guaranteed"


def _slurm(parts: tuple[str, ...]) -> SlurmRef | None:
    start = next((i for i, part in enumerate(parts) if _SLURM_ROOT.fullmatch(part)), None)
    if start is None:
        return None
    job = _suffix(parts[start + 1 :], "job_")
    return SlurmRef(job, _suffix(parts[start + 1 :], "step_")) if job else None


def _suffix(parts: tuple[str, ...], prefix: str) -> str | None:
    return next((part.removeprefix(prefix) for part in parts if part.startswith(prefix)), None)


def _exec(parts: tuple[str, ...]) -> ExecRef | None:
    if len(parts) < 2 or f"/{parts[0]}" != EXEC_PARENT:
        return None
    return ExecRef(parts[1].removesuffix(".scope"))


def _container(parts: tuple[str, ...]) -> ContainerRef | None:
    for index, part in enumerate(parts):
        match = _CONTAINER.fullmatch(part)
        if match and (match["kind"] or index):
            kind = match["kind"] or parts[index - 1]
            return ContainerRef(match["id"], _RUNTIMES.get(kind))
    return None


def _unit(parts: tuple[str, ...]) -> UnitRef | None:
    """The outermost service or scope; where there is none, the innermost slice."""
    units = [part for part in parts if _UNIT.fullmatch(part)]
    leaf = next((unit for unit in units if not unit.endswith(".slice") and not unit.startswith("user@")), None)
    return UnitRef(leaf or units[-1]) if units else None


def protected(path: str) -> str | None:
    """Return why nothing may ever be written at this cgroup, or None where it may be.

    The root, the system's own slices, Kubernetes' QoS levels and the node's services hold what keeps the node alive.
    """
    parts = tuple(part for part in path.split("/") if part)
    if not parts:
        return "it is the root of the tree"
    if len(parts) == 1 and parts[0] in _SYSTEM_SLICES:
        return "it is one of the system's own slices"
    if _QOS_ROOT.fullmatch(parts[-1]) or (parts[-1] in ("burstable", "besteffort") and parts[-2:-1] == ("kubepods",)):
        return "it holds a whole QoS level of Kubernetes"
    if _SLURM_ROOT.fullmatch(parts[-1]) or parts[-1].startswith("uid_"):
        return "it holds the jobs of several Slurm users"
    return "it is a service of the node itself" if _NODE_SERVICES.fullmatch(parts[-1]) else None
