"""Tells the service manager how the agent is (sd_notify); silent where there is none."""

from __future__ import annotations

import os
import socket


def notify(message: str) -> None:
    """Send one message such as `READY=1` to $NOTIFY_SOCKET; never raises and never blocks."""
    path = os.environ.get("NOTIFY_SOCKET", "")
    if not path:
        return
    address = "\0" + path[1:] if path.startswith("@") else path
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK) as channel:
            channel.sendto(message.encode(), address)
    except OSError:
        return
