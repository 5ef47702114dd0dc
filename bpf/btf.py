"""Where a field of the running kernel stands: a reader of BTF, the kernel's own type format.

The format is described in Documentation/bpf/btf.rst and include/uapi/linux/btf.h. Only what the probes ask for is
read: offsets and sizes of struct members, values of enumerators, the arguments of raw tracepoints.
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np

VMLINUX = Path("/sys/kernel/btf/vmlinux")

_MAGIC = 0xEB9F
_HEADER = struct.Struct("=HBBIIIII")

_INT, _PTR, _ARRAY, _STRUCT, _UNION, _ENUM = 1, 2, 3, 4, 5, 6
_TYPEDEF, _VOLATILE, _CONST, _RESTRICT, _FUNC_PROTO = 8, 9, 10, 11, 13
_TYPE_TAG, _ENUM64 = 18, 19
_SIZED = frozenset({_INT, _STRUCT, _UNION, _ENUM, _ENUM64, 16})
_WRAPPERS = frozenset({_TYPEDEF, _VOLATILE, _CONST, _RESTRICT, _TYPE_TAG})
_FIXED_EXTRA_WORDS = {_INT: 1, _ARRAY: 3, 14: 1, 17: 1}
_EXTRA_WORDS_PER_ENTRY = {_STRUCT: 3, _UNION: 3, _ENUM: 2, _FUNC_PROTO: 2, 15: 3, _ENUM64: 3}
_LAST_KIND = 19


class BtfError(LookupError):
    """The BTF data is malformed, or does not hold what was asked for."""


def joined(base: bytes, split: bytes) -> bytes:
    """BTF of a module (its ids and string offsets go on where the kernel's end) and of the kernel as one blob."""
    parts: list[tuple[bytes, bytes]] = []
    for blob in (base, split):
        if len(blob) < _HEADER.size:
            raise BtfError(f"BTF of {len(blob)} bytes is shorter than its header")
        *_, length, type_at, type_length, string_at, string_length = _HEADER.unpack_from(blob)
        types = blob[length + type_at : length + type_at + type_length]
        parts.append((types, blob[length + string_at : length + string_at + string_length]))
    types, strings = parts[0][0] + parts[1][0], parts[0][1] + parts[1][1]
    header = _HEADER.pack(_MAGIC, 1, 0, _HEADER.size, 0, len(types), len(types), len(strings))
    return header + types + strings


class Member(NamedTuple):
    """One member of a struct: its type id and where it starts, in bits from the start of the struct."""

    name: str
    type_id: int
    bit_offset: int


def _extra_words(kind: int, entries: int) -> int:
    """32-bit words that follow the three words common to every type."""
    return _FIXED_EXTRA_WORDS.get(kind, 0) + _EXTRA_WORDS_PER_ENTRY.get(kind, 0) * entries


class Btf:
    """One parsed BTF blob (native byte order). Type ids count from 1; 0 is void."""

    def __init__(self, blob: bytes) -> None:
        if len(blob) < _HEADER.size:
            raise BtfError(f"BTF of {len(blob)} bytes is shorter than its header")
        magic, version, _, header_length, type_at, type_length, string_at, string_length = _HEADER.unpack_from(blob)
        if magic != _MAGIC or version != 1:
            raise BtfError(f"BTF magic {magic:#x} version {version} is not {_MAGIC:#x} version 1 in this byte order")
        types = blob[header_length + type_at : header_length + type_at + type_length]
        self._strings = blob[header_length + string_at : header_length + string_at + string_length]
        if len(types) != type_length or len(self._strings) != string_length or type_length % 4:
            raise BtfError(f"BTF of {len(blob)} bytes is cut short")
        self._array = np.frombuffer(types, dtype=np.uint32)
        self._words: list[int] = self._array.tolist()
        self._starts = self._index()
        self._names = self._array[self._starts]
        self._kinds = (self._array[self._starts + 1] >> 24) & 0x1F

    def _index(self) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
        """First word of every type; types have no common length, so this walk cannot be vectorised."""
        words, starts, at, end = self._words, [0], 0, len(self._words)
        while at < end:
            starts.append(at)
            info = words[at + 1]
            kind = (info >> 24) & 0x1F
            if not 1 <= kind <= _LAST_KIND:
                raise BtfError(f"BTF type {len(starts) - 1} has kind {kind}, unknown to this reader")
            at += 3 + _extra_words(kind, info & 0xFFFF)
        if at != end:
            raise BtfError(f"BTF types end at word {at}, not at {end}")
        return np.array(starts, dtype=np.int64)

    def _string(self, offset: int) -> str:
        return self._strings[offset : self._strings.index(b"\0", offset)].decode()

    def _named(self, name: str, kinds: frozenset[int]) -> list[int]:
        """Ids of the types of these kinds with this name."""
        ids: list[int] = []
        for offset in self._string_offsets(name):
            found = np.nonzero(self._names[1:] == offset)[0] + 1
            ids += [int(i) for i in found if int(self._kinds[i]) in kinds]
        return ids

    def _type(self, type_id: int) -> tuple[int, int, int, int]:
        """Kind, number of entries, kind flag and size-or-type of a type."""
        if not 0 < type_id < len(self._starts):
            raise BtfError(f"BTF has no type {type_id}")
        start = int(self._starts[type_id])
        info = self._words[start + 1]
        return (info >> 24) & 0x1F, info & 0xFFFF, info >> 31, self._words[start + 2]

    def _bare(self, type_id: int) -> int:
        """The type behind typedefs and qualifiers."""
        while type_id:
            kind, _, _, target = self._type(type_id)
            if kind not in _WRAPPERS:
                break
            type_id = target
        return type_id

    def _members(self, type_id: int) -> list[Member]:
        kind, entries, has_bitfields, _ = self._type(type_id)
        if kind not in {_STRUCT, _UNION}:
            return []
        start, mask = int(self._starts[type_id]) + 3, 0xFFFFFF if has_bitfields else 0xFFFFFFFF
        words = self._words[start : start + 3 * entries]
        return [Member(self._string(words[i]), words[i + 1], words[i + 2] & mask) for i in range(0, len(words), 3)]

    def _find(self, type_id: int, name: str) -> tuple[int, int] | None:
        """Type id and bit offset of a member, looked for in anonymous members too."""
        for member in self._members(self._bare(type_id)):
            if member.name == name:
                return member.type_id, member.bit_offset
            if not member.name and (inner := self._find(member.type_id, name)):
                return inner[0], member.bit_offset + inner[1]
        return None

    def _resolve(self, path: str) -> tuple[int, int]:
        """Type id and bit offset of `struct.member.member…`."""
        root, *members = path.split(".")
        for type_id in self._named(root, frozenset({_STRUCT, _UNION, _TYPEDEF})):
            at, bits = type_id, 0
            for name in members:
                if not (found := self._find(at, name)):
                    break
                at, bits = found[0], bits + found[1]
            else:
                return at, bits
        raise BtfError(f"this kernel's BTF has no {path!r}")

    def offset(self, path: str) -> int:
        """Byte offset of `struct.member[.member…]`; BtfError where this kernel has none, or where it is a bit field."""
        bits = self._resolve(path)[1]
        if bits % 8:
            raise BtfError(f"{path!r} is a bit field at bit {bits}, it has no byte offset")
        return bits // 8

    def size(self, path: str) -> int:
        """Size in bytes of a struct or of one of its members; array and pointer members included."""
        return self._size(self._resolve(path)[0])

    def _size(self, type_id: int) -> int:
        bare = self._bare(type_id)
        kind, _, _, size = self._type(bare)
        if kind == _PTR:
            return struct.calcsize("P")
        if kind == _ARRAY:
            element, _, length = self._words[int(self._starts[bare]) + 3 : int(self._starts[bare]) + 6]
            return self._size(element) * length
        if kind in _SIZED:
            return size
        raise BtfError(f"BTF type {bare} of kind {kind} has no size")

    def enumerator(self, name: str) -> int:
        """Value of a named enumerator of any enum, as an unsigned number of up to 64 bits."""
        offsets = self._string_offsets(name)
        for type_id in np.nonzero((self._kinds == _ENUM) | (self._kinds == _ENUM64))[0].tolist():
            if type_id and (value := self._enumerator_in(type_id, offsets)) is not None:
                return value
        raise BtfError(f"this kernel's BTF has no enumerator {name!r}")

    def _string_offsets(self, name: str) -> list[int]:
        needle, at, found = name.encode() + b"\0", 0, list[int]()
        while (at := self._strings.find(needle, at)) >= 0:
            if at and self._strings[at - 1] == 0:
                found.append(at)
            at += 1
        return found

    def _enumerator_in(self, type_id: int, name_offsets: list[int]) -> int | None:
        kind, entries, _, _ = self._type(type_id)
        start, width = int(self._starts[type_id]) + 3, 2 if kind == _ENUM else 3
        for at in range(start, start + width * entries, width):
            if self._words[at] in name_offsets:
                high = self._words[at + 2] if kind == _ENUM64 else 0
                return self._words[at + 1] | high << 32
        return None

    def tracepoint_argument(self, tracepoint: str, struct_name: str) -> int:
        """Index, among the arguments of a raw tracepoint, of the first pointer to `struct struct_name`.

        Arguments were added and removed over time (`block_rq_issue` lost its queue in 5.11), so programs ask. The
        kernel describes them in `typedef void (*btf_trace_NAME)(void *data, …)` (include/trace/bpf_probe.h).
        """
        for typedef in self._named(f"btf_trace_{tracepoint}", frozenset({_TYPEDEF})):
            pointer = self._bare(typedef)
            prototype = self._type(pointer)[3]
            entries, start = self._type(prototype)[1], int(self._starts[prototype]) + 3
            for index in range(1, entries):
                if self._points_to(self._words[start + 2 * index + 1], struct_name):
                    return index - 1
        raise BtfError(f"this kernel's tracepoint {tracepoint!r} has no argument of struct {struct_name!r}")

    def tracepoint_type(self, tracepoint: str) -> int:
        """Id of `btf_trace_NAME`, by which a program is attached to a tracepoint with types; BtfError where none."""
        for typedef in self._named(f"btf_trace_{tracepoint}", frozenset({_TYPEDEF})):
            return typedef
        raise BtfError(f"this kernel has no tracepoint {tracepoint!r}, or none that its BTF describes")

    def _points_to(self, type_id: int, struct_name: str) -> bool:
        bare = self._bare(type_id)
        if not bare or self._type(bare)[0] != _PTR:
            return False
        target = self._bare(self._type(bare)[3])
        return bool(target) and self._string(int(self._names[target])) == struct_name


Answers = dict[str, int | None]


class KernelBtf:
    """The running kernel's BTF, parsed only when something is asked that no earlier run of this boot has asked.

    Answers are kept in `cache` (a folder that only root may write), in one file per boot and kernel; None as cache
    keeps them in memory only. The questions are those of `Btf`.
    """

    def __init__(self, path: Path = VMLINUX, cache: Path | None = None, base: Path | None = None) -> None:
        self._path = path
        self._base = base
        self._cache = cache
        self._parsed: Btf | None = None
        self._file = cache / self._cache_name() if cache and path.exists() else None
        self._answers: Answers = self._stored()

    def offset(self, path: str) -> int:
        """Byte offset of `struct.member[.member…]`."""
        return self._ask(f"offset {path}", lambda btf: btf.offset(path))

    def size(self, path: str) -> int:
        """Size in bytes of `struct[.member…]`."""
        return self._ask(f"size {path}", lambda btf: btf.size(path))

    def enumerator(self, name: str) -> int:
        """Value of an enumerator."""
        return self._ask(f"enumerator {name}", lambda btf: btf.enumerator(name))

    def tracepoint_argument(self, tracepoint: str, struct_name: str) -> int:
        """Index of the first argument of a raw tracepoint that points to `struct struct_name`."""
        return self._ask(
            f"argument {tracepoint} {struct_name}", lambda btf: btf.tracepoint_argument(tracepoint, struct_name)
        )

    def tracepoint_type(self, tracepoint: str) -> int:
        """Id of the BTF type of a tracepoint."""
        return self._ask(f"type {tracepoint}", lambda btf: btf.tracepoint_type(tracepoint))

    def has(self, path: str) -> bool:
        """Whether this kernel has `struct.member[.member…]`."""
        try:
            self.offset(path)
        except BtfError:
            return False
        return True

    def offsets(self, wanted: Mapping[str, str]) -> dict[str, int]:
        """Macro name -> byte offset, for macro name -> path."""
        return {macro: self.offset(path) for macro, path in wanted.items()}

    def _ask(self, question: str, compute: Callable[[Btf], int]) -> int:
        if question not in self._answers:
            try:
                self._answers[question] = compute(self._btf())
            except BtfError:
                if self._parsed is None:
                    raise
                self._answers[question] = None
            self._store()
        answer = self._answers[question]
        if answer is None:
            raise BtfError(f"this kernel's BTF has no answer to {question!r}")
        return answer

    def _btf(self) -> Btf:
        if self._parsed is None:
            try:
                blob = self._path.read_bytes()
                self._parsed = Btf(joined(self._base.read_bytes(), blob) if self._base else blob)
            except OSError as error:
                raise BtfError(f"cannot read {self._path}: {error.strerror}; build the kernel with BTF") from error
        return self._parsed

    def of_module(self, name: str) -> KernelBtf:
        """The types of a loaded module, with the kernel's own."""
        return KernelBtf(self._path.with_name(name), self._cache, self._path)

    def forget(self) -> None:
        """Free the parsed types (some 50 MB for a distribution's kernel); they are parsed again when needed."""
        self._parsed = None

    def _cache_name(self) -> str:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        module = f"-{self._path.name}" if self._base else ""
        return f"btf-{os.uname().release}{module}-{self._path.stat().st_size}-{boot}.json"

    def _stored(self) -> Answers:
        """Answers of an earlier run; none where the file is missing, unreadable, or not root's own."""
        try:
            if self._file is None or self._file.stat().st_uid != os.geteuid():
                return {}
            stored = json.loads(self._file.read_text())
        except (OSError, ValueError):
            return {}
        return dict(stored) if isinstance(stored, dict) else {}

    def _store(self) -> None:
        """Best effort: a cache that cannot be written only costs time."""
        if self._file is None:
            return
        try:
            self._file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            draft = self._file.with_suffix(f".{os.getpid()}")
            draft.write_text(json.dumps(self._answers))
            draft.replace(self._file)
        except OSError:
            self._file = None
