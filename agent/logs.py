"""Log lines on standard error: text for people (systemd's priorities where it reads them), or JSON for machines."""

from __future__ import annotations

import json
import logging
import os
import select
import sys
import time
from typing import TextIO

from agent.config import LogSection
from agent.units import printable

_SYSTEMD_PRIORITY = {logging.DEBUG: 7, logging.INFO: 6, logging.WARNING: 4, logging.ERROR: 3, logging.CRITICAL: 2}
_OWN_FIELDS = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime"}

FORGOTTEN_SECONDS = 60.0
"""A fault that did not come for this long is a new one."""

_PIECE = 1024
"""Characters, at most one page as UTF-8: a pipe tells that it can be written to as soon as a page of it is free."""


class TextFormatter(logging.Formatter):
    """`12:30:01.123 warning agent.loop: text`; under systemd a priority prefix instead of the clock."""

    def __init__(self, *, journald: bool) -> None:
        super().__init__()
        self._journald = journald

    def format(self, record: logging.LogRecord) -> str:
        text = f"{record.levelname.lower()} {record.name}: {printable(record.getMessage())}"
        if record.exc_info:
            text += "\n" + self.formatException(record.exc_info)
        if self._journald:
            return f"<{_SYSTEMD_PRIORITY.get(record.levelno, 6)}>{text}"
        clock = time.strftime("%H:%M:%S", time.localtime(record.created))
        return f"{clock}.{int(record.msecs):03d} {text}"


class JsonFormatter(logging.Formatter):
    """One JSON object a line: time (Unix seconds), level, logger, message, and what the caller put in `extra`."""

    def format(self, record: logging.LogRecord) -> str:
        line = {
            "time": round(record.created, 3),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        line |= {key: value for key, value in vars(record).items() if key not in _OWN_FIELDS}
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


class RareTracebacks(logging.Filter):
    """Passes a traceback on the first, second, fourth, eighth… time that the same fault comes within a minute.

    What fails in one pass of the loop fails in the next as well, and ten tracebacks a second fill a disk in days.
    """

    def __init__(self) -> None:
        super().__init__()
        self._seen: dict[tuple[str, str, type[BaseException]], tuple[int, float]] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether the record is written. Faults are told apart by the place that reports them and by their class."""
        kind = record.exc_info[0] if record.exc_info else None
        if kind is None:
            return True
        key = (record.name, str(record.msg), kind)
        count, last = self._seen.get(key, (0, record.created))
        count = count + 1 if 0.0 <= record.created - last < FORGOTTEN_SECONDS else 1
        self._seen[key] = count, record.created
        return count & (count - 1) == 0


class ImpatientHandler(logging.StreamHandler[TextIO]):
    """Leaves a line out, and later says how many, where writing it would wait for a reader that has stopped reading.

    A terminal that was halted or a full pipe must not hold up the loop: others depend on the limits it has set.
    """

    def __init__(self, stream: TextIO) -> None:
        super().__init__(stream)
        self._left_out = 0

    def emit(self, record: logging.LogRecord) -> None:
        """Write the line as far as there is room for it."""
        try:
            if self._left_out and self._write(self._format_left_out()):
                self._left_out = 0
            if not self._write(self.format(record)):
                self._left_out += 1
        except Exception:  # noqa: BLE001  # as every handler does: an error of logging is shown, not raised
            self.handleError(record)

    def _format_left_out(self) -> str:
        text = f"{self._left_out} line(s) are missing here: nobody read them"
        return self.format(logging.LogRecord(__name__, logging.WARNING, __file__, 0, text, None, None))

    def _write(self, line: str) -> bool:
        """Piece by piece; False where there was no room for the next one."""
        line += self.terminator
        for start in range(0, len(line), _PIECE):
            if not self._has_room():
                return False
            self.stream.write(line[start : start + _PIECE])
            self.stream.flush()
        return True

    def _has_room(self) -> bool:
        try:
            poll = select.poll()
            poll.register(self.stream.fileno(), select.POLLOUT)
            return bool(poll.poll(0))
        except (OSError, ValueError):
            return True  # no descriptor behind it


def setup(section: LogSection) -> None:
    """Send the root logger's lines to standard error in the configured form."""
    handler = ImpatientHandler(sys.stderr)
    handler.setFormatter(JsonFormatter() if section.json else TextFormatter(journald="JOURNAL_STREAM" in os.environ))
    handler.addFilter(RareTracebacks())
    logging.basicConfig(level=section.level.upper(), handlers=[handler], force=True)
