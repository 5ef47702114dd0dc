"""The profiler's hooks: probes on each copy of PyTorch's library that a process of a managed cgroup has loaded.

What a path leads to is the job's to choose, at any time: a pipe would hold up who opens it, a device may act on being
opened (a watchdog restarts the machine), a FUSE mount need not answer. So a place is looked at before it is opened, in
a thread that nobody waits for long, and what was opened is what is read and probed. Probes keep the file system that a
copy is on, be it that of a container that is gone: they go soon after the last process that has it.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path

from bpf.library_file import LibraryFile
from bpf.loader import ProbeError, Program

LIBRARY = "libtorch_cpu.so"
HOOKS = {
    "_ZN2at14RecordFunction3endEv": "span_ended",
    "_ZN2at14RecordFunctionC1ENS_11RecordScopeE": "span_constructed",
    "_ZN5torch8autograd8profiler25record_function_enter_new": "span_entered",
}
"""Beginnings of the names of C++ functions (ATen/record_function.h, torch/csrc/autograd/record_function_ops.cpp).

The one that begins a span comes last, so that no span is seen to begin whose end is not.
"""

MAX_LIBRARIES = 16
UNUSED_NS = 60_000_000_000
"""A job that starts over within this time finds its hooks in place."""

_MOST_THREADS = 64


@dataclass(slots=True)
class _Copy:
    """One copy of the library: its file, what is attached to it, who has it, since when nobody.

    `is_settled`: the probes are on it, or it is known why not.
    """

    file: LibraryFile
    is_settled: bool = False
    targets: list[str] = field(default_factory=list)
    users: set[int] = field(default_factory=set)
    unused_since_ns: int | None = None


class Libraries:
    """The copies with hooks, by device and inode. `refusal` says why the last one that could not have them has none."""

    def __init__(self, program: Program, proc_root: Path = Path("/proc")) -> None:
        self.refusal = ""
        self._program = program
        self._proc_root = proc_root
        self._copies: dict[tuple[str, int], _Copy] = {}

    def __len__(self) -> int:
        return sum(copy.is_settled for copy in self._copies.values())

    def look_into(self, process: int) -> bool:
        """Attach to the library that a process has loaded; False where it has none (yet), OSError where it ended.

        One that waits for storage is left for later: it may hold the lock of its memory meanwhile (mmap on NFS asks the
        server under it), and who reads its maps would wait as long, with a server that hangs for ever. A library whose
        storage does not answer at once is left for later as well.
        """
        folder = self._proc_root / str(process)
        if any(_waits(thread) for thread in islice((folder / "task").glob("[0-9]*/stat"), _MOST_THREADS)):
            return False
        for line in map(os.fsdecode, (folder / "maps").read_bytes().split(b"\n")):  # in paths that alone is escaped
            if not line.endswith(LIBRARY):
                continue
            _, _, _, device, inode, path = line.split(maxsplit=5)
            key = device, int(inode)
            if key not in self._copies:
                if len(self._copies) >= MAX_LIBRARIES:
                    self._release(next(iter(self._copies)))
                self._copies[key] = _Copy(LibraryFile(Path(f"{folder}/root{path}"), HOOKS))
            copy = self._copies[key]
            copy.users.add(process)
            copy.unused_since_ns = None
            if not copy.is_settled and not copy.file.is_pending:
                self._attach(copy)
            return copy.is_settled
        return False

    def ended(self, process: int) -> None:
        """A process has ended."""
        for copy in self._copies.values():
            copy.users.discard(process)

    def release_unused(self, is_alive: Callable[[int], bool], now_ns: int) -> None:
        """Let go of copies that no process has had for a while."""
        for key, copy in list(self._copies.items()):
            copy.users = {process for process in copy.users if is_alive(process)}
            if copy.users:
                continue
            if copy.unused_since_ns is None:
                copy.unused_since_ns = now_ns
            elif now_ns - copy.unused_since_ns >= UNUSED_NS:
                self._release(key)

    def _attach(self, copy: _Copy) -> None:
        """Attach to one copy of the library; without success the pipes still tell."""
        before, copy.is_settled = self._program.attached, True
        try:
            if copy.file.error:
                raise ProbeError(copy.file.error)  # noqa: TRY301 - as the others
            held = Path(f"/proc/self/fd/{copy.file.descriptor}")
            for prefix, function in HOOKS.items():
                self._program.attach_uprobe(held, copy.file.symbols.get(prefix, prefix), function)
        except ProbeError as error:
            self.refusal = str(error)
            self._detach(copy, before)
            return
        copy.targets = [target for target in self._program.attached if target not in before]

    def _detach(self, copy: _Copy, before: tuple[str, ...]) -> None:
        for target in reversed([target for target in self._program.attached if target not in before]):
            self._program.detach(target)
        copy.file.close()

    def _release(self, key: tuple[str, int]) -> None:
        """The file is closed last: BCC finds what it attached by the file's symbols."""
        copy = self._copies.pop(key)
        self._detach(copy, tuple(target for target in self._program.attached if target not in copy.targets))

    def close(self) -> None:
        """Let go of all."""
        for key in list(self._copies):
            self._release(key)


def _waits(thread: Path) -> bool:
    """Whether a thread is in uninterruptible sleep, by its `stat` (proc(5)), in which its name may be odd."""
    try:
        text = thread.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return False  # ended
    return text.rpartition(") ")[2].startswith("D")
