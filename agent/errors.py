"""The one exception tree of the agent; every message is a sentence for the operator."""

from __future__ import annotations

import re

MAX_QUOTED = 80
MAX_PATH = 240
"""Characters of a quoted value, and of a quoted path or a single word, that an error shows."""

_QUOTED = rf"(?<!\w)(['\"])(?=\S)(?:(?!\1).){{{MAX_QUOTED + 1},}}\1(?!\w)"
_LONG = re.compile(rf"{_QUOTED}|\S{{{MAX_PATH + 1},}}")


class PrefetchdError(Exception):
    """Something the operator can mend; the message quotes the bad value and says what to do."""

    exit_status = 1


class UsageError(PrefetchdError):
    """A command line or configuration that cannot be used."""

    exit_status = 2


class CannotEnforceError(PrefetchdError):
    """This node cannot limit bandwidth; the message says what to change."""

    exit_status = 3


def reason(error: Exception) -> str:
    """Why, in words, for a sentence that quotes the path or address itself.

    >>> reason(FileNotFoundError(2, "No such file or directory", "/etc/x"))
    'No such file or directory'
    """
    return getattr(error, "strerror", None) or str(error)


def shortened(message: str) -> str:
    """The message with what it quotes cut in the middle, so that a whole file given for a name is no flood.

    >>> shortened(f"Job {'x' * 500!r} is unknown.")
    "Job 'xxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx…xxxxxxxxxxxxxxxxxxx' is unknown."
    """
    return _LONG.sub(_cut, message)


def _cut(found: re.Match[str]) -> str:
    text = found[0]
    quotes = 2 if found[1] else 0
    limit = (MAX_QUOTED if quotes and "/" not in text else MAX_PATH) + quotes
    return text if len(text) <= limit else f"{text[: limit - 21]}…{text[-20:]}"
