"""Names, labels and annotations of this node's pods, followed at the API server in a thread of its own.

The control loop only ever looks up what is known already; it never waits for the network. While the API server is
away the last known pods stay, new ones are named by their UID, and `status()` says why.
"""

from __future__ import annotations

import logging
import os
import random
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

from agent.jobs import PodInfo
from bpf.samples import ProbeState, ProbeStatus

log = logging.getLogger(__name__)

PROBE = "pod_labels"
"""The name under which `status()` appears beside the probes."""
SERVICE_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
FIRST_RETRY_SECONDS, LAST_RETRY_SECONDS = 1.0, 60.0


class KubeError(Exception):
    """The API server did not give what was asked for; the message says why and, where it helps, what to do.

    `gone` is set when the position in the stream of changes is no longer known there (HTTP 410), which only asks for
    a new list; `refused` when asking again soon cannot help (HTTP 401 and 403).
    """

    def __init__(self, why: str, *, gone: bool = False, refused: bool = False) -> None:
        super().__init__(why)
        self.gone = gone
        self.refused = refused


@dataclass(frozen=True, slots=True)
class Pod:
    """One pod; `keys` are the UIDs that its cgroup may carry: a static pod's differs from that of its API object."""

    uid: str
    keys: tuple[str, ...]
    info: PodInfo


PodChange = tuple[Literal["ADDED", "MODIFIED", "DELETED"], Pod]


class Session(Protocol):
    """One connection to the API server; every method raises `KubeError` and nothing else."""

    def list(self) -> tuple[str, list[Pod]]:
        """All pods of the node, and the version from which changes follow."""

    def changes(self, version: str) -> Iterator[PodChange]:
        """Changes since `version`; ends only by an error."""

    def interrupt(self) -> None:
        """Make the call that is under way in another thread fail soon."""

    def close(self) -> None:
        """Close the connection, from the thread that uses it."""


class PodWatch:
    """Follows the pods of one node. Calling it with a pod UID gives what is known of the pod, or None."""

    def __init__(
        self,
        connect: Callable[[], Session],
        *,
        retry_seconds: tuple[float, float] = (FIRST_RETRY_SECONDS, LAST_RETRY_SECONDS),
    ) -> None:
        """`connect` is called for each attempt; waits between failed attempts grow from the first to the last value."""
        self._connect = connect
        self._retry_seconds = retry_seconds
        self._pods: dict[str, Pod] = {}
        self._index: Mapping[str, PodInfo] = {}
        self._why = "the first list of pods is under way"
        self._session: Session | None = None
        self._stop = threading.Event()
        self._synced = threading.Event()
        self._thread = threading.Thread(target=self._run, name="pods", daemon=True)

    def __call__(self, uid: str) -> PodInfo | None:
        """What is known of the pod; never waits."""
        return self._index.get(uid)

    def start(self) -> None:
        """Begin to follow."""
        self._thread.start()

    def wait(self, seconds: float) -> bool:
        """Wait until the first list has arrived, at most so long; says whether it has."""
        return self._synced.wait(seconds)

    def close(self) -> None:
        """Stop following; what is known stays."""
        self._stop.set()
        for _ in range(100):
            if not self._thread.is_alive():
                return
            if self._session:
                self._session.interrupt()
            self._thread.join(timeout=0.05)

    def status(self) -> ProbeStatus:
        """`attached` while changes arrive, `degraded` with last known pods, `unavailable` before the first list."""
        why = self._why
        if not why:
            return ProbeStatus(PROBE, ProbeState.ATTACHED)
        if self._synced.is_set():
            return ProbeStatus(PROBE, ProbeState.DEGRADED, f"{why}; pods made since are named by UID")
        return ProbeStatus(PROBE, ProbeState.UNAVAILABLE, f"{why}; pods are named by UID")

    def _run(self) -> None:
        failures = 0
        while not self._stop.is_set():
            try:
                self._follow()
            except KubeError as error:
                if self._stop.is_set():
                    return
                progressed = not self._why
                failures = 1 if progressed else failures + 1
                self._report(error)
                self._stop.wait(self._pause(failures, error))

    def _follow(self) -> None:
        """List, then apply changes until something breaks."""
        session = self._session = self._connect()
        try:
            version, pods = session.list()
            self._replace(pods)
            self._why = ""
            self._synced.set()
            for kind, pod in session.changes(version):
                self._apply(kind, pod)
        finally:
            session.close()

    def _replace(self, pods: Iterable[Pod]) -> None:
        self._pods = {pod.uid: pod for pod in pods}
        self._publish()

    def _apply(self, kind: str, pod: Pod) -> None:
        if kind == "DELETED":
            self._pods.pop(pod.uid, None)
        else:
            self._pods[pod.uid] = pod
        self._publish()

    def _publish(self) -> None:
        """A new index each time, so that look-ups in other threads need no lock."""
        self._index = {key: pod.info for pod in self._pods.values() for key in pod.keys}

    def _report(self, error: KubeError) -> None:
        if error.gone:
            return
        if str(error) != self._why:
            log.warning("pod labels: %s", error)
        self._why = str(error)

    def _pause(self, failures: int, error: KubeError) -> float:
        """Seconds until the next attempt: doubling, spread so that a thousand nodes do not come back at once."""
        first, last = self._retry_seconds
        seconds = last if error.refused else min(last, first * 2.0 ** (failures - 1))
        return seconds * random.uniform(0.5, 1.0)  # noqa: S311 - spreads load, guards nothing


def from_environment(
    environment: Mapping[str, str] = os.environ, service_account: Path = SERVICE_ACCOUNT
) -> PodWatch | None:
    """The watch of a pod's own node, or None outside Kubernetes, without a token, or without the `kube` extra."""
    host, port = environment.get("KUBERNETES_SERVICE_HOST"), environment.get("KUBERNETES_SERVICE_PORT", "443")
    if not host or not (service_account / "token").exists():
        return None
    node = environment.get("NODE_NAME")
    if not node:
        log.warning("pod labels: NODE_NAME is not set; set it from the pod's field spec.nodeName")
        return None
    try:
        from agent.kube_client import ApiServer  # noqa: PLC0415 - 22 MiB that only a node with pods pays for
    except ImportError:
        log.warning("pod labels: lightkube is not installed; install prefetchd[kube], or switch podLabels off")
        return None
    address = f"[{host}]" if ":" in host else host
    return PodWatch(ApiServer(f"https://{address}:{port}", node, service_account).connect)
