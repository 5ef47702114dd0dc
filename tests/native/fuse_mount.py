"""Mounts of fuse_server.py for the tests of the FUSE probe."""

import contextlib
import json
import subprocess
import sys
from pathlib import Path

from tests.native import fuse_server

SERVER = Path(fuse_server.__file__)


class Mount:
    """A mounted file system; after the block its `log` says what the server was asked."""

    def __init__(self, where):
        self.where = where
        self.data = where / "data"
        self.log = []

    def served(self, opcode):
        """Of one kind: requests, bytes, and the time in the server, ns."""
        chosen = [(size, ns) for kind, size, ns in self.log if kind == opcode]
        return len(chosen), sum(size for size, _ in chosen), sum(ns for _, ns in chosen)


@contextlib.contextmanager
def mounted(where, size, seconds_per_read=0.0):
    where.mkdir()
    command = [sys.executable, SERVER, where, str(size), str(seconds_per_read)]
    server = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    mount = Mount(where)
    try:
        assert server.stdout.readline() == "mounted\n"
        yield mount
    finally:
        output, _ = server.communicate(timeout=30)
        where.rmdir()
    mount.log = json.loads(output)
