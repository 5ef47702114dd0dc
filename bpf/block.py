"""The block probe: every bio of the managed cgroups, from submission to completion, with the program of block.c.

Ladder: fentry, then kprobe (both see submit_bio, so the wait in blk-throttle is known), then tracepoints only, where a
bio first shows after blk-throttle and that wait is unknown.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection
from pathlib import Path
from typing import NamedTuple

import numpy as np

from bpf.btf import BtfError
from bpf.decode import (
    BLOCK_CONTROL,
    BLOCK_RECORD,
    BLOCK_SLOT,
    BLOCK_TOLD,
    Records,
    decode_block_slots,
    device_name,
    device_number,
    old_records,
    open_records,
    places_taken,
)
from bpf.loader import HISTOGRAM_HEADER, MEMORY_HEADER, TYPED_HEADER, Loader, ProbeError, Program
from bpf.reasons import Reason, failed, partly
from bpf.samples import ProbeState, ProbeStatus, Sample

SOURCE = Path(__file__).with_name("block.c")
_SHARED = (
    MEMORY_HEADER,
    TYPED_HEADER,
    HISTOGRAM_HEADER,
    *(Path(__file__).with_name(name) for name in ("block_slots.h", "block_flight.h")),
)

UNATTRIBUTED = 0
"""Cgroup id of writes that a kernel thread submits for an owner that this kernel cannot tell."""

TIERS = ("fentry", "kprobe", "tracepoint")

_TIMEOUT_NS = 30_000_000_000
"""The block layer's own limit for a request (BLK_DEFAULT_RQ_TIMEOUT); past blk-throttle nothing takes longer."""

_SECOND_NS = 1_000_000_000
_PLACES = 8
_CLEARED = tuple(name for name in BLOCK_SLOT.names or () if not name.startswith("epoch"))
"""What a slot's next owner must not find."""
"""Places per bucket of the bios in flight (PLACES in block_flight.h)."""

_FIELDS = {
    "OFF_BIO_BDEV": "bio.bi_bdev",
    "OFF_BIO_OPF": "bio.bi_opf",
    "OFF_BIO_FLAGS": "bio.bi_flags",
    "OFF_BIO_SIZE": "bio.bi_iter.bi_size",
    "OFF_BIO_NEXT": "bio.bi_next",
    "OFF_BIO_PRIVATE": "bio.bi_private",
    "OFF_BDEV_DISK": "block_device.bd_disk",
    "OFF_DISK_MAJOR": "gendisk.major",
    "OFF_DISK_FIRST_MINOR": "gendisk.first_minor",
    "OFF_TASK_FLAGS": "task_struct.flags",
    "OFF_TASK_CGROUPS": "task_struct.cgroups",
    "OFF_SET_CGROUP": "css_set.dfl_cgrp",
    "OFF_CGROUP_KN": "cgroup.kn",
    "OFF_KN_ID": "kernfs_node.id",
    "OFF_RQ_LENGTH": "request.__data_len",
    "OFF_RQ_BIO": "request.bio",
    "OFF_RQ_BIOTAIL": "request.biotail",
}
_BLKCG_FIELDS = {
    "OFF_BIO_BLKG": "bio.bi_blkg",
    "OFF_BLKG_BLKCG": "blkcg_gq.blkcg",
    "OFF_BLKCG_CGROUP": "blkcg.css.cgroup",
    "OFF_CGROUP_ROOT": "cgroup.root",
    "OFF_CGROUP_LEVEL": "cgroup.level",
    "OFF_ROOT_HIERARCHY": "cgroup_root.hierarchy_id",
}
_ARGUMENTS = {
    "ARG_BIO_QUEUE_BIO": ("block_bio_queue", "bio"),
    "ARG_RQ_ISSUE_RQ": ("block_rq_issue", "request"),
    "ARG_RQ_COMPLETE_RQ": ("block_rq_complete", "request"),
    "ARG_SPLIT_BIO": ("block_split", "bio"),
    "ARG_BIO_REMAP_BIO": ("block_bio_remap", "bio"),
    "ARG_BIO_COMPLETE_BIO": ("block_bio_complete", "bio"),
}
_ENUMERATORS = ("BIO_CLONED", "REQ_OP_READ", "REQ_OP_WRITE", "REQ_OP_ZONE_APPEND")

_LISTED, _LOOKED_THROUGH = 1, 2
"""What stands in the map `devices` (block_slots.h)."""

_Attach = Callable[[str, str], None]
"""Attaches a function to a tracepoint: (tracepoint, function)."""


class Limits(NamedTuple):
    """Sizes of the kernel's maps; what does not fit is counted as lost."""

    slots: int = 8192
    cgroups: int = 4096
    devices: int = 256
    resolved_bits: int = 12
    bucket_bits: int = 12
    depth: int = 16
    bios_per_request: int = 128

    @property
    def in_flight(self) -> int:
        """Bios that may be in flight at once."""
        return _PLACES << self.bucket_bits


class BlockProbe:
    """Block-layer counters per (cgroup, whole device, read or write).

    With `devices` (`maj:min` each) only those are counted, wherever in a stack they are; without, each IO counts once,
    on the device that it was submitted to. `tiers` narrows the ladder (tests, benchmarks). A kernel on which no tier
    works gives a probe that is `unavailable` and reads nothing; the constructor does not raise.
    """

    name = "block"

    def __init__(
        self,
        loader: Loader,
        *,
        devices: Collection[str] | None = None,
        tiers: Collection[str] = TIERS,
        limits: Limits = Limits(),  # noqa: B008  # immutable
    ) -> None:
        self._limits = limits
        self._managed: frozenset[int] = frozenset()
        self._looked_through: frozenset[str] = frozenset()
        self._see_remaps: Callable[[], None] | None = None
        self._program: Program | None = None
        self._slots: Records = np.zeros(0, BLOCK_SLOT)
        self._told: Records = np.zeros(limits.slots, BLOCK_TOLD)
        self._control: Records = np.zeros(1, BLOCK_CONTROL)
        self._bios: Records = np.zeros(0, np.uint64)
        self._records: Records = np.zeros(0, BLOCK_RECORD)
        self._next_generation_ns = self._read_ns = 0
        self._tier = ""
        self._refusals: list[str] = []
        self._nothing = Reason()
        try:
            macros = self._macros(loader)
            if not any(self._open(loader, macros | {"TYPED": typed}, devices, tiers) for typed in (1, 0)):
                raise ProbeError(f"no tier of {', '.join(tiers) or 'none'} works here")  # noqa: TRY301 - closes too
        except (ProbeError, BtfError) as error:
            self._nothing = failed(error, self._refusals)
            self.close()

    def _open(
        self, loader: Loader, macros: dict[str, int], devices: Collection[str] | None, tiers: Collection[str]
    ) -> bool:
        """Compile and attach the best tier; False where the kernel takes none in this form.

        Typed programs read the kernel's structs with plain loads, which costs less per IO; where one is refused,
        raw tracepoints do the same through helpers.
        """
        self._program = program = loader.load(SOURCE, macros, shared=_SHARED)
        self._map_memory(program, devices)
        attach = program.attach_btf_tracepoint if macros["TYPED"] else program.attach_raw_tracepoint
        if self._climb(program, tiers, attach):
            self._see_remaps = lambda: attach("block_bio_remap", "raw_bio_remapped")
            return True
        self._forget_memory()
        program.close()
        self._program = None
        return False

    def _macros(self, loader: Loader) -> dict[str, int]:
        btf = loader.btf
        macros = btf.offsets(_FIELDS)
        with contextlib.suppress(BtfError):  # without CONFIG_BLK_CGROUP bios have no owner of their own
            ancestors = "OFF_CGROUP_ANCESTORS", "cgroup.ancestors"
            if not btf.has("cgroup.ancestors"):
                ancestors = "OFF_CGROUP_ANCESTOR_IDS", "cgroup.ancestor_ids"
            macros |= btf.offsets(_BLKCG_FIELDS | dict([ancestors]))
        macros |= {name: btf.tracepoint_argument(*asked) for name, asked in _ARGUMENTS.items()}
        macros |= {name: btf.enumerator(name) for name in _ENUMERATORS}
        limits = self._limits
        return macros | {
            "MAX_SLOTS": limits.slots,
            "MAX_CGROUPS": limits.cgroups,
            "MAX_DEVICES": limits.devices,
            "RESOLVED_BITS": limits.resolved_bits,
            "BUCKET_BITS": limits.bucket_bits,
            "MAX_DEPTH": limits.depth,
            "MAX_BIOS": limits.bios_per_request,
        }

    def _map_memory(self, program: Program, devices: Collection[str] | None) -> None:
        slots = self._limits.slots
        self._slots = np.frombuffer(program.view("slots", slots * BLOCK_SLOT.itemsize), BLOCK_SLOT, slots)
        places = self._limits.in_flight
        self._bios = np.frombuffer(program.view("buckets", places * 8), np.uint64, places)
        self._records = np.frombuffer(program.view("records", places * BLOCK_RECORD.itemsize), BLOCK_RECORD, places)
        self._control = np.frombuffer(program.view("control", BLOCK_CONTROL.itemsize), BLOCK_CONTROL, 1)
        free = program.map("free_slots")
        for slot in range(slots):
            free.push(free.Leaf(slot))
        self._control["generation"] = 1
        if devices is not None:
            table = program.map("devices")
            for device in devices:
                table[table.Key(device_number(device))] = table.Leaf(_LISTED)
            self._control["only_listed"] = 1

    def _climb(self, program: Program, tiers: Collection[str], attach: _Attach) -> bool:
        """Attach the best tier that this kernel takes; ends come before starts, so that no start is left open."""
        ladder: dict[str, Callable[[Program, _Attach], None]] = {
            "fentry": _attach_fentry,
            "kprobe": _attach_kprobe,
            "tracepoint": _attach_tracepoints,
        }
        for tier in (name for name in TIERS if name in tiers):
            try:
                attach("block_rq_issue", "raw_request_issued")
                attach("block_split", "raw_split")
                ladder[tier](program, attach)
            except ProbeError as error:
                self._refusals.append(str(error))
                program.detach_all()
            else:
                self._tier = tier
                return True
        return False

    @property
    def program(self) -> Program:
        """The loaded program; ProbeError where there is none."""
        if self._program is None:
            raise ProbeError("; ".join(filter(None, self._nothing)) or "the block probe is closed")
        return self._program

    def status(self) -> ProbeStatus:
        """Attached where blk-throttle's wait is seen, degraded where only tracepoints are."""
        if not self._tier:
            return ProbeStatus(self.name, ProbeState.UNAVAILABLE, self._nothing.why, detail=self._nothing.detail)
        state, (why, detail) = ProbeState.ATTACHED, Reason()
        if self._tier == "tracepoint":
            state, (why, detail) = ProbeState.DEGRADED, partly("the wait in blk-throttle is unknown", self._refusals)
        lost = sum(self.losses().values())
        return ProbeStatus(self.name, state, why, self._tier, lost, self._fill_ratio(), detail)

    def losses(self) -> dict[str, int]:
        """Bios that were not recorded for want of room, and those that counted without a time."""
        return {
            "in_flight_full": int(self._control["lost_in_flight"][0]),
            "slots_full": int(self._control["lost_slots"][0]),
            "ends_missed": int(self._slots["missed"].sum()),
        }

    def _fill_ratio(self) -> float:
        """How full the fullest of the bounded maps is; the place of a bio that never ended is free once it is stale."""
        limits = self._limits
        return max(
            int(np.count_nonzero(self._slots["live"])) / limits.slots,
            places_taken(self._bios, self._records, self._read_ns - _TIMEOUT_NS) / limits.in_flight,
            len(self._managed) / limits.cgroups,
        )

    def manage(self, cgroup_ids: Collection[int]) -> None:
        """Count these cgroups and what is below them, and no others; counters of the others are dropped."""
        wanted = frozenset(cgroup_ids)
        if self._program is None or wanted == self._managed:
            return
        table = self._program.map("managed")
        for cgroup in self._managed - wanted:
            with contextlib.suppress(KeyError):
                del table[table.Key(cgroup)]
        for cgroup in wanted - self._managed:
            table[table.Key(cgroup)] = table.Leaf(1)
        self._managed = wanted
        self._control["generation"] += 1
        self._recycle()

    def look_through(self, devices: Collection[str]) -> None:
        """Count nothing on these mapped devices (`maj:min`), but what they pass on, on the device that it goes to.

        Replaces what was looked through before; counters of these devices are dropped. What a mapper's own threads
        move from one disk to another is no job's. Raises ProbeError where the kernel does not tell what is passed on.
        """
        wanted = frozenset(devices)
        if self._program is None or not self._tier:
            return
        if wanted and self._see_remaps is not None:  # costs the IO of partitions too: not before it is needed
            self._see_remaps()
            self._see_remaps = None
        table = self._program.map("devices")
        for device in self._looked_through - wanted:
            with contextlib.suppress(KeyError):
                del table[table.Key(device_number(device))]
        for device in wanted - self._looked_through:
            table[table.Key(device_number(device))] = table.Leaf(_LOOKED_THROUGH)
        self._looked_through = wanted
        self._control["generation"] += 1
        self._recycle()

    def _recycle(self) -> None:
        """Give the slots of cgroups no longer managed, and of devices looked through, back to the kernel.

        The epoch moves first, so that requests still in flight no longer touch a slot.
        """
        passed = {device_number(device) for device in self._looked_through}
        live = np.nonzero(self._slots["live"].copy())[0]  # the kernel writes meanwhile, which numpy refuses
        owners, devices = self._slots["cgroup"][live].tolist(), self._slots["device"][live].tolist()
        for slot, owner, device in zip(live.tolist(), owners, devices, strict=True):
            if device in passed or (owner not in self._managed and owner != UNATTRIBUTED):
                self._free(slot)

    def _free(self, slot: int) -> None:
        assert self._program is not None  # noqa: S101  # manage() returned otherwise
        entry, keys = self._slots[slot], self._program.map("slot_of")
        key = keys.Key(int(entry["cgroup"]), int(entry["device"]), int(entry["op"]))
        with contextlib.suppress(KeyError):
            del keys[key]
        epoch = (int(entry["epoch"]) + 1) & 0xFFFFFFFF
        self._slots["epoch"][slot] = self._slots["epoch_of_ends"][slot] = epoch
        for name in _CLEARED:
            self._slots[name][slot] = 0
        self._told[slot] = 0
        free = self._program.map("free_slots")
        free.push(free.Leaf(slot))

    def read(self, now_ns: int) -> Sample:
        """The counters of the managed cgroups, and of UNATTRIBUTED, as they stand.

        Needs no system call, except where bios stay in flight for a second: then it asks sysfs for idle devices.
        """
        if not self._tier:
            return Sample(now_ns)
        if now_ns >= self._next_generation_ns:
            self._next_generation_ns = now_ns + _SECOND_NS
            self._control["generation"] += 1
        self._read_ns = now_ns
        running = open_records(self._bios, self._records, self._slots)
        over = self._over(running, now_ns)
        blocks = decode_block_slots(self._slots, running, over, self._told, throttle=self._tier != "tracepoint")
        return Sample(now_ns, blocks=blocks)

    def _over(self, running: Records, now_ns: int) -> Records:
        """Records of bios whose end was missed: older than the kernel lets a request be, or on a device that is idle.

        They stay where they are until their place is needed, when the kernel's side counts them as missed. A record
        that waits in blk-throttle is none of them: nothing bounds that wait.
        """
        old = old_records(running, now_ns - _SECOND_NS)
        if not old.size:
            return old
        devices = self._slots["device"][old["slot"]]
        each = set(devices.tolist())  # `np.unique` would import numpy.ma in the midst of a pass
        idle = [device for device in each if is_idle(device_name(device))]
        chosen: Records = old[np.isin(devices, idle) | (old["submitted"] < now_ns - _TIMEOUT_NS)]
        return chosen

    def close(self) -> None:
        """Detach and free."""
        self._forget_memory()
        self._tier = ""
        if self._program is not None:
            self._program.close()
            self._program = None

    def _forget_memory(self) -> None:
        self._slots, self._control = np.zeros(0, BLOCK_SLOT), self._control.copy()
        self._bios, self._records = np.zeros(0, np.uint64), np.zeros(0, BLOCK_RECORD)


def is_idle(device: str) -> bool:
    """Whether no request is in flight on a device `maj:min` (sysfs, Documentation/block/stat.rst)."""
    try:
        return not any(map(int, Path(f"/sys/dev/block/{device}/inflight").read_text().split()))
    except (OSError, ValueError):
        return False


def _attach_fentry(program: Program, attach: _Attach) -> None:
    program.attach_fentry("bio_endio")
    attach("block_bio_queue", "raw_bio_queued")
    program.attach_fentry("submit_bio")


def _attach_kprobe(program: Program, attach: _Attach) -> None:
    program.attach_kprobe("bio_endio", "kprobe_bio_endio")
    attach("block_bio_queue", "raw_bio_queued")
    program.attach_kprobe("submit_bio", "kprobe_submit_bio")


def _attach_tracepoints(_: Program, attach: _Attach) -> None:
    attach("block_rq_complete", "raw_request_completed")
    attach("block_bio_complete", "raw_bio_completed")
    attach("block_bio_queue", "raw_bio_started")
