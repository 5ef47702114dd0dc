"""Link state on loopback, against the socket's own TCP_INFO and the kernel's interface counters."""

import ast
import contextlib
import ctypes
import socket
import struct
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from bpf.link_state import LinkProbe, interface_packets, read_connections
from bpf.net_namespaces import own_namespace, visited
from bpf.samples import LinkState, ObjectKey, ProbeState, ProbeStatus

pytestmark = pytest.mark.native

SO_ATTACH_FILTER, SO_DETACH_FILTER = 26, 27  # include/uapi/asm-generic/socket.h
TCP_INFO_TOTAL_RETRANS_AT = 100  # the 24th
TCP_INFO_RTT_AT = 68  # struct tcp_info, include/uapi/linux/tcp.h: 8 bytes of flags, then u32s; tcpi_rtt is the 16th


def mean_round_trip_ns(clients):
    """By the sockets' own TCP_INFO; an acknowledgement that comes late changes it."""
    rtts = [
        struct.unpack_from("=I", client.getsockopt(6, socket.TCP_INFO, 104), TCP_INFO_RTT_AT)[0] for client in clients
    ]
    return sum(rtts) * 1000 // len(rtts)


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


def until(condition):
    """Wait for the probe's thread."""
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline, "it does not come"
        time.sleep(0.02)


@pytest.fixture
def watching():
    made = []

    def begin(*endpoints, managed=(1,), **more):
        made.append(LinkProbe(endpoints, every_seconds=0.05, **more))
        made[-1].manage(managed)
        return made[-1]

    yield begin
    for probe in made:
        probe.close()


@pytest.mark.parametrize(
    ("family", "address", "shown"), [(socket.AF_INET, "127.0.0.1", "127.0.0.1"), (socket.AF_INET6, "::1", "[::1]")]
)
def test_connections_and_round_trips(watching, family, address, shown):
    with connected(family, address, 3) as (port, clients):
        probe = watching(f"*:{port}")
        until(lambda: probe.read(0).links)
        (key,) = probe.read(0).links
        assert isinstance(key, ObjectKey)
        assert key.endpoint == f"{shown}:{port}"
        until(lambda: probe.read(0).links[key] == LinkState(3, mean_round_trip_ns(clients), 0))
        assert probe.status().state is ProbeState.ATTACHED
    until(lambda: probe.read(0).links[key] == LinkState(0, None, 0))


def test_the_socket_belongs_to_the_cgroup_it_was_made_in(make_cgroup):
    cgroup = make_cgroup()
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        enter = 'echo $$ >"$0/cgroup.procs" && exec "$@"'
        talk = f"import socket; s = socket.create_connection(('127.0.0.1', {port})); s.recv(1)"
        client = subprocess.Popen(["sh", "-c", enter, cgroup, sys.executable, "-c", talk])
        accepted, _ = server.accept()
        with accepted:
            owners = {one.key.cgroup_id for one in read_connections([port])}
        client.wait()
    assert owners == {cgroup.stat().st_ino}


@contextlib.contextmanager
def deaf(receiver):
    """A socket whose kernel drops all that comes for it, by a filter that accepts nothing (socket(7))."""
    nothing = ctypes.create_string_buffer(struct.pack("HBBI", 0x06, 0, 0, 0))  # BPF_RET | BPF_K: keep 0 bytes
    program = struct.pack("HL", 1, ctypes.addressof(nothing))
    receiver.setsockopt(socket.SOL_SOCKET, SO_ATTACH_FILTER, program)
    yield
    receiver.setsockopt(socket.SOL_SOCKET, SO_DETACH_FILTER, 0)


def test_segments_sent_again_are_counted_while_connections_come_and_go(watching):
    """The truth is the socket's own TCP_INFO."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        probe = watching(f"127.0.0.1:{port}")
        total = 0
        for _ in range(2):
            with socket.create_connection(("127.0.0.1", port)) as client, server.accept()[0] as receiver:
                with deaf(receiver):
                    client.sendall(b"request")
                    until(lambda client=client: again(client) >= 2)
                receiver.recv(1000)
                total += again(client)
                until(lambda total=total: known(probe, "retransmits") == [total])
            until(lambda: known(probe, "connections") == [0])
        assert known(probe, "retransmits") == [total]


def known(probe, name):
    return [getattr(one, name) for one in probe.read(0).links.values()]


def again(client):
    """tcpi_total_retrans of a socket."""
    return struct.unpack_from("=I", client.getsockopt(6, socket.TCP_INFO, 104), TCP_INFO_TOTAL_RETRANS_AT)[0]


def test_other_ports_and_other_peers_are_left_out(watching):
    with connected(socket.AF_INET, "127.0.0.1", 1) as (port, _):
        assert list(read_connections([port - 1])) == []
        probe = watching(f"127.0.0.2:{port}")
        until(lambda: probe.read(0).interfaces)
        assert probe.read(0).links == {}


def test_it_looks_only_while_somebody_is_managed(watching):
    looks = []
    probe = watching("*:1", look=lambda _ports: iter(looks.append(1) or ()))
    until(lambda: len(looks) > 2)
    probe.manage([])
    seen = len(looks)
    time.sleep(0.2)
    assert len(looks) == seen
    assert probe.read(0).interfaces == {}


def test_a_kernel_that_refuses_is_told(watching):
    def refuse(_ports):
        raise PermissionError(1, "Operation not permitted")

    probe = watching("*:1", look=refuse)
    until(lambda: probe.status().state is ProbeState.UNAVAILABLE)
    assert "Operation not permitted" in probe.status().why
    assert (probe.read(0).links, probe.read(0).interfaces) == ({}, {})


def test_packets_agree_with_sysfs():
    names = list(interface_packets())
    before = {name: packets_by_sysfs(name) for name in names}
    seen = interface_packets()
    for name in names:
        assert before[name] <= seen[name] <= packets_by_sysfs(name)


def packets_by_sysfs(name):
    folder = Path("/sys/class/net") / name / "statistics"
    return sum(int((folder / f"{way}_packets").read_text()) for way in ("rx", "tx"))


def test_asking_imports_nothing():
    """The first question comes in the midst of a pass."""
    ask = "before = set(sys.modules); interface_packets(); [*read_connections([80])]; print(*set(sys.modules) - before)"
    program = f"import sys; from bpf.link_state import interface_packets, read_connections; {ask}"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "\n"


TALK = """
import os, pathlib, socket, sys
pathlib.Path(sys.argv[1], "cgroup.procs").write_text(str(os.getpid()))
server = socket.create_server(("127.0.0.1", 0))
client = socket.create_connection(server.getsockname())
accepted, _ = server.accept()
client.sendall(b"request" * 100)
accepted.recv(1000)
print(server.getsockname()[1], flush=True)
sys.stdin.read()
"""


@contextlib.contextmanager
def elsewhere(cgroup):
    """A process of this cgroup in a network namespace of its own, with a connection to itself: (process id, port)."""
    enter = 'ip link set lo up && exec "$@"'
    command = ["unshare", "--net", "sh", "-c", enter, "sh", sys.executable, "-c", TALK, cgroup]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        line = process.stdout.readline()
        assert line, "no network namespace can be made here"
        yield process.pid, int(line)
        process.communicate()


def namespaces_of_threads():
    found = set()
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(FileNotFoundError):  # it has just ended
            found.add((task / "ns/net").stat().st_ino)
    return found


def test_connections_in_a_jobs_own_network_namespace(watching, make_cgroup):
    """Beside those in the agent's own, for the container whose they are; a namespace that vanishes is no failure."""
    job = make_cgroup()
    container = make_cgroup(job)
    with elsewhere(container) as (process, port), connected(socket.AF_INET, "127.0.0.1", 2) as (own_port, _):
        assert Path(f"/proc/{process}/ns/net").stat().st_ino != own_namespace()
        assert list(read_connections([port])) == []
        probe = watching(f"*:{port}", f"*:{own_port}", root=job.parent, managed=[job.stat().st_ino])
        mine = ObjectKey(container.stat().st_ino, f"127.0.0.1:{port}")
        until(lambda: mine in probe.read(0).links)
        state = probe.read(0).links[mine]
        assert (state.connections, state.retransmits) == (1, 0)
        assert state.round_trip_ns > 0
        assert sorted(known(probe, "connections")) == [1, 2]
        assert probe.status() == ProbeStatus("links", ProbeState.ATTACHED)
        until(lambda: namespaces_of_threads() == {own_namespace()})
    until(lambda: probe.read(0).links[mine] == LinkState(0, None, 0))
    assert probe.status() == ProbeStatus("links", ProbeState.ATTACHED)


def test_namespaces_of_unmanaged_cgroups_are_not_visited(watching, make_cgroup):
    job, other = make_cgroup(), make_cgroup()
    with elsewhere(other) as (_, port):
        probe = watching(f"*:{port}", root=job.parent, managed=[job.stat().st_ino])
        until(lambda: probe.read(0).interfaces)
        assert probe.read(0).links == {}


def test_a_visit_ends_at_home_however_it_ends(make_cgroup):
    homes = []

    def visit(process):
        with contextlib.suppress(ZeroDivisionError), visited([2**30, process]) as is_there:
            homes.append((is_there, own_namespace()))
            raise ZeroDivisionError
        homes.append(own_namespace())
        with visited([2**30]) as is_there:  # no process can have this number
            homes.append((is_there, own_namespace()))

    with elsewhere(make_cgroup()) as (process, _):
        thread = threading.Thread(target=visit, args=[process])
        thread.start()
        thread.join()
        there, here = Path(f"/proc/{process}/ns/net").stat().st_ino, own_namespace()
    assert homes == [(True, there), here, (False, here)]


def test_a_namespace_that_may_not_be_entered_is_unknown(watching, make_cgroup, monkeypatch):
    """With its reason and a count; the agent's own is looked at all the same."""
    job = make_cgroup()

    def refuse(_namespace):
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr("bpf.net_namespaces._enter", refuse)
    with elsewhere(job) as (_, port), connected(socket.AF_INET, "127.0.0.1", 1) as (own_port, _):
        probe = watching(f"*:{port}", f"*:{own_port}", root=job.parent, managed=[job.stat().st_ino])
        until(lambda: probe.status().lost_events > 2)
        assert known(probe, "connections") == [1]
        status = probe.status()
        assert status.state is ProbeState.DEGRADED
        assert "in 1 of the jobs' network namespaces are unknown: Operation not permitted" in status.why


def test_odd_names_of_interfaces():
    """The kernel takes any bytes but `/`, `:` and white space; here for the loopback of a namespace of its own."""
    program = "import bpf.link_state as l; print(ascii(l.interface_packets()))"
    rename = 'ip link set lo name "$0" && exec "$@"'
    name = b"\xc3\xa9\xff\xf0x"
    command = ["unshare", "--net", "sh", "-c", rename, name, sys.executable, "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert ast.literal_eval(done.stdout) == {"\xe9\\xff\\xf0x": 0}
