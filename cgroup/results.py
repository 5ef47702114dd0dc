"""What became of a line that was to be written, and how it is told."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from cgroup.errors import CgroupError, ControllerMissing, Vanished
from cgroup.files import LineFiles
from cgroup.lines import Line, Values, describe_values
from cgroup.plan import LineState, Write
from cgroup.restore import restore_line

Mode = Literal["observe", "dry-run", "enforce"]
Result = Literal["written", "unchanged", "dry_run", "conflict", "vanished", "error", "rate_limited"]

MOST_TROUBLES = 1000
"""Lines whose trouble is remembered; those of cgroups that are gone are among them."""

_log = logging.getLogger("cgroup.enforce")


@dataclass(frozen=True, slots=True)
class WriteResult:
    """What became of one line: `before` as read, `after` the keys that were (or in a dry run would be) written."""

    line: Line
    result: Result
    before: Values
    after: Values
    why: str


@dataclass(frozen=True, slots=True)
class Conflict:
    """A line that somebody else changed: what we had written, and what stands there instead."""

    expected: Values
    found: Values


def failed(line: Line, reason: str) -> WriteResult:
    """Return a failure; `Tally` says it."""
    return WriteResult(line, "error", {}, {}, reason)


class Tally:
    """Counts results, and logs what fails: once as long as a line has the same trouble, since it is tried again."""

    def __init__(self) -> None:
        self.counts: Counter[Result] = Counter()
        self._said: dict[Line, str] = {}

    def take(self, results: Iterable[WriteResult]) -> tuple[WriteResult, ...]:
        """Take in what became of some lines, and return it."""
        results = tuple(results)
        for result in results:
            self._hear(result)
        self.counts.update(result.result for result in results)
        return results

    def _hear(self, result: WriteResult) -> None:
        if result.result in ("written", "unchanged", "vanished"):
            self._said.pop(result.line, None)
        elif result.result == "error" and self._said.get(result.line) != result.why:
            if len(self._said) >= MOST_TROUBLES:
                self._said.clear()
            self._said[result.line] = result.why
            _log.error("%s: %s", result.line, result.why)


def quiet(write: Write) -> Result:
    """Return the result of a plan that writes nothing."""
    return "rate_limited" if write.verdict == "rate_limited" else "unchanged"


def tell(what: str, line: Line, before: Values, after: Values, why: str) -> None:
    """Log one write: what stood there, what stands there now, why."""
    old = describe_values({key: before.get(key) for key in after})
    _log.info("%s %s: %s -> %s (%s)", what, line, old, describe_values(after), why)


def free_line(files: LineFiles, line: Line, state: LineState, why: str) -> WriteResult:
    """Put one line back; never raises."""
    ours = (state.wrote,) if state.was is None else (state.wrote, state.was)
    try:
        outcome = restore_line(files, line, state.prior, ours)
    except (Vanished, ControllerMissing):
        return WriteResult(line, "vanished", state.wrote, {}, why)
    except (OSError, CgroupError) as error:
        return failed(line, str(error))
    if not outcome.after:
        return WriteResult(line, "conflict" if outcome.foreign else "unchanged", outcome.before, {}, why)
    tell("released", line, outcome.before, outcome.after, why)
    return WriteResult(line, "written", outcome.before, outcome.after, why)
