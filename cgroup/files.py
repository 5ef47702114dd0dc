"""All access to cgroup files (and read_ahead_kb), relative to a root, and safe against recycled paths.

A cgroup's folder is opened first and its inode compared with the id: only then is a file below that very folder
opened, so a write can never reach a cgroup that took the path over.
"""
# ruff: noqa: PTH116  # the guardian imports this, and pathlib would cost it a megabyte

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Protocol

from cgroup.errors import ControllerMissing, IoFileError, Vanished
from cgroup.lines import (
    DEFAULT_WEIGHT,
    IO_MAX,
    READ_AHEAD,
    SUBTREE_CONTROL,
    WEIGHT_FILES,
    Line,
    Values,
    format_line,
    parse_line,
)
from cgroup.tree import CGROUP_ROOT, cgroup_id, children, find, join

_READ_BYTES = 64 * 1024
_BOUNDS = (IO_MAX, "io.latency")


class LineFiles(Protocol):
    """The files behind an interface, so that one contract suite runs over the kernel's and over a fake in memory.

    Every method raises Vanished where the cgroup or the device is gone, ControllerMissing where the cgroup is there
    but the file is not, IoFileError where the text makes no sense, and OSError with its path otherwise.
    """

    def read(self, line: Line) -> dict[str, int | None]:
        """Return the line's values."""

    def write(self, line: Line, changes: Values) -> None:
        """Set these keys and leave the line's others alone."""

    def generation(self, line: Line) -> tuple[int, int]:
        """Return numbers that change when the file or the device is made anew and its limits are lost with it."""

    def locate(self, line: Line) -> Line:
        """Return the line with the path at which its cgroup id lives now."""

    def cgroup_id(self, path: str) -> int:
        """Return the id of the cgroup at the path."""

    def in_use(self, line: Line) -> bool:
        """Return whether somebody relies on a controller that the cgroup.subtree_control line enabled."""


class KernelFiles:
    """The kernel's cgroup v2 file system, or a folder that looks like it."""

    def __init__(self, root: str = CGROUP_ROOT, sys_root: str = "/sys") -> None:
        self.root = root
        self.sys_root = sys_root

    def read(self, line: Line) -> dict[str, int | None]:
        """See LineFiles."""
        with self._opened(line, os.O_RDONLY) as file:
            return parse_line(line, _read_all(file))

    def write(self, line: Line, changes: Values) -> None:
        """See LineFiles. One write call: the kernel takes a whole line or nothing of it (tg_set_limit)."""
        text = format_line(line, changes) + "\n"
        # Truncation means nothing to the kernel's files; to plain ones, which stand in for them in tests, it does.
        with self._opened(line, os.O_WRONLY | os.O_TRUNC) as file:
            os.write(file, text.encode("ascii"))

    def generation(self, line: Line) -> tuple[int, int]:
        """See LineFiles: the inodes of the file and of the device's folder in sysfs."""
        with self._opened(line, os.O_RDONLY) as file:
            inode = os.fstat(file).st_ino
        try:
            return inode, os.stat(self._device_folder(line)).st_ino
        except OSError:
            return inode, 0

    def locate(self, line: Line) -> Line:
        """See LineFiles. Looks at the path the line names first, then everywhere."""
        if line.file == READ_AHEAD:
            return line
        path = find(self.root, line.cgroup_id, line.path)
        if path is None:
            raise Vanished(f"the cgroup {line.path} (id {line.cgroup_id}) does not exist any more.")
        return replace(line, path=path)

    def cgroup_id(self, path: str) -> int:
        """See LineFiles."""
        return cgroup_id(self.root, path)

    def in_use(self, line: Line) -> bool:
        """See LineFiles: a child that hands the controller on, or has limits or weights: they would go with it."""
        return any(_uses_io(join(self.root, child.path)) for child in children(self.root, line.path))

    def _device_folder(self, line: Line) -> str:
        return f"{self.sys_root}/dev/block/{line.device}"

    @contextmanager
    def _opened(self, line: Line, flags: int) -> Iterator[int]:
        """Yield a descriptor of the line's file; translate what the kernel answers about things that are gone."""
        name = self._name(line)
        try:
            file = self._open(line, flags)
            try:
                yield file
            finally:
                os.close(file)
        except OSError as error:
            if error.errno in (errno.ENODEV, errno.ENXIO):  # the folder was removed meanwhile, or no such disk
                raise Vanished(f"{name} or the device {line.device} is gone.") from error
            raise OSError(error.errno, f"{os.strerror(error.errno or 0)}, setting or reading {line}", name) from error

    def _name(self, line: Line) -> str:
        if line.file == READ_AHEAD:
            return f"{self._device_folder(line)}/queue/{READ_AHEAD}"
        return f"{join(self.root, line.path)}/{line.file}"

    def _open(self, line: Line, flags: int) -> int:
        if line.file == READ_AHEAD:
            return _open_or_vanished(self._name(line), flags)
        folder = _open_or_vanished(join(self.root, line.path), os.O_PATH | os.O_DIRECTORY)
        try:
            if os.fstat(folder).st_ino != line.cgroup_id:
                raise Vanished(f"the cgroup {line.path} is another one now (its id was {line.cgroup_id}).")
            return os.open(line.file, flags | os.O_CLOEXEC, dir_fd=folder)
        except FileNotFoundError as error:
            raise ControllerMissing(
                f"{self._name(line)} does not exist: enable `io` in cgroup.subtree_control of every cgroup above, "
                "or let the agent do it (enable_io_controller)."
            ) from error
        finally:
            os.close(folder)


def _open_or_vanished(path: str, flags: int) -> int:
    try:
        return os.open(path, flags | os.O_CLOEXEC)
    except (FileNotFoundError, NotADirectoryError) as error:
        raise Vanished(f"{path} does not exist any more.") from error


def _read_all(file: int) -> str:
    chunks = []
    while chunk := os.read(file, _READ_BYTES):
        chunks.append(chunk)
    try:
        return b"".join(chunks).decode("ascii")
    except UnicodeDecodeError as error:
        raise IoFileError("a kernel file holds bytes that are no ASCII text.") from error


def _text(path: str) -> str:
    try:
        file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return ""
    try:
        return _read_all(file)
    finally:
        os.close(file)


def _uses_io(folder: str) -> bool:
    if "io" in _text(f"{folder}/{SUBTREE_CONTROL}").split():
        return True
    if any(_text(f"{folder}/{file}").strip() for file in _BOUNDS):
        return True
    usual: tuple[list[str], ...] = (
        [],
        [str(DEFAULT_WEIGHT)],
        ["default", str(DEFAULT_WEIGHT)],
    )  # bfq leaves out a word
    return any(_text(f"{folder}/{file}").split() not in usual for file in WEIGHT_FILES)
