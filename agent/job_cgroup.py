"""A cgroup for one command: made below `/prefetchd.slice`, emptied and removed when the command has ended.

Where systemd is the init, the cgroup is a scope that systemd makes; elsewhere it is a plain folder of cgroup v2.
The weight travels with the cgroup as an extended attribute, so that the agent needs no file of its own for it.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from agent.errors import PrefetchdError
from cgroup.pods import EXEC_PARENT

WEIGHT_ATTRIBUTE = "user.prefetchd.weight"
POLL_SECONDS = 0.02
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,99}")


class ExecError(PrefetchdError):
    """The command was not started; 125 as with env(1) and timeout(1), since lower ones are the command's own."""

    exit_status = 125


def check_name(name: str) -> str:
    """The name, if a cgroup and a systemd unit can bear it; raises ExecError."""
    if not _NAME.fullmatch(name):
        raise ExecError(
            f"Job name {name!r} cannot name a cgroup; use letters, digits, '_', '-' and '.', beginning with a letter "
            "or digit."
        )
    return name


def read_weight(folder: str | Path) -> float | None:
    """The weight that `prefetchd exec --weight` left on a cgroup's folder; None where there is none."""
    try:
        weight = float(os.getxattr(folder, WEIGHT_ATTRIBUTE))
    except (OSError, ValueError):
        return None
    return weight if 1.0 <= weight <= 10000.0 else None


@dataclass(frozen=True, slots=True)
class JobCgroup:
    """The folder of a job's cgroup; `own` says that we made it (a scope's folder belongs to systemd)."""

    folder: Path
    own: bool

    def join(self) -> None:
        """Move the calling process in."""
        (self.folder / "cgroup.procs").write_text("0")

    def set_weight(self, weight: float) -> None:
        """Note the weight for the agent."""
        try:
            os.setxattr(self.folder, WEIGHT_ATTRIBUTE, f"{weight:g}".encode())
        except OSError as error:
            raise ExecError(
                f"The weight cannot be noted on {self.folder} ({error.strerror}); this kernel is older than 5.7: give "
                "it in the configuration's [[jobs]] rule."
            ) from None

    def processes(self) -> set[int]:
        """Every process in the cgroup and below it, but those that this pid namespace does not see.

        They stand there as 0, and a signal for 0 would go to our own process group.
        """
        found: set[int] = set()
        for folder in _folders(self.folder):
            with contextlib.suppress(OSError):
                found |= {int(pid) for pid in (folder / "cgroup.procs").read_text().split()}
        return found - {0}

    def empty(self, grace_seconds: float) -> int:
        """End what is left in the cgroup: SIGTERM, then SIGKILL after the grace; returns how many there were."""
        left = self.processes()
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGTERM)
                os.kill(pid, signal.SIGCONT)
        deadline = time.monotonic() + grace_seconds
        while self.processes():
            if time.monotonic() >= deadline:
                self._kill()
            time.sleep(POLL_SECONDS)
        return len(left)

    def _kill(self) -> None:
        """cgroup.kill reaches processes that are being forked as well; kernels before 5.14 lack it."""
        with contextlib.suppress(OSError):
            (self.folder / "cgroup.kill").write_text("1")
            return
        for pid in self.processes():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def remove(self, patience_seconds: float = 2.0) -> None:
        """Remove the folder and what the command made below it; a scope is left to systemd, which is waited for."""
        deadline = time.monotonic() + patience_seconds
        while self.folder.exists() and time.monotonic() < deadline:
            if self.own:
                _remove_tree(self.folder)
            if self.folder.exists():
                time.sleep(POLL_SECONDS)
        if self.own:
            with contextlib.suppress(OSError):  # other jobs are in it
                self.folder.parent.rmdir()


@contextlib.contextmanager
def making(root: str, name: str) -> Iterator[JobCgroup]:
    """Make a plain cgroup for the job below the v2 root; the body starts the command in it.

    Until the body is done no other `exec` sweeps, so an empty new cgroup is not mistaken for a left-over. Raises
    ExecError where a job of that name runs.
    """
    slice_folder = Path(root + EXEC_PARENT)
    with _locked(slice_folder):
        sweep(slice_folder)
        try:
            (slice_folder / name).mkdir()
        except FileExistsError:
            raise in_use(name) from None
        except OSError as error:
            raise _cannot_make(slice_folder / name, error) from None
        _pass_io_on(slice_folder)
        yield JobCgroup(slice_folder / name, own=True)


def _cannot_make(folder: Path, error: OSError) -> ExecError:
    user = os.environ.get("USER") or "NAME"
    return ExecError(
        f"Cgroup {str(folder)!r} cannot be made ({error.strerror}); run as root, outside of a container: "
        f"sudo prefetchd exec --user {user} …"
    )


def in_use(name: str) -> ExecError:
    """The error for a name that is taken."""
    return ExecError(f"A job {name!r} already runs on this node; give this one another name with --job.")


def scope_of(root: str, name: str) -> JobCgroup:
    """The cgroup that systemd will make for the job; raises ExecError where one of that name is in use."""
    found = JobCgroup(Path(f"{root}{EXEC_PARENT}/{name}.scope"), own=False)
    if found.processes():
        raise in_use(name)
    return found


@contextlib.contextmanager
def _locked(slice_folder: Path) -> Iterator[None]:
    """Make the slice's folder if it is missing, and hold its lock."""
    try:
        descriptor = _lock(slice_folder)
    except OSError as error:
        raise _cannot_make(slice_folder, error) from None
    try:
        yield
    finally:
        os.close(descriptor)


def _lock(slice_folder: Path) -> int:
    """A descriptor that holds the lock; made anew as long as the folder is removed before it is locked."""
    while True:
        slice_folder.mkdir(exist_ok=True)
        with contextlib.suppress(FileNotFoundError):
            descriptor = os.open(slice_folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            if slice_folder.exists() and os.fstat(descriptor).st_ino == slice_folder.stat().st_ino:
                return descriptor
            os.close(descriptor)


def sweep(slice_folder: Path) -> None:
    """Remove cgroups without a process: their command's `exec` and keeper were both killed."""
    for folder in slice_folder.iterdir():
        cgroup = JobCgroup(folder, own=True)
        if folder.is_dir() and folder.suffix != ".scope" and not cgroup.processes():
            _remove_tree(cgroup.folder)


def _remove_tree(folder: Path) -> None:
    """Remove a cgroup and those below it; what is in use stays."""
    for below in sorted(_folders(folder), reverse=True):
        with contextlib.suppress(OSError):
            below.rmdir()


def _folders(folder: Path) -> list[Path]:
    return [Path(found) for found, _, _ in os.walk(folder)]


def _pass_io_on(slice_folder: Path) -> None:
    """The slice is ours: let its jobs have the io controller wherever the slice itself has it."""
    with contextlib.suppress(OSError):
        if "io" in (slice_folder / "cgroup.controllers").read_text().split():
            (slice_folder / "cgroup.subtree_control").write_text("+io")
