"""What there is to draw on."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Canvas:
    """The terminal: size in cells, whether only ASCII can be shown, and whether somebody presses keys."""

    width: int = 80
    height: int = 24
    ascii_only: bool = False
    keys: bool = True
