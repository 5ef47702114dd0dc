"""The agent's side of its helpers, the one that reads ahead and the one that moves files: cgroup, process, talk.

Nothing here blocks but `close`, which is for the agent's end.
"""

from __future__ import annotations

import json
import logging
import signal
import socket
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from math import isfinite
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar, Generic, NamedTuple, Protocol, TypeVar

from agent.rearrange.defragment import Mend
from agent.rearrange.files import processes_of
from agent.rearrange.window import LEAST_RATE, memory_budget_bytes
from cgroup.child import Child

log = logging.getLogger(__name__)

RENEW_SECONDS = 0.5
END_SECONDS = 2.0
OWN_BYTES = 32 << 20
"""What the helper itself needs of its memory limit, beside the pages that it reads ahead."""
CAP_HEADROOM = 1.25
"""The cap lies this much above the rate that the helper keeps to: a job that comes to a page whose request waits behind
a cap would wait with it."""


@dataclass(frozen=True, slots=True)
class Target:
    """A job to serve: its cgroup's path, its disks (maj:min) with what may be used of each (bytes/s, requests/s).

    `in_flight`: nothing more is asked of a disk that has so many requests in hand; 0 is as many as it takes.
    """

    job: int
    path: str
    rates: Mapping[str, float]
    requests: Mapping[str, float] = field(default_factory=dict)
    in_flight: int = 0


class Told(NamedTuple):
    """What the helper said last of one job: bytes since it started; `outstanding` is what is not used yet.

    `used` and `unused` begin at zero as well with each time that the job is served. `ahead_of` is what of `ahead` came
    from each disk (maj:min).
    """

    ahead: int = 0
    used: int = 0
    unused: int = 0
    outstanding: int = 0
    ahead_of: Mapping[str, int] = MappingProxyType({})


T = TypeVar("T")


class Served(Protocol[T]):
    """What the loop asks of a helper; a fake in tests."""

    problem: str
    told: dict[int, T]
    skips: dict[str, int]

    @property
    def pid(self) -> int:
        """0 where none runs."""

    @property
    def is_lost(self) -> bool:
        """Whether one was started and has ended by itself; until `serve` or `close` has taken that in."""

    def start(self) -> bool:
        """False, with `problem`, where it cannot run."""

    def serve(self, targets: Iterable[Target], now: float) -> bool:
        """False once it is gone."""

    def end(self) -> None:
        """Have it end; nobody waits for that."""

    def close(self) -> None:
        """End it and wait for that."""


@dataclass(slots=True)
class HelperBase(ABC, Generic[T]):
    """At most one helper. `root` is where cgroup v2 is mounted, `cgroup` a path below it that belongs to the agent.

    `problem` says why it cannot run here, or why it ended; `told` what it said by job, `skips` what it left out.
    """

    module: ClassVar[str]
    cannot: ClassVar[str]
    """What it runs, and what cannot be done without it, for the log."""
    root: str
    cgroup: str
    memory_bytes: int
    needs_limits: bool = True
    problem: str = ""
    told: dict[int, T] = field(default_factory=dict)
    skips: dict[str, int] = field(default_factory=dict)
    _child: Child | None = None
    _ending: tuple[int, threading.Thread] | None = None
    """The process id of the last one that was told to end, and the thread that sees to it."""
    _caps: dict[str, int] = field(default_factory=dict)
    """Bytes/s for which the limit of its cgroup was last written, by disk."""
    _sent: str = ""
    _sent_at: float = 0.0

    @abstractmethod
    def settings(self) -> Mapping[str, Any]:
        """What it is told beside its cgroup."""

    @abstractmethod
    def count(self, told: list[Any]) -> T:
        """What it said of one job."""

    @abstractmethod
    def line(self, device: str, rate: float, requests: float) -> str:
        """The limit of its cgroup on a device, as io.max takes it."""

    @property
    def folder(self) -> Path:
        """The helper's cgroup in the file system."""
        return Path(self.root + self.cgroup)

    @property
    def pid(self) -> int:
        """Its process id, 0 where none runs."""
        return self._child.pid if self._child is not None and self._child.exit_code is None else 0

    @property
    def is_lost(self) -> bool:
        """See `Served`."""
        return self._child is not None and self._child.exit_code is not None

    def start(self) -> bool:
        """Make the cgroup with its limit and start the helper in it; False, with `problem`, where that cannot be."""
        if self.pid:
            return True
        self._drop()
        self.problem = self._unended() or self._prepare() or self._spawn()
        if self.problem:
            log.warning("%s: %s", self.cannot, self.problem)
            with suppress(OSError):  # processes or cgroups are in it
                self.folder.rmdir()
        return not self.problem

    def _unended(self) -> str:
        if self._ending is None or not self._ending[1].is_alive():
            return ""
        return f"the last helper, process {self._ending[0]}, has not ended yet; it may wait for the disk"

    def _prepare(self) -> str:
        try:
            self.folder.mkdir(exist_ok=True)
            if others := processes_of(str(self.folder)).pids:  # the limits below would hold for them
                return (
                    f"the cgroup {self.cgroup} holds processes of somebody else, such as {others[0]}; "
                    "name an unused one in rearrange.cgroup"
                )
            limits = {"memory.max": str(self.memory_bytes + OWN_BYTES), "memory.swap.max": "0"}
            for name, text in limits.items():
                file = self.folder / name
                if file.exists():
                    file.write_text(text)
            missing = [name for name in ("memory.max", "io.max") if not (self.folder / name).exists()]
        except OSError as error:
            return f"the cgroup {self.cgroup} cannot be made ({error}); see rearrange.cgroup"
        if missing and self.needs_limits:
            return (
                f"the cgroup {self.cgroup} has no {' and no '.join(missing)}: enable `memory` and `io` in "
                "cgroup.subtree_control above it, or name another in rearrange.cgroup"
            )
        return ""

    def _spawn(self) -> str:
        settings = {"folder": str(self.folder), "root": self.root, **self.settings()}
        try:
            self._child = Child(self.module, settings, socket.SOCK_SEQPACKET)
        except OSError as error:
            return f"the helper cannot be started ({error})"
        self._child.socket.settimeout(0.0)
        self._sent, self._caps = "", {}
        self.told, self.skips = {}, {}
        return ""

    def serve(self, targets: Iterable[Target], now: float) -> bool:
        """Name the jobs to read ahead for, again and again; False once the helper is gone."""
        is_lost = self.is_lost  # before its last words are heard
        self.listen()
        if is_lost:
            self._lose()
        if self._child is None:
            return False
        chosen = tuple(targets)
        self._cap(chosen)
        message = json.dumps({"targets": [self._target(one) for one in chosen]})
        if message != self._sent or now - self._sent_at >= RENEW_SECONDS:
            with suppress(OSError):
                self._child.socket.send(message.encode())
                self._sent, self._sent_at = message, now
        return True

    def _lose(self) -> None:
        """Say why it has ended, where it has not done so itself."""
        if self._child is not None and not self.problem:
            self.problem = f"the helper ended with {_ending(self._child.exit_code)}"
            log.warning("%s: %s", self.cannot, self.problem)
        self._drop()

    def _target(self, one: Target) -> dict[str, Any]:
        return {
            "job": one.job,
            "folder": self.root + one.path,
            "devices": sorted(one.rates),
            "bytes_per_second": round(min(one.rates.values(), default=0.0), -5),  # small changes are no message's worth
            "requests_per_second": round(min(one.requests.values(), default=0.0), 1),
            "in_flight": one.in_flight,
        }

    def _cap(self, targets: Iterable[Target]) -> None:
        """Bound the cgroup where its rate changed by a tenth; what is served no more is not read from either."""
        wanted: dict[str, float] = {}
        requests: dict[str, float] = {}
        for one in targets:
            for device, rate in one.rates.items():
                wanted[device] = wanted.get(device, 0.0) + CAP_HEADROOM * rate
                requests[device] = requests.get(device, 0.0) + CAP_HEADROOM * one.requests.get(device, 0.0)
        for device, rate in wanted.items():
            before = self._caps.get(device)
            if before is None or abs(rate - before) > 0.1 * before:
                with suppress(OSError):
                    (self.folder / "io.max").write_text(self.line(device, rate, requests[device]))
                    self._caps[device] = round(rate)

    def listen(self) -> None:
        """Take in what it said."""
        while self._child is not None:
            try:
                data = self._child.socket.recv(1 << 20)
            except ConnectionResetError:  # told once, where it ended before it had read all; its own words come after
                continue
            except OSError:
                return
            if not data:
                return
            self._hear(json.loads(data))

    def _hear(self, message: Mapping[str, Any]) -> None:
        if "problem" in message:
            self.problem = str(message["problem"])
            log.warning("%s: %s", self.cannot, self.problem)
        for job, counts in message.get("jobs", {}).items():
            self.told[int(job)] = self.count(counts)
        self.skips = message.get("skips", self.skips)

    def end(self) -> None:
        """Have it end and its cgroup removed. A thread waits: one that waits for the disk takes its time."""
        child, self._child = self._child, None
        if child is not None:
            thread = threading.Thread(target=self._reap, args=(child,), daemon=True)
            self._ending = child.pid, thread
            thread.start()

    def _reap(self, child: Child) -> None:
        """It ends by itself once its socket closes; if not, it is killed."""
        child.let_go(END_SECONDS)
        child.end()
        self._remove()

    def close(self) -> None:
        """End it, wait for that, though not for ever, and remove the cgroup, also one that a lost helper has left."""
        self.end()
        if self._ending is not None:
            self._ending[1].join(2 * END_SECONDS)
        self._remove()

    def _drop(self) -> None:
        """Give up one that has ended by itself."""
        if self._child is not None:
            self._child.end(END_SECONDS)
            self._child = None

    def _remove(self) -> None:
        """Remove the cgroup; the kernel frees it a moment after the last process has gone."""
        deadline = time.monotonic() + END_SECONDS
        while self.folder.is_dir() and time.monotonic() < deadline:
            try:
                self.folder.rmdir()
            except FileNotFoundError:
                return
            except OSError:
                time.sleep(0.02)


class HelperProcess(HelperBase[Told]):
    """The helper that reads ahead."""

    module: ClassVar[str] = "agent.rearrange.helper"
    cannot: ClassVar[str] = "cannot read ahead"

    def settings(self) -> Mapping[str, Any]:
        """What of its memory may be in flight."""
        return {"budget_bytes": memory_budget_bytes(self.memory_bytes)}

    def count(self, told: list[Any]) -> Told:
        """See `Told`."""
        return Told(*told)

    def line(self, device: str, rate: float, requests: float) -> str:  # noqa: ARG002 - it may ask as often as it likes
        """It only reads."""
        return f"{device} rbps={_whole(rate)}"


class MoverProcess(HelperBase[Mend]):
    """The helper that makes files contiguous."""

    module: ClassVar[str] = "agent.rearrange.mover"
    cannot: ClassVar[str] = "cannot make files contiguous"

    def settings(self) -> Mapping[str, Any]:
        """Its memory, which bounds the size of a file."""
        return {"memory_bytes": self.memory_bytes}

    def count(self, told: list[Any]) -> Mend:
        """See `Mend`."""
        files, size, left_files, left_bytes, is_moving = told
        return Mend(files, size, left_files, left_bytes, bool(is_moving))

    def line(self, device: str, rate: float, requests: float) -> str:
        """Bytes either way, and the requests by which a fragmented file is read."""
        few = f" riops={max(1, round(requests))}" if isfinite(requests) else ""  # the disk's capacity may name none
        return f"{device} rbps={_whole(rate)} wbps={_whole(rate)}{few}"


def _ending(code: int | None) -> str:
    """An exit code in words."""
    if code == -signal.SIGKILL:
        return "SIGKILL; see the kernel's log for whether it lacked memory (memory limits stand in [rearrange])"
    return f"exit code {code}; its last words stand in this log"


def _whole(rate: float) -> int:
    return max(LEAST_RATE, round(rate))
