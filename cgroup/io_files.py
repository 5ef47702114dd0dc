"""The text of the io controller's files, to and from frozen values. Pure; the only error raised is IoFileError.

Formats: Documentation/admin-guide/cgroup-v2.rst, "IO Interface Files"; block/blk-throttle.c, block/blk-cgroup.c,
block/blk-iocost.c, block/bfq-cgroup.c. What kernels print beyond the documentation, and is accepted here:

* io.stat names a device without any field, followed by the next device on the same line (5.x and 6.x print the name
  before they know whether the device has something to report), and a read may end right behind such a name;
* `(unknown)` in the place of a device number (ZFS, hidden paths of NVMe multipath): skipped, with its fields;
* io.stat carries fields of other controllers (`cost.usage`, `use_delay`, `depth`): kept as text in `extra`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from cgroup.errors import IoFileError

IO_MAX_KEYS = ("rbps", "wbps", "riops", "wiops")
UNKNOWN_DEVICE = "(unknown)"

_DEVICE = re.compile(r"[0-9]{1,10}:[0-9]{1,10}")
_DECIMAL = re.compile(r"[0-9]{1,20}(\.[0-9]{1,20})?")
_STAT_KEYS = ("rbytes", "wbytes", "rios", "wios", "dbytes", "dios")


@dataclass(frozen=True, slots=True)
class IoMaxLine:
    """One device's limits in io.max: bytes/s and requests/s; None is the kernel's `max`, no limit."""

    device: str
    rbps: int | None = None
    wbps: int | None = None
    riops: int | None = None
    wiops: int | None = None


@dataclass(frozen=True, slots=True)
class IoStatLine:
    """One device's counters in io.stat since the cgroup was made: bytes and requests; d = discard."""

    device: str
    rbytes: int = 0
    wbytes: int = 0
    rios: int = 0
    wios: int = 0
    dbytes: int = 0
    dios: int = 0
    extra: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class IoWeights:
    """io.weight or io.bfq.weight: the cgroup's default weight (None: not printed) and those set per device."""

    default: int | None
    devices: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class PressureLine:
    """One line of io.pressure: averages in percent of wall time, and the total in microseconds."""

    avg10_percent: float
    avg60_percent: float
    avg300_percent: float
    total_us: int


@dataclass(frozen=True, slots=True)
class IoPressure:
    """io.pressure; a line that the kernel did not print is None."""

    some: PressureLine | None
    full: PressureLine | None


def is_device(text: str) -> bool:
    """Return whether the text is a `maj:min` device number.

    >>> is_device("259:1048575"), is_device("sda")
    (True, False)
    """
    return _DEVICE.fullmatch(text) is not None


def parse_io_max(text: str) -> dict[str, IoMaxLine]:
    """Return the limits by device. The kernel leaves out devices without any limit."""
    return {device: _io_max_line(device, fields) for device, fields in _nested(text, "io.max").items()}


def _io_max_line(device: str, fields: Mapping[str, str]) -> IoMaxLine:
    limits = {key: _limit(fields[key], key) for key in IO_MAX_KEYS if key in fields}
    return IoMaxLine(device, **limits)


def _limit(text: str, key: str) -> int | None:
    return None if text == "max" else _number(text, f"io.max {key}")


def format_io_max(device: str, limits: Mapping[str, int | None]) -> str:
    """Return the line that sets the given keys of one device and leaves its other keys alone; None writes `max`.

    >>> format_io_max("8:0", {"rbps": 1048576, "riops": None})
    '8:0 rbps=1048576 riops=max'
    """
    if not is_device(device):
        raise IoFileError(f"{device!r} is no device number; io.max wants the form MAJOR:MINOR.")
    unknown = [key for key in limits if key not in IO_MAX_KEYS]
    if unknown or not limits:
        raise IoFileError(f"io.max has no key {unknown!r}; use some of {', '.join(IO_MAX_KEYS)}.")
    fields = (f"{key}={_limit_text(key, limits[key])}" for key in IO_MAX_KEYS if key in limits)
    return f"{device} {' '.join(fields)}"


def _limit_text(key: str, value: int | None) -> str:
    if value is None:
        return "max"
    if value < 1:
        raise IoFileError(f"{key}={value} would stop the cgroup for good; the least limit is 1.")
    return str(value)


def parse_io_stat(text: str) -> dict[str, IoStatLine]:
    """Return the counters by device; a device printed without fields has zeros."""
    return {device: _io_stat_line(device, fields) for device, fields in _nested(text, "io.stat").items()}


def _io_stat_line(device: str, fields: Mapping[str, str]) -> IoStatLine:
    counters = {key: _number(fields[key], f"io.stat {key}") for key in _STAT_KEYS if key in fields}
    extra = {key: value for key, value in fields.items() if key not in _STAT_KEYS}
    return IoStatLine(device, **counters, extra=extra)


def parse_io_weight(text: str, file: str = "io.weight") -> IoWeights:
    """Return io.weight or io.bfq.weight. bfq before Linux 5.4 prints the bare default weight."""
    default: int | None = None
    devices: dict[str, int] = {}
    for words in filter(None, map(str.split, text.splitlines())):
        name, value = ("default", words[0]) if len(words) == 1 else (words[0], words[1])
        if name == "default":
            default = _number(value, f"{file} default")
        elif is_device(name):
            devices[name] = _number(value, f"{file} {name}")
        elif name != UNKNOWN_DEVICE:
            raise IoFileError(f"{file} has a line {' '.join(words)!r} for neither a device nor the default.")
    return IoWeights(default, devices)


def format_io_weight(device: str, weight: int | None) -> str:
    """Return the line that sets one device's weight, or gives it back to the cgroup's default.

    >>> format_io_weight("8:0", None)
    '8:0 default'
    """
    if not is_device(device):
        raise IoFileError(f"{device!r} is no device number; a weight wants the form MAJOR:MINOR.")
    return f"{device} {'default' if weight is None else weight}"


def parse_io_pressure(text: str) -> IoPressure:
    """Return io.pressure; empty text (pressure accounting off) gives two unknown lines."""
    lines: dict[str, PressureLine] = {}
    for words in filter(None, map(str.split, text.splitlines())):
        if words[0] not in ("some", "full"):
            raise IoFileError(f"io.pressure has a line for {words[0]!r}; 'some' and 'full' are known.")
        lines[words[0]] = _pressure_line(words[0], words[1:])
    return IoPressure(lines.get("some"), lines.get("full"))


def _pressure_line(name: str, words: list[str]) -> PressureLine:
    fields = dict(word.partition("=")[::2] for word in words)
    avg10, avg60, avg300 = (
        _decimal(fields.get(key, ""), f"io.pressure {name} {key}") for key in ("avg10", "avg60", "avg300")
    )
    return PressureLine(avg10, avg60, avg300, _number(fields.get("total", ""), f"io.pressure {name} total"))


def parse_cost_qos(text: str) -> frozenset[str]:
    """Return the devices for which io.cost is switched on (`io.cost.qos` of the root cgroup)."""
    return frozenset(dev for dev, fields in _nested(text, "io.cost.qos").items() if fields.get("enable") == "1")


def parse_controllers(text: str) -> frozenset[str]:
    """Return the names in cgroup.controllers or cgroup.subtree_control."""
    return frozenset(text.split())


def parse_scheduler(text: str) -> str:
    """Return the active one of a `queue/scheduler` file, whose name stands in brackets; a lone name is active.

    >>> parse_scheduler("none [bfq] mq-deadline")
    'bfq'
    """
    words = text.split()
    for word in words:
        if word.startswith("[") and word.endswith("]"):
            return word[1:-1]
    return words[0] if len(words) == 1 else "none"


def _nested(text: str, file: str) -> dict[str, dict[str, str]]:
    """Read `device key=value ...` records; a device named twice has its fields joined, the later one wins."""
    records: dict[str, dict[str, str]] = {}
    for line in text.splitlines():
        for device, key, value in _line_fields(line, file):
            fields = records.setdefault(device, {})
            if key:
                fields[key] = value
    return records


def _line_fields(line: str, file: str) -> Iterator[tuple[str, str, str]]:
    """Yield (device, key, value); (device, "", "") for the name alone. Words that are no field are skipped."""
    device: str | None = None
    for word in line.split():
        key, equals, value = word.partition("=")
        if is_device(word):
            device = word
            yield device, "", ""
        elif word == UNKNOWN_DEVICE:
            device = UNKNOWN_DEVICE
        elif device is None:
            raise IoFileError(f"{file} has a line that starts with {word[:60]!r}, not with a device number.")
        elif equals and device != UNKNOWN_DEVICE:
            yield device, key, value


def _number(text: str, what: str) -> int:
    if text.isascii() and text.isdigit() and len(text) <= 20:
        return int(text)
    raise IoFileError(f"{what} is {text[:60]!r}, which is no whole number.")


def _decimal(text: str, what: str) -> float:
    if _DECIMAL.fullmatch(text):
        return float(text)
    raise IoFileError(f"{what} is {text[:60]!r}, which is no number.")
