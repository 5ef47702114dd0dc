"""What is read from files that are renewed while the agent runs, such as certificates and passwords."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Generic, TypeVar

from agent.config import ConfigError

log = logging.getLogger(__name__)

T = TypeVar("T")


class Renewed(Generic[T]):
    """What `read` made of the files when they could last be used; `name` is a plural for the log."""

    def __init__(self, name: str, paths: Sequence[str], read: Callable[[], T]) -> None:
        """Raises ConfigError, as `read` does, where the files cannot be used."""
        self._name = name
        self._paths = paths
        self._read = read
        self._lock = threading.Lock()
        self._seen = self._state()
        self._value = read()

    def value(self) -> T:
        """What the files say; what they said before while new ones cannot be used (or are not all there)."""
        with self._lock:
            state = self._state()
            if state != self._seen:
                self._seen = state
                self._take_up()
            return self._value

    def _take_up(self) -> None:
        try:
            self._value = self._read()
        except ConfigError as error:
            log.warning("going on with the %s as they were: %s", self._name, error)
        else:
            log.info("the %s have changed and are taken up", self._name)

    def _state(self) -> list[tuple[int, int, int] | None]:
        found: list[tuple[int, int, int] | None] = []
        for path in self._paths:
            try:
                status = Path(path).stat()
            except OSError:
                found.append(None)
            else:
                found.append((status.st_ino, status.st_ctime_ns, status.st_size))
        return found
