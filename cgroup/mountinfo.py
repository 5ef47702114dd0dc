"""/proc/PID/mountinfo, parsed. Pure. Format: proc(5) and fs/proc_namespace.c."""

from __future__ import annotations

import re
from dataclasses import dataclass

from cgroup.errors import IoFileError
from cgroup.io_files import is_device

_OCTAL = re.compile(r"\\([0-3][0-7]{2})")


@dataclass(frozen=True, slots=True)
class Mount:
    """One mount.

    `device` is the super block's maj:min (0:N where no block device stands behind it), `root` the path inside that
    file system which is shown at `point`.
    """

    device: str
    root: str
    point: str
    options: tuple[str, ...]
    fstype: str
    source: str
    super_options: tuple[str, ...]

    def option(self, name: str) -> str | None:
        """Return the value of a `name=value` super option, or None."""
        for text in self.super_options:
            key, equals, value = text.partition("=")
            if key == name and equals:
                return value
        return None


def parse_mountinfo(text: str) -> tuple[Mount, ...]:
    """Return the mounts in the order of the file; a later mount on the same point hides the earlier one."""
    return tuple(_mount(line) for line in text.split("\n") if line.strip())


def _mount(line: str) -> Mount:
    head, dash, tail = line.partition(" - ")
    fields = head.split(" ")
    # The source may be empty (two spaces in a row), and some file systems print no super options at all.
    fstype, source, super_options = (*tail.split(" ", 2), "", "")[:3]
    if not dash or len(fields) < 6 or not is_device(fields[2]) or not fstype:
        raise IoFileError(f"mountinfo has a line {line[:120]!r}, which does not name a device and a file system.")
    return Mount(
        device=fields[2],
        root=unescape(fields[3]),
        point=unescape(fields[4]),
        options=tuple(fields[5].split(",")),
        fstype=unescape(fstype),
        source=unescape(source),
        super_options=tuple(map(unescape, _split_options(super_options))),
    )


def _split_options(text: str) -> list[str]:
    """Split at commas; overlay escapes a comma that belongs to a path with a backslash."""
    return [part for part in re.split(r"(?<!\\),", text.strip(" \r")) if part]


def unescape(text: str) -> str:
    r"""Undo the octal escapes for space, tab, newline, backslash and `#`.

    >>> unescape("/mnt/my\\040data")
    '/mnt/my data'
    """
    return _OCTAL.sub(lambda match: chr(int(match[1], 8)), text)
