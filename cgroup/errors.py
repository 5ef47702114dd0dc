"""Everything that the package raises on purpose, as one tree."""
# ruff: noqa: N818  # `Vanished` and `DeviceRefused` say what happened; "Error" would add nothing

from __future__ import annotations


class CgroupError(Exception):
    """Base of all errors of this package; the message is one sentence that says what to do."""


class IoFileError(CgroupError):
    """The text of a kernel file could not be understood."""


class Vanished(CgroupError):
    """A cgroup or a device is gone. That is churn, not a fault: the caller drops it and goes on."""


class ControllerMissing(CgroupError):
    """The cgroup is there, but not the file: the io controller is not enabled for it."""


class DeviceRefused(CgroupError):
    """A device, path or mount on which nothing can or may be enforced, with the reason."""


class JournalError(CgroupError):
    """The journal cannot be read, written or owned."""


class JournalFull(JournalError):
    """No room for a journal record: without the record nothing may be enforced."""


class JournalBusy(JournalError):
    """Another process owns the journal."""


class GuardianError(CgroupError):
    """The guardian cannot be started."""
