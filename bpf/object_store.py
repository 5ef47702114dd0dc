"""The object-store probe: requests of the managed cgroups on TCP connections, with the program of object_store.c.

Works under TLS, since nothing that is sent is looked at. Ladder: fentry, then kprobe, then the socket tracepoints of
Linux 6.3. The first request on a TLS 1.3 connection shows its first byte early: session tickets come before the answer,
and with clients that take them before they ask (GnuTLS, seen with s3fs) they count as a request of their own.
"""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

from bpf.btf import BtfError
from bpf.decode import decode_object
from bpf.endpoints import ANY_PEER, format_endpoint, parse_endpoint
from bpf.loader import HISTOGRAM_HEADER, MEMORY_HEADER, Loader, ProbeError, Program
from bpf.owners import OWNER_HEADER, Owners
from bpf.reasons import Reason, failed
from bpf.samples import ObjectCounters, ObjectKey, ProbeState, ProbeStatus, Sample

SOURCE = Path(__file__).with_name("object_store.c")
TIERS = ("fentry", "kprobe", "tracepoint")
TLS_PORTS = frozenset({443})

_FIELDS = {
    "OFF_SK_FAMILY": "sock.__sk_common.skc_family",
    "OFF_SK_DPORT": "sock.__sk_common.skc_dport",
    "OFF_SK_DADDR": "sock.__sk_common.skc_daddr",
    "OFF_SK_V6_DADDR": "sock.__sk_common.skc_v6_daddr",
    "OFF_SK_PROTOCOL": "sock.sk_protocol",
    "OFF_SK_STATE": "sock.__sk_common.skc_state",
    "OFF_TCP_COPIED_SEQ": "tcp_sock.copied_seq",
    "OFF_TCP_RCV_NXT": "tcp_sock.rcv_nxt",
}
MAX_ENDPOINTS = 32
"""Of one cgroup; what it has more is counted by port, as `*:PORT`. A read costs 15 µs for each (measured)."""

_SLOTS = 8192
_CONNECTIONS = 65536
_PEERS = 1024
_PLAIN, _TLS = 1, 2


class ObjectStoreProbe:
    """Object-store counters per (cgroup, endpoint), of at most `MAX_ENDPOINTS` per cgroup by name.

    `endpoints` are `address:port`, `[address]:port` or `*:port`; ValueError quotes one that is none of these. On
    `tls_ports` the first exchange of a connection is taken for the handshake.
    """

    name = "object_store"

    def __init__(
        self,
        loader: Loader,
        *,
        endpoints: Collection[str] = ANY_PEER,
        tls_ports: Collection[int] = TLS_PORTS,
        tiers: Collection[str] = TIERS,
    ) -> None:
        peers = [parse_endpoint(endpoint) for endpoint in endpoints]
        self._program: Program | None = None
        self._owners: Owners | None = None
        self._tier = ""
        self._refusals: list[str] = []
        self._nothing = Reason()
        self._connections = 0
        macros = {"MAX_SLOTS": _SLOTS, "MAX_CONNECTIONS": _CONNECTIONS, "MAX_PEERS": _PEERS}
        macros["MAX_ENDPOINTS"] = MAX_ENDPOINTS
        try:
            macros |= loader.btf.offsets(_FIELDS)
            self._program = loader.load(SOURCE, macros, shared=[MEMORY_HEADER, HISTOGRAM_HEADER, OWNER_HEADER])
            self._owners = Owners(self._program)
            self._watch(self._program.map("peers"), peers, tls_ports)
            self._climb(self._program, tiers)
        except (ProbeError, BtfError) as error:
            self._nothing = failed(error, self._refusals)
            self._drop()

    @staticmethod
    def _watch(table: Any, peers: Collection[tuple[bytes, int]], tls_ports: Collection[int]) -> None:
        for address, port in peers:
            key = table.Key()
            key.address[:] = [int.from_bytes(address[at : at + 4], "little") for at in range(0, 16, 4)]
            key.port = socket.htons(port)
            table[key] = table.Leaf(_TLS if port in tls_ports else _PLAIN)

    def _climb(self, program: Program, tiers: Collection[str]) -> None:
        ladder: dict[str, Callable[[Program], None]] = {
            "fentry": _attach_fentry,
            "kprobe": _attach_kprobe,
            "tracepoint": _attach_tracepoints,
        }
        for tier in (name for name in TIERS if name in tiers):
            try:
                program.attach_raw_tracepoint("inet_sock_set_state", "raw_state")
                ladder[tier](program)
            except ProbeError as error:
                self._refusals.append(str(error))
                program.detach_all()
            else:
                self._tier = tier
                return
        raise ProbeError(f"no tier of {', '.join(tiers) or 'none'} works here")

    def status(self) -> ProbeStatus:
        """Attached in any tier: all see the same."""
        if self._program is None:
            return ProbeStatus(self.name, ProbeState.UNAVAILABLE, self._nothing.why, detail=self._nothing.detail)
        lost = int(self._program.map("objects_lost")[0].value)
        fill = max(len(self._program.map("objects")) / _SLOTS, self._connections / _CONNECTIONS)
        return ProbeStatus(self.name, ProbeState.ATTACHED, "", self._tier, lost, fill)

    def manage(self, cgroup_ids: Collection[int]) -> None:
        """Count these cgroups and what is below them, and no others."""
        if self._owners is None or self._program is None:
            return
        dropped = self._owners.replace(cgroup_ids)
        if not dropped:
            return
        self._connections = 0  # until the next read
        objects, connections = self._program.map("objects"), self._program.map("connections")
        endpoints = self._program.map("endpoints")
        for table, keys in (
            (endpoints, [key for key in endpoints if key.value in dropped]),
            (objects, [key for key in objects if key.cgroup in dropped]),
            (connections, [key for key, value in connections.items() if value.key.cgroup in dropped]),
        ):
            for key in keys:
                with contextlib.suppress(KeyError):
                    del table[key]

    def read(self, now_ns: int) -> Sample:
        """The counters as they stand; histogram and squares of a request follow when its connection goes on."""
        if self._program is None or self._owners is None:
            return Sample(now_ns)
        found: dict[ObjectKey, ObjectCounters] = {}
        for key, value in self._owners.entries(self._program.map("objects"), lambda key: int(key.cgroup)):
            address = b"".join(int(word).to_bytes(4, "little") for word in key.peer.address)
            port = socket.ntohs(key.peer.port)
            endpoint = format_endpoint(address, port) if any(address) else f"*:{port}"
            found[ObjectKey(key.cgroup, endpoint)] = decode_object(bytes(value))
        self._connections = sum(counters.open_connections for counters in found.values())  # to count them takes longer
        return Sample(now_ns, objects=found)

    def _drop(self) -> None:
        if self._program is not None:
            self._program.close()
        self._program = self._owners = None

    def close(self) -> None:
        """Detach and free."""
        self._drop()


def _attach_fentry(program: Program) -> None:
    program.attach_fentry("tcp_cleanup_rbuf")
    program.attach_fentry("tcp_sendmsg")


def _attach_kprobe(program: Program) -> None:
    program.attach_kprobe("tcp_cleanup_rbuf", "kprobe_tcp_cleanup_rbuf")
    program.attach_kprobe("tcp_sendmsg", "kprobe_tcp_sendmsg")


def _attach_tracepoints(program: Program) -> None:
    program.attach_raw_tracepoint("sock_recv_length", "raw_received")
    program.attach_raw_tracepoint("sock_send_length", "raw_sent")
