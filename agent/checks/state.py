"""Where the agent keeps what it must undo: folder, free space, lock of another instance, kill switch, address."""

from __future__ import annotations

import fcntl
import os
import shutil
import socket
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from agent.checks.finding import Finding, failed, note, ok, unknown, warning
from agent.checks.host import Host
from agent.config import Config, split_address

JOURNAL_BYTES = 16 * 2**20
"""Free space wanted for the journal; a record of one cap is below 1 KiB."""


@dataclass(frozen=True, slots=True)
class StateFacts:
    """What was seen.

    `folder` is the nearest existing one at or above the state directory; `holder` the pid in a held lock (-1: held,
    pid unknown; None: nobody); `address_taken` says that something answers where the agent would listen.
    """

    directory: str
    folder: str
    writable: bool
    free_bytes: int
    holder: int | None
    holder_alive: bool
    lock_readable: bool
    kill_switch: str | None
    listen: str
    address_taken: bool


def gather(host: Host, config: Config) -> StateFacts:
    """Look at the folder and try the lock (shared, released at once) and the address."""
    section = config.enforcement
    folder = host.at(section.state_directory)
    while not folder.is_dir():
        folder = folder.parent
    holder, readable = lock_holder(host.at(section.state_directory) / "lock")
    return StateFacts(
        directory=section.state_directory,
        folder=str(folder),
        writable=os.access(folder, os.W_OK),
        free_bytes=shutil.disk_usage(folder).free,
        holder=holder,
        holder_alive=holder is not None and host.exists(f"/proc/{holder}"),
        lock_readable=readable,
        kill_switch=section.kill_switch_file if host.exists(section.kill_switch_file) else None,
        listen=config.metrics.listen,
        address_taken=_answers(config.metrics.listen),
    )


def lock_holder(path: Path) -> tuple[int | None, bool]:
    """(pid of the agent that holds the lock, -1 where the file names none, None where nobody holds it; readable?)."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return None, True
    except OSError:
        return None, False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        text = os.read(descriptor, 32).strip()
        return int(text) if text.isdigit() else -1, True
    finally:
        os.close(descriptor)
    return None, True


def _answers(listen: str) -> bool:
    host, port = split_address(listen)
    with suppress(OSError), socket.create_connection((host, port), timeout=0.5):
        return True
    return False


def is_held(host: Host, config: Config) -> bool:
    """Whether an agent holds the lock of this configuration's state directory, as far as that can be seen."""
    return lock_holder(host.at(config.enforcement.state_directory) / "lock")[0] is not None


def check(facts: StateFacts, *, answers: bool) -> Iterator[Finding]:
    """Judge the facts; `answers`: an agent was asked for its state, and told it."""
    yield _directory(facts)
    yield _instance(facts, answers=answers)
    yield _address(facts, answers=answers)
    yield _switch(facts)


def _directory(facts: StateFacts) -> Finding:
    if not facts.writable:
        evidence = f"{facts.folder} is not writable for this user"
        if facts.folder != facts.directory:
            evidence += f", and {facts.directory} must be made there"
        return unknown("state.directory", evidence, "Run the doctor as root: sudo prefetchd doctor")
    evidence = f"{facts.free_bytes / 2**20:,.0f} MiB free at {facts.folder}"
    if facts.folder != facts.directory:
        evidence += f" for {facts.directory}"
    if facts.free_bytes < JOURNAL_BYTES:
        fix = f"Free at least {JOURNAL_BYTES >> 20} MiB there: without a journal nothing may be enforced."
        return failed("state.directory", evidence, fix, "enforcing")
    return ok("state.directory", evidence)


def _instance(facts: StateFacts, *, answers: bool) -> Finding:
    if not facts.lock_readable:
        return unknown("state.instance", f"{facts.directory}/lock cannot be read", "Run the doctor as root.")
    if facts.holder is None and answers:
        fix = "Give the doctor the --config of that agent: what it says of this configuration is not about that one."
        return note("state.instance", f"an agent answers that keeps its state elsewhere than in {facts.directory}", fix)
    if facts.holder is None:
        return ok("state.instance", "no agent runs on this node")
    if facts.holder < 0 or not facts.holder_alive:
        return ok("state.instance", f"an agent holds {facts.directory}/lock from elsewhere, probably a container")
    return ok("state.instance", f"an agent runs as process {facts.holder}")


def _address(facts: StateFacts, *, answers: bool) -> Finding:
    if facts.address_taken and not answers and facts.holder is None and facts.lock_readable:
        evidence = f"something else answers at {facts.listen}"
        return failed("state.address", evidence, f"ss -ltnp 'sport = :{facts.listen.rpartition(':')[2]}' shows who; or "
                      "choose another metrics.listen.", "measuring")  # fmt: skip
    return ok("state.address", f"{facts.listen} {'is the running agent' if facts.address_taken else 'is free'}")


def _switch(facts: StateFacts) -> Finding:
    if facts.kill_switch:
        fix = f"rm {facts.kill_switch} when enforcement may go on"
        return warning("state.kill_switch", f"{facts.kill_switch} exists: enforce behaves as dry-run", fix)
    return ok("state.kill_switch", "not set")
