"""The endpoint: paths, health, basic auth, TLS with client certificates, and clients that misbehave."""

import base64
import contextlib
import http.client
import json
import shutil
import socket
import socketserver
import ssl
import subprocess
import threading
import time
from http.server import ThreadingHTTPServer
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, Gauge

from agent import server
from agent.client import AgentClient, AgentUnreachable
from agent.config import ConfigError, MetricsSection
from agent.errors import PrefetchdError
from agent.server import MAX_CLIENTS, Endpoint


@pytest.fixture
def serve():
    running = []

    def start(health=None, **section):
        registry = CollectorRegistry()
        Gauge("prefetchd_thing", "A thing.", registry=registry).set(3)
        endpoint = Endpoint(
            MetricsSection(listen="127.0.0.1:0", **section), registry, lambda: {"jobs": []}, lambda: health or {}
        )
        endpoint.start()
        running.append(endpoint)
        return endpoint

    yield start
    for endpoint in running:
        endpoint.close()


def get(endpoint, path, headers=None, context=None, method="GET"):
    kind = http.client.HTTPSConnection if context else http.client.HTTPConnection
    options = {"context": context} if context else {}
    connection = kind("127.0.0.1", endpoint.port, timeout=5, **options)
    try:
        connection.request(method, path, headers=headers or {})
        response = connection.getresponse()
        return response.status, response.read().decode()
    finally:
        connection.close()


def test_paths(serve):
    endpoint = serve()
    assert "prefetchd_thing 3.0" in get(endpoint, "/metrics")[1]
    assert json.loads(get(endpoint, "/state")[1]) == {"jobs": []}
    assert get(endpoint, "/healthz") == (200, "ok\n")
    assert get(endpoint, "/nothing")[0] == 404
    assert get(endpoint, "/metrics", method="HEAD") == (200, "")
    assert get(endpoint, "/metrics", method="POST")[0] == 501


def test_health_says_why_not(serve):
    endpoint = serve(health={"healthz": "loop silent for 9 s", "readyz": ""})
    assert get(endpoint, "/healthz") == (503, "loop silent for 9 s\n")
    assert get(endpoint, "/readyz")[0] == 200


def header(text):
    return {"Authorization": "Basic " + base64.b64encode(text.encode()).decode()}


def test_basic_auth(serve, tmp_path):
    users = tmp_path / "users"
    users.write_text("# scraper\nprom:s3cret:with colon\n")
    users.chmod(0o600)
    endpoint = serve(basic_auth_file=str(users))
    assert get(endpoint, "/metrics")[0] == 401
    assert get(endpoint, "/metrics", header("prom:wrong"))[0] == 401
    assert get(endpoint, "/metrics", header("nobody:"))[0] == 401
    assert get(endpoint, "/metrics", {"Authorization": "Basic ###"})[0] == 401
    assert get(endpoint, "/metrics", header("prom:s3cret:with colon"))[0] == 200
    assert get(endpoint, "/healthz")[0] == 200


def test_renewed_passwords_are_taken_up_and_what_is_no_password_file_is_said_once(serve, tmp_path, caplog):
    """Who leaves must be out without a restart, and an editor that saves half a file must lock nobody out."""
    users = tmp_path / "users"
    users.write_text("prom:old\n")
    users.chmod(0o600)
    endpoint = serve(basic_auth_file=str(users))
    users.write_text("prom:new\n")
    assert [get(endpoint, "/metrics", header(who))[0] for who in ("prom:old", "prom:new")] == [401, 200]
    users.write_text("prom\n")
    assert [get(endpoint, "/metrics", header("prom:new"))[0] for _ in range(2)] == [200, 200]
    users.unlink()
    assert get(endpoint, "/metrics")[0] == 401
    warnings = [record.message for record in caplog.records if record.levelname == "WARNING"]
    start = f"going on with the users as they were: Password file {str(users)!r}"
    assert warnings == [
        f"{start} has a line that is not user:password; correct it.",
        f"{start} cannot be read (No such file or directory); check metrics.basic_auth_file.",
    ]


@pytest.mark.parametrize(
    ("text", "mode", "words"),
    [
        ("a:b", 0o644, "chmod 600"),
        ("ab", 0o600, "user:password"),
        ("", 0o600, "no line"),
        ("# prom:s3cret\n\n", 0o600, "no line"),
    ],
)
def test_bad_password_files(serve, tmp_path, text, mode, words):
    users = tmp_path / "users"
    users.write_text(text)
    users.chmod(mode)
    with pytest.raises(ConfigError, match=words):
        serve(basic_auth_file=str(users))


@pytest.fixture(scope="module")
def certificate(tmp_path_factory):
    """(certificate, key) of 127.0.0.1, PEM files."""
    return issue(tmp_path_factory.mktemp("tls"))


def issue(folder):
    key, cert = folder / "key.pem", folder / "cert.pem"
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-keyout", key, "-out", cert, "-days", "2",
         "-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1"],
        check=True, capture_output=True,
    )  # fmt: skip
    return cert, key


def test_a_renewed_certificate_is_taken_up_and_half_of_one_is_not(serve, certificate, tmp_path):
    """A cluster renews them every few weeks; nobody restarts an agent for that."""
    (tmp_path / "new").mkdir()
    new, new_key = issue(tmp_path / "new")
    before, after = (ssl.create_default_context(cafile=str(cert)) for cert in (certificate[0], new))
    cert, key = (shutil.copy(path, tmp_path) for path in certificate)
    endpoint = serve(certificate=cert, key=key)
    assert get(endpoint, "/healthz", context=before)[0] == 200
    shutil.copy(new, cert)
    assert get(endpoint, "/healthz", context=before)[0] == 200
    shutil.copy(new_key, key)
    assert get(endpoint, "/healthz", context=after)[0] == 200
    Path(cert).unlink()
    assert get(endpoint, "/healthz", context=after)[0] == 200


def test_tls_with_client_certificates(serve, certificate):
    cert, key = certificate
    endpoint = serve(certificate=str(cert), key=str(key), client_ca=str(cert))
    trusting = ssl.create_default_context(cafile=str(cert))
    with pytest.raises((ssl.SSLError, ConnectionError, http.client.HTTPException)):
        get(endpoint, "/metrics", context=trusting)
    trusting.load_cert_chain(cert, key)
    assert get(endpoint, "/metrics", context=trusting)[0] == 200


def test_a_client_says_that_the_certificate_is_not_trusted_rather_than_that_nobody_answers(serve, certificate):
    cert, key = certificate
    endpoint = serve(certificate=str(cert), key=str(key))
    url = f"https://127.0.0.1:{endpoint.port}"
    with pytest.raises(AgentUnreachable) as refused:
        AgentClient(url).state()
    assert f"The certificate at {url} is not trusted (self-signed certificate); give --ca FILE" in str(refused.value)
    assert AgentClient(url, ca=str(cert)).state()
    with pytest.raises(AgentUnreachable, match="give --address https://"):
        AgentClient(f"http://127.0.0.1:{endpoint.port}").state()


def test_a_client_does_not_speak_of_tls_where_nobody_listens():
    with pytest.raises(AgentUnreachable) as refused:
        AgentClient("http://127.0.0.1:1").state()
    assert str(refused.value).endswith("wait until its log says where it answers, or give --address.")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"ca": "{none}"}, "authority '{none}' cannot be used (No such file or directory); give --ca a PEM file."),
        ({"ca": "{text}"}, "authority '{text}' cannot be used (no certificate or crl found); give --ca a PEM file."),
        ({"key": "{text}"}, "Key '{text}' has no certificate with it; give --certificate FILE too."),
        ({"certificate": "{text}"}, "'{text}' cannot be used (no PEM file); check --certificate and --key."),
        ({"certificate": "{cert}", "key": "{other}"}, "'{cert}' with key '{other}' cannot be used (key values mism"),
    ],
)
def test_a_client_says_which_tls_file_cannot_be_used(certificate, tmp_path, given, message):
    text, other = tmp_path / "text", tmp_path / "other.pem"
    text.write_text("nothing")
    subprocess.run(["openssl", "genrsa", "-out", other, "2048"], check=True, capture_output=True)
    names = {"none": tmp_path / "none", "text": text, "cert": certificate[0], "other": other}
    client = AgentClient("https://127.0.0.1:1", **{name: value.format(**names) for name, value in given.items()})
    with pytest.raises(PrefetchdError) as refused:
        client.state()
    assert message.format(**names) in str(refused.value)


def connect(endpoint, count=1):
    return [socket.create_connection(("127.0.0.1", endpoint.port), timeout=10) for _ in range(count)]


def close(clients):
    for client in clients:
        client.close()


@pytest.mark.parametrize("count", [MAX_CLIENTS - 1, 3 * MAX_CLIENTS])
def test_silent_clients_do_not_block_others(serve, count):
    endpoint = serve()
    before = threading.active_count()
    silent = connect(endpoint, count)
    try:
        assert get(endpoint, "/healthz")[0] == 200
        assert threading.active_count() - before <= 2 * MAX_CLIENTS
    finally:
        close(silent)


def test_who_was_hung_up_on_makes_room_however_late_its_thread_runs(serve, monkeypatch):
    def finish_late(handler):
        time.sleep(0.2)
        end(handler)

    end = socketserver.StreamRequestHandler.finish
    monkeypatch.setattr(socketserver.StreamRequestHandler, "finish", finish_late)
    endpoint = serve()
    silent = connect(endpoint, 3 * MAX_CLIENTS)
    try:
        assert get(endpoint, "/healthz")[0] == 200
    finally:
        close(silent)


def test_threads_that_cannot_be_had_for_a_while_cost_no_place_for_ever(serve, monkeypatch):
    endpoint, begin = serve(), ThreadingHTTPServer.process_request
    refused = []

    def refuse(server, request, client_address):
        if len(refused) < 3 * MAX_CLIENTS:
            refused.append(client_address)
            raise RuntimeError("can't start new thread")
        begin(server, request, client_address)

    monkeypatch.setattr(ThreadingHTTPServer, "process_request", refuse)
    for _ in range(3 * MAX_CLIENTS):
        with pytest.raises((OSError, http.client.HTTPException)):
            get(endpoint, "/healthz")
    assert get(endpoint, "/healthz")[0] == 200


def test_silent_clients_do_not_block_others_behind_tls(serve, certificate):
    cert, key = certificate
    endpoint = serve(certificate=str(cert), key=str(key))
    silent = connect(endpoint, 3 * MAX_CLIENTS)
    try:
        assert get(endpoint, "/healthz", context=ssl.create_default_context(cafile=str(cert)))[0] == 200
    finally:
        close(silent)


def test_a_request_that_trickles_in_is_cut_off(serve, monkeypatch):
    monkeypatch.setattr(server, "CLIENT_TIMEOUT_SECONDS", 1.0)
    (client,) = connect(serve())
    began = time.monotonic()
    with client, contextlib.suppress(ConnectionError):
        client.sendall(b"GET /metrics HTTP/1.1\r\n")
        while time.monotonic() - began < 20.0:
            client.sendall(b"X: y\r\n")
            time.sleep(0.1)
    assert time.monotonic() - began < 10.0


@pytest.mark.parametrize(
    "headers",
    [
        {"Accept": "application/openmetrics-text;version=\xff\xff"},
        {"Accept": "application/openmetrics-text;version=1.x;;;q="},
        {"Accept": "application/openmetrics-text;version=99.9.9;escaping=nonsense"},
        {"Accept": ";;;,,,version=version=="},
        {"Authorization": "Basic \xff\xff"},
    ],
)
def test_headers_without_sense_are_answered(serve, headers):
    assert get(serve(), "/metrics", headers)[0] == 200


def test_a_password_that_is_no_ascii_is_refused(serve, tmp_path):
    users = tmp_path / "users"
    users.write_text("a:b\n")
    users.chmod(0o600)
    assert get(serve(basic_auth_file=str(users)), "/metrics", {"Authorization": "Basic \xff"})[0] == 401


def test_what_cannot_be_answered_is_said_and_logged(serve, caplog):
    class Broken:
        def collect(self):
            raise RuntimeError("a broken collector")

    endpoint = serve()
    broken = Broken()
    broken.describe = list  # so that registering does not collect
    endpoint._registry.register(broken)
    assert get(endpoint, "/metrics") == (500, "failed; the agent's log says why\n")
    assert "a broken collector" in caplog.text
    assert get(endpoint, "/healthz")[0] == 200


@pytest.mark.parametrize(
    "request_bytes", [b"GET /\r\n\r\n", b"\x16\x03\x01\x00\r\n\r\n", b"GET /" + b"a" * 70000 + b" HTTP/1.1\r\n\r\n"]
)
def test_garbage_is_answered_and_forgotten(serve, request_bytes):
    endpoint = serve()
    (client,) = connect(endpoint)
    with client:
        client.sendall(request_bytes)
        assert client.recv(100)
    assert get(endpoint, "/healthz")[0] == 200


def test_address_in_use_is_a_sentence(serve):
    port = serve().port
    with pytest.raises(ConfigError, match="choose another address"):
        Endpoint(MetricsSection(listen=f"127.0.0.1:{port}"), CollectorRegistry(), dict, dict)
