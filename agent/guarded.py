"""A probe that fails costs its own part of a sample, and says so; it takes neither the others nor the agent along."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection
from dataclasses import replace

from bpf.probes import Probe
from bpf.samples import ProbeState, ProbeStatus, Sample

log = logging.getLogger(__name__)

AGAIN_NS = 5_000_000_000
"""Between attempts to tell a probe again which cgroups count, where it could not take them (a full map)."""


class Absent:
    """A probe that could not be made."""

    def __init__(self, name: str, why: str) -> None:
        self.name = name
        self._why = why

    def status(self) -> ProbeStatus:
        """Unavailable, with the reason."""
        return ProbeStatus(self.name, ProbeState.UNAVAILABLE, self._why)

    def manage(self, cgroup_ids: Collection[int]) -> None:
        """Nothing counts."""

    def read(self, now_ns: int) -> Sample:
        """Nothing is known."""
        return Sample(now_ns)

    def close(self) -> None:
        """Nothing is open."""


def made(name: str, make: Callable[[], Probe]) -> Probe:
    """The probe, or one that says why it could not be made, whatever that was (no room in /tmp, no `mount`)."""
    try:
        return make()
    except Exception as error:
        log.exception("probe %s cannot be made; the others are", name)
        return Absent(name, f"it cannot be made ({str(error) or type(error).__name__})")


class Guarded:
    """A probe as `bpf.probes.Probe`; while it fails it is unavailable, and its counters stand where they stood.

    They must not go: what is there again would look like all of its past at once.
    """

    def __init__(self, probe: Probe) -> None:
        self.name = probe.name
        self._probe = probe
        self._last = Sample(0)
        self._wanted: frozenset[int] | None = None
        self._again_ns = 0
        self._failures: dict[str, str] = {}

    def status(self) -> ProbeStatus:
        """The probe's own, or why it fails."""
        try:
            status = self._probe.status()
            self._failures.pop("its status", None)
        except Exception as error:  # noqa: BLE001 - whatever the kernel comes up with
            self._fail("its status", error)
            status = ProbeStatus(self.name, ProbeState.UNAVAILABLE)
        if not self._failures:
            return status
        why = "; ".join(f"{what} fails ({error})" for what, error in self._failures.items())
        return replace(status, state=ProbeState.UNAVAILABLE, why=why)

    def manage(self, cgroup_ids: Collection[int]) -> None:
        """Pass on which cgroups count; what fails is tried again."""
        wanted = frozenset(cgroup_ids)
        try:
            self._probe.manage(wanted)
            self._wanted = None
            self._failures.pop("taking the jobs", None)
        except Exception as error:  # noqa: BLE001 - as above
            self._wanted = wanted
            self._fail("taking the jobs", error)

    def read(self, now_ns: int) -> Sample:
        """What the probe reads; where that fails, its last counters without what they told of that moment alone."""
        if self._wanted is not None and now_ns >= self._again_ns:
            self._again_ns = now_ns + AGAIN_NS
            self.manage(self._wanted)
        try:
            self._last = self._probe.read(now_ns)
            self._failures.pop("its reading", None)
        except Exception as error:  # noqa: BLE001 - as above
            self._fail("its reading", error)
            streams = tuple(replace(one, recent=()) for one in self._last.streams)
            self._last = replace(self._last, time_ns=now_ns, streams=streams)
        return self._last

    def close(self) -> None:
        """Detach and free."""
        self._probe.close()

    def _fail(self, what: str, error: Exception) -> None:
        said = str(error) or type(error).__name__
        if self._failures.get(what) != said:
            log.error("probe %s: %s fails; the others go on", self.name, what, exc_info=error)
        self._failures[what] = said
