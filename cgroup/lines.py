"""What can be set and undone: one device's line in one file of one cgroup, as keys and numbers. Pure.

Besides io.max, io.weight and io.bfq.weight there are two more that the agent may touch where its configuration allows
it: `io` in a cgroup.subtree_control, and a disk's queue/read_ahead_kb. All are journalled and undone the same way.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from cgroup.errors import IoFileError
from cgroup.io_files import (
    IO_MAX_KEYS,
    format_io_max,
    format_io_weight,
    parse_controllers,
    parse_io_max,
    parse_io_weight,
)

Values = Mapping[str, int | None]
"""Keys of one line with their numbers. None is the kernel's own: `max`, the default weight, not enabled."""

IO_MAX = "io.max"
SUBTREE_CONTROL = "cgroup.subtree_control"
READ_AHEAD = "read_ahead_kb"
WEIGHT_FILES = ("io.weight", "io.bfq.weight")
DEFAULT_WEIGHT = 100

KEYS: Mapping[str, tuple[str, ...]] = {
    IO_MAX: IO_MAX_KEYS,
    "io.weight": ("weight",),
    "io.bfq.weight": ("weight",),
    SUBTREE_CONTROL: ("io",),
    READ_AHEAD: ("kilobytes",),
}


@dataclass(frozen=True, slots=True)
class Line:
    """Where something is set. Lines are the same when cgroup id, device and file are: the path only helps to find it.

    `device` is "" for cgroup.subtree_control; `cgroup_id` is 0 and `path` "" for read_ahead_kb.
    """

    cgroup_id: int
    path: str = field(compare=False)
    device: str
    file: str

    def __str__(self) -> str:
        return f"{self.path or 'disk'} {self.file} {self.device}".strip()


@dataclass(frozen=True, slots=True)
class Target:
    """A cgroup (its id, and its path relative to the root, `/train.slice/j1`) and a device, `8:0`."""

    cgroup_id: int
    path: str
    device: str


@dataclass(frozen=True, slots=True)
class Limit:
    """A cap through io.max: bytes/s and requests/s; None is no cap of ours, so what was there before us."""

    rbps: int | None = None
    wbps: int | None = None
    riops: int | None = None
    wiops: int | None = None

    @property
    def file(self) -> str:
        """The file that holds it."""
        return IO_MAX

    def values(self) -> dict[str, int | None]:
        """By io.max key."""
        return {"rbps": self.rbps, "wbps": self.wbps, "riops": self.riops, "wiops": self.wiops}


@dataclass(frozen=True, slots=True)
class Weight:
    """A proportional weight (1..10000; bfq 1..1000); None gives back what was there before us."""

    weight: int | None
    file: Literal["io.weight", "io.bfq.weight"] = "io.weight"

    def values(self) -> dict[str, int | None]:
        """By the one key there is."""
        return {"weight": self.weight}


Setting = Limit | Weight


def line_of(target: Target, file: str = IO_MAX) -> Line:
    """Return the line of a target in a file."""
    return Line(target.cgroup_id, target.path, target.device, file)


def parse_line(line: Line, text: str) -> dict[str, int | None]:
    """Return the values of the line in the file's text. Raises IoFileError."""
    if line.file == IO_MAX:
        limits = parse_io_max(text).get(line.device)
        return {key: getattr(limits, key, None) for key in IO_MAX_KEYS}
    if line.file in WEIGHT_FILES:
        return {"weight": parse_io_weight(text, line.file).devices.get(line.device)}
    if line.file == SUBTREE_CONTROL:
        return {"io": 1 if "io" in parse_controllers(text) else None}
    if line.file == READ_AHEAD and text.strip().isdecimal():
        return {"kilobytes": int(text)}
    raise IoFileError(f"{line} holds {text[:60]!r}, which is nothing that can be set here.")


def format_line(line: Line, changes: Values) -> str:
    """Return the text to write so that these keys change and no others. Raises IoFileError."""
    if line.file == IO_MAX:
        return format_io_max(line.device, changes)
    if line.file in WEIGHT_FILES:
        return format_io_weight(line.device, changes["weight"])
    if line.file == SUBTREE_CONTROL:
        return "-io" if changes["io"] is None else "+io"
    kilobytes = changes["kilobytes"]
    if line.file == READ_AHEAD and kilobytes is not None:
        return str(kilobytes)
    raise IoFileError(f"{line} cannot be set to {dict(changes)!r}.")


def describe_values(values: Values) -> str:
    """Return values for a log line.

    >>> describe_values({"rbps": 1048576, "wbps": None})
    'rbps=1048576 wbps=max'
    """
    return " ".join(f"{key}={'max' if value is None else value}" for key, value in values.items())


def restorable(actual: Values, prior: Values, ours: tuple[Values, ...]) -> dict[str, int | None]:
    """Return the keys that still hold one of our values, with what they held before us."""
    return {
        key: prior[key]
        for key in prior
        if actual.get(key) != prior[key] and any(actual.get(key) == mine.get(key) for mine in ours)
    }


def foreign(actual: Values, prior: Values, ours: tuple[Values, ...]) -> tuple[str, ...]:
    """Return the keys that hold neither one of our values nor what was there before us: somebody else set them."""
    return tuple(
        key for key in prior if actual.get(key) != prior[key] and all(actual.get(key) != mine.get(key) for mine in ours)
    )
