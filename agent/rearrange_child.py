"""How both helper processes live and end: in a cgroup of the agent's own, for as long as the agent's socket is open.

Nothing but the standard library. However the agent died, the process goes back to the cgroup that it came from, removes
the one that it was in, and ends.
"""
# ruff: noqa: PTH106, PTH123  # pathlib would cost a megabyte

from __future__ import annotations

import json
import os
import select
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from typing import Any

LEAVE_SECONDS = 2.0

Settings = Mapping[str, Any]


def live(
    arguments: list[str],
    name: str,
    oom_score: int,
    prepare: Callable[[], object],
    serve: Callable[[socket.socket, Settings], object],
) -> None:
    """Run as a module with the arguments FD SETTINGS; SETTINGS is JSON with folder and root (see `enter`, `leave`).

    `prepare` is called in the cgroup, `serve` until the agent is gone. Only a cgroup that cannot be entered is said to
    the agent and returns; else the process ends here.
    """
    settings = json.loads(arguments[1])
    ignore((signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2))
    for file_name, text in (("oom_score_adj", str(oom_score)), ("comm", name)):
        with suppress(OSError), open(f"/proc/self/{file_name}", "w", encoding="ascii") as file:
            file.write(text)
    agent = socket.socket(fileno=int(arguments[0]))
    try:
        came_from = enter(settings["folder"])
    except (OSError, StopIteration) as error:
        _tell(agent, {"problem": f"cannot enter {settings['folder']} ({error})"})
        return
    try:
        prepare()
        os.chdir("/")
        _tell(agent, {"ready": os.getpid()})
        serve(agent, settings)
    except Exception as error:  # noqa: BLE001 - whatever it is, the process ends below, and the agent says why
        sys.excepthook(type(error), error, error.__traceback__)
        _tell(agent, {"problem": f"the helper failed ({error!r})"})
    finally:
        leave(settings["folder"], settings["root"], came_from)
        sys.stderr.flush()
        os._exit(0)  # threads may wait for the disk; nobody waits for them


def _tell(agent: socket.socket, message: Settings) -> None:
    """Say something to the agent, if it is there."""
    with suppress(OSError):
        agent.send(json.dumps(message).encode())


def listen(agent: socket.socket, seconds: float, obey: Callable[[Mapping[str, Any]], object]) -> bool:
    """Wait for what the agent says, for so long, and do it; False once the agent is gone."""
    readable, _, _ = select.select([agent], [], [], seconds)
    while readable:
        try:
            data = agent.recv(1 << 20, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return True
        except OSError:
            return False
        if not data:
            return False
        obey(json.loads(data))
    return True


def ignore(numbers: Iterable[signal.Signals]) -> None:
    """Let these signals pass by."""
    for number in numbers:
        signal.signal(number, signal.SIG_IGN)


def enter(folder: str) -> str:
    """Move this process to its cgroup; returns the folder of the one that it came from, "" where it stays."""
    if not folder:
        return ""
    with open("/proc/self/cgroup", encoding="utf-8", errors="surrogateescape") as file:
        path = next(line.rstrip("\n")[3:] for line in file if line.startswith("0::"))
    with open(f"{folder}/cgroup.procs", "w", encoding="ascii") as file:
        file.write("0")
    return path


def leave(folder: str, root: str, path: str) -> None:
    """Go back, remove the cgroup. Whatever fails, the agent's next start removes it."""
    if not folder:
        return
    for back in (root.rstrip("/") + path, root):
        with suppress(OSError):
            with open(f"{back}/cgroup.procs", "w", encoding="ascii") as file:
                file.write("0")
            break
    deadline = time.monotonic() + LEAVE_SECONDS
    while time.monotonic() < deadline:
        try:
            os.rmdir(folder)
        except FileNotFoundError:
            return
        except OSError:  # a child that was killed is still on its way out
            time.sleep(0.02)
