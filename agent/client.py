"""Reading the running agent's endpoint: all that `top`, `explain` and `doctor` know of it."""

from __future__ import annotations

import base64
import json
import ssl
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from contextlib import contextmanager
from dataclasses import dataclass
from http.client import HTTPException
from pathlib import Path
from typing import Any

from agent.errors import MAX_QUOTED, PrefetchdError, UsageError, reason
from agent.small_file import read_small
from agent.units import printable

MAX_STATE_BYTES = 256 * 2**20
"""A longer answer is not read to its end."""
MAX_SILENCES = 5
"""So many times what may pass between two words may pass until the last of them."""

_LISTS = ("jobs", "neighbours", "devices", "probes")


class AgentUnreachable(PrefetchdError):  # noqa: N818 - says what happened
    """Nobody answers, or not an agent."""


def for_terminal(value: Any) -> Any:
    """The state with every text as a terminal may have it: a cgroup is called whatever its maker likes."""
    if isinstance(value, str):
        return printable(value)
    if isinstance(value, dict):
        return {for_terminal(key): for_terminal(one) for key, one in value.items()}
    return [for_terminal(one) for one in value] if isinstance(value, list) else value


@dataclass(frozen=True, slots=True)
class AgentClient:
    """Where the agent listens and how to show who we are.

    `url` is `http://ADDR:PORT` or `https://…`. `ca` is a PEM file to trust, `certificate` and `key` are ours,
    `auth_file` holds one line `user:password`.
    """

    url: str
    ca: str = ""
    certificate: str = ""
    key: str = ""
    auth_file: str = ""
    timeout_seconds: float = 3.0

    def state(self) -> dict[str, Any]:
        """What `/state` says; raises AgentUnreachable."""
        body = self.get("/state")
        try:
            state = json.loads(body)
        except (ValueError, RecursionError):
            state = None
        if not isinstance(state, dict) or "jobs" not in state or not all(map(_are_rows, map(state.get, _LISTS))):
            raise AgentUnreachable(f"{self.url}/state answers something else than prefetchd does; check --address.")
        return state

    @contextmanager
    def understood(self) -> Iterator[None]:
        """Around what is made of a state: one of another version is told as such, in an AgentUnreachable."""
        try:
            yield
        except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError, RecursionError) as error:
            raise AgentUnreachable(
                f"{self.url}/state holds what this prefetchd cannot show ({printable(repr(error))}); use that of the "
                "agent's version."
            ) from error

    def get(self, path: str) -> bytes:
        """The body of a GET; raises AgentUnreachable with one sentence.

        It is waited for in a thread of its own, since a timeout of the socket begins anew with every byte.
        """
        answer: Future[bytes] = Future()
        thread = threading.Thread(target=_fulfil, args=(answer, lambda: self._get(path)), daemon=True)
        try:
            thread.start()
        except RuntimeError as error:
            raise AgentUnreachable(
                f"{self.url} cannot be asked ({error}); raise the limit of memory or processes (ulimit -v, ulimit -u)."
            ) from None
        seconds = MAX_SILENCES * self.timeout_seconds
        try:
            return answer.result(seconds)
        except FutureTimeout:
            raise AgentUnreachable(_silent(self.url, f"no whole answer in {seconds:g} s")) from None

    def _get(self, path: str) -> bytes:
        request = urllib.request.Request(self.url + path, headers=self._headers())  # noqa: S310 - the scheme is checked
        # An environment's http_proxy is for the world outside; the agent is on this node or named outright.
        opener = urllib.request.build_opener(
            urllib.request.ProxyHandler({}), urllib.request.HTTPSHandler(context=self._tls()), _NoRedirects()
        )
        try:
            with opener.open(request, timeout=self.timeout_seconds) as answer:
                return bytes(answer.read(MAX_STATE_BYTES))
        except urllib.error.HTTPError as error:
            raise AgentUnreachable(_refused(self.url + path, error)) from None
        except (OSError, HTTPException, UnicodeError) as error:
            raise AgentUnreachable(_silent(self.url, getattr(error, "reason", error))) from None

    def _headers(self) -> dict[str, str]:
        if not self.auth_file:
            return {}
        try:
            lines = read_small(Path(self.auth_file)).decode().splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise PrefetchdError(
                f"Password file {self.auth_file!r} cannot be read ({reason(error)}); check --auth."
            ) from None
        users = [line for line in lines if ":" in line and not line.startswith("#")]
        if not users:
            raise PrefetchdError(f"Password file {self.auth_file!r} has no line user:password; add one.")
        return {"Authorization": "Basic " + base64.b64encode(users[0].encode()).decode()}

    def _tls(self) -> ssl.SSLContext:
        if self.key and not self.certificate:
            raise UsageError(f"Key {self.key!r} has no certificate with it; give --certificate FILE too.")
        try:
            context = ssl.create_default_context(cafile=self.ca or None)
        except OSError as error:
            raise PrefetchdError(
                f"Certificate authority {self.ca!r} cannot be used ({_tls_reason(error)}); give --ca a PEM file."
            ) from None
        if not self.certificate:
            return context
        try:
            context.load_cert_chain(self.certificate, self.key or None)
        except OSError as error:
            pair = f"{self.certificate!r} with key {self.key!r}" if self.key else f"{self.certificate!r}"
            raise PrefetchdError(
                f"Certificate {pair} cannot be used ({_tls_reason(error)}); check --certificate and --key."
            ) from None
        return context


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """An agent sends nobody elsewhere, and who else answers is shown what identifies us no further."""

    def http_error_302(self, *_: Any) -> None:
        """Not handled: it becomes an HTTPError."""

    http_error_301 = http_error_303 = http_error_307 = http_error_308 = http_error_302  # type: ignore[assignment]


def _fulfil(answer: Future[bytes], ask: Callable[[], bytes]) -> None:
    try:
        answer.set_result(ask())
    except Exception as error:  # noqa: BLE001 - it is raised where the answer is waited for
        answer.set_exception(error)


def _are_rows(rows: Any) -> bool:
    return rows is None or (isinstance(rows, list) and all(isinstance(row, dict) for row in rows))


def _silent(url: str, cause: Exception | str) -> str:
    """Why nothing was heard, and what to do."""
    if isinstance(cause, ssl.SSLCertVerificationError):
        return (
            f"The certificate at {url} is not trusted ({cause.verify_message.rstrip('.')}); give --ca FILE that signs "
            "it, and --address as it names it."
        )
    told = printable(str(getattr(cause, "strerror", None) or cause))[:MAX_QUOTED]
    if url.startswith("http://") and isinstance(cause, ConnectionResetError):
        return f"No agent answers at {url} ({told}); give --address https://… where it speaks TLS."
    return (
        f"No agent answers at {url} ({told}); start it with `prefetchd run` and wait until its log says where it "
        "answers, or give --address."
    )


def _tls_reason(error: OSError) -> str:
    """Why, without OpenSSL's file and line."""
    if isinstance(error, ssl.SSLError):
        return error.reason.replace("_", " ").lower() if error.reason else "no PEM file"
    return reason(error)


def _refused(url: str, error: urllib.error.HTTPError) -> str:
    error.close()
    if error.code == 401:
        return f"{url} wants a user and password; give --auth FILE with one line user:password."
    return f"{url} answers {error.code} {printable(str(error.reason))[:MAX_QUOTED]}; check --address."
