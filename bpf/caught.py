"""What BCC, LLVM and libbpf write to standard error, caught: one line of it says why a program is refused."""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
from collections.abc import Iterator
from typing import IO


class Caught:
    """What the C libraries wrote to standard error."""

    def __init__(self, sink: IO[bytes] | None) -> None:
        self._sink = sink

    def reason(self) -> str:
        """The line that says most: the first compiler error, else the last line of the verifier's or libbpf's log."""
        if self._sink is None:
            return ""
        self._sink.seek(0)
        lines = [line.strip() for line in self._sink.read().decode(errors="replace").splitlines() if line.strip()]
        errors = [line for line in lines if "error:" in line]
        telling = [line for line in lines if not line.startswith(("processed ", "HINT:"))]
        return errors[0] if errors else (telling[-1] if telling else "")


@contextlib.contextmanager
def caught_stderr(verbose: bool) -> Iterator[Caught]:
    """Catch what is written to descriptor 2 while the body runs; with `verbose` it goes where it went."""
    if verbose:
        yield Caught(None)
        return
    sys.stderr.flush()
    saved = os.dup(2)
    with tempfile.TemporaryFile() as sink:
        os.dup2(sink.fileno(), 2)
        try:
            yield Caught(sink)
        finally:
            os.dup2(saved, 2)
            os.close(saved)
