"""Lines that are set once and held: `io` in a subtree_control, and read_ahead_kb. Journalled and undone like limits."""

from __future__ import annotations

import os
from collections.abc import Mapping

from cgroup.errors import CgroupError, Vanished
from cgroup.files import LineFiles
from cgroup.journal import Entry, Journal
from cgroup.lines import READ_AHEAD, SUBTREE_CONTROL, Line, Values
from cgroup.look import gone
from cgroup.plan import LineState
from cgroup.results import WriteResult, failed, free_line, tell
from cgroup.tree import ancestors


class HeldLines:
    """Sets lines that stay until they are released, whatever is desired of limits."""

    def __init__(self, files: LineFiles, journal: Journal | None, *, may_enable_io: bool = False) -> None:
        self._files = files
        self._journal = journal
        self._may_enable_io = may_enable_io
        self._lines: dict[Line, LineState] = {}

    @property
    def lines(self) -> Mapping[Line, LineState]:
        """What is held now."""
        return self._lines

    def enable_io(self, path: str, why: str, *, dry: bool) -> list[WriteResult]:
        """Enable `io` for a cgroup in every ancestor's subtree_control that lacks it; stops at the first failure."""
        for line in gone(self._files, [line for line in self._lines if line.file == SUBTREE_CONTROL]):
            self._drop(line)  # of jobs that come and go none must be remembered for ever
        results: list[WriteResult] = []
        for ancestor in ancestors(path):
            line = Line(0, ancestor, "", SUBTREE_CONTROL)
            try:
                line = Line(self._files.cgroup_id(ancestor), ancestor, "", SUBTREE_CONTROL)
                results.append(self._enable_one(line, why, dry=dry))
            except Vanished:
                results.append(WriteResult(line, "vanished", {}, {}, why))
            if results[-1].result in ("error", "vanished"):
                break
        return results

    def pass_io_on(self, line: Line, why: str, reason: str, *, dry: bool) -> list[WriteResult]:
        """Enable `io` above a cgroup that shall be limited; where that is not allowed, fail for that `reason`."""
        every = self.enable_io(line.path, why, dry=dry) if self._may_enable_io else []
        return [one for one in every if one.result != "unchanged"] or [failed(line, reason)]

    def _enable_one(self, line: Line, why: str, *, dry: bool) -> WriteResult:
        if not self._may_enable_io and self._files.read(line)["io"] is None:
            return failed(line, "`io` is not enabled here, and the configuration does not allow to enable it")
        return self._set(line, {"io": 1}, why, dry=dry)

    def set_read_ahead(self, device: str, kilobytes: int, why: str, *, dry: bool) -> WriteResult:
        """Set a disk's read-ahead in KiB; the kernel keeps whole pages of it (queue_ra_store in block/blk-sysfs.c).

        It is rounded here: what is written down before the write must be what stands there after it.
        """
        whole = kilobytes - kilobytes % (os.sysconf("SC_PAGE_SIZE") // 1024)
        return self._set(Line(0, "", device, READ_AHEAD), {"kilobytes": whole}, why, dry=dry)

    def release_read_ahead(self, device: str, why: str) -> list[WriteResult]:
        """Put a disk's read-ahead back, if it is held."""
        line = Line(0, "", device, READ_AHEAD)
        if line not in self._lines:
            return []
        outcome = free_line(self._files, line, self._lines[line], why)
        if outcome.result != "error":
            self._drop(line)
        return [outcome]

    def forget(self, line: Line) -> None:
        """Hold a line no more."""
        self._lines.pop(line, None)

    def _set(self, line: Line, values: Values, why: str, *, dry: bool) -> WriteResult:
        try:
            before = self._files.read(line)
            if all(before[key] == value for key, value in values.items()):
                return WriteResult(line, "unchanged", before, {}, why)
            if dry or self._journal is None:
                return WriteResult(line, "dry_run", before, values, why)
            prior = self._lines[line].prior if line in self._lines else before
            self._journal.record([Entry(line, prior, before, values)])
            self._files.write(line, values)
        except Vanished:
            self._drop(line)
            return WriteResult(line, "vanished", {}, {}, why)
        except (OSError, CgroupError) as error:
            if line not in self._lines:  # what the journal announced did not happen
                self._drop(line)
            return failed(line, str(error))
        self._lines[line] = LineState(prior, values)
        tell("wrote", line, before, values, why)
        return WriteResult(line, "written", before, values, why)

    def _drop(self, line: Line) -> None:
        """Hold a line no more, and have the journal forget it."""
        self.forget(line)
        if self._journal is not None:
            self._journal.forget([line])
