"""The page-cache probe: bytes that the managed cgroups read through the cache, and bytes that were missing in it.

Ladder: fentry, then kprobe (both see filemap_read, so every read whatever the call), then the read system calls, which
leave out io_uring and splice. What mmap readers see is counted where they fault: the pages that a fault maps.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Collection
from pathlib import Path

from bpf.btf import BtfError
from bpf.loader import MEMORY_HEADER, Loader, Macros, ProbeError, Program
from bpf.owners import OWNER_HEADER, Owners
from bpf.reasons import Reason, failed, partly
from bpf.samples import CacheCounters, ProbeState, ProbeStatus, Sample

SOURCE = Path(__file__).with_name("page_cache.c")
TIERS = ("fentry", "kprobe", "tracepoint")

_ADDED = "filemap:mm_filemap_add_to_page_cache"
_SYSCALLS = ("read", "pread64", "readv", "preadv", "preadv2")
_FAULTS = {"mm_filemap_map_pages": "raw_map_pages", "mm_filemap_fault": "raw_fault"}
_FIELDS = {
    "OFF_TASK_FILES": "task_struct.files",
    "OFF_FILES_FDT": "files_struct.fdt",
    "OFF_FDT_MAX": "fdtable.max_fds",
    "OFF_FDT_FD": "fdtable.fd",
    "OFF_FILE_FLAGS": "file.f_flags",
    "OFF_FILE_INODE": "file.f_inode",
    "OFF_INODE_MODE": "inode.i_mode",
}
_CGROUPS = 4096


class PageCacheProbe:
    """Cache counters per cgroup. `tiers` narrows the ladder (tests, benchmarks)."""

    name = "page_cache"

    def __init__(self, loader: Loader, *, tiers: Collection[str] = TIERS) -> None:
        self._program: Program | None = None
        self._owners: Owners | None = None
        self._tier = ""
        self._refusals: list[str] = []
        self._nothing = Reason()
        self._unseen: list[str] = []
        try:
            self._program = loader.load(SOURCE, _macros(loader), shared=[MEMORY_HEADER, OWNER_HEADER])
            self._owners = Owners(self._program)
            self._climb(self._program, tiers)
        except (ProbeError, BtfError) as error:
            self._nothing = failed(error, self._refusals)
            self._drop()

    def _climb(self, program: Program, tiers: Collection[str]) -> None:
        ladder: dict[str, Callable[[Program], None]] = {
            "fentry": _attach_fentry,
            "kprobe": _attach_kprobe,
            "tracepoint": self._attach_tracepoints,
        }
        program.attach_tracepoint(_ADDED, "page_added")
        for tier in (name for name in TIERS if name in tiers):
            try:
                ladder[tier](program)
            except ProbeError as error:
                self._refusals.append(str(error))
                for target in program.attached:
                    if target != f"tracepoint:{_ADDED}":
                        program.detach(target)
            else:
                self._tier = tier
                return
        raise ProbeError(f"no tier of {', '.join(tiers) or 'none'} works here")

    def _attach_tracepoints(self, program: Program) -> None:
        for call in _SYSCALLS:
            program.attach_tracepoint(f"syscalls:sys_exit_{call}", "read_returned")
            program.attach_tracepoint(f"syscalls:sys_enter_{call}", "read_entered")
        self._unseen = ["io_uring and splice"]
        try:
            for tracepoint, function in _FAULTS.items():  # since Linux 6.12
                program.attach_raw_tracepoint(tracepoint, function)
        except ProbeError:
            self._unseen.append("mmap")

    def status(self) -> ProbeStatus:
        """Attached where all reads are seen, degraded where only system calls are."""
        if self._program is None:
            return ProbeStatus(self.name, ProbeState.UNAVAILABLE, self._nothing.why, detail=self._nothing.detail)
        state, (why, detail) = ProbeState.ATTACHED, Reason()
        if self._unseen:
            meaning = f"reads by {', '.join(self._unseen)} are not seen"
            state, (why, detail) = ProbeState.DEGRADED, partly(meaning, self._refusals)
        lost = int(self._program.map("cache_lost")[0].value)
        fill = len(self._program.map("caches")) / _CGROUPS
        return ProbeStatus(self.name, state, why, self._tier, lost, fill, detail)

    def manage(self, cgroup_ids: Collection[int]) -> None:
        """Count these cgroups and what is below them, and no others."""
        if self._owners is None or self._program is None:
            return
        caches = self._program.map("caches")
        for cgroup in self._owners.replace(cgroup_ids):
            with contextlib.suppress(KeyError):
                del caches[caches.Key(cgroup)]

    def read(self, now_ns: int) -> Sample:
        """The counters as they stand."""
        if self._program is None or self._owners is None:
            return Sample(now_ns)
        found = {
            int(key.value): CacheCounters(value.read_bytes, value.missed_bytes)
            for key, value in self._owners.entries(self._program.map("caches"), lambda key: int(key.value))
        }
        return Sample(now_ns, cache=found)

    def _drop(self) -> None:
        if self._program is not None:
            self._program.close()
        self._program = self._owners = None

    def close(self) -> None:
        """Detach and free."""
        self._drop()


def _macros(loader: Loader) -> Macros:
    macros = loader.btf.offsets(_FIELDS) | {
        "MAX_CGROUPS": _CGROUPS,
        "PAGE_BYTES": os.sysconf("SC_PAGESIZE"),
        "OPEN_DIRECT": os.O_DIRECT,
    }
    if loader.tracepoint_has_field(_ADDED, "order"):  # since 5.17: folios
        macros["HAS_ORDER"] = 1
    return macros


def _attach_fentry(program: Program) -> None:
    program.attach_fexit("filemap_read")
    program.attach_fexit("filemap_fault")
    program.attach_fexit("filemap_map_pages")
    program.attach_fentry("filemap_read")
    program.attach_fentry("filemap_fault")


def _attach_kprobe(program: Program) -> None:
    program.attach_kretprobe("filemap_read", "kretprobe_read")
    program.attach_kretprobe("filemap_fault", "kretprobe_fault")
    program.attach_kretprobe("filemap_map_pages", "kretprobe_map_pages")
    program.attach_kprobe("filemap_read", "kprobe_read")
    program.attach_kprobe("filemap_fault", "kprobe_fault")
    program.attach_kprobe("filemap_map_pages", "kprobe_map_pages")
