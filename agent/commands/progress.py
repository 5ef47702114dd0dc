"""A bar with the time that is left, for commands that read a long file."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from agent.units import printable


@contextmanager
def progress_of(path: Path) -> Iterator[Callable[[int], object]]:
    """Takes how many bytes of the file have been read; shown on standard error, where that is a terminal."""
    if not sys.stderr.isatty() or not path.is_file():
        yield lambda _: None
        return
    from rich.console import Console  # noqa: PLC0415 - only where a bar is shown
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn  # noqa: PLC0415

    columns = (TextColumn("{task.description}", markup=False), BarColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(file=sys.stderr), transient=True) as bar:
        task = bar.add_task(f"reading {printable(path.name)}", total=path.stat().st_size)
        yield lambda read: bar.update(task, completed=read)


@contextmanager
def complaints() -> Iterator[list[str]]:
    """Sentences that are told on standard error at the end, below the bar and before a result."""
    told: list[str] = []
    yield told
    for sentence in told:
        print(f"prefetchd: {sentence}", file=sys.stderr)
