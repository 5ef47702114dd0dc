"""The helper that reads ahead, without processes to look at: how often it looks."""

import socket
import threading
import time
from itertools import pairwise

import pytest

from agent.rearrange_helper import Helper, Target


@pytest.fixture
def helper():
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    made = Helper(theirs, 1 << 20)
    yield made
    ours.close()
    theirs.close()


def test_it_rests_as_long_as_a_look_takes(helper, monkeypatch):
    """Hundreds of processes with hundreds of files each take longer to look at than the time between two looks."""
    looks, looked = [], threading.Event()

    def look(_target, _now):
        began = time.monotonic()
        time.sleep(0.1)
        looks.append((began, time.monotonic()))
        if len(looks) == 4:
            looked.set()

    monkeypatch.setattr(helper, "_serve", look)
    helper._targets = {7: Target(7, "/sys/fs/cgroup/job", frozenset({"8:0"}), 1e6, 0)}
    helper._renewed = time.monotonic() + 3600  # its lease does not end
    thread = threading.Thread(target=helper.run, daemon=True)
    thread.start()
    try:
        assert looked.wait(30)
    finally:
        helper._agent.shutdown(socket.SHUT_RDWR)
        thread.join(30)
    for (began, ended), (again, _) in pairwise(looks):
        assert again - ended >= 0.99 * (ended - began)
