"""The endpoint: paths, health, basic auth, TLS with client certificates, and clients that misbehave."""

import base64
import http.client
import json
import socket
import ssl
import subprocess

import pytest
from prometheus_client import CollectorRegistry, Gauge

from agent.config import ConfigError, MetricsSection
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


def test_basic_auth(serve, tmp_path):
    users = tmp_path / "users"
    users.write_text("# scraper\nprom:s3cret:with colon\n")
    users.chmod(0o600)
    endpoint = serve(basic_auth_file=str(users))

    def header(text):
        return {"Authorization": "Basic " + base64.b64encode(text.encode()).decode()}

    assert get(endpoint, "/metrics")[0] == 401
    assert get(endpoint, "/metrics", header("prom:wrong"))[0] == 401
    assert get(endpoint, "/metrics", header("nobody:"))[0] == 401
    assert get(endpoint, "/metrics", {"Authorization": "Basic ###"})[0] == 401
    assert get(endpoint, "/metrics", header("prom:s3cret:with colon"))[0] == 200
    assert get(endpoint, "/healthz")[0] == 200


@pytest.mark.parametrize(("text", "mode", "words"), [("a:b", 0o644, "chmod 600"), ("ab", 0o600, "user:password")])
def test_bad_password_files(serve, tmp_path, text, mode, words):
    users = tmp_path / "users"
    users.write_text(text)
    users.chmod(mode)
    with pytest.raises(ConfigError, match=words):
        serve(basic_auth_file=str(users))


def test_tls_with_client_certificates(serve, tmp_path):
    key, cert = tmp_path / "key.pem", tmp_path / "cert.pem"
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-keyout", key, "-out", cert, "-days", "2",
         "-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1"],
        check=True, capture_output=True,
    )  # fmt: skip
    endpoint = serve(certificate=str(cert), key=str(key), client_ca=str(cert))
    trusting = ssl.create_default_context(cafile=str(cert))
    with pytest.raises((ssl.SSLError, ConnectionError, http.client.HTTPException)):
        get(endpoint, "/metrics", context=trusting)
    trusting.load_cert_chain(cert, key)
    assert get(endpoint, "/metrics", context=trusting)[0] == 200


def test_silent_clients_do_not_block_others(serve):
    endpoint = serve()
    silent = [socket.create_connection(("127.0.0.1", endpoint.port)) for _ in range(MAX_CLIENTS - 1)]
    try:
        assert get(endpoint, "/healthz")[0] == 200
    finally:
        for client in silent:
            client.close()


def test_address_in_use_is_a_sentence(serve):
    port = serve().port
    with pytest.raises(ConfigError, match="choose another address"):
        Endpoint(MetricsSection(listen=f"127.0.0.1:{port}"), CollectorRegistry(), dict, dict)
