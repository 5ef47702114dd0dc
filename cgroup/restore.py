"""Put back what was there before us: one routine for start-up, exit, `prefetchd restore` and the guardian.

Only values that are still ours are touched. Needs the journal and the cgroup tree, no configuration.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from cgroup.errors import CgroupError, ControllerMissing, Vanished
from cgroup.files import KernelFiles, LineFiles
from cgroup.journal import BOOT_ID_PATH, DEFAULT_PATH, Entry, Journal
from cgroup.lines import (
    IO_MAX,
    READ_AHEAD,
    SUBTREE_CONTROL,
    WEIGHT_FILES,
    Line,
    Values,
    describe_values,
    foreign,
    restorable,
)
from cgroup.tree import CGROUP_ROOT

_ORDER = {IO_MAX: 0, **dict.fromkeys(WEIGHT_FILES, 0), READ_AHEAD: 1, SUBTREE_CONTROL: 2}


@dataclass(frozen=True, slots=True)
class Restored:
    """What became of one line. `before` is what was found, `after` the keys that were put back (may be none)."""

    line: Line
    before: Values
    after: Values
    foreign: tuple[str, ...] = ()

    def __str__(self) -> str:
        if not self.after:
            return f"{self.line}: {'left alone, ' + ', '.join(self.foreign) + ' changed' if self.foreign else 'clean'}"
        old = describe_values({key: self.before.get(key) for key in self.after})
        return f"{self.line}: {old} -> {describe_values(self.after)}"


@dataclass(frozen=True, slots=True)
class RestoreReport:
    """The outcome per line. A line of which one key was restored while another is foreign counts in both."""

    restored: tuple[Restored, ...] = ()
    foreign: tuple[Restored, ...] = ()
    clean: tuple[Restored, ...] = ()
    vanished: tuple[Line, ...] = ()
    errors: tuple[str, ...] = ()
    failed: tuple[Line, ...] = ()

    def __str__(self) -> str:
        return (
            f"{len(self.restored)} restored, {len(self.clean)} clean, {len(self.foreign)} changed by somebody else, "
            f"{len(self.vanished)} vanished, {len(self.errors)} errors"
        )


def undo_order(line: Line) -> tuple[int, int]:
    """Limits first, then read-ahead, then controllers from the leaves up: a parent's cannot be taken before."""
    return _ORDER.get(line.file, 3), -line.path.count("/")


def restore_line(files: LineFiles, line: Line, prior: Values, ours: tuple[Values, ...]) -> Restored:
    """Give back what in one line still holds one of our values. Raises what LineFiles raises."""
    found = files.locate(line)
    before = files.read(found)
    after = restorable(before, prior, ours)
    if after and line.file == SUBTREE_CONTROL and files.in_use(found):
        return Restored(found, before, {}, foreign=("io (in use by others)",))
    if after:
        files.write(found, after)
    return Restored(found, before, after, foreign(before, prior, ours))


def restore_entries(files: LineFiles, entries: list[Entry], log: Callable[[str], None]) -> RestoreReport:
    """Restore what the journal's entries say. Never raises: one bad line does not keep the others from being freed."""
    done: list[Restored] = []
    vanished: list[Line] = []
    errors: list[str] = []
    failed: list[Line] = []
    for entry in sorted(entries, key=lambda entry: undo_order(entry.line)):
        try:
            outcome = restore_line(files, entry.line, entry.prior, (entry.wrote, entry.was))
        except (Vanished, ControllerMissing):
            vanished.append(entry.line)
            continue
        except (OSError, CgroupError) as error:
            errors.append(f"{entry.line}: {error}")
            failed.append(entry.line)
            continue
        log(str(outcome))
        done.append(outcome)
    return RestoreReport(
        restored=tuple(outcome for outcome in done if outcome.after),
        foreign=tuple(outcome for outcome in done if outcome.foreign),
        clean=tuple(outcome for outcome in done if not outcome.after and not outcome.foreign),
        vanished=tuple(vanished),
        errors=tuple(errors),
        failed=tuple(failed),
    )


def back_already(files: LineFiles, priors: Mapping[Line, Values]) -> list[Line]:
    """Return the lines that hold what was there before us (`priors`), or are gone."""
    back = []
    for line, prior in priors.items():
        try:
            if files.read(line) == prior:
                back.append(line)
        except (Vanished, ControllerMissing):
            back.append(line)
        except (OSError, CgroupError):
            continue
    return back


def recover(files: LineFiles, journal: Journal, log: Callable[[str], None] = lambda _: None) -> RestoreReport:
    """Restore all that an opened journal holds, and have it forget what needs no second try."""
    report = restore_entries(files, list(journal.entries.values()), log)
    failed = set(report.failed)
    journal.forget([line for line in journal.entries if line not in failed])
    return report


def restore(
    journal_path: str = DEFAULT_PATH,
    root: str = CGROUP_ROOT,
    sys_root: str = "/sys",
    *,
    log: Callable[[str], None] = lambda _: None,
    wait_seconds: float = 2.0,
    boot_id_path: str = BOOT_ID_PATH,
) -> RestoreReport:
    """Restore from a journal that no agent holds. Raises JournalBusy while one does, else JournalError."""
    journal = Journal.open(journal_path, root, wait_seconds=wait_seconds, boot_id_path=boot_id_path)
    try:
        return recover(KernelFiles(root, sys_root), journal, log)
    finally:
        journal.close()
