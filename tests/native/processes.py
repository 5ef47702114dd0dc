"""Processes that tests started, or that those have started: whether they live, and how they end."""

import time
from pathlib import Path


def alive(pid):
    """Whether a process is there and no zombie."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


def wait_for_end(pid, seconds=30.0):
    wait_until(lambda: not alive(pid), seconds, f"{pid} does not end")


def wait_until(condition, seconds=30.0, said="waited in vain"):
    """Look every now and then, with a deadline that a busy machine keeps as well."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, said
        time.sleep(0.02)
