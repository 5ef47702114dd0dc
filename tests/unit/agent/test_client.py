"""What answers at the agent's address need not be an agent: no command hangs, breaks or repeats its words raw."""

import json
import socket
import threading
import time
from contextlib import suppress

import pytest

from agent.__main__ import main
from agent.client import AgentClient, AgentUnreachable

HEAD = b"HTTP/1.1 200 OK\r\nContent-Length: 100000\r\n\r\n"
ROWS = {"jobs": [], "devices": [], "probes": []}


@pytest.fixture
def answering():
    """Starts a server that says this to who asks: bytes, or pieces that come a tenth of a second after each other."""
    server = socket.create_server(("127.0.0.1", 0))

    def serve(pieces):
        with suppress(OSError):
            while True:
                client, _ = server.accept()
                with client, suppress(OSError):
                    client.recv(65536)
                    for piece in pieces:
                        client.sendall(piece)
                        time.sleep(0.1 if len(pieces) > 1 else 0)

    def start(*pieces):
        threading.Thread(target=serve, args=(pieces,), daemon=True).start()
        return f"http://127.0.0.1:{server.getsockname()[1]}"

    yield start
    server.close()


def whole(body):
    return b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body)


@pytest.mark.parametrize("pieces", [[HEAD] + [b" "] * 50, [b"HTTP/1.1 200 OK\r\n"] + [b"X: y\r\n"] * 50])
def test_an_answer_that_drips_is_given_up(answering, pieces):
    began = time.monotonic()
    with pytest.raises(AgentUnreachable, match=r"no whole answer in 1 s"):
        AgentClient(answering(*pieces), timeout_seconds=0.2).state()
    assert time.monotonic() - began < 4


@pytest.mark.parametrize(
    "body",
    [
        b"[" * 100_000,
        b"{}",
        b'{"jobs": 5, "devices": [], "probes": []}',
        b'{"jobs": ["a"], "devices": [], "probes": []}',
        b'{"time": ' + b"9" * 5000 + b"}",
    ],
)
def test_what_no_agent_says_is_told_as_such(answering, body):
    with pytest.raises(AgentUnreachable, match="answers something else than prefetchd does"):
        AgentClient(answering(whole(body))).state()


def test_where_no_thread_can_be_had_nobody_is_asked(monkeypatch):
    def refuse(_):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    with pytest.raises(AgentUnreachable, match=r"can't start new thread.*ulimit"):
        AgentClient("http://127.0.0.1:1").state()


@pytest.mark.parametrize("target", ["http://[::", "http://127.0.0.1:{port}/elsewhere", "file:///etc/hostname"])
def test_no_other_address_is_asked_instead(answering, tmp_path, target):
    """It would be shown the password."""
    password = tmp_path / "password"
    password.write_text("a:b")
    with socket.create_server(("127.0.0.1", 0)) as other:
        other.settimeout(0.2)
        head = f"HTTP/1.1 302 Found\r\nLocation: {target.format(port=other.getsockname()[1])}\r\n\r\n"
        with pytest.raises(AgentUnreachable, match="answers 302 Found; check --address"):
            AgentClient(answering(head.encode()), auth_file=str(password), timeout_seconds=1.0).state()
        with pytest.raises(TimeoutError):
            other.accept()


@pytest.mark.parametrize("line", [b"\x1b[31m" * 5000, b"HTTP/1.1 500 \x1b[31m" + b"x" * 60_000 + b"\r\n\r\n"])
def test_words_from_elsewhere_steer_no_terminal(answering, line):
    with pytest.raises(AgentUnreachable) as told:
        AgentClient(answering(line)).state()
    assert str(told.value).isprintable()
    assert len(str(told.value)) < 400


@pytest.mark.parametrize("command", [["top", "--once"], ["top", "--json"], ["explain", "a"]])
@pytest.mark.parametrize("jobs", [[{}], [{"job": "a"}], [{"job": "a", "pod": "", "namespace": "", "score": "x"}]])
def test_a_state_of_another_version_is_a_sentence(answering, capsys, command, jobs):
    url = answering(whole(json.dumps(ROWS | {"jobs": jobs}).encode()))
    assert main([*command, "--address", url]) in (0, 1)
    told = capsys.readouterr()
    assert told.out or "holds what this prefetchd cannot show" in told.err
