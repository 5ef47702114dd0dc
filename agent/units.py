"""Numbers as people read them: short, with their unit, `?` where unknown; and names that are safe to show. Pure."""

from __future__ import annotations

UNKNOWN = "?"
_PREFIXES = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))


def _short(value: float) -> str:
    """Three figures at most: 0.12, 3.4, 56, 789."""
    if value >= 19.95 or value == int(value):
        return f"{value:.0f}"
    return f"{value:.1f}" if value >= 0.95 else f"{value:.2g}"


def amount(value: float | None, unit: str) -> str:
    """A quantity with a decimal prefix; what is left of an average that fades away is nothing.

    >>> amount(1.5e9, "B/s"), amount(700.0, "B"), amount(None, "B"), amount(3e-27, "B/s")
    ('1.5 GB/s', '700 B', '?', '0 B/s')
    """
    if value is None:
        return UNKNOWN
    value = 0.0 if abs(value) < 0.01 else value
    for size, prefix in _PREFIXES:
        if abs(value) >= 0.9995 * size:
            return f"{_short(value / size)} {prefix}{unit}"
    return f"{_short(value)} {unit}".rstrip()


def rate(value: float | None) -> str:
    """Bytes per second."""
    return amount(value, "B/s")


def duration(seconds: float | None) -> str:
    """A time span in the unit that suits it.

    >>> duration(0.00012), duration(0.35), duration(95.0), duration(0.0)
    ('120 µs', '350 ms', '1 min 35 s', '0 s')
    """
    if seconds is None:
        return UNKNOWN
    if seconds < 5e-7:
        return "0 s"
    if seconds < 0.9995e-3:
        return f"{_short(seconds * 1e6)} µs"
    if seconds < 0.9995:
        return f"{_short(seconds * 1e3)} ms"
    if seconds < 60:
        return f"{_short(seconds)} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s"


def percent(ratio: float | None) -> str:
    """A ratio 0..1 in percent.

    >>> percent(0.153), percent(0.0002), percent(0.0)
    ('15.3 %', '<0.1 %', '0 %')
    """
    if ratio is None:
        return UNKNOWN
    return "<0.1 %" if 0.0 < ratio < 0.001 else f"{_short(100.0 * ratio)} %"


def tight(text: str) -> str:
    """The same without spaces, for narrow columns."""
    return text.replace(" ", "")


def queue(depth: float | None, capacity: float | None) -> str:
    """Depth of a queue out of its capacity.

    >>> queue(2.0, 8.0), queue(None, 8.0), queue(1.5, None)
    ('2/8', '?/8', '1.5/?')
    """
    return f"{UNKNOWN if depth is None else _short(depth)}/{UNKNOWN if capacity is None else _short(capacity)}"


def printable(text: str) -> str:
    r"""What came from outside, names above all, may not steer a terminal, begin a line of its own, or be no UTF-8.

    >>> printable("a\x1b[2J\n\udcff")
    'a\\x1b[2J\\n\\udcff'
    """
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode("ascii") for char in text)
