"""Plain text on a terminal: width, colours where they are wanted, wrapped columns. No dependency."""

from __future__ import annotations

import os
import shutil
import sys
import textwrap
from collections.abc import Iterable, Mapping
from typing import TextIO

_CODES = {"bold": "1", "dim": "2", "red": "31", "green": "32", "yellow": "33", "magenta": "35", "cyan": "36"}
MIN_TEXT_COLUMNS = 30


def colours_wanted(stream: TextIO | None = None, environment: Mapping[str, str] = os.environ) -> bool:
    """Whether to colour: a terminal that is not dumb, and no NO_COLOR (https://no-color.org)."""
    terminal = (stream or sys.stdout).isatty()
    return terminal and not environment.get("NO_COLOR") and environment.get("TERM", "") not in ("", "dumb")


def paint(text: str, style: str, *, colours: bool) -> str:
    """The text in a style such as `bold red`."""
    if not colours or not style:
        return text
    return f"\033[{';'.join(_CODES[word] for word in style.split())}m{text}\033[0m"


def text_columns() -> int | None:
    """Columns of the terminal; None where output goes elsewhere and is better not wrapped."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else None


def hanging(prefix: str, paragraphs: Iterable[str], columns: int | None, prefix_columns: int) -> str:
    """Paragraphs to the right of a prefix, wrapped to the terminal; below it where there is no room beside it."""
    if columns is None:
        room, indent = 10**6, " " * prefix_columns
    elif columns - prefix_columns < MIN_TEXT_COLUMNS:
        room, indent = max(columns - 4, 20), "    "
        prefix = prefix.rstrip() + "\n" + indent
    else:
        room, indent = columns - prefix_columns, " " * prefix_columns
    lines = [line for text in paragraphs for line in textwrap.wrap(text, room, break_on_hyphens=False) or [""]]
    return prefix + f"\n{indent}".join(lines)
