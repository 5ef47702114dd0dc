"""Where the lab keeps what it downloads and builds, and the lock that lets one lab run at a time."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

_TELL_SECONDS = 10.0
_WORK_PREFIX = "prefetchd-lab-work-"

PROJECT = Path(__file__).resolve().parents[2]
"""The root of the source tree: visible in the guest under the same path, read-only."""


def cache_folder(name: str = "") -> Path:
    """Return (and create) the lab's cache folder, or a folder in it; nothing of it belongs to the host system."""
    given = os.environ.get("PREFETCHD_LAB_CACHE")  # set in the guest, where the home folder is another
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    folder = (Path(given) if given else base / "prefetchd" / "lab") / name
    if not folder.is_dir():
        folder.mkdir(parents=True)
    return folder


def lock_path() -> Path:
    """Return the path of the lock file, one for all users and clones of this machine."""
    return Path(tempfile.gettempdir()) / "prefetchd-lab.lock"


@contextmanager
def work_folder(progress: Callable[[str], None]) -> Iterator[Path]:
    """Hold the machine's lock and give a folder that goes with it.

    Folders of labs that were killed go as well: who holds the lock is the only one to have any.
    """
    with machine_lock(progress):
        for stale in Path(tempfile.gettempdir()).glob(f"{_WORK_PREFIX}*"):
            shutil.rmtree(stale, ignore_errors=True)
        with tempfile.TemporaryDirectory(prefix=_WORK_PREFIX) as folder:
            yield Path(folder)


@contextmanager
def machine_lock(progress: Callable[[str], None]) -> Iterator[None]:
    """Hold the lock while the body runs; say once every 10 s that another lab is waited for."""
    path = lock_path()
    with path.open("a") as file:
        if os.geteuid() == 0:
            path.chmod(0o666)
        # Blocked in the kernel, waiters are served in turn; a thread does that, so this one can say what it waits for.
        waiter = threading.Thread(target=fcntl.flock, args=(file.fileno(), fcntl.LOCK_EX), daemon=True)
        waiter.start()
        waited_seconds = 0.0
        waiter.join(1.0)
        while waiter.is_alive():
            progress(f"waits for another lab on this machine ({path}), {waited_seconds:.0f} s")
            waiter.join(_TELL_SECONDS)
            waited_seconds += _TELL_SECONDS
        yield
