"""Which mapped devices are looked through: those that join disks of both media, such as dm-cache.

The IO of a job on one of them counts on the disks below, where it went, so that each medium has the share, the pool and
the limits that are its own. Every other mapped device counts as one (cgroup/stacks.py).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace

from bpf.loader import ProbeError
from bpf.probes import Probe, SeesThrough
from bpf.samples import Sample

log = logging.getLogger(__name__)

LOOK_SECONDS = 10.0
"""Between looks at what is known: a mapped device can be given another table, or its number to another device."""

Find = Callable[[str], frozenset[str]]
"""The devices that IO on this one passes: `passed_through`."""


class Stacks:
    """Keeps the probe informed, and out of samples what it counted before it was."""

    def __init__(self, probes: Sequence[Probe], find: Find) -> None:
        self._probes = tuple(probe for probe in probes if isinstance(probe, SeesThrough))
        self._find = find
        self._known: dict[str, frozenset[str]] = {}
        self._passed: frozenset[str] = frozenset()
        self._looked_ns: int | None = None
        self._refused: set[str] = set()

    def without(self, sample: Sample) -> Sample:
        """The sample without what was counted on devices that are looked through: from now on, or in between."""
        if not self._probes:
            return sample
        seen = {key.device for key in sample.blocks}
        if self._looked_ns is None or sample.time_ns - self._looked_ns > LOOK_SECONDS * 1e9:
            self._looked_ns = sample.time_ns
            self._known = {device: way for device, way in self._known.items() if way}
            self._look(seen | self._known.keys())
        elif not seen <= self._known.keys():
            self._look(seen - self._known.keys())
        if self._passed.isdisjoint(seen):
            return sample
        self._tell()
        return replace(
            sample, blocks={key: one for key, one in sample.blocks.items() if key.device not in self._passed}
        )

    def _look(self, devices: Collection[str]) -> None:
        for device in devices:
            self._known[device] = self._found(device)
        passed = frozenset[str]().union(*self._known.values())
        if passed != self._passed:
            self._announce(passed)
            self._passed = passed
            self._tell()

    def _found(self, device: str) -> frozenset[str]:
        try:
            return self._find(device)
        except OSError as error:
            if device not in self._refused:
                self._refused.add(device)
                log.warning("mapped device %s counts as one, not on the disks below: %s", device, error)
            return frozenset()

    def _announce(self, passed: frozenset[str]) -> None:
        for devices, what in (
            (passed - self._passed, "lead to disks of both media: what jobs do there counts on the disks"),
            (self._passed - passed, "count as they stand again"),
        ):
            if devices:
                log.info("mapped devices %s %s", ", ".join(sorted(devices)), what)

    def _tell(self) -> None:
        for probe in self._probes:
            try:
                probe.look_through(self._passed)
            except ProbeError as error:
                log.warning("IO on mapped devices counts there, not on their disks: %s", error)
                self._probes, self._passed = (), frozenset()
