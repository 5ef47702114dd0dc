"""Sums over connections that come and go, and the bound on what is kept."""

from bpf import link_state
from bpf.link_state import Connection, Links
from bpf.samples import LinkState, ObjectKey

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
