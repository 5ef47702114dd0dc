"""What the kernel knows of the way to an object store: round trips and retransmissions per peer, packets per interface.

From netlink through pyroute2, imported with this module and not with the first question: that comes in the midst of a
pass. No BPF and no rights are needed.
"""

from __future__ import annotations

import socket
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any

from pyroute2 import DiagSocket, IPRoute

from bpf.samples import ObjectKey

_ESTABLISHED = 1 << 1  # enum in include/net/tcp_states.h
_INFO_EXTENSION = 1 << 1  # INET_DIAG_INFO, include/uapi/linux/inet_diag.h


@dataclass(frozen=True, slots=True)
class LinkState:
    """Open connections of one cgroup to one endpoint: how many, mean smoothed round trip (ns), retransmitted segments.

    `retransmits` falls when a connection closes: it is the sum over those that are open.
    """

    connections: int
    round_trip_ns: int
    retransmits: int


def read_links(ports: Collection[int]) -> dict[ObjectKey, LinkState]:
    """Established TCP connections to these remote ports, by (cgroup, endpoint).

    The cgroup is the one that the socket was made in, not its managed ancestor; 0 before Linux 5.10. OSError where
    netlink cannot be asked.
    """
    found: dict[ObjectKey, list[tuple[int, int]]] = {}
    for message in _sockets():
        port = int(message["idiag_dport"])
        info = message.get_attr("INET_DIAG_INFO")
        if port not in ports or not info:
            continue
        key = ObjectKey(int(message.get_attr("INET_DIAG_CGROUP_ID") or 0), _endpoint(message["idiag_dst"], port))
        found.setdefault(key, []).append((int(info["tcpi_rtt"]), int(info["tcpi_total_retrans"])))
    return {
        key: LinkState(len(ends), sum(us for us, _ in ends) * 1000 // len(ends), sum(lost for _, lost in ends))
        for key, ends in found.items()
    }


def _sockets() -> Iterator[Any]:
    with DiagSocket() as diag:
        diag.bind()
        for family in (socket.AF_INET, socket.AF_INET6):
            yield from diag.get_sock_stats(family=family, states=_ESTABLISHED, extensions=_INFO_EXTENSION)


def _endpoint(address: str, port: int) -> str:
    """As the object-store probe writes it: IPv4 in IPv6 is IPv4."""
    bare = address.removeprefix("::ffff:")
    return f"[{bare}]:{port}" if ":" in bare else f"{bare}:{port}"


def interface_packets() -> dict[str, int]:
    """Packets received and sent since boot, by interface; the loopback is left out."""
    with IPRoute() as route:
        links = {link.get_attr("IFLA_IFNAME"): link.get_attr("IFLA_STATS64") for link in route.get_links()}
    return {name: int(stats["rx_packets"]) + int(stats["tx_packets"]) for name, stats in links.items() if name != "lo"}
