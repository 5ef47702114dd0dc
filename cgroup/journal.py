"""What was there before us, written down before it is changed.

The journal lives in /run/prefetchd by default. A crash of the agent must not lose it, but a reboot should: limits die
with the cgroups they belong to, and /run is the one place that is emptied at the same moment. Where /run does outlive a
reboot, the boot id in the header tells that every record is void.

One record a line: checksum, then JSON. Each `set` record is whole in itself (what was there before us, what stood
there just before this write, what is about to be written), so replay takes the last one per line, and a torn or damaged
record loses one step at most. A record is on disk before the write it announces: after a crash a line therefore holds
`was`, `wrote`, or what somebody else put there.

Version 1 kept whole io.max lines as text; it is still read.
"""
# ruff: noqa: PTH104, PTH108, PTH116, PTH120, PTH123  # the guardian imports this, and pathlib would cost it a megabyte

from __future__ import annotations

import errno
import json
import os
import stat
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from cgroup.errors import IoFileError, JournalError
from cgroup.journal_lock import ignore_errors, take_lock, translated
from cgroup.lines import IO_MAX, KEYS, Line, Values, parse_line

VERSION = 2
DEFAULT_PATH = "/run/prefetchd/journal"
BOOT_ID_PATH = "/proc/sys/kernel/random/boot_id"

RESERVE_BYTES = 64 * 1024
"""Room that must be there before enforcement begins again after the journal was full: some 200 records."""

_COMPACT_AFTER = 1000  # records, beside four times what is alive


@dataclass(frozen=True, slots=True)
class Entry:
    """One line under control: what it held before us, just before the last write, and what that write puts there."""

    line: Line
    prior: Values
    was: Values
    wrote: Values


@dataclass(frozen=True, slots=True)
class JournalState:
    """What a journal file says. `damaged` counts records skipped for a wrong checksum, a torn last one not included.

    `root_id` is the inode of the cgroup root below which its cgroups were seen, 0 where it does not say.
    """

    entries: Mapping[Line, Entry] = field(default_factory=dict)
    boot_id: str = ""
    damaged: int = 0
    torn: bool = False
    root_id: int = 0


def boot_id(path: str = BOOT_ID_PATH) -> str:
    """Return the id of this boot, "" where the kernel has none."""
    try:
        with open(path, encoding="ascii") as file:
            return file.read().strip()
    except OSError:
        return ""


def read_journal(path: str) -> JournalState:
    """Return what the file says; a missing file says nothing. Raises JournalError where a newer version wrote it."""
    try:
        with open(path, "rb", opener=_without_waiting) as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise JournalError(f"{path} is not a regular file, so it is no journal: move it away.")
            return replay(file.read())
    except FileNotFoundError:
        return JournalState()
    except OSError as error:
        raise JournalError(f"{path} cannot be read ({error.strerror}).") from error


def _without_waiting(path: str, flags: int) -> int:
    """A named pipe in the journal's place would keep the reader waiting for ever."""
    return os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC)


def root_id(path: str) -> int:
    """Return the inode of a cgroup root, 0 where there is none. It differs between cgroup namespaces."""
    try:
        return os.stat(path).st_ino
    except OSError:
        return 0


def replay(data: bytes) -> JournalState:
    """Return the state after the records in a file's bytes. Pure. Raises JournalError for a newer version only."""
    *whole, last = data.split(b"\n")
    records = [_decode(text) for text in whole]
    tail = _decode(last)
    entries: dict[Line, Entry] = {}
    found_boot_id, found_root_id = "", 0
    for record in (*records, tail):
        kind = record.get("type") if record else None
        if record and kind == "head":
            found_boot_id, found_root_id = str(record.get("boot", "")), _whole(record.get("root"))
            _refuse_newer(record)
        elif record and kind in ("set", "done"):
            _replay_one(record, entries)
    return JournalState(entries, found_boot_id, records.count(None), bool(last) and tail is None, found_root_id)


def _whole(value: object) -> int:
    return value if isinstance(value, int) else 0


def _decode(text: bytes) -> dict[str, Any] | None:
    """Return a record, or None where its checksum or its form is wrong."""
    checksum, _, body = text.partition(b" ")
    try:
        if not body or int(checksum, 16) != zlib.crc32(body):
            return None
        record = json.loads(body)
    except ValueError:
        return None
    return record if isinstance(record, dict) else None


def _encode(record: Mapping[str, Any]) -> bytes:
    body = json.dumps(record, separators=(",", ":"), sort_keys=True).encode("ascii")
    return b"%08x %s\n" % (zlib.crc32(body), body)


def _refuse_newer(head: Mapping[str, Any]) -> None:
    version = head.get("version", 1)
    if not isinstance(version, int) or version > VERSION:
        raise JournalError(
            f"the journal was written by a newer prefetchd (its version is {version}, {VERSION} is known): "
            "run `prefetchd restore` of that release."
        )


def _refuse_other_root(path: str, state: JournalState, root: str, this_root: int) -> None:
    if state.entries and state.root_id and this_root and state.root_id != this_root:
        raise JournalError(
            f"the journal {path} tells of cgroups below another root (its inode is {state.root_id}, that of {root} is "
            f"{this_root}): restore in the cgroup namespace of the agent that wrote it (on the host itself: "
            "`nsenter --target 1 --cgroup --mount prefetchd restore`)."
        )


def _replay_one(record: Mapping[str, Any], entries: dict[Line, Entry]) -> None:
    """A record whose checksum is right but whose content is not understood cannot be undone; it is left out."""
    try:
        line = _line(record)
        if record["type"] == "done":
            entries.pop(line, None)
            return
        prior, was, wrote = (_values(line, record, name) for name in ("prior", "was", "wrote"))
    except (KeyError, TypeError, ValueError, IoFileError):
        return
    entries[line] = Entry(line, prior, was, wrote)


def _line(record: Mapping[str, Any]) -> Line:
    return Line(int(record["id"]), str(record.get("path", "")), str(record["device"]), str(record["file"]))


def _values(line: Line, record: Mapping[str, Any], name: str) -> dict[str, int | None]:
    """Version 1 has text lines of io.max, and no `was`."""
    raw = record.get(name, record.get("wrote"))
    if isinstance(raw, str):
        return parse_line(Line(line.cgroup_id, line.path, line.device, IO_MAX), raw)
    if not isinstance(raw, dict):
        raise TypeError(f"{name} is {raw!r}")
    return {key: None if raw[key] is None else int(raw[key]) for key in KEYS[line.file] if key in raw}


class Journal:
    """The journal of the one process that may enforce on this host; it holds a lock on it for life."""

    def __init__(self, path: str, lock: int, state: JournalState) -> None:
        self.path = path
        self.damaged = state.damaged
        self._lock = lock
        self._entries = dict(state.entries)
        self._file: int | None = None
        self._appended = 0
        self._boot_id = ""
        self._root_id = 0

    @classmethod
    def open(
        cls,
        path: str = DEFAULT_PATH,
        root: str = "",
        *,
        wait_seconds: float = 0.0,
        boot_id_path: str = BOOT_ID_PATH,
    ) -> Journal:
        """Take the lock and read what a predecessor left; nothing is written yet.

        `root` is the cgroup root below which it will be used. Raises JournalBusy where another process holds the lock
        (after waiting for it), and JournalError, also where the predecessor worked below another root: from here its
        cgroups would all look gone.
        """
        lock = take_lock(path + ".lock", wait_seconds)
        this_boot, this_root = boot_id(boot_id_path), root_id(root)
        try:
            state = read_journal(path)
            if state.boot_id and this_boot and state.boot_id != this_boot:
                state = JournalState()
            _refuse_other_root(path, state, root, this_root)
        except JournalError:
            os.close(lock)
            raise
        journal = cls(path, lock, state)
        journal._boot_id, journal._root_id = this_boot, this_root
        return journal

    @property
    def entries(self) -> Mapping[Line, Entry]:
        """What is under control now."""
        return self._entries

    def record(self, entries: Sequence[Entry]) -> None:
        """Write down what is about to be written, durably. Raises JournalFull or JournalError: then do not write."""
        before = {entry.line: self._entries.get(entry.line) for entry in entries}
        self._entries.update((entry.line, entry) for entry in entries)
        try:
            self._append([_set_record(entry) for entry in entries])
        except JournalError:
            for line, entry in before.items():
                if entry is None:
                    del self._entries[line]
                else:
                    self._entries[line] = entry
            raise

    def forget(self, lines: Iterable[Line]) -> None:
        """Note that lines are no longer under control.

        Never raises: without the note a later restore finds nothing of ours in the line and leaves it alone.
        """
        gone = [line for line in lines if self._entries.pop(line, None)]
        if not gone:
            return
        try:
            if self._entries:
                self._append([_done_record(line) for line in gone])
            else:
                self._empty()
        except JournalError:
            return

    def probe(self) -> None:
        """Check that there is room for many records. Raises JournalFull or JournalError."""
        self._keep_lock()
        file = self._file if self._file is not None else self._rewrite()
        size = os.fstat(file).st_size
        try:
            os.posix_fallocate(file, size, RESERVE_BYTES)
        except OSError as error:
            raise translated(error, self.path) from error
        finally:
            self._cut_off(file, size)

    def keep(self) -> None:
        """Write down again what is under control where somebody removed the file, since restoring begins there.

        Raises JournalFull or JournalError.
        """
        if not self._entries:
            return
        try:
            os.stat(self.path)
        except FileNotFoundError:
            self._keep_lock()
            self._close_file()
            self._rewrite()
        except OSError as error:
            raise translated(error, self.path) from error

    def _empty(self) -> None:
        """Cut the file to nothing: that takes no room, so it works on a full disk as well."""
        self._close_file()
        try:
            os.truncate(self.path, 0)
        except FileNotFoundError:
            return
        except OSError as error:
            raise translated(error, self.path) from error

    def _append(self, records: Sequence[Mapping[str, Any]]) -> None:
        if self._appended > _COMPACT_AFTER + 4 * len(self._entries):
            self._close_file()
        self._keep_lock()
        file = self._file if self._file is not None else self._rewrite()
        size = os.fstat(file).st_size
        try:
            _write_durably(file, b"".join(map(_encode, records)))
        except OSError as error:
            self._cut_off(file, size)
            raise translated(error, self.path) from error
        self._appended += len(records)

    def _cut_off(self, file: int, size: int) -> None:
        """Take away what was torn; where that fails too, the next record starts another file, or it were lost in it."""
        try:
            os.ftruncate(file, size)
        except OSError:
            self._close_file()

    def _keep_lock(self) -> None:
        """Where somebody removed the folder, make it again: a lock nobody can find keeps no second agent away."""
        path = self.path + ".lock"
        try:
            found, held = os.stat(path, follow_symlinks=False), os.fstat(self._lock)
            if (found.st_dev, found.st_ino) == (held.st_dev, held.st_ino):
                return
        except FileNotFoundError:
            pass
        except OSError as error:
            raise translated(error, path) from error
        again = take_lock(path, 0.0)
        os.close(self._lock)
        self._lock = again
        self._close_file()

    def _rewrite(self) -> int:
        """Replace the file by a small one that holds just what is alive; until then the old one stays."""
        temporary = self.path + ".new"
        head = {"type": "head", "version": VERSION, "boot": self._boot_id, "root": self._root_id, "pid": os.getpid()}
        data = b"".join(map(_encode, [head, *map(_set_record, self._entries.values())]))
        try:
            file = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise translated(error, temporary) from error
        try:
            _write_durably(file, data)
            os.rename(temporary, self.path)
            _sync_folder(self.path)
        except OSError as error:
            os.close(file)
            ignore_errors(lambda: os.unlink(temporary))
            raise translated(error, temporary) from error
        self._file = file
        self._appended = 0
        return file

    def _close_file(self) -> None:
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def close(self) -> None:
        """Give up the lock. What is still in the journal stays for the next start to restore."""
        self._close_file()
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1


def _set_record(entry: Entry) -> dict[str, Any]:
    values = {"prior": dict(entry.prior), "was": dict(entry.was), "wrote": dict(entry.wrote)}
    return {"type": "set", **_line_record(entry.line), **values}


def _done_record(line: Line) -> dict[str, Any]:
    return {"type": "done", **_line_record(line)}


def _line_record(line: Line) -> dict[str, Any]:
    return {"id": line.cgroup_id, "path": line.path, "device": line.device, "file": line.file}


def _write_durably(file: int, data: bytes) -> None:
    """A write that stops short means that there was no more room."""
    if os.write(file, data) != len(data):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    os.fsync(file)


def _sync_folder(path: str) -> None:
    folder = os.open(os.path.dirname(path) or ".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
