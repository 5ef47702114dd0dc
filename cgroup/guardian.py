"""The agent's side of the guardian: start it, keep it told that the agent lives, replace it when it is gone."""

from __future__ import annotations

import logging
import socket
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from cgroup.child import Child
from cgroup.errors import GuardianError
from cgroup.journal import BOOT_ID_PATH, DEFAULT_PATH
from cgroup.tree import CGROUP_ROOT, join

_log = logging.getLogger(__name__)

_START_SECONDS = 30.0  # a second or less, but the host's CPUs may have more to do
_RESTORE_SECONDS = 2.0
_AGAIN_SECONDS = 1.0  # between two starts of a guardian that keeps dying


class Watchman(Protocol):
    """What the enforcer needs to know of the guardian."""

    def beat(self) -> None:
        """Tell that the agent lives."""

    def take_restores(self) -> int:
        """Return how often the guardian put everything back since the last call; waits while it is at it."""


@dataclass(frozen=True, slots=True)
class GuardianStatus:
    """How the guardian is. `moved` tells whether it left the agent's cgroup; `note` why not, or what was wrong."""

    alive: bool
    pid: int
    resident_bytes: int
    moved: bool
    starts: int
    restores: int
    note: str = ""


class Guardian:
    """One guardian process at a time. `limit_seconds` without `beat` and it takes the agent for stuck."""

    def __init__(
        self,
        journal: str = DEFAULT_PATH,
        root: str = CGROUP_ROOT,
        sys_root: str = "/sys",
        *,
        limit_seconds: float = 5.0,
        cgroup: str = "",
        boot_id_path: str = BOOT_ID_PATH,
    ) -> None:
        self._settings = {
            "journal": str(journal),
            "root": str(root),
            "sys_root": str(sys_root),
            "limit_seconds": limit_seconds,
            "cgroup": cgroup,
            "boot_id_path": str(boot_id_path),
        }
        self._limit_seconds = limit_seconds
        self._child: Child | None = None
        self._unread = b""
        self._heard_at = 0.0
        self._unanswered_since: float | None = None
        self._tried_at = 0.0
        self._spawned_at = 0.0
        self._starts = 0
        self._restores = 0
        self._taken = 0
        self._restoring = False
        self._resident_kilobytes = 0
        self._moved = False
        self._note = ""

    def start(self) -> None:
        """Start it and wait until it is ready. Raises GuardianError with the reason."""
        self._spawn()
        while not self._resident_kilobytes:
            if trouble := self._trouble():
                self._drop()
                raise GuardianError(f"the guardian {trouble}; its messages are in the log.")
            self._listen(0.05)

    def _spawn(self) -> None:
        try:
            self._child = Child("cgroup.guard", self._settings)
        except OSError as error:
            raise GuardianError(f"the guardian cannot be started ({error}).") from error
        self._unread = b""
        self._restoring = False
        self._unanswered_since = None
        self._resident_kilobytes = 0
        self._spawned_at = time.monotonic()
        self._starts += 1

    def beat(self) -> None:
        """Tell that the agent lives; never blocks, never raises."""
        if self._child is None:
            return
        if self._unanswered_since is None:
            self._unanswered_since = time.monotonic()
        with suppress(OSError):
            self._child.socket.send(b".", socket.MSG_DONTWAIT)

    def take_restores(self) -> int:
        """Return how often it restored since the last call; where it is at it, wait until it is done."""
        self._listen(0.0)
        deadline = time.monotonic() + _RESTORE_SECONDS
        while self._restoring and time.monotonic() < deadline and self._alive():
            self._listen(0.05)
        new = self._restores - self._taken
        self._taken = self._restores
        return new

    def check(self) -> GuardianStatus:
        """Look after it: one that is dead or does not answer is replaced, and that is logged.

        Does not wait for the new one: it restores even where the agent dies before it is ready.
        """
        self._listen(0.0)
        trouble = self._trouble()
        if trouble and time.monotonic() - self._tried_at >= _AGAIN_SECONDS:
            self._tried_at = time.monotonic()
            self._note = f"the guardian {trouble}"
            _log.warning("%s; starting another", self._note)
            self._drop()
            try:
                self._spawn()
            except GuardianError as error:
                self._note = str(error)
                _log.error("%s", error)
        return self.status

    @property
    def status(self) -> GuardianStatus:
        """What is known without looking again."""
        pid = self._child.pid if self._child else 0
        resident_bytes = self._resident_kilobytes * 1024
        return GuardianStatus(self._alive(), pid, resident_bytes, self._moved, self._starts, self._restores, self._note)

    def _alive(self) -> bool:
        return self._child is not None and self._child.exit_code is None

    def _trouble(self) -> str:
        if self._child is None:
            return "does not run"
        pid, code = self._child.pid, self._child.exit_code
        if code is not None:
            return f"(pid {pid}) died with {code}"
        if not self._resident_kilobytes:
            late = time.monotonic() - self._spawned_at > _START_SECONDS
            return f"(pid {pid}) was not ready after {_START_SECONDS:.0f} s" if late else ""
        waiting = time.monotonic() - self._unanswered_since if self._unanswered_since is not None else 0.0
        # Twice the limit: where the agent itself was late, the guardian is not to blame.
        return f"(pid {pid}) does not answer" if waiting > 2 * self._limit_seconds else ""

    def _listen(self, seconds: float) -> None:
        """Take in what it said, waiting so long for a first word."""
        if self._child is None:
            return
        ours = self._child.socket
        ours.settimeout(seconds)
        with suppress(OSError):
            while data := ours.recv(4096):
                self._unread += data
                ours.settimeout(0.0)
        *lines, self._unread = self._unread.split(b"\n")
        for line in lines:
            self._hear(line.decode("utf-8", "replace").split())

    def _hear(self, words: list[str]) -> None:
        self._unanswered_since = None
        match words:
            case ["ready", _, kilobytes, moved, *why]:
                self._resident_kilobytes = int(kilobytes)
                self._moved = moved == "moved"
                self._note = " ".join(why)
                if self._note:
                    _log.warning("the guardian stays in the agent's cgroup and dies with it: %s", self._note)
            case ["restoring"]:
                self._restoring = True
            case ["restored", count, *_]:
                self._restoring = False
                self._restores += count != "0"

    def _drop(self) -> None:
        """End a guardian that is of no use. Not gently: it ignores everything else, and the agent is alive."""
        if self._child is not None:
            self._child.end()
            self._child = None

    def close(self) -> None:
        """Let it go, after the journal was closed: it puts back what is left and ends."""
        if self._child is not None:
            self._child.let_go(_START_SECONDS)
        self._drop()
        if self._moved:
            with suppress(OSError):
                Path(join(str(self._settings["root"]), str(self._settings["cgroup"]))).rmdir()
