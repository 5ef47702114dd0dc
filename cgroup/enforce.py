"""Carries out what the planner says: read, compare, write, and undo it all again.

Rules: nothing is written before the journal has it; a line that somebody else changed is theirs from then on; what
vanished is dropped; whatever fails, the next call starts from what is really there.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping

from cgroup.errors import CgroupError, ControllerMissing, JournalError, Vanished
from cgroup.files import LineFiles
from cgroup.guardian import Watchman
from cgroup.hold import HeldLines
from cgroup.journal import Entry, Journal
from cgroup.lines import Limit, Line, Setting, Target, Values, describe_values, line_of
from cgroup.look import Observer, gone
from cgroup.plan import LineState, PlanState, Rules, Write, plan, with_raise
from cgroup.pods import protected
from cgroup.restore import RestoreReport, back_already, recover, restore_line, undo_order
from cgroup.results import Conflict, Mode, Result, Tally, WriteResult, failed, free_line, quiet, tell
from cgroup.slices import Slices

RETRY_SECONDS = 5.0
"""A line whose write failed is left alone for this long."""

_log = logging.getLogger(__name__)


class Enforcer:
    """Keeps the lines of jobs and best-effort cgroups as they are wanted.

    What a predecessor left in the journal is put back first, in any mode (`recovered` tells). Call `reconcile` at least
    once a second, also with nothing wanted: it retries, releases and tells the guardian that the agent lives. Not safe
    for threads.
    """

    def __init__(
        self,
        files: LineFiles,
        journal: Journal | None,
        mode: Mode = "observe",
        *,
        rules: Rules | None = None,
        guardian: Watchman | None = None,
        may_enable_io: bool = False,
        clock: Callable[[], float] | None = None,
    ) -> None:
        """`clock` (monotonic seconds) lets cuts wait for their moment in blk-throttle's slices; None: none waits."""
        self._files = files
        self._observer = Observer(files)
        self._journal = journal
        self._rules = rules or Rules()
        self._guardian = guardian
        self._mode: Mode = "observe"
        self._lines: dict[Line, LineState] = {}
        self._stuck: dict[Line, LineState] = {}
        self._held = HeldLines(files, journal, may_enable_io=may_enable_io)
        self._raises: Mapping[int, tuple[float, ...]] = {}
        self._retry_at: dict[Line, float] = {}
        self._conflicts: dict[Line, Conflict] = {}
        self._refused: set[str] = set()
        self._slices = Slices(clock)
        self._tally = Tally()
        self._suspended_at = 0.0
        self.suspended: str | None = None
        """Why nothing is enforced although the mode says so (no room for the journal), or None."""
        self.recovered = self._recover()
        self.set_mode(mode)

    @property
    def mode(self) -> Mode:
        """`observe`: look at nothing; `dry-run`: plan and log; `enforce`: write."""
        return self._mode

    @property
    def counters(self) -> Mapping[Result, int]:
        """How many results of each kind there were; a conflict counts once, when it is found."""
        return self._tally.counts

    @property
    def conflicts(self) -> Mapping[Line, Conflict]:
        """Lines that somebody else changed; they are left alone for as long as their cgroup and the agent live."""
        return self._conflicts

    @property
    def managed(self) -> Mapping[Line, LineState]:
        """Lines under control now (in a dry run: that would be)."""
        return self._lines

    def actual(self, target: Target) -> Limit:
        """Return the limits in force at a target. Raises what LineFiles raises."""
        return Limit(**self._files.read(line_of(target)))

    def set_mode(self, mode: Mode) -> tuple[WriteResult, ...]:
        """Change the mode; leaving `enforce` puts everything back at once. Raises JournalError without a journal."""
        if mode == "enforce" and self._journal is None:
            raise JournalError("enforcement needs a journal, and there is none.")
        released = self.release_all(f"mode is now {mode}") if mode != self._mode else ()
        self._mode = mode
        return released

    def reconcile(self, desired: Mapping[Target, tuple[Setting, str]], now: float) -> tuple[WriteResult, ...]:
        """Bring the lines to what is desired, each with its reason; lines that are no longer named go back.

        `now` in monotonic seconds. Lines that are left alone (in conflict, failed a moment ago) give no result.
        """
        self._notice_guardian()
        results = self._retry_stuck(now)
        if self._mode == "observe" or (self.suspended and not self._resumed(now)):
            return self._tally.take(results)
        try:
            if self._journal is not None:
                self._journal.keep()
        except JournalError as error:
            return self._tally.take([*results, *self._suspend(error, [], now)])
        wanted = self._wanted(desired, now, results)
        writes = self._plan(wanted, now, results)
        results.extend(self._carry_out(self._slices.ready(writes) if self._mode == "enforce" else writes, now))
        return self._tally.take(results)

    @property
    def due(self) -> float | None:
        """When `reconcile_due` should be called (the clock's seconds), unless the next `reconcile` comes before."""
        return self._slices.due if self._mode == "enforce" and not self.suspended else None

    def reconcile_due(self, now: float) -> tuple[WriteResult, ...]:
        """Make the writes of the last `reconcile` that waited for their moment in blk-throttle's slices."""
        if self.due is None:
            return ()
        self._notice_guardian()
        return self._tally.take(self._carry_out(self._slices.take_due(), now))

    def release_all(self, why: str) -> tuple[WriteResult, ...]:
        """Put everything back at once, without regard to rates. What cannot be freed is tried again by `reconcile`."""
        return self._tally.take(self._release_all(why))

    def release(self, target: Target, why: str) -> tuple[WriteResult, ...]:
        """Put one target back at once; while it is wanted, the next `reconcile` caps it anew. Frees stuck requests."""
        lines = [line for line in self._lines if (line.cgroup_id, line.device) == (target.cgroup_id, target.device)]
        results = [free_line(self._files, line, self._lines[line], why) for line in lines if self._mode == "enforce"]
        self._forget(outcome.line for outcome in results if outcome.result != "error")
        return self._tally.take(results)

    def close(self) -> tuple[WriteResult, ...]:
        """Put everything back and give up the journal; close the guardian after this."""
        results = self.release_all("the agent stops")
        if self._journal is not None:
            self._journal.close()
        return results

    def enable_io(self, path: str, why: str) -> tuple[WriteResult, ...]:
        """Enable `io` for a cgroup in every ancestor's subtree_control that lacks it, where that is allowed."""
        return self._tally.take(self._held.enable_io(path, why, dry=self._mode != "enforce"))

    def set_read_ahead(self, device: str, kilobytes: int, why: str) -> tuple[WriteResult, ...]:
        """Set a disk's read-ahead; `release_read_ahead`, `release_all` and every restore put it back."""
        return self._tally.take([self._held.set_read_ahead(device, kilobytes, why, dry=self._mode != "enforce")])

    def release_read_ahead(self, device: str, why: str) -> tuple[WriteResult, ...]:
        """Put a disk's read-ahead back."""
        return self._tally.take(self._held.release_read_ahead(device, why))

    def _recover(self) -> RestoreReport:
        if self._journal is None:
            return RestoreReport()
        left = dict(self._journal.entries)
        report = recover(self._files, self._journal, lambda text: _log.warning("restored after a crash: %s", text))
        for line in report.failed:
            self._stuck[line] = LineState(left[line].prior, left[line].wrote, was=left[line].was)
        return report

    def _release_all(self, why: str) -> list[WriteResult]:
        if self._mode != "enforce":  # a dry run only remembers what it would have written
            self._lines.clear()
        lines = {**self._lines, **self._held.lines, **self._stuck}
        results = {line: free_line(self._files, line, lines[line], why) for line in sorted(lines, key=undo_order)}
        self._stuck = {line: lines[line] for line, outcome in results.items() if outcome.result == "error"}
        self._lines.clear()
        self._forget(line for line in lines if line not in self._stuck)
        return list(results.values())

    def _retry_stuck(self, now: float) -> list[WriteResult]:
        results = []
        for line in [line for line in self._stuck if self._retry_at.get(line, now) <= now]:
            self._retry_at[line] = now + RETRY_SECONDS
            results.append(free_line(self._files, line, self._stuck[line], "tried again"))
            if results[-1].result != "error":
                del self._stuck[line]
                self._forget([line])
        return results

    def _wanted(
        self, desired: Mapping[Target, tuple[Setting, str]], now: float, results: list[WriteResult]
    ) -> dict[Line, tuple[Values, str]]:
        """Leave out what must not or cannot be written now."""
        for line in gone(self._files, self._conflicts):
            del self._conflicts[line]
        self._retry_at = {line: at for line, at in self._retry_at.items() if now < at <= now + RETRY_SECONDS}
        wanted: dict[Line, tuple[Values, str]] = {}
        for target, (setting, why) in desired.items():
            line = line_of(target, setting.file)
            reason = protected(target.path)
            if reason is not None and line.path not in self._refused:  # said once: who asks goes on asking
                self._refused.add(line.path)
                results.append(failed(line, f"never written, since {reason}"))
            elif reason is None and line not in self._conflicts:
                wanted[line] = (setting.values(), why)
        return wanted

    def _plan(self, wanted: Mapping[Line, tuple[Values, str]], now: float, results: list[WriteResult]) -> list[Write]:
        actual: dict[Line, Values] = {}
        for line in [line for line in {**wanted, **self._lines} if line not in self._retry_at]:
            why = wanted[line][1] if line in wanted else "no longer wanted"
            values = self._read(line, why, now, results)
            if values is not None:
                actual[line] = values
        return plan(wanted, actual, PlanState(self._lines, self._raises), now, self._rules)

    def _read(self, line: Line, why: str, now: float, results: list[WriteResult]) -> Values | None:
        """Return what stands there, or None where there is nothing to plan with this time."""
        state = self._lines.get(line)
        if state is not None and self._mode == "dry-run":
            state = None
        sight = self._observer.look(line, state, now)
        if sight.lost:
            self._forget([line])
        if sight.trouble == "vanished":
            results.append(WriteResult(line, "vanished", {}, {}, why))
        elif sight.trouble == "missing":
            told = self._held.pass_io_on(line, why, sight.reason, dry=self._mode != "enforce")
            if all(one.result != "written" for one in told):
                self._retry_at[line] = now + RETRY_SECONDS
            results.extend(told)
        elif sight.trouble == "error":
            self._retry_at[line] = now + RETRY_SECONDS
            results.append(failed(line, sight.reason))
        pretended = self._lines.get(line) if self._mode == "dry-run" else None
        return pretended.wrote if pretended and sight.values is not None else sight.values

    def _carry_out(self, writes: list[Write], now: float) -> list[WriteResult]:
        if self._mode == "dry-run":
            return [self._pretend(write, now) for write in writes]
        ahead = [self._entry(write) for write in writes if write.verdict == "write"]
        try:
            if ahead:
                self._the_journal.record(ahead)
        except JournalError as error:
            return self._suspend(error, writes, now)
        return [self._perform(write, now) for write in writes]

    def _entry(self, write: Write) -> Entry:
        state = self._lines.get(write.line)
        prior = state.prior if state else write.before
        return Entry(write.line, prior, write.before, {**write.before, **write.after})

    def _suspend(self, error: JournalError, writes: list[Write], now: float) -> list[WriteResult]:
        """Without a record nothing may be written; and what stands is put back, since it could not be followed up."""
        self.suspended = str(error)
        self._suspended_at = now
        losses = [failed(write.line, str(error)) for write in writes if write.verdict == "write"]
        return [*losses, *self._release_all("the journal cannot be written")]

    def _resumed(self, now: float) -> bool:
        """Look for room now and then: caps that come and go would be worse than none."""
        if 0 <= now - self._suspended_at < RETRY_SECONDS:
            return False
        self._suspended_at = now
        try:
            self._the_journal.probe()
        except JournalError as error:
            self.suspended = str(error)
            return False
        _log.warning("the journal can be written again; enforcing")
        self.suspended = None
        return True

    @property
    def _the_journal(self) -> Journal:
        if self._journal is None:
            raise JournalError("enforcement needs a journal, and there is none.")
        return self._journal

    def _pretend(self, write: Write, now: float) -> WriteResult:
        """Remember what would stand there now, so that the next plan is what it would be."""
        if write.verdict == "write":
            entry = self._entry(write)
            self._lines[write.line] = LineState(entry.prior, entry.wrote)
            self._note_raise(write, now)
        elif write.verdict == "release":
            self._lines.pop(write.line, None)
        if not write.after:
            return WriteResult(write.line, quiet(write), write.before, {}, write.why)
        tell("would write", write.line, write.before, write.after, write.why)
        return WriteResult(write.line, "dry_run", write.before, write.after, write.why)

    def _perform(self, write: Write, now: float) -> WriteResult:
        actions: Mapping[str, Callable[[Write, float], WriteResult]] = {
            "write": self._write,
            "release": self._give_back,
            "conflict": self._leave_to_others,
        }
        action = actions.get(write.verdict)
        if action is None:
            return WriteResult(write.line, quiet(write), write.before, {}, write.why)
        try:
            return action(write, now)
        except (Vanished, ControllerMissing) as error:
            if isinstance(error, Vanished):  # it may be the disk that is gone, and it may come back
                self._retry_at[write.line] = now + RETRY_SECONDS
            self._forget([write.line])
            return WriteResult(write.line, "vanished", write.before, {}, write.why)
        except (OSError, CgroupError) as error:
            self._retry_at[write.line] = now + RETRY_SECONDS
            self._take_back(write)
            return failed(write.line, str(error))

    def _write(self, write: Write, now: float) -> WriteResult:
        line, entry = write.line, self._entry(write)
        found = self._files.read(line)
        if found != write.before:  # changed since it was planned, a moment ago
            self._take_back(write)
            return WriteResult(line, "unchanged", found, {}, "changed while it was planned; looked at again next time")
        generation = self._files.generation(line)  # anew: while a line holds no limit its file may go unseen
        self._files.write(line, write.after)
        self._slices.written(line)
        self._lines[line] = LineState(entry.prior, entry.wrote, generation)
        self._note_raise(write, now)
        tell("wrote", line, write.before, write.after, write.why)
        return WriteResult(line, "written", write.before, write.after, write.why)

    def _take_back(self, write: Write) -> None:
        """The announced write did not happen: have the journal say what is still there."""
        state = self._lines.get(write.line)
        if state is None:
            self._forget([write.line])
            return
        try:
            self._the_journal.record([Entry(write.line, state.prior, state.wrote, state.wrote)])
        except JournalError as error:
            _log.error("%s", error)

    def _give_back(self, write: Write, now: float) -> WriteResult:
        state = self._lines.get(write.line)
        if state is None:  # given up since it was planned, see `_leave_to_others`
            return WriteResult(write.line, "unchanged", write.before, {}, "put back by the guardian meanwhile")
        outcome = free_line(self._files, write.line, state, write.why)
        if outcome.result == "error":
            self._retry_at[write.line] = now + RETRY_SECONDS
            return outcome
        self._note_raise(write, now)
        self._forget([write.line])
        return outcome

    def _leave_to_others(self, write: Write, now: float) -> WriteResult:
        """A foreign change wins. What in the line is still ours is put back, since nobody would do so later.

        The guardian is asked once more: the agent may have stood still right here, with the plan already made.
        """
        del now
        self._notice_guardian()
        state = self._lines.get(write.line)
        if state is None:
            return WriteResult(write.line, "unchanged", write.before, {}, "put back by the guardian meanwhile")
        outcome = restore_line(self._files, write.line, state.prior, (state.wrote,))
        self._conflicts[write.line] = Conflict(state.wrote, outcome.before)
        self._forget([write.line])
        ours, theirs = describe_values(state.wrote), describe_values(outcome.before)
        _log.warning("%s: we wrote %s, somebody else %s; left alone from now on", write.line, ours, theirs)
        return WriteResult(write.line, "conflict", outcome.before, outcome.after, "somebody else changed this line")

    def _notice_guardian(self) -> None:
        """Beat, and drop what the guardian put back while the agent stood still."""
        if self._guardian is None:
            return
        self._guardian.beat()
        if self._guardian.take_restores():
            _log.warning("the guardian took the agent for dead and put everything back; starting over")
            lines = {**self._lines, **self._held.lines}
            self._forget(back_already(self._files, {line: state.prior for line, state in lines.items()}))

    def _note_raise(self, write: Write, now: float) -> None:
        self._raises = with_raise(self._raises, write, now, self._rules)

    def _forget(self, lines: Iterable[Line]) -> None:
        lines = list(lines)
        for line in lines:
            self._lines.pop(line, None)
            self._held.forget(line)
            self._slices.forget(line)
        if self._journal is not None:
            self._journal.forget(lines)
