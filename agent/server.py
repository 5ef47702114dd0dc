"""The HTTP endpoint: /metrics, /healthz, /readyz and /state; loopback by default, TLS and basic auth on request."""

from __future__ import annotations

import base64
import contextlib
import hmac
import json
import logging
import socket
import ssl
import stat
import threading
import time
from collections.abc import Callable, Mapping
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, cast

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder

from agent.config import ConfigError, MetricsSection, split_address
from agent.errors import reason
from agent.renewed import Renewed

log = logging.getLogger(__name__)

CLIENT_TIMEOUT_SECONDS = 10.0
"""A client whose request or whose reading of the answer takes longer is dropped."""
MAX_CLIENTS = 32
"""Connections that may wait for their request, and as many that are answered: nobody can exhaust the node, nor lock out
a scraper by holding connections open."""
LEAVING_SECONDS = 5.0
"""For how long a newcomer waits for the place of a client that was hung up on: its thread ends as soon as it runs."""


class Endpoint:
    """The server and its thread. `state` and `health` are called per request and must be quick and thread-safe."""

    def __init__(
        self,
        section: MetricsSection,
        registry: CollectorRegistry,
        state: Callable[[], dict[str, Any]],
        health: Callable[[], Mapping[str, str]],
    ) -> None:
        """`health()` maps `healthz` and `readyz` to the reason why not, empty when all is well."""
        self._registry = registry
        self._state = state
        self._health = health
        users = section.basic_auth_file
        self._users = Renewed("users", [users] if users else [], lambda: _read_users(users))
        self._server = _bound(section, _handler(self))
        self._thread = threading.Thread(target=self._server.serve_forever, name="endpoint", daemon=True)

    @property
    def port(self) -> int:
        """The port in use (another than asked for where 0 was asked for)."""
        return int(self._server.server_address[1])

    def start(self) -> None:
        """Answer requests from now on."""
        self._thread.start()

    def close(self) -> None:
        """Stop answering."""
        if self._thread.is_alive():
            self._server.shutdown()
            self._thread.join(timeout=5)
        self._server.server_close()

    def allowed(self, authorization: str | None) -> bool:
        """Say whether this Authorization header names a user of the password file (true where there is none)."""
        users = self._users.value()
        if not users:
            return True
        scheme, _, token = (authorization or "").partition(" ")
        try:
            user, _, password = base64.b64decode(token, validate=True).decode().partition(":")
        except ValueError:  # no base64, or no UTF-8 in it
            return False
        expected = users.get(user, "")
        matches = hmac.compare_digest(expected.encode(), password.encode())
        return scheme.lower() == "basic" and bool(expected) and matches

    def answer(self, path: str, accept: str) -> tuple[HTTPStatus, str, bytes]:
        """(status, content type, body) of a GET."""
        if path == "/metrics":
            encode, kind = _encoder(accept)
            return HTTPStatus.OK, kind, encode(self._registry)
        if path == "/state":
            return HTTPStatus.OK, "application/json", json.dumps(self._state(), default=str).encode()
        if path in ("/healthz", "/readyz"):
            why = self._health().get(path[1:], "")
            status = HTTPStatus.SERVICE_UNAVAILABLE if why else HTTPStatus.OK
            return status, "text/plain; charset=utf-8", f"{why or 'ok'}\n".encode()
        hint = b"prefetchd: /metrics /healthz /readyz /state\n"
        return (HTTPStatus.OK if path == "/" else HTTPStatus.NOT_FOUND), "text/plain; charset=utf-8", hint


def refuse_unusable(section: MetricsSection) -> None:
    """Raise ConfigError where an endpoint would: its address is taken or none, a file cannot be used."""
    _read_users(section.basic_auth_file)
    _bound(section, BaseHTTPRequestHandler).server_close()


def _bound(section: MetricsSection, handler: type[BaseHTTPRequestHandler]) -> _Server:
    files = [path for path in (section.certificate, section.key, section.client_ca) if path]
    tls = Renewed("TLS files", files, lambda: _tls_context(section)) if section.certificate else None
    try:
        return _Server(split_address(section.listen), handler, tls)
    except (OSError, OverflowError, UnicodeError) as error:
        raise ConfigError(
            f"Cannot listen on {section.listen!r} ({reason(error)}); choose another address with --listen."
        ) from None


def _encoder(accept: str) -> tuple[Callable[[CollectorRegistry], bytes], str]:
    """What the client would like; the plain text format where it cannot say so."""
    try:
        return choose_encoder(accept)
    except (ValueError, IndexError, TypeError):
        return choose_encoder("")


class _Server(ThreadingHTTPServer):
    """One thread per connection. Those whose request is not there yet are `waiting`, by client address."""

    daemon_threads = True
    block_on_close = False
    request_queue_size = 128

    def __init__(
        self, address: tuple[str, int], handler: type[BaseHTTPRequestHandler], tls: Renewed[ssl.SSLContext] | None
    ) -> None:
        if ":" in address[0]:
            self.address_family = socket.AF_INET6
        self._tls = tls
        self._slots = threading.BoundedSemaphore(2 * MAX_CLIENTS)
        self._lock = threading.Lock()
        self._waiting: dict[Any, tuple[socket.socket, float]] = {}
        self._leaving: set[Any] = set()
        super().__init__(address, handler)

    def process_request(self, request: Any, client_address: Any) -> None:
        """Take a client on; where too many send nothing, the one that has been at it longest goes."""
        with self._lock:
            if len(self._waiting) >= MAX_CLIENTS:
                self._hang_up(next(iter(self._waiting)))
        if not self._slots.acquire(timeout=LEAVING_SECONDS if self._leaving else 0):
            self.shutdown_request(request)
            return
        with self._lock:
            self._waiting[client_address] = request, time.monotonic() + CLIENT_TIMEOUT_SECONDS
        try:
            super().process_request(request, client_address)
        except RuntimeError:  # no thread can be had now; its place must be there for the next
            self._leave(client_address)
            raise

    def service_actions(self) -> None:
        """Called twice a second: hang up on those that took too long, however busily they send."""
        now = time.monotonic()
        with self._lock:
            for client in [client for client, (_, until) in self._waiting.items() if until < now]:
                self._hang_up(client)

    def _hang_up(self, client: Any) -> None:
        connection, _ = self._waiting.pop(client)
        self._leaving.add(client)
        with contextlib.suppress(OSError):
            connection.shutdown(socket.SHUT_RDWR)

    def request_is_there(self, client: Any) -> None:
        """The client has asked: from here on it costs no more than the answer."""
        with self._lock:
            self._waiting.pop(client, None)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """The TLS handshake is made here, in the client's own thread, so that a slow one holds up nobody."""
        try:
            request.settimeout(CLIENT_TIMEOUT_SECONDS)
            if self._tls:
                request = self._encrypted(self._tls.value(), request, client_address)
            super().process_request_thread(request, client_address)
        except OSError:
            self.shutdown_request(request)
        finally:
            self._leave(client_address)

    def _leave(self, client: Any) -> None:
        self.request_is_there(client)
        self._slots.release()
        with self._lock:
            self._leaving.discard(client)

    def _encrypted(self, context: ssl.SSLContext, request: socket.socket, client: Any) -> ssl.SSLSocket:
        """The encrypted connection takes the descriptor over, and with it the place among those that wait."""
        encrypted = context.wrap_socket(request, server_side=True, do_handshake_on_connect=False)
        try:
            with self._lock:
                if client not in self._waiting:
                    raise ConnectionAbortedError
                self._waiting[client] = encrypted, self._waiting[client][1]
            encrypted.do_handshake()
        except OSError:
            encrypted.close()
            raise
        return encrypted

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that went away is no event worth a line."""


def _handler(endpoint: Endpoint) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        timeout = CLIENT_TIMEOUT_SECONDS
        server_version = "prefetchd"
        sys_version = ""

        def parse_request(self) -> bool:
            """The headers are read here."""
            is_good = super().parse_request()
            cast("_Server", self.server).request_is_there(self.client_address)
            return is_good

        def do_GET(self) -> None:
            path = self.path.partition("?")[0]
            if path not in ("/healthz", "/readyz") and not endpoint.allowed(self.headers.get("Authorization")):
                self._send(HTTPStatus.UNAUTHORIZED, "text/plain", b"unauthorized\n", challenge=True)
                return
            try:
                answer = endpoint.answer(path, self.headers.get("Accept", ""))
            except Exception:  # whatever it is, who asks must not be left without an answer, nor the operator
                log.exception("GET %s cannot be answered", path)
                self._send(HTTPStatus.INTERNAL_SERVER_ERROR, "text/plain", b"failed; the agent's log says why\n")
                return
            self._send(*answer)

        do_HEAD = do_GET  # noqa: N815

        def _send(self, status: HTTPStatus, kind: str, body: bytes, *, challenge: bool = False) -> None:
            self.send_response(status)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(body)))
            if challenge:
                self.send_header("WWW-Authenticate", 'Basic realm="prefetchd"')
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(body)

        def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - the base class's name
            """Requests are not logged."""

    return Handler


def _tls_context(section: MetricsSection) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        context.load_cert_chain(section.certificate, section.key)
        if section.client_ca:
            context.load_verify_locations(section.client_ca)
            context.verify_mode = ssl.CERT_REQUIRED
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(
            f"TLS files in [metrics] cannot be used ({error}); check the paths and PEM contents."
        ) from None
    return context


def _read_users(path: str) -> dict[str, str]:
    """User -> password from lines `user:password`; the file must be readable by its owner alone."""
    if not path:
        return {}
    try:
        file = Path(path)
        if file.stat().st_mode & (stat.S_IRWXG | stat.S_IRWXO):
            raise ConfigError(f"Password file {path!r} is readable by others; run: chmod 600 {path}")
        lines = [line for line in file.read_text().splitlines() if line.strip() and not line.startswith("#")]
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"Password file {path!r} cannot be read ({reason(error)}); check metrics.basic_auth_file."
        ) from None
    if not lines:  # nobody named is not everybody let in
        raise ConfigError(f"Password file {path!r} has no line user:password; add one, or leave basic_auth_file out.")
    users = dict(line.split(":", 1) for line in lines if ":" in line)
    if len(users) != len(lines) or not all(users.values()):
        raise ConfigError(f"Password file {path!r} has a line that is not user:password; correct it.")
    return users
