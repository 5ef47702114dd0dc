"""Reading the files of a host below a root folder, so that tests can lay out a host of their own."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Host:
    """The host whose `/` is at `root`; `root_user` says whether we may read everything."""

    root: Path = Path("/")
    root_user: bool = True

    def at(self, path: str | Path) -> Path:
        """Where an absolute path of the host is found."""
        return self.root / str(path).lstrip("/")

    def read(self, path: str | Path) -> str | None:
        """The text of a file without its last newline; None where it is missing or cannot be read."""
        try:
            return self.at(path).read_text(encoding="utf-8", errors="replace").rstrip("\n")
        except OSError:
            return None

    def exists(self, path: str | Path) -> bool:
        """Whether the path exists (False where a folder above it may not be entered)."""
        return os.path.lexists(self.at(path))

    def names(self, folder: str | Path) -> tuple[str, ...]:
        """Sorted names in a folder; empty where it is missing or cannot be read."""
        try:
            return tuple(sorted(entry.name for entry in self.at(folder).iterdir()))
        except OSError:
            return ()


def this_host() -> Host:
    """The machine we run on."""
    return Host(root_user=os.geteuid() == 0)
