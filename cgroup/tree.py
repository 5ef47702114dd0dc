"""The cgroup v2 tree: ids, walks and lookups by id.

The id of a cgroup is the inode of its folder, which is what bpf_get_current_cgroup_id() returns (kernfs_id in
fs/kernfs/dir.c). Paths are relative to the root and start with `/`; cgroup v2 does not rename: an id has one path.
"""
# ruff: noqa: PTH116, PTH123  # the guardian imports this, and pathlib would cost it a megabyte

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from dataclasses import dataclass

from cgroup.errors import Vanished
from cgroup.io_files import parse_controllers

CGROUP_ROOT = "/sys/fs/cgroup"
MAX_CGROUPS = 100_000
"""A bound for walks; a node with more cgroups than this has another problem."""


@dataclass(frozen=True, slots=True)
class Cgroup:
    """A cgroup: its id and its path relative to the root."""

    id: int
    path: str


def join(root: str, path: str) -> str:
    """Return the folder of a cgroup in the file system.

    >>> join("/sys/fs/cgroup", "/a/b"), join("/sys/fs/cgroup", "/")
    ('/sys/fs/cgroup/a/b', '/sys/fs/cgroup')
    """
    return root.rstrip("/") + "/" + path.strip("/") if path.strip("/") else root


def cgroup_id(root: str, path: str) -> int:
    """Return the id of the cgroup at the path; raises Vanished where there is none."""
    try:
        return os.stat(join(root, path)).st_ino
    except (FileNotFoundError, NotADirectoryError) as error:
        raise Vanished(f"the cgroup {path} does not exist any more.") from error


def walk(root: str, start: str = "/", limit: int = MAX_CGROUPS) -> Iterator[Cgroup]:
    """Yield `start` and every cgroup below it, parents first. What vanishes meanwhile is left out."""
    try:
        pending = [Cgroup(cgroup_id(root, start), "/" + start.strip("/"))]
    except Vanished:
        return
    while pending and limit > 0:
        current = pending.pop()
        yield current
        limit -= 1
        pending.extend(children(root, current.path))


def children(root: str, path: str) -> list[Cgroup]:
    """Return the cgroups right below a path; none where the cgroup is gone."""
    base = path.rstrip("/")
    try:
        with os.scandir(join(root, path)) as entries:
            folders = (entry for entry in entries if entry.is_dir(follow_symlinks=False))
            return [Cgroup(entry.inode(), f"{base}/{entry.name}") for entry in folders]
    except OSError as error:
        if error.errno not in (errno.ENOENT, errno.ENOTDIR, errno.ENODEV):
            raise
        return []


def find(root: str, wanted: int, hint: str = "") -> str | None:
    """Return the path of the cgroup with that id, looking at `hint` first, or None where it is gone."""
    if hint:
        try:
            if cgroup_id(root, hint) == wanted:
                return hint
        except Vanished:
            pass
    return next((cgroup.path for cgroup in walk(root) if cgroup.id == wanted), None)


def missing_delegation(root: str, path: str, controller: str = "io") -> tuple[str, ...]:
    """Return the ancestors of a cgroup, from the root down, whose subtree_control lacks the controller.

    Empty means that the cgroup has the controller's files. Raises Vanished where an ancestor is gone.
    """
    missing = []
    for ancestor in ancestors(path):
        try:
            with open(join(root, ancestor) + "/cgroup.subtree_control", encoding="ascii", errors="replace") as file:
                if controller not in parse_controllers(file.read()):
                    missing.append(ancestor)
        except FileNotFoundError as error:
            raise Vanished(f"the cgroup {ancestor} does not exist any more.") from error
    return tuple(missing)


def ancestors(path: str) -> tuple[str, ...]:
    """Return the paths above a cgroup from the root down.

    >>> ancestors("/a/b/c")
    ('/', '/a', '/a/b')
    """
    parts = [part for part in path.split("/") if part]
    return tuple("/" + "/".join(parts[:depth]) for depth in range(len(parts)))
