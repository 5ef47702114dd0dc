"""The API server as lightkube speaks to it: pods of one node, with every wait bounded and every failure a sentence.

Needs the `kube` extra; nothing but `agent.kube` imports it.
"""

from __future__ import annotations

import ssl
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, cast

import httpx2 as httpx
from lightkube import ApiError, Client, KubeConfig
from lightkube.config.models import Cluster, User
from lightkube.core.exceptions import ConfigError
from lightkube.resources.core_v1 import Pod as ApiPod

from agent.jobs import PodInfo
from agent.kube import KubeError, Pod, PodChange

ANSWER_SECONDS = 10.0
WATCH_SECONDS = 240
"""The server ends a quiet watch after this time; one that is quiet for much longer is a dead connection."""
WATCH_GRACE_SECONDS = 30.0
REPEAT_SECONDS = 1.0
"""Least time between two requests: a server that ends every watch at once is not asked in a tight loop."""
PODS_PER_PAGE = 50
MOST_PODS = 5000
MOST_BYTES = 32 << 20
"""Of a page, and of one change: a pod has at most 1.5 MB in etcd. What is longer is no answer, and would be the agent's
end where its memory is limited."""
OWN_ANNOTATIONS = "prefetchd.io/"
STATIC_POD_UID = "kubernetes.io/config.hash"
"""Annotation with the UID that the kubelet gave a static pod (pkg/kubelet/types/pod_update.go)."""


@dataclass(frozen=True, slots=True)
class ApiServer:
    """Where the API server is and who asks; token and certificate are read anew at each connection, as they rotate."""

    url: str
    node: str
    service_account: Path
    answer_seconds: float = ANSWER_SECONDS
    watch_seconds: int = WATCH_SECONDS
    grace_seconds: float = WATCH_GRACE_SECONDS
    repeat_seconds: float = REPEAT_SECONDS

    def connect(self) -> PodSession:
        """A session; raises `KubeError` when the service account's files cannot be used."""
        return PodSession(self)


class PodSession:
    """One connection; raises `KubeError` from every method."""

    def __init__(self, server: ApiServer) -> None:
        self._server = server
        account = server.service_account
        token = account / "token"
        try:
            user = User(token=token.read_text().strip(), token_file=str(token))
            self._transport = _Transport(server, _context(account / "ca.crt"))
            self._client = Client(
                KubeConfig.from_one(cluster=Cluster(server=server.url), user=user),
                timeout=httpx.Timeout(server.answer_seconds),
                trust_env=False,
                transport=self._transport,
            )
        except (OSError, ConfigError, ssl.SSLError) as error:
            raise KubeError(f"the service account in {str(account)!r} cannot be used ({error})") from error

    def list(self) -> tuple[str, list[Pod]]:
        """All pods of the node, and the version from which changes follow."""
        try:
            found = self._client.list(
                ApiPod, namespace="*", fields={"spec.nodeName": self._server.node}, chunk_size=PODS_PER_PAGE
            )
            pods = [_pod(one) for one in islice(found, MOST_PODS + 1)]
            if len(pods) > MOST_PODS:
                raise ValueError(f"more than {MOST_PODS} pods of one node")  # noqa: TRY301 - explained like the others
            version = found.resourceVersion
        except Exception as error:  # what an API server, or a proxy before it, may send has no bounds
            raise self._explain(error) from error
        return version, pods

    def changes(self, version: str) -> Iterator[PodChange]:
        """Changes since `version`; a watch that ended quietly is taken up again where it stood."""
        try:
            events = self._client.watch(
                ApiPod,
                namespace="*",
                fields={"spec.nodeName": self._server.node},
                server_timeout=self._server.watch_seconds,
                resource_version=version,
            )
            for kind, one in events:
                if kind in ("ADDED", "MODIFIED", "DELETED"):
                    yield cast("PodChange", (kind, _pod(one)))
        except Exception as error:  # as above
            raise self._explain(error) from error

    def interrupt(self) -> None:
        """Make the call that is under way in another thread fail soon."""
        self._transport.interrupt()

    def close(self) -> None:
        """Close the connection, from the thread that uses it: one closed under a reader leaves the reader waiting."""
        self._client.close()

    def _explain(self, error: Exception) -> KubeError:
        url = self._server.url
        if self._transport.interrupted:
            return KubeError("the agent is ending")
        code = _status_code(error)
        if code is not None:
            return _explain_status(code, url)
        if isinstance(error, httpx.TimeoutException):
            return KubeError(f"the API server {url!r} did not answer in time")
        if isinstance(error, httpx.TransportError):
            return KubeError(f"the API server {url!r} cannot be reached ({error})")
        return KubeError(f"the API server {url!r} sent what cannot be read ({type(error).__name__}: {error})")


def _status_code(error: Exception) -> int | None:
    """The HTTP status behind an error; None where there was no answer. Watches carry theirs inside a 200."""
    if isinstance(error, ApiError):
        return int(error.status.code or 0)
    return error.response.status_code if isinstance(error, httpx.HTTPStatusError) else None


def _explain_status(code: int, url: str) -> KubeError:
    if code == httpx.codes.GONE:
        return KubeError("the API server no longer knows the last change seen (410)", gone=True)
    if code == httpx.codes.UNAUTHORIZED:
        return KubeError(f"the API server {url!r} refuses the token (401); check the service account", refused=True)
    if code == httpx.codes.FORBIDDEN:
        why = f"the API server {url!r} forbids it (403); give the service account list and watch on pods"
        return KubeError(why, refused=True)
    return KubeError(f"the API server {url!r} answered {code}")


def _pod(one: Any) -> Pod:
    """What the agent keeps of a pod: a few hundred bytes of the many thousand that its object has.

    TypeError where something is no text: lightkube passes on what the server sent.
    """
    metadata = one.metadata
    annotations = metadata.annotations or {}
    static = annotations.get(STATIC_POD_UID)
    own = {key: text for key, text in annotations.items() if key.startswith(OWN_ANNOTATIONS)}
    labels, namespace = dict(metadata.labels or {}), metadata.namespace or ""
    for text in (metadata.uid, metadata.name, namespace, static or "", *labels, *labels.values(), *own.values()):
        if not isinstance(text, str):
            raise TypeError(f"{text!r} of pod {metadata.name!r} is not text")
    keys = (metadata.uid, static) if static else (metadata.uid,)
    return Pod(metadata.uid, keys, PodInfo(metadata.name, namespace, labels, own))


def _context(authority: Path) -> ssl.SSLContext:
    return ssl.create_default_context(cafile=str(authority) if authority.exists() else None)


class _Bounded(httpx.SyncByteStream):
    """An answer of at most MOST_BYTES, or (`by_line`) of lines of at most so many."""

    def __init__(self, stream: httpx.SyncByteStream, *, by_line: bool) -> None:
        self._stream = stream
        self._by_line = by_line

    def __iter__(self) -> Iterator[bytes]:
        size = 0
        for part in self._stream:
            ends = self._by_line and b"\n" in part
            if size + (part.index(b"\n") if ends else len(part)) > MOST_BYTES:
                raise httpx.DecodingError(f"longer than {MOST_BYTES} bytes")
            size = len(part) - part.rindex(b"\n") if ends else size + len(part)
            yield part

    def close(self) -> None:
        """Close what is read from."""
        self._stream.close()


class _Transport(httpx.HTTPTransport):
    """Bounds what lightkube leaves open: how long a watch may be silent, how soon an ended one is asked for again."""

    def __init__(self, server: ApiServer, context: ssl.SSLContext) -> None:
        super().__init__(verify=context, trust_env=False)
        self._server = server
        self._ending = threading.Event()
        self._asked = False
        self._stream: Any = None

    @property
    def interrupted(self) -> bool:
        """Whether `interrupt()` was called."""
        return self._ending.is_set()

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        if "watch" in request.url.params:
            if self._asked:
                self._ending.wait(self._server.repeat_seconds)
            self._asked = True
            seconds = self._server.watch_seconds + self._server.grace_seconds
            request.extensions["timeout"] = {**request.extensions["timeout"], "read": seconds}
        if self.interrupted:
            raise httpx.ReadError("interrupted", request=request)
        request.extensions["trace"] = self._trace
        response = super().handle_request(request)
        response.stream = _Bounded(cast("httpx.SyncByteStream", response.stream), by_line="watch" in request.url.params)
        return response

    def _trace(self, event: str, info: Mapping[str, Any]) -> None:
        """Keep the connection's stream as soon as there is one (httpcore's `trace` extension)."""
        if event in ("connection.connect_tcp.complete", "connection.start_tls.complete"):
            self._stream = info["return_value"]

    def interrupt(self) -> None:
        """Make a read that waits for an answer or for the next change fail now, and every later request."""
        self._ending.set()
        connection = self._stream.get_extra_info("socket") if self._stream else None
        if connection is not None:
            try:
                connection.shutdown(2)
            except OSError:
                return
