"""Sums over connections that come and go, the bound on what is kept, and answers of netlink that make no sense."""

import errno
import struct
import time

import pytest
from pyroute2.netlink.exceptions import NetlinkDecodeError, NetlinkError

from bpf import link_state
from bpf.link_state import Connection, LinkProbe, Links, interface_packets, read_connections
from bpf.net_namespaces import StrandedError
from bpf.samples import LinkState, ObjectKey, ProbeState

HERE, THERE = ObjectKey(7, "192.0.2.1:443"), ObjectKey(7, "192.0.2.2:443")


def test_connections_of_one_endpoint_are_one_link():
    seen = Links().update([Connection(HERE, 1, 100, 0), Connection(HERE, 2, 300, 2), Connection(THERE, 3, 50, 0)])
    assert seen == {HERE: LinkState(2, 200_000, 2), THERE: LinkState(1, 50_000, 0)}


def test_what_was_sent_again_only_grows():
    links = Links()
    steps = (
        [Connection(HERE, 1, 100, 3)],
        [Connection(HERE, 1, 100, 5), Connection(HERE, 2, 100, 1)],
        [Connection(HERE, 2, 100, 1)],
        [],
        [Connection(HERE, 4, 100, 2)],
    )
    assert [links.update(connections)[HERE].retransmits for connections in steps] == [3, 6, 6, 6, 8]


def test_endpoints_that_changed_are_forgotten(monkeypatch):
    monkeypatch.setattr(link_state, "_MAX_KEYS", 2)
    links = Links()
    links.update([Connection(HERE, 1, 100, 3)])
    links.update([Connection(THERE, 2, 100, 0)])
    found = links.update([Connection(ObjectKey(7, "192.0.2.3:443"), 3, 100, 0), Connection(THERE, 2, 100, 0)])
    assert HERE not in found
    assert len(found) == 2


def test_counters_that_go_back_take_nothing_away():
    links = Links()
    steps = ([Connection(HERE, 1, 100, 5)], [Connection(HERE, 1, 100, 2)], [Connection(HERE, 1, 100, 3)])
    assert [links.update(connections)[HERE].retransmits for connections in steps] == [5, 5, 6]


def test_the_same_number_in_two_namespaces_is_two_connections():
    links = Links()
    both = [Connection(HERE, 1, 100, 3), Connection(THERE, 1, 100, 4, namespace=9)]
    assert links.update(both)[THERE].retransmits == 4
    assert links.update(both)[HERE].retransmits == 3


def test_what_is_in_a_namespace_that_was_not_read_is_unknown_and_goes_on_later():
    links = Links()
    near, far = Connection(HERE, 1, 100, 3), Connection(THERE, 2, 100, 4, namespace=9)
    links.update([near, far])
    for _ in range(2):
        assert links.update([near], unread=[9]) == {HERE: LinkState(1, 100_000, 3), THERE: LinkState(None, None, 4)}
    assert links.update([near, far._replace(retransmits=6)])[THERE].retransmits == 6
    assert links.update([near])[THERE] == LinkState(0, None, 6)


def test_ten_thousand_connections_are_one_look():
    links = Links()
    many = [Connection(ObjectKey(at % 100, f"192.0.2.1:{at % 50 + 1}"), at, 100, 1) for at in range(10_000)]
    began = time.thread_time()
    found = [links.update(many) for _ in range(3)][-1]
    assert time.thread_time() - began < 3.0
    assert sum(one.connections for one in found.values()) == sum(one.retransmits for one in found.values()) == 10_000


class Message(dict):
    """As pyroute2 gives it: fields, and attributes by name."""

    def __init__(self, attributes, **fields):
        super().__init__(fields)
        self.get_attr = attributes.get


def socket_message(address, port=443, **attributes):
    info = {"INET_DIAG_INFO": {"tcpi_rtt": 7, "tcpi_total_retrans": 1}, "INET_DIAG_CGROUP_ID": 7}
    return Message(info | attributes, idiag_dport=port, idiag_dst=address, idiag_cookie=1)


@pytest.mark.parametrize(
    ("address", "endpoint"),
    [
        ("192.0.2.1", "192.0.2.1:443"),
        ("::ffff:192.0.2.1", "192.0.2.1:443"),
        ("::ffff:c000:201", "192.0.2.1:443"),
        ("::ffff:0:0:1", "[::ffff:0:0:1]:443"),
        ("::192.0.2.1", "[::c000:201]:443"),
        ("2001:DB8:0:0::1", "[2001:db8::1]:443"),
        ("::", "[::]:443"),
        ("0.0.0.0", "0.0.0.0:443"),
    ],
)
def test_odd_addresses(monkeypatch, address, endpoint):
    monkeypatch.setattr(
        link_state, "_sockets", lambda _ports: iter([socket_message(address), socket_message(address, 0)])
    )
    assert [one.key for one in read_connections([443])] == [ObjectKey(7, endpoint)]


def test_endpoints_are_compared_by_what_they_mean():
    probe = LinkProbe(["*:0443", "[::ffff:192.0.2.7]:80"], look=lambda _ports: iter(()), packets=dict)
    assert probe._is_wanted("192.0.2.1:443")
    assert probe._is_wanted("[2001:db8::1]:443")
    assert probe._is_wanted("192.0.2.7:80")
    assert not probe._is_wanted("192.0.2.8:80")


def test_sockets_without_what_is_wanted(monkeypatch):
    """Those that are being closed have no information, and old kernels tell no cgroup."""
    messages = [socket_message("::1", INET_DIAG_INFO=None), socket_message("::1", INET_DIAG_CGROUP_ID=None)]
    monkeypatch.setattr(link_state, "_sockets", lambda _ports: iter(messages))
    assert [one.key.cgroup_id for one in read_connections([443])] == [0]


def watch(look, **more):
    """A probe that has looked twice."""
    looks = []

    def count(ports):
        looks.append(ports)
        return look(len(looks))

    probe = LinkProbe(["*:443"], look=count, packets=lambda: {"eth0": 1}, every_seconds=0.005, **more)
    probe.manage([7])
    deadline = time.monotonic() + 10.0
    while len(looks) < 4 and time.monotonic() < deadline:
        time.sleep(0.005)
    return probe


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (OSError(errno.ENOBUFS, "No buffer space available"), "No buffer space available"),
        (struct.error("unpack requires a buffer of 4 bytes"), "makes no sense: error"),
        (KeyError("tcpi_rtt"), "makes no sense: KeyError"),
        (UnicodeDecodeError("utf-8", b"\xff", 0, 1, "invalid start byte"), "makes no sense: UnicodeDecodeError"),
        (TypeError("no"), "makes no sense: TypeError"),
    ],
)
def test_a_look_that_fails_costs_a_count_and_its_values(error, words):
    """And nothing else: the next one that goes well is told."""

    def look(_number):
        raise error

    probe = watch(look)
    status = probe.status()
    assert (status.state, words in status.why) == (ProbeState.UNAVAILABLE, True)
    assert status.lost_events >= 3
    assert (probe.read(0).links, probe.read(0).interfaces) == ({}, {})
    probe.close()


def test_after_a_failure_the_probe_goes_on():
    def look(number):
        if number < 3:
            raise OSError(errno.ENOBUFS, "No buffer space available")
        return iter([Connection(HERE, 1, 100, 3)])

    probe = watch(look)
    deadline = time.monotonic() + 10.0
    while not probe.read(0).links and time.monotonic() < deadline:
        time.sleep(0.005)
    assert probe.read(0).links == {HERE: LinkState(1, 100_000, 3)}
    assert (probe.status().state, probe.status().lost_events) == (ProbeState.ATTACHED, 2)
    probe.close()


def test_netlink_refuses(monkeypatch):
    def refuse():
        raise NetlinkError(errno.EPERM)

    monkeypatch.setattr(link_state, "DiagSocket", refuse)
    with pytest.raises(OSError, match="refuses socket diagnostics") as caught:
        list(read_connections([443]))
    assert caught.value.errno == errno.EPERM


def test_namespaces_beyond_the_limit_are_unknown(tmp_path, monkeypatch):
    found = link_state.find_namespaces(tmp_path, [])._replace(processes={at: [at] for at in range(1, 71)})
    monkeypatch.setattr(link_state, "find_namespaces", lambda *_: found)
    monkeypatch.setattr(link_state, "own_namespace", lambda: 1)
    visits = []
    monkeypatch.setattr(link_state, "visited", lambda who: visits.append(who[0]) or Inside())
    probe = watch(lambda _number: iter(()), root=tmp_path)
    probe.close()
    assert set(visits) == set(range(2, 66))
    assert "in 5 of the jobs' network namespaces are unknown: there are 69" in probe.status().why


class Inside:
    """A visit without a journey."""

    def __enter__(self):
        return True

    def __exit__(self, *_):
        return None


def test_a_thread_that_cannot_come_home_ends(tmp_path, monkeypatch):
    def strand(_who):
        raise StrandedError("the way back is barred")

    found = link_state.find_namespaces(tmp_path, [])._replace(processes={1: [1], 2: [2]})
    monkeypatch.setattr(link_state, "find_namespaces", lambda *_: found)
    monkeypatch.setattr(link_state, "own_namespace", lambda: 1)
    monkeypatch.setattr(link_state, "visited", strand)
    probe = LinkProbe(["*:443"], look=lambda _ports: iter(()), packets=dict, every_seconds=0.005, root=tmp_path)
    probe.manage([7])
    probe._thread.join(timeout=10.0)
    assert not probe._thread.is_alive()
    status = probe.status()
    assert (status.state, status.why) == (ProbeState.UNAVAILABLE, "the way back is barred")
    probe.close()


def test_interfaces_with_odd_names_or_without_counters(monkeypatch):
    class Route:
        def __enter__(self):
            return self

        def __exit__(self, *_):
            return None

        def get_links(self):
            counters = {"rx_packets": 2, "tx_packets": 3}
            rows = [("eth0", counters), (b"\xff\xfe0", counters), ("lo", counters), ("eth1", None), (None, counters)]
            return [Message({"IFLA_IFNAME": name, "IFLA_STATS64": stats}) for name, stats in rows]

    monkeypatch.setattr(link_state, "IPRoute", Route)
    assert interface_packets() == {"eth0": 5, "\\xff\\xfe0": 5}


@pytest.mark.parametrize("fault", [NetlinkError(errno.EBUSY, "busy"), NetlinkDecodeError(KeyError("IFLA"))])
def test_interfaces_that_cannot_be_asked_for_are_no_end_of_the_loop(monkeypatch, fault):
    """None of pyroute2's errors is an OSError, and the loop asks once a second."""

    class Refusing:
        def __enter__(self):
            raise fault

        def __exit__(self, *_):
            """Never entered."""

    monkeypatch.setattr(link_state, "IPRoute", Refusing)
    with pytest.raises(OSError, match="makes no sense"):
        interface_packets()
