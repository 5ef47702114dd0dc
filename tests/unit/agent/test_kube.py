"""Pod labels from an API server that is well, slow, strict, forgetful, broken, or away."""

import os
import subprocess
import threading
import time
from itertools import pairwise

import pytest

from agent import kube_client
from agent.kube import PROBE, KubeError, PodWatch, from_environment
from agent.kube_client import ApiServer
from bpf.samples import ProbeState
from tests.unit.agent.api_server import ApiServerStandIn, pod

TRAINING = {"prefetchd.io/training": "true"}


def eventually(condition, seconds=30.0):
    limit = time.monotonic() + seconds
    while time.monotonic() < limit:
        if condition():
            return True
        time.sleep(0.01)
    return bool(condition())


@pytest.fixture
def account(tmp_path):
    folder = tmp_path / "serviceaccount"
    folder.mkdir()
    (folder / "token").write_text("token-1\n")
    (folder / "namespace").write_text("prefetchd")
    return folder


@pytest.fixture
def server():
    stand_in = ApiServerStandIn()
    stand_in.put(pod("bert-0", "uid-1", labels=TRAINING, annotations={"prefetchd.io/weight": "200", "other": "x"}))
    stand_in.events.get()
    yield stand_in
    stand_in.close()


@pytest.fixture
def watch_of(account):
    watches = []

    def make(port, *, seconds=5.0, watch_seconds=60, grace_seconds=30.0, repeat=0.02):
        api = ApiServer(f"http://127.0.0.1:{port}", "n1", account, seconds, watch_seconds, grace_seconds, repeat)
        watch = PodWatch(api.connect, retry_seconds=(0.05, 0.2))
        watches.append(watch)
        watch.start()
        return watch

    yield make
    for watch in watches:
        watch.close()
    assert not [thread for thread in threading.enumerate() if thread.name == "pods"]


def test_pods_of_the_node_are_known_with_labels_and_own_annotations(server, watch_of):
    server.put(pod("elsewhere-0", "uid-9", node="n2"))
    server.events.get()
    watch = watch_of(server.port)
    assert watch.wait(30)
    known = watch("uid-1")
    assert (known.name, known.namespace, known.labels) == ("bert-0", "ml", TRAINING)
    assert known.annotations == {"prefetchd.io/weight": "200"}
    assert watch("uid-9") is None
    assert watch.status().state is ProbeState.ATTACHED
    assert server.asked(watch=False)[0]["path"] == "/api/v1/pods"


def test_changes_arrive_without_a_new_list(server, watch_of):
    watch = watch_of(server.port)
    assert watch.wait(30)
    server.put(pod("gpt-0", "uid-2"))
    assert eventually(lambda: watch("uid-2"))
    server.put(pod("gpt-0", "uid-2", labels=TRAINING), "MODIFIED")
    assert eventually(lambda: watch("uid-2").labels == TRAINING)
    server.put(pod("gpt-0", "uid-2"), "DELETED")
    assert eventually(lambda: watch("uid-2") is None)
    assert watch("uid-1")
    assert len(server.asked(watch=False)) == 1
    assert server.asked(watch=True)[0]["query"]["resourceVersion"] == "11"


def test_a_static_pod_is_known_by_the_uid_of_its_cgroup(server, watch_of):
    server.put(pod("etcd-n1", "uid-api", annotations={"kubernetes.io/config.hash": "0123456789abcdef"}))
    watch = watch_of(server.port)
    assert eventually(lambda: watch("0123456789abcdef"))
    assert watch("0123456789abcdef") == watch("uid-api")


def test_a_quiet_end_of_the_watch_is_taken_up_where_it_stood_and_not_in_a_tight_loop(server, watch_of):
    server.end_watches = True
    watch = watch_of(server.port, repeat=0.1)
    assert watch.wait(30)
    assert eventually(lambda: len(server.asked(watch=True)) >= 3)
    times = [request["at"] for request in server.asked(watch=True)]
    assert all(later - sooner >= 0.09 for sooner, later in pairwise(times))
    assert len(server.asked(watch=False)) == 1
    assert watch.status().state is ProbeState.ATTACHED


def test_gone_asks_for_a_new_list(server, watch_of):
    watch = watch_of(server.port)
    assert watch.wait(30)
    missed = pod("missed-0", "uid-3")
    server.pods["uid-3"] = missed
    server.forget_history()
    assert eventually(lambda: watch("uid-3"))
    assert watch.status().state is ProbeState.ATTACHED
    assert len(server.asked(watch=False)) == 2


@pytest.mark.parametrize(("code", "word"), [(401, "token"), (403, "list and watch"), (500, "500")])
def test_a_refusal_is_reported_and_got_over(server, watch_of, account, code, word):
    server.refuse = code
    watch = watch_of(server.port)
    assert eventually(lambda: word in watch.status().why)
    assert watch.status().state is ProbeState.UNAVAILABLE
    assert watch("uid-1") is None
    server.refuse = 0
    assert watch.wait(30)
    assert watch("uid-1")


def test_a_rotated_token_is_read_anew(server, watch_of, account):
    server.token = "token-2"
    watch = watch_of(server.port)
    assert eventually(lambda: "401" in watch.status().why)
    (account / "token").write_text("token-2")
    assert watch.wait(30)


def test_a_slow_server_does_not_hold_up_look_ups(server, watch_of):
    server.delay = 2.0
    watch = watch_of(server.port, seconds=1.0)
    begun = time.monotonic()
    assert watch("uid-1") is None
    assert time.monotonic() - begun < 0.5, "it waited for the answer, which may take a second"
    assert eventually(lambda: "did not answer in time" in watch.status().why)
    server.delay = 0.0
    assert watch.wait(30)


def test_a_restarted_server_is_found_again_and_pods_stay_known_meanwhile(watch_of):
    first = ApiServerStandIn()
    first.put(pod("bert-0", "uid-1", labels=TRAINING))
    first.events.get()
    watch = watch_of(first.port)
    assert watch.wait(30)
    first.close()
    assert eventually(lambda: watch.status().state is ProbeState.DEGRADED)
    assert "named by UID" in watch.status().why
    assert watch("uid-1").labels == TRAINING
    second = ApiServerStandIn(port=first.port)
    second.put(pod("gpt-0", "uid-2"))
    try:
        assert eventually(lambda: watch("uid-2"))
        assert watch("uid-1") is None
        assert watch.status().state is ProbeState.ATTACHED
    finally:
        second.close()


def test_a_connection_that_died_in_silence_is_noticed(server, watch_of):
    watch = watch_of(server.port, watch_seconds=0, grace_seconds=0.3)
    assert watch.wait(30)
    assert eventually(lambda: len(server.asked(watch=False)) >= 2)


def test_what_cannot_be_read_is_reported(server, watch_of):
    server.garbage = True
    watch = watch_of(server.port)
    assert eventually(lambda: "cannot be read" in watch.status().why)


@pytest.mark.parametrize(
    "wrong",
    [
        {"uid": None},
        {"uid": ["uid-9"]},
        {"name": None},
        {"name": 7},
        {"namespace": {"a": 1}},
        {"labels": {"a": 1}},
        {"labels": ["a"]},
        {"annotations": {"prefetchd.io/weight": 3}},
        {"annotations": {"kubernetes.io/config.hash": ["x"]}},
    ],
    ids=str,
)
@pytest.mark.parametrize("watched", [False, True], ids=["list", "watch"])
def test_a_pod_that_is_none_is_reported_and_got_over(server, watch_of, wrong, watched):
    """What is not text would end whoever makes a name or a label of it: the watch's thread, or the loop."""
    odd = pod("odd-0", "uid-9")
    odd["metadata"] |= wrong
    if not watched:
        server.pods["odd"] = odd
    watch = watch_of(server.port)
    if watched:
        assert watch.wait(30)
        server.events.put({"type": "ADDED", "object": odd})
    assert eventually(lambda: "cannot be read" in watch.status().why)
    server.pods.pop("odd", None)
    assert eventually(lambda: watch.status().state is ProbeState.ATTACHED)
    assert watch("uid-1").name == "bert-0"
    assert watch("uid-9") is None


def test_an_answer_without_an_end_is_reported_and_got_over(server, watch_of, monkeypatch):
    """A list, and a change: either would fill the memory."""
    monkeypatch.setattr(kube_client, "MOST_BYTES", 20_000)
    huge = pod("huge-0", "uid-9", annotations={"other": "x" * 30_000})
    server.pods["uid-9"] = huge
    watch = watch_of(server.port)
    assert eventually(lambda: "longer than 20000 bytes" in watch.status().why)
    server.pods.pop("uid-9")
    assert eventually(lambda: watch.status().state is ProbeState.ATTACHED)
    server.events.put({"type": "ADDED", "object": huge})
    assert eventually(lambda: "longer than 20000 bytes" in watch.status().why)
    assert eventually(lambda: watch.status().state is ProbeState.ATTACHED)
    for number in range(100):
        server.put(pod(f"small-{number}", f"uid-{number + 10}"))
    assert eventually(lambda: watch("uid-109") is not None), "many small changes have no end either, and may have none"


def test_more_pods_than_a_node_has_are_reported(server, watch_of, monkeypatch):
    monkeypatch.setattr(kube_client, "MOST_PODS", 3)
    for number in range(4):
        server.pods[number] = pod(f"more-{number}", f"uid-{number}")
    watch = watch_of(server.port)
    assert eventually(lambda: "more than 3 pods" in watch.status().why)
    assert server.asked(watch=False)[0]["query"]["limit"] == "50"


def test_no_service_account_is_reported(watch_of, server, account):
    (account / "token").unlink()
    watch = watch_of(server.port)
    assert eventually(lambda: "service account" in watch.status().why)
    assert watch.status().name == PROBE


def test_repeated_failures_wait_longer_each_time(monkeypatch):
    times, pauses = [], []

    def connect():
        times.append(time.monotonic())
        raise KubeError("away")

    watch = PodWatch(connect, retry_seconds=(0.04, 0.32))
    pause = watch._stop.wait
    monkeypatch.setattr(watch._stop, "wait", lambda seconds: pauses.append(seconds) or pause(seconds))
    watch.start()
    assert eventually(lambda: len(times) >= 6)
    watch.close()
    for full, seconds, (sooner, later) in zip((0.04, 0.08, 0.16, 0.32, 0.32), pauses, pairwise(times), strict=False):
        assert 0.5 * full <= seconds <= full
        assert later - sooner >= seconds


def test_a_node_without_kubernetes_has_no_watch(tmp_path, account):
    assert from_environment({}, account) is None
    assert from_environment({"KUBERNETES_SERVICE_HOST": "127.0.0.1", "NODE_NAME": "n1"}, tmp_path / "none") is None
    assert from_environment({"KUBERNETES_SERVICE_HOST": "127.0.0.1"}, account) is None


def test_inside_a_pod_the_server_is_asked_over_tls_with_its_own_authority(account, tmp_path):
    certificate = make_certificate(tmp_path)
    (account / "ca.crt").write_bytes((tmp_path / "ca.crt").read_bytes())
    stand_in = ApiServerStandIn(certificate=certificate)
    stand_in.put(pod("bert-0", "uid-1"))
    environment = {
        "KUBERNETES_SERVICE_HOST": "127.0.0.1",
        "KUBERNETES_SERVICE_PORT": str(stand_in.port),
        "NODE_NAME": "n1",
    }
    watch = from_environment(environment, account)
    watch.start()
    try:
        assert watch.wait(30), watch.status()
        assert watch("uid-1").name == "bert-0"
    finally:
        watch.close()
        stand_in.close()


def test_a_server_with_a_foreign_certificate_is_not_trusted(account, tmp_path):
    stand_in = ApiServerStandIn(certificate=make_certificate(tmp_path))
    api = ApiServer(f"https://127.0.0.1:{stand_in.port}", "n1", account)
    try:
        session = api.connect()
        with pytest.raises(KubeError, match="cannot be reached"):
            session.list()
        session.close()
    finally:
        stand_in.close()


def make_certificate(folder):
    """A certificate for 127.0.0.1, its own authority; returns the path of certificate and key in one file."""
    kind = ["-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2"]
    subject = ["-subj", "/CN=stand-in", "-addext", "subjectAltName=IP:127.0.0.1"]
    command = ["openssl", "req", *kind, *subject, "-keyout", "key.pem", "-out", "ca.crt"]
    subprocess.run(command, cwd=folder, check=True, capture_output=True, env={"PATH": os.environ["PATH"]}, timeout=60)
    both = folder / "both.pem"
    both.write_bytes((folder / "key.pem").read_bytes() + (folder / "ca.crt").read_bytes())
    return both
