"""An answer over loopback that comes piece by piece, and a client in a cgroup that reads it whole, in some way.

`python tests/native/trickle.py CGROUP PORT BYTES HOW` is the client; `run` starts it and answers.
"""

import os
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

PIECES, PIECE_BYTES, GAP_S = 10, 1000, 0.02
ANSWER_BYTES = PIECES * PIECE_BYTES


def _at_once(connection, size):
    return connection.recv(size, socket.MSG_WAITALL)


def _at_low_water(connection, size):
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, size)
    return connection.recv(size)


def _after_looking(connection, size):
    while len(connection.recv(size, socket.MSG_PEEK)) < size:
        time.sleep(GAP_S / 2)
    return connection.recv(size)


def _to_the_end(connection, size):
    return connection.recv(size + 1, socket.MSG_WAITALL)


WAYS = {"waitall": _at_once, "lowat": _at_low_water, "peek": _after_looking, "end": _to_the_end}


def run(server, cgroup, how):
    """One request and its answer."""
    answering = threading.Thread(target=_answer, args=(server,))
    answering.start()
    port = server.getsockname()[1]
    subprocess.run([sys.executable, __file__, cgroup, str(port), str(ANSWER_BYTES), how], check=True, timeout=60)
    answering.join()


def _answer(server):
    connection, _ = server.accept()
    with connection:
        connection.recv(3)
        for _ in range(PIECES):
            connection.sendall(b"a" * PIECE_BYTES)
            time.sleep(GAP_S)


def main(cgroup, port, size, how):
    Path(cgroup, "cgroup.procs").write_text(str(os.getpid()))
    with socket.create_connection(("127.0.0.1", int(port))) as connection:
        connection.sendall(b"GET")
        assert len(WAYS[how](connection, int(size))) == int(size)


if __name__ == "__main__":
    main(*sys.argv[1:])
