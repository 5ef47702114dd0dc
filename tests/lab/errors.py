"""What can be wrong with the lab itself, as opposed to what runs in it."""

from __future__ import annotations


class LabBroken(RuntimeError):  # noqa: N818 -- a state, not an error of the caller
    """The lab failed: no kernel, no boot, a panic, a device that did not come up. Says nothing about the test."""


class LabTimeout(LabBroken):
    """The guest or a command in it did not end within its time limit; the guest is gone."""


class LabUnavailable(LabBroken):
    """This machine cannot run the lab at all (rights, programs); the message says what is missing."""
