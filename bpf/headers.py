"""Kernel headers for BCC's compiler, wherever they can be had.

Programs take no struct layout from them (offsets come from BTF), so any recent kernel's headers will do: BCC only
needs them for its own prelude.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import platform
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

log = logging.getLogger(__name__)

_ARCHITECTURES = {"x86_64": ("x86", "amd64"), "aarch64": ("arm64", "arm64")}
_PREFIX = "prefetchd-headers-"
_PROOF = Path("include/linux/kconfig.h")
_GENERATED = Path("include/generated/autoconf.h")


@dataclass(frozen=True, slots=True)
class Headers:
    """Where headers were found: `tree` is None where BCC finds them by itself.

    A tree that we made is locked through the descriptor `lock` while we live, and ours to remove.
    """

    origin: str
    tree: Path | None = None
    lock: int | None = None

    @property
    def temporary(self) -> bool:
        """Whether `remove` has something to do."""
        return self.lock is not None

    def remove(self) -> None:
        """Remove the tree if we made it."""
        if self.tree is not None and self.lock is not None:
            shutil.rmtree(self.tree, ignore_errors=True)
            os.close(self.lock)


def find_headers(root: Path = Path("/")) -> Headers | None:
    """The first of: BCC_KERNEL_SOURCE, the running kernel's own, /sys/kernel/kheaders, any carried in /usr/src."""
    if given := os.environ.get("BCC_KERNEL_SOURCE"):
        return Headers(f"BCC_KERNEL_SOURCE={given}", Path(given))
    own = root / "lib/modules" / os.uname().release / "build"
    if own.is_dir():
        return Headers(f"the running kernel's own, {own}")
    archive = root / "sys/kernel/kheaders.tar.xz"
    if archive.is_file() and (unpacked := _extract(archive)):
        return unpacked
    for tree in _newest_first(root / "usr/src", "*"):
        if (tree / _PROOF).is_file() and (tree / _GENERATED).is_file():
            return Headers(f"another kernel's, {tree}", tree)
    return _joined(root / "usr/src")


def _extract(archive: Path) -> Headers | None:
    """Headers that the kernel carries itself (CONFIG_IKHEADERS); None where that fails (no xz, no room)."""
    tree, lock = _new_tree()
    found = Headers(f"the running kernel's own, {archive}", tree, lock)
    try:
        subprocess.run(["tar", "-xJf", str(archive), "-C", str(tree)], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError) as error:
        said = getattr(error, "stderr", b"") or b""
        log.warning("%s cannot be unpacked: %s %s", archive, error, said.decode(errors="replace").strip())
        found.remove()
        return None
    return found


def _new_tree() -> tuple[Path, int]:
    """A temporary folder that is locked until this process ends; those of processes that were killed are removed."""
    for left in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError):  # somebody else's, or in use
            os.close(_locked(left))
            shutil.rmtree(left, ignore_errors=True)
    tree = Path(tempfile.mkdtemp(prefix=_PREFIX))
    return tree, _locked(tree)


def _locked(folder: Path) -> int:
    """Descriptor that holds the lock on a folder; BlockingIOError where another one does."""
    lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(lock)
        raise
    return lock


def _newest_first(folder: Path, pattern: str) -> Iterator[Path]:
    """Sub-folders by the numbers in their names, highest first."""
    found = [path for path in folder.glob(pattern) if path.is_dir()]
    yield from sorted(found, key=lambda path: [int(n) for n in re.findall(r"\d+", path.name)], reverse=True)


def _joined(sources: Path) -> Headers | None:
    """Debian's pair of packages, linux-headers-V-common and linux-headers-V-ARCH, linked into one tree."""
    kernel_arch, debian_arch = _ARCHITECTURES.get(platform.machine(), (platform.machine(), platform.machine()))
    for specific in _newest_first(sources, f"linux-headers-*-{debian_arch}"):
        common = specific.with_name(specific.name.removesuffix(debian_arch) + "common")
        if (common / _PROOF).is_file() and (specific / _GENERATED).is_file():
            tree, lock = _new_tree()
            _link(tree / "include", common / "include", specific / "include")
            below = Path("arch") / kernel_arch / "include"
            _link(tree / below, common / below, specific / below)
            return Headers(f"another kernel's, {common} and {specific}", tree, lock)
    return None


def _link(into: Path, common: Path, specific: Path) -> None:
    """Links to everything in two folders; what only one build of the kernel has wins."""
    into.mkdir(parents=True)
    entries = {path.name: path for folder in (common, specific) for path in folder.iterdir()}
    for name, target in entries.items():
        (into / name).symlink_to(target)
