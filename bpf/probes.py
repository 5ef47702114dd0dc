"""The one interface that every probe has, real or simulated."""

from __future__ import annotations

from collections.abc import Collection
from typing import Protocol, runtime_checkable

from bpf.samples import ProbeStatus, Sample


class Probe(Protocol):
    """A source of raw counters for the managed cgroups.

    `manage` replaces the set of cgroup ids that are counted (the kernel side filters by it first); counters of ids
    no longer managed are dropped. `read` returns only this probe's part of a `Sample` and never blocks. `close`
    detaches everything and may be called twice.
    """

    @property
    def name(self) -> str:
        """The probe's name in `doctor` and in metrics."""

    def status(self) -> ProbeStatus:
        """What works on this kernel, and why the rest does not."""

    def manage(self, cgroup_ids: Collection[int]) -> None:
        """Count these cgroups (descendants belong to the managed ancestor) and no others."""

    def read(self, now_ns: int) -> Sample:
        """The counters as they stand at `now_ns` (CLOCK_MONOTONIC)."""

    def close(self) -> None:
        """Detach and free; harmless when repeated."""


@runtime_checkable
class SeesThrough(Protocol):
    """A probe that can count what a mapped device passes on where it goes, instead of on the mapped device."""

    def look_through(self, devices: Collection[str]) -> None:
        """Look through these (`maj:min`) and no others. Raises ProbeError where the kernel does not allow it."""
