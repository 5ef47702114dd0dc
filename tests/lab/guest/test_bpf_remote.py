"""The page-cache and object-store probes on a stock kernel, in the tiers that need functions to be traceable."""

import http.server
import mmap
import os
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from bpf.loader import Loader
from bpf.object_store import ObjectStoreProbe
from bpf.page_cache import PageCacheProbe
from bpf.samples import ProbeState
from tests.lab.disks import mounted
from tests.native import trickle, workload

pytestmark = pytest.mark.guest

MIB = 1 << 20
SIZE = 8 * MIB
TIERS = ["fentry", "kprobe"]
WAIT_S = 0.2


@pytest.fixture(scope="module")
def loader():
    with Loader() as made:
        yield made


@pytest.fixture(scope="module", params=TIERS)
def cache_probe(request, loader):
    made = PageCacheProbe(loader, tiers=[request.param])
    assert (made.status().state, made.status().tier) == (ProbeState.ATTACHED, request.param), made.status().why
    yield made
    made.close()


@pytest.mark.parametrize("kind", ["buffered", "mapped"])
@pytest.mark.parametrize("warm", [0, SIZE // 2, SIZE])
def test_misses_are_what_was_not_in_the_cache(cache_probe, cgroup, ssd, kind, warm):
    with mounted(ssd) as folder:
        path = workload.make_file(folder / "data", SIZE)
        Path("/proc/sys/vm/drop_caches").write_text("3")
        with path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_RANDOM)
            for at in range(0, warm, MIB):
                os.pread(file.fileno(), MIB, at)
        cache_probe.manage([cgroup.stat().st_ino])
        workload.run(cgroup, kind, path, 65536, SIZE // 65536)
        counters = cache_probe.read(time.monotonic_ns()).cache[cgroup.stat().st_ino]
    # The program of the process itself comes from a file system that the page cache knows too.
    assert 0.9 * SIZE <= counters.read_bytes < 3 * SIZE
    assert SIZE - warm <= counters.missed_bytes < SIZE - warm + 6 * MIB


def test_a_page_counts_once_though_its_fault_is_tried_again(cache_probe, cgroup, ssd):
    calls = SIZE // mmap.PAGESIZE // 2
    with mounted(ssd) as folder:
        path = workload.make_file(folder / "data", SIZE)
        Path("/proc/sys/vm/drop_caches").write_text("3")
        process = workload.start(cgroup, "apart", path, 2 * mmap.PAGESIZE, calls)
        cache_probe.manage([cgroup.stat().st_ino])
        workload.finish(process)
        counters = cache_probe.read(time.monotonic_ns()).cache[cgroup.stat().st_ino]
    assert calls * mmap.PAGESIZE <= counters.read_bytes < 1.5 * calls * mmap.PAGESIZE


class Store(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self):
        time.sleep(WAIT_S)
        self.send_response(200)
        self.send_header("Content-Length", "100000")
        self.end_headers()
        self.wfile.write(b"a" * 100_000)

    def log_message(self, *_):
        pass


@pytest.mark.parametrize("tier", TIERS)
def test_requests_to_a_store(loader, cgroup, tier):
    subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Store)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    endpoint = f"127.0.0.1:{server.server_address[1]}"
    probe = ObjectStoreProbe(loader, endpoints=[endpoint], tiers=[tier])
    assert probe.status().tier == tier, probe.status().why
    probe.manage([cgroup.stat().st_ino])
    client = Path(workload.__file__).with_name("http_client.py")
    subprocess.run([sys.executable, client, cgroup, f"http://{endpoint}/o", "4", "2"], input="", check=True, text=True)
    ((key, counters),) = probe.read(time.monotonic_ns()).objects.items()
    probe.close()
    server.shutdown()
    server.server_close()
    thread.join()
    assert key.endpoint == endpoint
    assert (counters.requests, sum(counters.histogram), counters.open_connections) == (4, 4, 0)
    assert counters.bytes > 400_000
    assert counters.first_byte_ns >= 4 * WAIT_S * 0.95e9


@pytest.mark.parametrize("how", trickle.WAYS)
@pytest.mark.parametrize("tier", TIERS)
def test_bytes_count_once_however_they_are_read(loader, cgroup, tier, how):
    subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
    with socket.create_server(("127.0.0.1", 0)) as server:
        probe = ObjectStoreProbe(loader, endpoints=[f"127.0.0.1:{server.getsockname()[1]}"], tiers=[tier])
        assert probe.status().tier == tier, probe.status().why
        probe.manage([cgroup.stat().st_ino])
        trickle.run(server, cgroup, how)
        (counters,) = probe.read(time.monotonic_ns()).objects.values()
        probe.close()
    assert (counters.requests, counters.bytes) == (1, trickle.ANSWER_BYTES)
