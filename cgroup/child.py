"""A child process that needs nothing but the standard library and this project, tied to its parent by a socket."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

_SOURCE = str(Path(__file__).resolve().parent.parent)


class Child:
    """Runs `main([FD, SETTINGS])` of `module` in a session of its own; FD is the other end of `socket`.

    It is expected to end by itself once the socket, a pair of `kind`, closes. OSError where it cannot be started.
    """

    def __init__(self, module: str, settings: Mapping[str, Any], kind: socket.SocketKind = socket.SOCK_STREAM) -> None:
        self.socket, theirs = socket.socketpair(socket.AF_UNIX, kind)
        program = f"import sys; sys.path.insert(0, sys.argv[1]); from {module} import main; main(sys.argv[2:])"
        # -I -S: no site-packages, no user site, no environment: nothing but the standard library and this project.
        command = [sys.executable, "-I", "-S", "-c", program, _SOURCE, str(theirs.fileno()), json.dumps(settings)]
        try:
            self._process = subprocess.Popen(
                command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL, start_new_session=True
            )
        except OSError:
            self.socket.close()
            raise
        finally:
            theirs.close()

    @property
    def pid(self) -> int:
        """Its process id, also when it has ended."""
        return self._process.pid

    @property
    def exit_code(self) -> int | None:
        """What it ended with (negative: a signal), None while it runs."""
        return self._process.poll()

    def let_go(self, seconds: float) -> None:
        """Close the socket and wait so long for it to end by itself."""
        self.socket.close()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(seconds)

    def end(self, seconds: float | None = None) -> None:
        """Kill it where it still runs, wait (so long: one that waits for a disk takes its time), close the socket."""
        if self._process.poll() is None:
            self._process.kill()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(seconds)
        self.socket.close()
