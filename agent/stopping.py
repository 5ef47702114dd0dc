"""What the operator asks of the running agent by signal: to stop, or to disarm."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import time
from collections.abc import Sequence
from types import FrameType
from typing import Self

STOP = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
DISARM = signal.SIGUSR1


class StoppedEarlyError(BaseException):
    """A signal asks to stop while the agent is still being put together; undoes what was done so far.

    No `Exception`, since a probe that fails is given up and the next one tried: a stop must not pass for that.
    """


class SignalFlags:
    """SIGTERM, SIGINT, SIGHUP and SIGQUIT ask to stop, SIGUSR1 to disarm; in force from entry to exit.

    Until `started` the first request to stop raises StoppedEarlyError, since BPF programs take seconds to compile. From
    then on handlers only set flags, so that nothing disturbs the way out, and end `wait` early.
    """

    def __init__(self) -> None:
        self.stop = ""
        self.disarm = False
        self._starting = True
        self._previous: dict[int, object] = {}
        self._previous_wakeup = -1
        self._woken, self._wakeup = -1, -1

    def __enter__(self) -> Self:
        self._woken, self._wakeup = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._previous_wakeup = signal.set_wakeup_fd(self._wakeup, warn_on_full_buffer=False)
        for number in (*STOP, DISARM):
            self._previous[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)  # type: ignore[arg-type]  # what signal() itself returned
        signal.set_wakeup_fd(self._previous_wakeup)
        os.close(self._woken)
        os.close(self._wakeup)

    def started(self) -> None:
        """Nothing is interrupted from here on."""
        self._starting = False

    def wait(self, until: float, filenos: Sequence[int] = ()) -> None:
        """Sleep until `until` (monotonic seconds), a signal, or until one of the descriptors (-1: none) has something.

        A signal alone would not end poll(): Python resumes it (PEP 475).
        """
        poll = select.poll()
        for fileno in (self._woken, *filenos):
            if fileno >= 0:
                poll.register(fileno, select.POLLIN)
        remaining = until - time.monotonic()
        if remaining > 0 and not self.stop and not self.disarm:
            poll.poll(remaining * 1000)
        with contextlib.suppress(BlockingIOError):
            os.read(self._woken, 4096)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        del frame
        if number == DISARM:
            self.disarm = True
            return
        first, self.stop = not self.stop, signal.Signals(number).name
        if self._starting and first:
            raise StoppedEarlyError(self.stop)
