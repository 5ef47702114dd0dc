"""Seeds: every part of a simulated node draws from its own stream, so that one part's draws never move another's."""

from __future__ import annotations

import random
import zlib


def stream(seed: int, *names: str | int) -> random.Random:
    """A generator for one part, the same in every process for the same seed and names."""
    text = "/".join(str(name) for name in (seed, *names))
    return random.Random(zlib.crc32(text.encode()) ^ (seed << 32))  # noqa: S311 - a simulation, not a secret
