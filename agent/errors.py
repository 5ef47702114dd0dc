"""The one exception tree of the agent; every message is a sentence for the operator."""

from __future__ import annotations


class PrefetchdError(Exception):
    """Something the operator can mend; the message quotes the bad value and says what to do."""

    exit_status = 1


class UsageError(PrefetchdError):
    """A command line or configuration that cannot be used."""

    exit_status = 2


class CannotEnforceError(PrefetchdError):
    """This node cannot limit bandwidth; the message says what to change."""

    exit_status = 3
