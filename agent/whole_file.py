"""Files that commands write for the operator: there whole, or not at all."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from agent.errors import PrefetchdError


@contextmanager
def replacing(path: Path, what: str, *, permissions: int = 0o666) -> Iterator[BinaryIO]:
    """A file beside `path` to write to, which takes its place at the end; what stood there stays where that fails.

    `what` begins the sentence of the PrefetchdError that an OSError becomes. `permissions` are less the umask. What a
    run that was killed has left beside it is removed and never written to: whose it is, is not known.
    """
    partial = path.with_name(f"{path.name}.partial")
    try:
        partial.unlink(missing_ok=True)
        descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, permissions)
        try:
            with os.fdopen(descriptor, "wb") as file:
                yield file
            partial.replace(path)
        finally:
            with suppress(OSError):
                partial.unlink()
    except OSError as error:
        raise PrefetchdError(
            f"{what} {str(path)!r} cannot be written ({error.strerror}); choose another path."
        ) from None
