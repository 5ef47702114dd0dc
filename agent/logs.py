"""Log lines on standard error: text for people (systemd's priorities where it reads them), or JSON for machines."""

from __future__ import annotations

import json
import logging
import os
import sys
import time

from agent.config import LogSection

_SYSTEMD_PRIORITY = {logging.DEBUG: 7, logging.INFO: 6, logging.WARNING: 4, logging.ERROR: 3, logging.CRITICAL: 2}
_OWN_FIELDS = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime"}


class TextFormatter(logging.Formatter):
    """`12:30:01.123 warning agent.loop: text`; under systemd a priority prefix instead of the clock."""

    def __init__(self, *, journald: bool) -> None:
        super().__init__()
        self._journald = journald

    def format(self, record: logging.LogRecord) -> str:
        text = f"{record.levelname.lower()} {record.name}: {record.getMessage()}"
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


def setup(section: LogSection) -> None:
    """Send the root logger's lines to standard error in the configured form."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter() if section.json else TextFormatter(journald="JOURNAL_STREAM" in os.environ))
    logging.basicConfig(level=section.level.upper(), handlers=[handler], force=True)
