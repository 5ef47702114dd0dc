"""What the kernel knows of the way to an object store: round trips and retransmissions per peer, packets per interface.

From netlink through pyroute2, imported with this module and not with the first question: that comes in the midst of a
pass. No BPF is needed, and no rights for the agent's own network namespace. A job's own (a pod's) is visited, which
takes CAP_SYS_ADMIN. Interfaces are those of the agent's namespace.
"""

from __future__ import annotations

import errno
import ipaddress
import itertools
import socket
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from pyroute2 import DiagSocket, IPRoute
from pyroute2.netlink.exceptions import NetlinkError

from bpf.endpoints import ANY_PEER, format_endpoint, parse_endpoint
from bpf.net_namespaces import StrandedError, find_namespaces, own_namespace, visited
from bpf.samples import LinkState, ObjectKey, ProbeState, ProbeStatus, Sample

LOOK_EVERY_SECONDS = 5.0
BUSY_RATIO = 0.01
"""Most of a core that looking may take: with thousands of connections (100 µs each, measured) it comes less often."""

MAX_NAMESPACES = 64
"""Besides the agent's own; the connections of what jobs have more are unknown, and the status says so."""

MAX_INTERFACES = 16
"""By name, in the order in which they appeared; what a host has more (one per container) is summed as `OTHERS`."""

OTHERS = "other"
_Answer = TypeVar("_Answer")
_MAX_KEYS = 4096
_ESTABLISHED = 1 << 1  # enum in include/net/tcp_states.h
_INFO_EXTENSION = 1 << 1  # INET_DIAG_INFO, include/uapi/linux/inet_diag.h


class Connection(NamedTuple):
    """One established TCP connection: whose, its number (the socket's cookie), smoothed round trip, segments resent.

    Numbers are unique in one network namespace (before Linux 5.12 in no more than that); 0 is the agent's own.
    """

    key: ObjectKey
    cookie: int
    round_trip_us: int
    retransmits: int
    namespace: int = 0


def read_connections(ports: Collection[int]) -> Iterator[Connection]:
    """Established TCP connections to these remote ports.

    The cgroup is the one that the socket was made in, not its managed ancestor; 0 before Linux 5.10. OSError where
    netlink cannot be asked.
    """
    for message in _sockets(ports):
        port = int(message["idiag_dport"])
        info = message.get_attr("INET_DIAG_INFO") if port in ports else None
        if info:
            cgroup = int(message.get_attr("INET_DIAG_CGROUP_ID") or 0)
            key = ObjectKey(cgroup, _endpoint(message["idiag_dst"], port))
            yield Connection(key, int(message["idiag_cookie"]), int(info["tcpi_rtt"]), int(info["tcpi_total_retrans"]))


def _sockets(ports: Collection[int]) -> Iterator[Any]:
    """One question for each port: the kernel leaves out the other sockets, and each that it tells costs 100 µs here."""
    try:
        with DiagSocket() as diag:
            diag.bind()
            for family, port in itertools.product((socket.AF_INET, socket.AF_INET6), ports):
                yield from diag.get_sock_stats(
                    family=family, states=_ESTABLISHED, extensions=_INFO_EXTENSION, dport=port
                )
    except NetlinkError as error:  # pyroute2's own tree
        raise OSError(error.code, f"netlink refuses socket diagnostics: {error}") from error


def _endpoint(address: str, port: int) -> str:
    """As the object-store probe writes it: IPv4 in IPv6 is IPv4."""
    known = ipaddress.ip_address(address)
    packed = known.packed if known.version == 6 else bytes(10) + b"\xff\xff" + known.packed
    return format_endpoint(packed, port)


def interface_packets() -> dict[str, int]:
    """Packets received and sent since boot, by interface; the loopback is left out.

    OSError where netlink cannot be asked or its answer makes no sense.
    """
    return _asked(_interface_packets)


def _interface_packets() -> dict[str, int]:
    with IPRoute() as route:
        return _packets(route.get_links())


def _packets(links: Iterable[Any]) -> dict[str, int]:
    """Any byte but `/` and white space may be in an interface's name, and one may come without counters."""
    found = {}
    for link in links:
        name, stats = link.get_attr("IFLA_IFNAME"), link.get_attr("IFLA_STATS64")
        if isinstance(name, bytes):
            name = name.decode(errors="backslashreplace")
        if name and name != "lo" and stats:
            found[name] = int(stats["rx_packets"]) + int(stats["tx_packets"])
    return found


def bounded(packets: Mapping[str, int], most: int = MAX_INTERFACES) -> dict[str, int]:
    """The first interfaces by name, the others as one sum.

    >>> bounded({"eth0": 5, "veth1": 1, "veth2": 2}, 1)
    {'eth0': 5, 'other': 3}
    """
    named = dict(list(packets.items())[:most])
    rest = sum(packets.values()) - sum(named.values())
    return named | ({OTHERS: rest} if len(packets) > most else {})


class Links:
    """What is known of each (cgroup, endpoint): its state, and retransmissions of connections come and gone."""

    def __init__(self) -> None:
        self._seen: dict[tuple[int, int], Connection] = {}
        self._totals: dict[ObjectKey, int] = {}

    def update(self, connections: Collection[Connection], unread: Collection[int] = ()) -> dict[ObjectKey, LinkState]:
        """Take in what is open now; a connection seen for the first time brings all that it sent again.

        How many are open to what had some in one of the `unread` namespaces is unknown, and it goes on where it was.
        """
        hidden = {at: one for at, one in self._seen.items() if one.namespace in unread}
        open_now: dict[ObjectKey, list[int]] = {}
        for one in connections:
            open_now.setdefault(one.key, []).append(one.round_trip_us)
            before = self._seen.get((one.namespace, one.cookie))
            grown = max(0, one.retransmits - (before.retransmits if before else 0))
            self._totals[one.key] = self._totals.pop(one.key, 0) + grown  # to the end: the last seen is dropped last
        self._seen = hidden | {(one.namespace, one.cookie): one for one in connections}
        while len(self._totals) > _MAX_KEYS:
            del self._totals[next(iter(self._totals))]
        unknown = {one.key for one in hidden.values()}
        return {
            key: LinkState(None, None, total) if key in unknown else _state(open_now.get(key, ()), total)
            for key, total in self._totals.items()
        }


def _state(round_trips_us: Collection[int], retransmits: int) -> LinkState:
    count = len(round_trips_us)
    return LinkState(count, sum(round_trips_us) * 1000 // count if count else None, retransmits)


def _asked(question: Callable[[], _Answer]) -> _Answer:
    """Netlink's answer; OSError also where it makes no sense, on which pyroute2 may raise anything."""
    try:
        return question()
    except OSError:
        raise
    except Exception as error:
        raise OSError(errno.EBADMSG, f"its answer makes no sense: {error!r}") from error


class LinkProbe:
    """Looks every few seconds, in a thread of its own, while a cgroup is managed: a look takes milliseconds.

    `endpoints` as of the object-store probe. `links` of its sample are by the cgroup that a socket was made in, which
    may be below the managed one. With `root`, where cgroup v2 is mounted, the network namespaces of the managed
    cgroups' processes are looked at too. What cannot be looked at is unknown, and counted in `lost_events`.
    """

    name = "links"

    def __init__(
        self,
        endpoints: Collection[str] = ANY_PEER,
        *,
        root: Path | None = None,
        look: Callable[[Collection[int]], Iterator[Connection]] = read_connections,
        packets: Callable[[], Mapping[str, int]] = interface_packets,
        every_seconds: float = LOOK_EVERY_SECONDS,
    ) -> None:
        self._ports = frozenset(parse_endpoint(endpoint)[1] for endpoint in endpoints)
        anywhere = [endpoint for endpoint in endpoints if endpoint.startswith("*:")]
        self._everywhere = frozenset(str(parse_endpoint(endpoint)[1]) for endpoint in anywhere)
        self._exact = frozenset(format_endpoint(*parse_endpoint(endpoint)) for endpoint in endpoints)
        self._root, self._look, self._packets, self._every = root, look, packets, every_seconds
        self._managed: frozenset[int] = frozenset()
        self._found = Sample(0)
        self._why = self._partly = ""
        self._failures = 0
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def status(self) -> ProbeStatus:
        """Attached, degraded where some namespace cannot be looked at, or unavailable where netlink cannot be asked."""
        state = ProbeState.UNAVAILABLE if self._why else ProbeState.DEGRADED if self._partly else ProbeState.ATTACHED
        return ProbeStatus(self.name, state, self._why or self._partly, lost_events=self._failures)

    def manage(self, cgroup_ids: Collection[int]) -> None:
        """Begin to look with the first cgroup, end with the last."""
        self._managed = frozenset(cgroup_ids)
        if cgroup_ids and self._thread is None:
            self._stop = threading.Event()
            self._thread = threading.Thread(target=self._run, args=(self._stop,), name=self.name, daemon=True)
            self._thread.start()
        elif not cgroup_ids:
            self.close()

    def _run(self, stop: threading.Event) -> None:
        links, pause = Links(), 0.0
        while not stop.wait(pause):
            began = time.thread_time()
            try:
                found = self._look_around(links)
                self._found, self._why = Sample(0, links=found, interfaces=bounded(_asked(self._packets))), ""
            except StrandedError as error:
                self._fail(str(error))
                return
            except OSError as error:
                self._fail(f"netlink cannot be asked: {error.strerror or error}")
            pause = max(self._every, (time.thread_time() - began) / BUSY_RATIO)

    def _fail(self, why: str) -> None:
        self._found, self._why = Sample(0), why
        self._failures += 1

    def _look_around(self, links: Links) -> dict[ObjectKey, LinkState]:
        """The agent's own namespace, whose failure is the probe's; then those of jobs, each of which may fail alone."""
        connections = self._wanted(0)
        others, why = self._others()
        unread = set(list(others)[MAX_NAMESPACES:])
        if unread:
            why = f"there are {len(others)}, and at most {MAX_NAMESPACES} are looked at"
        for namespace in others.keys() - unread:
            try:
                with visited(others[namespace]) as is_there:
                    connections += self._wanted(namespace) if is_there else []
            except OSError as error:
                unread.add(namespace)
                why = error.strerror or str(error)
        self._failures += len(unread)
        count = f"{len(unread) or 'some'} of the jobs' network namespaces"
        self._partly = f"connections in {count} are unknown: {why}" if why else ""
        return links.update(connections, unread)

    def _others(self) -> tuple[dict[int, list[int]], str]:
        if self._root is None:
            return {}, ""
        found = find_namespaces(self._root, self._managed)
        own = own_namespace()
        return {namespace: who for namespace, who in sorted(found.processes.items()) if namespace != own}, found.why

    def _wanted(self, namespace: int) -> list[Connection]:
        """Connections to the endpoints asked for, of the namespace that this thread is in."""
        found = _asked(lambda: list(self._look(self._ports)))
        return [one._replace(namespace=namespace) for one in found if self._is_wanted(one.key.endpoint)]

    def _is_wanted(self, endpoint: str) -> bool:
        return endpoint in self._exact or endpoint.rpartition(":")[2] in self._everywhere

    def read(self, now_ns: int) -> Sample:
        """What the last look found."""
        return Sample(now_ns, links=self._found.links, interfaces=self._found.interfaces)

    def close(self) -> None:
        """End the thread; harmless when repeated."""
        if self._thread is not None:
            self._stop.set()
            self._thread.join(timeout=5.0)
            self._thread, self._found = None, Sample(0)
