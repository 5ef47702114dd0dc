"""The guardian process: waits for the agent to die or to stand still, then puts everything back.

Small on purpose: started by the interpreter alone (no site-packages), it imports a handful of modules, all of them
before it says `ready`, since a container's files may be gone when it is needed. It holds one end of a socket pair:

* the agent sends `.` as a heartbeat; the guardian answers each with `.`;
* end of file means that the agent died, however it died. The guardian waits for the journal's lock: whoever holds it
  is a new agent that restores by itself. Once it has the lock it restores and ends;
* no heartbeat for longer than the limit means that the agent is stuck. The guardian says `restoring`, restores without
  touching the journal (the agent owns it and may wake up), says `restored` and goes on watching.

It ignores the signals that end a session or a service: it ends by itself once the agent has.
"""
# ruff: noqa: PTH103, PTH105, PTH123  # pathlib would cost a megabyte

from __future__ import annotations

import json
import os
import select
import signal
import socket
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from cgroup.errors import CgroupError, JournalBusy
from cgroup.files import KernelFiles
from cgroup.journal import read_journal
from cgroup.restore import RestoreReport, restore, restore_entries
from cgroup.tree import join

LOCK_WAIT_SECONDS = 30.0
RETRY_SECONDS = (0.2, 0.5, 1.0, 2.0, 5.0)
"""Pauses before lines that could not be restored are tried again."""


@dataclass(frozen=True, slots=True)
class Settings:
    """What the guardian is told at start, as JSON. `cgroup` is where it moves to ("" to stay), relative to the root."""

    journal: str
    root: str
    sys_root: str
    limit_seconds: float
    cgroup: str
    boot_id_path: str


class Guard:
    """The waiting and restoring; `clock` in monotonic seconds."""

    def __init__(self, settings: Settings, agent: socket.socket, clock: Callable[[], float] = time.monotonic) -> None:
        self._settings = settings
        self._agent = agent
        self._clock = clock
        agent.settimeout(0.0)

    def run(self) -> None:
        """Return when the agent is gone and everything is put back."""
        self.say(f"ready {os.getpid()} {resident_kilobytes()} {self._move()}")
        last_beat = self._clock()
        stuck = False
        while True:
            looked = self._clock()
            alive, beats = self._wait(max(0.01, min(self._settings.limit_seconds / 4, 1.0)))
            now = self._clock()
            if not alive:
                self._after_death()
                return
            # A guardian that itself stood still (frozen with the agent) knows nothing of the time it missed.
            if beats or now - looked > self._settings.limit_seconds / 2:
                last_beat, stuck = now, False
            elif now - last_beat > self._settings.limit_seconds:
                self._while_stuck(again=stuck)
                last_beat, stuck = self._clock(), True

    def _wait(self, seconds: float) -> tuple[bool, int]:
        """Return whether the agent's end is open, and how many heartbeats came."""
        select.select([self._agent], [], [], seconds)
        beats = 0
        try:
            while data := self._agent.recv(4096):
                beats += len(data)
        except BlockingIOError:
            if beats:
                self.say(".")
            return True, beats
        except OSError:
            return False, beats
        return False, beats

    def _after_death(self) -> None:
        for pause in (*RETRY_SECONDS, 0.0):
            try:
                report = self._restore_and_own_journal()
            except JournalBusy:
                log("a new agent holds the journal and restores by itself")
                return
            except (CgroupError, OSError) as error:
                log(f"cannot restore: {error}")
            else:
                log(f"the agent is gone: {report}")
                self._leave_report(report)
                if not report.errors:
                    return
            time.sleep(pause)

    def _restore_and_own_journal(self) -> RestoreReport:
        chosen = self._settings
        return restore(
            chosen.journal,
            chosen.root,
            chosen.sys_root,
            log=log,
            wait_seconds=LOCK_WAIT_SECONDS,
            boot_id_path=chosen.boot_id_path,
        )

    def _while_stuck(self, *, again: bool) -> None:
        """Restore; again and again while it lasts, since the agent may be let go for an instant and write."""
        try:
            entries = list(read_journal(self._settings.journal).entries.values())
        except CgroupError as error:
            log(str(error))
            return
        if not entries:  # also while the agent is still starting up
            return
        self.say("restoring")
        report = restore_entries(KernelFiles(self._settings.root, self._settings.sys_root), entries, _quietly)
        if not again or report.restored:
            log(f"no heartbeat for {self._settings.limit_seconds:g} s, so the agent is stuck: {report}")
            self._leave_report(report)
        self.say(f"restored {len(report.restored)} {len(report.errors)}")

    def _leave_report(self, report: RestoreReport) -> None:
        """Leave what was done beside the journal: the agent's next life shows it."""
        path = f"{self._settings.journal}.restored"
        with suppress(OSError):
            with open(path + ".new", "w", encoding="utf-8") as file:
                json.dump({"summary": str(report), "restored": [str(r) for r in report.restored]}, file)
            os.replace(path + ".new", path)

    def _move(self) -> str:
        """Move to a cgroup of its own, since a container's runtime kills what is left in the container's."""
        if not self._settings.cgroup:
            return "stayed"
        folder = join(self._settings.root, self._settings.cgroup)
        try:
            os.makedirs(folder, exist_ok=True)
            with open(f"{folder}/cgroup.procs", "w", encoding="ascii") as file:
                file.write("0")
        except OSError as error:
            return f"stayed: {error.strerror} ({folder})"
        return "moved"

    def say(self, text: str) -> None:
        """Tell the agent; one that does not listen or is gone does not matter here."""
        with suppress(OSError):
            self._agent.send(f"{text}\n".encode())


def log(text: str) -> None:
    """Write to standard error, which may be gone with the container."""
    with suppress(OSError, ValueError):
        sys.stderr.write(f"prefetchd guardian: {text}\n")
        sys.stderr.flush()


def _quietly(text: str) -> None:
    """What was restored while the agent is stuck stands in the report."""


def resident_kilobytes() -> int:
    """Return this process's resident memory."""
    try:
        with open("/proc/self/statm", encoding="ascii") as file:
            return int(file.read().split()[1]) * (os.sysconf("SC_PAGE_SIZE") // 1024)
    except (OSError, ValueError, IndexError):
        return 0


def harden() -> None:
    """Outlive what ends the agent: signals to the service, and the out-of-memory killer."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    for path, text in (("/proc/self/oom_score_adj", "-1000"), ("/proc/self/comm", "prefetchd-guard")):
        with suppress(OSError), open(path, "w", encoding="ascii") as file:
            file.write(text)


def main(arguments: list[str]) -> None:
    """Run as `guard FD SETTINGS`, FD being the guardian's end of the socket pair."""
    values: dict[str, Any] = json.loads(arguments[1])
    harden()
    os.chdir("/")
    Guard(Settings(**values), socket.socket(fileno=int(arguments[0]))).run()
