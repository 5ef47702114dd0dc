"""What the kernel knows of the way to an object store: round trips and retransmissions per peer, packets per interface.

From netlink through pyroute2, imported with this module and not with the first question: that comes in the midst of a
pass. No BPF and no rights are needed. Only connections of the agent's own network namespace are seen.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any, NamedTuple

from pyroute2 import DiagSocket, IPRoute
from pyroute2.netlink.exceptions import NetlinkError

from bpf.object_store import ANY_PEER, format_endpoint, parse_endpoint
from bpf.samples import LinkState, ObjectKey, ProbeState, ProbeStatus, Sample

LOOK_EVERY_SECONDS = 5.0
BUSY_RATIO = 0.01
"""Most of a core that looking may take: with thousands of connections (75 µs each, measured) it comes less often."""

MAX_INTERFACES = 16
"""By name, in the order in which they appeared; what a host has more (one per container) is summed as `OTHERS`."""

OTHERS = "other"
_MAX_KEYS = 4096
_ESTABLISHED = 1 << 1  # enum in include/net/tcp_states.h
_INFO_EXTENSION = 1 << 1  # INET_DIAG_INFO, include/uapi/linux/inet_diag.h


class Connection(NamedTuple):
    """One established TCP connection: whose, its number (the socket's cookie), smoothed round trip, segments resent."""

    key: ObjectKey
    cookie: int
    round_trip_us: int
    retransmits: int


def read_connections(ports: Collection[int]) -> Iterator[Connection]:
    """Established TCP connections to these remote ports.

    The cgroup is the one that the socket was made in, not its managed ancestor; 0 before Linux 5.10. OSError where
    netlink cannot be asked.
    """
    for message in _sockets():
        port = int(message["idiag_dport"])
        info = message.get_attr("INET_DIAG_INFO") if port in ports else None
        if info:
            cgroup = int(message.get_attr("INET_DIAG_CGROUP_ID") or 0)
            key = ObjectKey(cgroup, _endpoint(message["idiag_dst"], port))
            yield Connection(key, int(message["idiag_cookie"]), int(info["tcpi_rtt"]), int(info["tcpi_total_retrans"]))


def _sockets() -> Iterator[Any]:
    try:
        with DiagSocket() as diag:
            diag.bind()
            for family in (socket.AF_INET, socket.AF_INET6):
                yield from diag.get_sock_stats(family=family, states=_ESTABLISHED, extensions=_INFO_EXTENSION)
    except NetlinkError as error:  # pyroute2's own tree
        raise OSError(error.code, f"netlink refuses socket diagnostics: {error}") from error


def _endpoint(address: str, port: int) -> str:
    """As the object-store probe writes it: IPv4 in IPv6 is IPv4."""
    bare = address.removeprefix("::ffff:")
    return f"[{bare}]:{port}" if ":" in bare else f"{bare}:{port}"


def interface_packets() -> dict[str, int]:
    """Packets received and sent since boot, by interface; the loopback is left out."""
    with IPRoute() as route:
        links = {link.get_attr("IFLA_IFNAME"): link.get_attr("IFLA_STATS64") for link in route.get_links()}
    return {name: int(stats["rx_packets"]) + int(stats["tx_packets"]) for name, stats in links.items() if name != "lo"}


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
        self._seen: dict[int, int] = {}
        self._totals: dict[ObjectKey, int] = {}

    def update(self, connections: Collection[Connection]) -> dict[ObjectKey, LinkState]:
        """Take in what is open now; a connection seen for the first time brings all that it sent again."""
        open_now: dict[ObjectKey, list[int]] = {}
        for one in connections:
            open_now.setdefault(one.key, []).append(one.round_trip_us)
            grown = one.retransmits - self._seen.get(one.cookie, 0)
            self._totals[one.key] = self._totals.pop(one.key, 0) + grown  # to the end: the last seen is dropped last
        self._seen = {one.cookie: one.retransmits for one in connections}
        while len(self._totals) > _MAX_KEYS:
            del self._totals[next(iter(self._totals))]
        return {
            key: LinkState(len(us := open_now.get(key, [])), sum(us) * 1000 // len(us) if us else None, total)
            for key, total in self._totals.items()
        }


class LinkProbe:
    """Looks every few seconds, in a thread of its own, while a cgroup is managed: a look takes milliseconds.

    `endpoints` as of the object-store probe. `links` of its sample are by the cgroup that a socket was made in, which
    may be below the managed one.
    """

    name = "links"

    def __init__(
        self,
        endpoints: Collection[str] = ANY_PEER,
        *,
        look: Callable[[Collection[int]], Iterator[Connection]] = read_connections,
        packets: Callable[[], Mapping[str, int]] = interface_packets,
        every_seconds: float = LOOK_EVERY_SECONDS,
    ) -> None:
        self._ports = frozenset(parse_endpoint(endpoint)[1] for endpoint in endpoints)
        self._everywhere = frozenset(endpoint[2:] for endpoint in endpoints if endpoint.startswith("*:"))
        self._exact = frozenset(format_endpoint(*parse_endpoint(endpoint)) for endpoint in endpoints)
        self._look, self._packets, self._every = look, packets, every_seconds
        self._found = Sample(0)
        self._why = ""
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def status(self) -> ProbeStatus:
        """Attached, or unavailable where netlink cannot be asked."""
        state = ProbeState.UNAVAILABLE if self._why else ProbeState.ATTACHED
        return ProbeStatus(self.name, state, self._why)

    def manage(self, cgroup_ids: Collection[int]) -> None:
        """Begin to look with the first cgroup, end with the last."""
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
                found = links.update([one for one in self._look(self._ports) if self._is_wanted(one.key.endpoint)])
                self._found, self._why = Sample(0, links=found, interfaces=bounded(self._packets())), ""
            except OSError as error:
                self._found, self._why = Sample(0), f"netlink cannot be asked: {error.strerror or error}"
            pause = max(self._every, (time.thread_time() - began) / BUSY_RATIO)

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
