"""The helper that reads ahead, without processes to look at: how often it looks."""

import socket
import threading
import time

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
    looks = []

    def look(_target, _now):
        looks.append(time.monotonic())
        time.sleep(0.3)

    monkeypatch.setattr(helper, "_serve", look)
    helper._targets = {7: Target(7, "/sys/fs/cgroup/job", frozenset({"8:0"}), 1e6, 0)}
    helper._renewed = time.monotonic()
    threading.Thread(target=helper.run, daemon=True).start()
    time.sleep(1.6)
    helper._agent.shutdown(socket.SHUT_RDWR)
    assert 2 <= len(looks) <= 3
