"""The object-store probe with real clients against a real S3 server, over HTTP and TLS.

The clients are boto3, curl and both programs that are called s3fs: the Python library and the mount.

Ground truth: what the server logged is within what the probe saw, and that within what the client timed.
"""

import contextlib
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from bpf.fuse import FuseProbe
from bpf.object_store import ObjectStoreProbe
from bpf.samples import FuseKey
from tests.native import s3_client, workload
from tests.native.conftest import missing

pytestmark = pytest.mark.native

ROOT = Path(__file__).parents[2]
ENVIRONMENT = os.environ | {"PYTHONPATH": str(ROOT)}
SERVER = Path(s3_client.__file__).with_name("s3_server.py")
WAIT_S = 0.05


class Store:
    """The running server; after the block its `log` says what it served."""

    def __init__(self, process, scheme):
        self.process, self.scheme = process, scheme
        self.port = int(process.stdout.readline())
        self.url = f"{scheme}://127.0.0.1:{self.port}"
        self.object = f"{self.url}/{s3_client.BUCKET}/{s3_client.OBJECT}"

    def asked(self):
        """End the server: what it was asked for by readers as (method, bytes, ns, client's port)."""
        output, _ = self.process.communicate(timeout=30)
        return [entry for entry in json.loads(output) if entry[0] in ("GET", "HEAD")]


@pytest.fixture(scope="module")
def certificate(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tls")
    command = "openssl req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=localhost -keyout key.pem -out cert.pem"
    subprocess.run(command.split(), cwd=folder, check=True, capture_output=True)
    return folder / "cert.pem", folder / "key.pem"


@pytest.fixture(params=["http", "https"])
def store(request, certificate):
    command = [sys.executable, SERVER, str(WAIT_S), *(certificate if request.param == "https" else ())]
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=ENVIRONMENT
    )
    made = Store(process, request.param)
    tool = s3_client.client(made.url)
    with contextlib.closing(tool), pytest.warns() if request.param == "https" else contextlib.nullcontext():
        tool.create_bucket(Bucket=s3_client.BUCKET)
        body = os.urandom(s3_client.OBJECT_BYTES)
        tool.put_object(Bucket=s3_client.BUCKET, Key=s3_client.OBJECT, Body=body, ACL="public-read")
    yield made
    if process.poll() is None:
        process.communicate(timeout=30)


@pytest.fixture
def probe(loader, store):
    tls = [store.port] if store.scheme == "https" else []
    made = ObjectStoreProbe(loader, endpoints=[f"127.0.0.1:{store.port}"], tls_ports=tls)
    yield made
    made.close()


def only(probe):
    ((key, counters),) = probe.read(time.monotonic_ns()).objects.items()
    return key, counters


def once_closed(probe):
    """The counters once the server, too, has closed its side of every connection."""
    deadline = time.monotonic() + 60
    while (found := only(probe)[1]).open_connections and time.monotonic() < deadline:
        time.sleep(0.05)
    return found


def ports(served):
    return {port for *_, port in served}


def assert_between(counters, served, first_ns, last_ns):
    """The probe's times hold the server's and are held by the client's."""
    size, gets = sum(size for _, size, _, _ in served), sum(method == "GET" for method, *_ in served)
    assert counters.requests == len(served)
    assert size <= counters.bytes < 1.05 * size + 50_000
    assert sum(ns for _, _, ns, _ in served) <= counters.last_byte_ns <= last_ns * 1.02
    # Under TLS 1.3 a connection's session tickets come before its first answer.
    assert (gets - len(ports(served))) * WAIT_S * 1e9 <= counters.first_byte_ns <= first_ns


@pytest.mark.parametrize("connections", [1, 4])
@pytest.mark.parametrize("library", ["boto3", "s3fs"])
def test_python_clients(probe, store, make_cgroup, library, connections):
    if importlib.util.find_spec(library) is None:
        missing(f"{library} is not installed: run `make setup-test`")
    cgroup = make_cgroup()
    probe.manage([cgroup.stat().st_ino])
    client = subprocess.Popen(
        [sys.executable, s3_client.__file__, library, cgroup, store.url, "40", str(connections)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=ENVIRONMENT,
    )
    times = json.loads(client.stdout.readline())
    key, running = only(probe)
    client.communicate("done\n", timeout=30)
    ended = once_closed(probe)
    served = store.asked()
    assert key.endpoint == f"127.0.0.1:{store.port}"
    assert len(times) == sum(method == "GET" for method, *_ in served) == 40
    assert [size for _, _, size in times] == [s3_client.OBJECT_BYTES] * 40
    assert_between(running, served, *(sum(entry[at] for entry in times) for at in (0, 1)))
    assert running.open_connections == len(ports(served)) == connections, "they are kept alive"
    assert (ended.open_connections, sum(ended.histogram)) == (0, len(served))


@pytest.mark.parametrize("parallel", [(), ("--parallel", "--parallel-max", "4")])
def test_curl(probe, store, make_cgroup, parallel):
    cgroup = make_cgroup()
    probe.manage([cgroup.stat().st_ino])
    told = "%{time_starttransfer} %{time_total} %{num_connects} %{size_download}\\n"
    command = ["curl", "-sk", "--http1.1", *parallel, "-w", told]
    for _ in range(20):
        command += ["-o", "/dev/null", store.object]
    enter = 'echo $$ >"$0/cgroup.procs" && exec "$@"'
    done = subprocess.run(["sh", "-c", enter, cgroup, *command], capture_output=True, text=True, check=True)
    counters = once_closed(probe)
    served = store.asked()
    rows = [[float(word) for word in line.split()] for line in done.stdout.splitlines()]
    assert {row[3] for row in rows} == {s3_client.OBJECT_BYTES}
    assert_between(counters, served, *(sum(row[at] for row in rows) * 1e9 for at in (0, 1)))
    assert sum(row[2] for row in rows) == len(ports(served)) == (4 if parallel else 1)
    assert (counters.open_connections, sum(counters.histogram)) == (0, 20)


@contextlib.contextmanager
def mounted_by_s3fs(store, cgroup, folder):
    """The bucket mounted at a folder by s3fs, which runs in a cgroup of its own."""
    secret = folder.with_suffix(".secret")
    secret.write_text("test:test")
    secret.chmod(0o600)
    folder.mkdir()
    options = f"url={store.url},use_path_request_style,passwd_file={secret},no_check_certificate,ssl_verify_hostname=0"
    enter = 'echo $$ >"$0/cgroup.procs" && exec "$@"'
    daemon = subprocess.Popen(
        ["sh", "-c", enter, cgroup, "s3fs", s3_client.BUCKET, folder, "-f", "-o", options],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        deadline = time.monotonic() + 30
        while not os.path.ismount(folder):
            assert daemon.poll() is None, "s3fs does not mount"
            assert time.monotonic() < deadline, "s3fs does not mount in time"
            time.sleep(0.05)
        yield folder
    finally:
        subprocess.run(["fusermount", "-u", folder], check=False)
        daemon.wait(timeout=30)


def test_a_bucket_mounted_by_s3fs(loader, probe, store, make_cgroup, tmp_path):
    """The job's requests are to the file system, those to the store are its daemon's."""
    if not Path("/dev/fuse").exists() or shutil.which("s3fs") is None:
        missing("no FUSE in this kernel, or s3fs is not installed: run `make setup-test`")
    job, helper = make_cgroup(), make_cgroup()
    probe.manage([helper.stat().st_ino])
    fuse = FuseProbe(loader)
    fuse.manage([job.stat().st_ino])
    try:
        with mounted_by_s3fs(store, helper, tmp_path / "bucket") as folder:
            report = workload.run(job, "buffered", folder / s3_client.OBJECT, s3_client.OBJECT_BYTES // 6, 6)
            reads = fuse.read(time.monotonic_ns()).fuse[FuseKey(job.stat().st_ino, str(folder), "read")]
            key, counters = only(probe)
    finally:
        fuse.close()
    served = store.asked()
    assert report.bytes == s3_client.OBJECT_BYTES == reads.bytes
    assert WAIT_S * 1e9 <= reads.total_ns <= reads.requests * sum(report.times_ns), "a read waits for its GET"
    assert key.cgroup_id == helper.stat().st_ino
    # GnuTLS, unlike OpenSSL, may take a connection's session tickets before it asks: an exchange of their own.
    handshakes = len(ports(served)) if store.scheme == "https" else 0
    assert len(served) <= counters.requests <= len(served) + handshakes
    assert counters.bytes >= sum(size for _, size, _, _ in served) >= s3_client.OBJECT_BYTES
    assert counters.last_byte_ns >= sum(ns for _, _, ns, _ in served)
