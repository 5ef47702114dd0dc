"""The devices that the configuration names, as they stand now: disks come and go, and their numbers are given again."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from math import inf

from agent.config import DeviceRule
from agent.types import Capacity, DeviceInfo, Medium
from cgroup.actuators import detect, pick
from cgroup.errors import CgroupError, DeviceRefused
from cgroup.hotplug import DeviceChange
from cgroup.mounts import Mounts

log = logging.getLogger(__name__)


class NamedDevices:
    """Looks the rules up again every `every_seconds`: a limit must never reach a disk that took a number over.

    `news` tells of disks that came or went since it was last asked; then they are looked up at once.
    A device that is refused is left out; one whose actuator cannot work as the host is set up is observed only. Both
    are logged with the reason, once as long as it stays the same.
    """

    def __init__(
        self,
        rules: Sequence[DeviceRule],
        mounts: Mounts,
        root: str,
        every_seconds: float = 10.0,
        news: Callable[[], Sequence[DeviceChange]] = tuple,
    ) -> None:
        self._rules = tuple(rules)
        self._mounts = mounts
        self._root = root
        self._every_ns = int(every_seconds * 1e9)
        self._news = news
        self._looked_ns: int | None = None
        self._told: dict[DeviceRule, str] = {}
        self._found = self._look()

    def at(self, now_ns: int) -> Mapping[str, DeviceInfo]:
        """By `maj:min`, at most `every_seconds` old; the same object as long as nothing changed."""
        is_news = any(one.action != "change" for one in self._news())
        if is_news or self._looked_ns is None or now_ns - self._looked_ns >= self._every_ns:
            self._looked_ns = now_ns
            found = self._look()
            if found != self._found:
                self._announce(found)
                self._found = found
        return self._found

    @property
    def known(self) -> Mapping[str, DeviceInfo]:
        """What was found last."""
        return self._found

    def _look(self) -> dict[str, DeviceInfo]:
        found = {}
        for rule in self._rules:
            info, trouble = self._resolved(rule)
            if trouble and self._told.get(rule) != trouble:
                log.warning("%s", trouble)
            self._told[rule] = trouble
            if info is not None:
                found[info.device] = info
        return found

    def _resolved(self, rule: DeviceRule) -> tuple[DeviceInfo | None, str]:
        """(the device, or None where it is refused; what is to be said of it)."""
        try:
            device = self._mounts.resolve(rule.device, rule.medium)
        except (CgroupError, OSError) as refusal:
            return None, f"device {rule.device!r} of the configuration is left out: {refusal}"
        capacity, actuator, trouble = _capacity(rule), "io.max", ""
        try:
            actuator = pick(rule.actuator, device.device, detect(device.device, self._root)).file
        except DeviceRefused as refusal:
            if capacity is not None:
                trouble = f"device {device.name} is observed only: {refusal}"
            capacity = None
        return DeviceInfo(device.device, device.name, Medium(device.medium), capacity, actuator), trouble

    def _announce(self, found: Mapping[str, DeviceInfo]) -> None:
        for number in sorted(self._found.keys() - found.keys()):
            log.warning("device %s (%s) is named no more: nothing is enforced there", self._found[number].name, number)
        for number in sorted(found.keys() - self._found.keys()):
            log.info("device %s (%s) is there now, as the configuration names it", found[number].name, number)


def _capacity(rule: DeviceRule) -> Capacity | None:
    """What the rule says; a dimension left out is unlimited, and without a read rate nothing is enforced."""
    if rule.read_bytes_per_second is None:
        return None
    return Capacity(
        rbps=rule.read_bytes_per_second,
        wbps=rule.write_bytes_per_second or inf,
        riops=rule.read_requests_per_second or inf,
        wiops=rule.write_requests_per_second or inf,
    )
