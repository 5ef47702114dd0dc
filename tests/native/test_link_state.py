"""Link state on loopback, against the socket's own TCP_INFO and the kernel's interface counters."""

import contextlib
import socket
import struct
import subprocess
import sys
from pathlib import Path

import pytest

from bpf.link_state import interface_packets, read_links
from bpf.samples import ObjectKey

pytestmark = pytest.mark.native

TCP_INFO_RTT_AT = 68  # struct tcp_info, include/uapi/linux/tcp.h: 8 bytes of flags, then u32s; tcpi_rtt is the 16th


@contextlib.contextmanager
def connected(family, address, count):
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(socket.create_server((address, 0), family=family))
        port = server.getsockname()[1]
        clients = []
        for _ in range(count):
            client = stack.enter_context(socket.create_connection((address, port)))
            accepted, _ = server.accept()
            stack.enter_context(accepted)
            client.sendall(b"request" * 100)
            accepted.recv(1000)
            clients.append(client)
        yield port, clients


@pytest.mark.parametrize(
    ("family", "address", "shown"), [(socket.AF_INET, "127.0.0.1", "127.0.0.1"), (socket.AF_INET6, "::1", "[::1]")]
)
def test_connections_and_round_trips(family, address, shown):
    with connected(family, address, 3) as (port, clients):
        found = read_links([port])
        rtts = [
            struct.unpack_from("=I", client.getsockopt(6, socket.TCP_INFO, 104), TCP_INFO_RTT_AT)[0]
            for client in clients
        ]
    ((key, state),) = found.items()
    assert isinstance(key, ObjectKey)
    assert key.endpoint == f"{shown}:{port}"
    assert (state.connections, state.retransmits) == (3, 0)
    assert state.round_trip_ns == sum(rtts) * 1000 // 3


def test_other_ports_are_left_out():
    with connected(socket.AF_INET, "127.0.0.1", 1) as (port, _):
        assert read_links([port - 1]) == {}


def test_packets_agree_with_sysfs():
    for name, packets in interface_packets().items():
        folder = Path("/sys/class/net") / name / "statistics"
        now = sum(int((folder / f"{way}_packets").read_text()) for way in ("rx", "tx"))
        assert 0 <= now - packets < 10_000


def test_asking_imports_nothing():
    """The first question comes in the midst of a pass."""
    ask = "before = set(sys.modules); interface_packets(); read_links([80]); print(*set(sys.modules) - before)"
    program = f"import sys; from bpf.link_state import interface_packets, read_links; {ask}"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "\n"
