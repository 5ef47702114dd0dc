"""What the probes of remote file systems share: they count per mount, and attach once their module is loaded.

A read looks for the module every few seconds while it is missing; the one that finds it compiles (under a second).
"""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from bpf.btf import BtfError
from bpf.decode import device_name
from bpf.loader import Loader, Macros, ProbeError, Program
from bpf.owners import Owners
from bpf.reasons import Reason, failed
from bpf.samples import ProbeState, ProbeStatus

MOUNTINFO = Path("/proc/self/mountinfo")

_LOOK_EVERY_NS = 5_000_000_000
_SLOTS = 4096
_RUNNING = 16384


@dataclass(frozen=True, slots=True)
class Call:
    """Counters of one (cgroup, mount, op), `op` by the number that the program gives it, `value` as it stands there."""

    cgroup_id: int
    mount: str
    op: int
    value: bytes


class MountProbe(ABC):
    """A program with the maps NAME_calls, by cgroup, device and op, and NAME_lost."""

    name: str

    def __init__(self, loader: Loader) -> None:
        self._loader = loader
        self._program: Program | None = None
        self._owners: Owners | None = None
        self._wanted: frozenset[int] = frozenset()
        self._tier = ""
        self._refusals: list[str] = []
        self._nothing = Reason()
        self._broken = self._closed = False
        self._next_look_ns = self._next_mounts_ns = 0
        self._mounts: dict[str, str] = {}
        self._try()

    @abstractmethod
    def _missing(self) -> str:
        """Why the file system is not there to be traced; empty where it is."""

    @abstractmethod
    def _attach(self) -> None:
        """Load the program with `_load`, attach it and name the tier; ProbeError or BtfError where that cannot be."""

    @abstractmethod
    def _names(self, lines: Iterable[str]) -> Mapping[str, str]:
        """What the mounts of a mountinfo file are called, by `maj:min`."""

    def _unseen(self) -> Reason:
        """What the tier that is attached does not see."""
        return Reason()

    def _try(self) -> None:
        """Attach if the file system is there; what fails although it is will not get better."""
        try:
            self._nothing = Reason(self._missing())
            if not self._nothing.why:
                self._attach()
        except (ProbeError, BtfError) as error:
            self._nothing, self._broken = failed(error, self._refusals), True
            self._drop()

    def _load(self, source: Path, macros: Macros, shared: Sequence[Path]) -> Program:
        sizes = {"MAX_SLOTS": _SLOTS, "MAX_RUNNING": _RUNNING}
        self._program = self._loader.load(source, {**macros, **sizes}, shared)
        self._owners = Owners(self._program)
        self._owners.replace(self._wanted)
        return self._program

    def status(self) -> ProbeStatus:
        """Unavailable with the reason, degraded where the tier leaves something out, else attached."""
        if self._program is None:
            return ProbeStatus(self.name, ProbeState.UNAVAILABLE, self._nothing.why, detail=self._nothing.detail)
        why, detail = self._unseen()
        state = ProbeState.DEGRADED if why else ProbeState.ATTACHED
        lost = int(self._program.map(f"{self.name}_lost")[0].value)
        fill = len(self._program.map(f"{self.name}_calls")) / _SLOTS
        return ProbeStatus(self.name, state, why, self._tier, lost, fill, detail)

    def manage(self, cgroup_ids: Collection[int]) -> None:
        """Count these cgroups and what is below them, and no others."""
        self._wanted = frozenset(cgroup_ids)
        if self._owners is None or self._program is None:
            return
        dropped = self._owners.replace(self._wanted)
        if dropped:
            calls = self._program.map(f"{self.name}_calls")
            for key in [key for key in calls if key.cgroup in dropped]:
                with contextlib.suppress(KeyError):
                    del calls[key]

    def _calls(self, now_ns: int) -> Iterator[Call]:
        """The counters as they stand, after another look for the module where it was missing."""
        if self._program is None and not self._broken and not self._closed and now_ns >= self._next_look_ns:
            self._next_look_ns = now_ns + _LOOK_EVERY_NS
            self._try()
        if self._program is not None and self._owners is not None:
            calls = self._program.map(f"{self.name}_calls")
            found = self._owners.entries(calls, lambda key: int(key.cgroup))
            others: Collection[str] = ()
            if found and now_ns >= self._next_mounts_ns:
                self._next_mounts_ns = now_ns + _LOOK_EVERY_NS
                others = self._other_mounts()
            for key, value in found:
                if device_name(key.device) in others:
                    with contextlib.suppress(KeyError):
                        del calls[key]
                    continue
                yield Call(key.cgroup, self._mount_of(device_name(key.device)), key.op, bytes(value))

    def _mount_of(self, device: str) -> str:
        """The name of a super block; its device number where this mount namespace does not know it (any more)."""
        if device not in self._mounts:
            self._mounts |= self._names(_mount_lines())
        return self._mounts.setdefault(device, device)

    def _other_mounts(self) -> Collection[str]:
        """Device numbers that stand for another mount than they did; their names are brought up to date.

        The kernel gives the number of what was unmounted to the next that is mounted.
        """
        lines = _mount_lines()
        there = {(mount.device, name) for mount in parse_mounts(lines) for name in (mount.where, mount.source)}
        names = {
            device: name
            for device, name in self._names(lines).items()
            if (device, self._mounts.get(device)) not in there
        }
        others = names.keys() & self._mounts.keys()
        self._mounts |= names
        return others

    def _drop(self) -> None:
        if self._program is not None:
            self._program.close()
        self._program = self._owners = None

    def close(self) -> None:
        """Detach and free."""
        self._closed = True
        if not self._nothing.why:
            self._nothing = Reason("closed")
        self._drop()


def _mount_lines() -> list[str]:
    """Lines of mountinfo. A mount point may be called by any bytes: whoever may mount FUSE may choose them."""
    return MOUNTINFO.read_bytes().decode(errors="backslashreplace").split("\n")


@dataclass(frozen=True, slots=True)
class Mount:
    """A line of mountinfo: device `maj:min`, mount point, file system and source; octal escapes stay as they are."""

    device: str
    where: str
    kind: str
    source: str


def parse_mounts(lines: Iterable[str]) -> Iterator[Mount]:
    """The mounts of a mountinfo file (proc(5)); lines that are torn are left out."""
    for line in lines:
        before, dash, after = line.partition(" - ")
        fields, kinds = before.split(), after.split()
        if dash and len(fields) > 4 and len(kinds) > 1:
            yield Mount(fields[2], fields[4], kinds[0], kinds[1])
