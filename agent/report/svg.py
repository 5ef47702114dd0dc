"""Static pictures: lines, bars and strips over time, histograms, each drawn for a given width. Pure.

The pictures are complete without a script: axes with units, phases behind the data, a title for those who cannot see.
Elements of class `data` may be stretched along x by the page's script; `data-…` attributes tell it the geometry.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from html import escape
from math import ceil, floor, log10

Values = Sequence[float | None]

LEFT, RIGHT, TOP, BOTTOM = 58, 12, 20, 38
CHARACTER = 6.6
"""Width of a character of the labels, in the picture's units."""


@dataclass(frozen=True, slots=True)
class Series:
    """One line: name, style (`s0`…), values per bin; `area` fills below it, `steps` draws stairs, `bars` columns."""

    name: str
    style: str
    values: Values
    area: bool = False
    steps: bool = False
    bars: bool = False
    dashed: bool = False


@dataclass(frozen=True, slots=True)
class Band:
    """A stretch of time with a label, drawn behind the data."""

    begin: float
    end: float
    label: str
    style: str


@dataclass(frozen=True, slots=True)
class TimePlot:
    """Values over time: bins of `bin_seconds`, `seconds` in all; `scale` divides values into the unit of the axis."""

    key: str
    title: str
    unit: str
    series: Sequence[Series]
    seconds: float
    bin_seconds: float
    scale: float = 1.0
    top: float | None = None
    bands: Sequence[Band] = field(default_factory=tuple)
    levels: Sequence[tuple[float, str]] = field(default_factory=tuple)
    height: int = 190


@dataclass(frozen=True, slots=True)
class Strip:
    """Which of several kinds held at each time: coloured stretches on one row."""

    key: str
    title: str
    kinds: Sequence[str | None]
    styles: dict[str, str]
    seconds: float
    bin_seconds: float
    bands: Sequence[Band] = field(default_factory=tuple)
    height: int = 96


@dataclass(frozen=True, slots=True)
class Histogram:
    """Groups of columns: `labels` under the axis, one row of ratios (0..1) per series."""

    key: str
    title: str
    axis: str
    labels: Sequence[str]
    series: Sequence[Series]
    height: int = 200


def ticks(top: float, count: int = 4) -> list[float]:
    """Round numbers from 0 up to `top`, at most `count` + 1 of them.

    >>> ticks(100.0), ticks(0.7)
    ([0.0, 25.0, 50.0, 75.0, 100.0], [0.0, 0.2, 0.4, 0.6])
    """
    if not top > 0:
        return [0.0]
    raw = top / count
    power = 10.0 ** floor(log10(raw))
    step = next(factor * power for factor in (1, 2, 2.5, 5, 10) if factor * power >= raw * 0.999)
    return [round(step * place, 12) for place in range(floor(top / step + 1e-9) + 1)]


def time_step(seconds: float, count: int) -> float:
    """Seconds between two labels of a time axis with at most `count` of them.

    >>> time_step(60.0, 6), time_step(7200.0, 6)
    (10, 1800)
    """
    steps = (1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14400, 21600, 43200, 86400)
    return next((step for step in steps if seconds / step <= count), 86400 * ceil(seconds / 86400 / count))


def clock(seconds: float, step: float) -> str:
    """Time since the start: `1:30` (minutes), `2:05 h` where steps are long.

    >>> clock(90, 10), clock(7500, 900), clock(0, 10)
    ('1:30', '2:05', '0:00')
    """
    whole = round(seconds)
    if step >= 300:
        return f"{whole // 3600}:{whole % 3600 // 60:02}"
    return f"{whole // 60}:{whole % 60:02}"


def number(value: float) -> str:
    """A label of an axis."""
    return f"{value:,.0f}" if abs(value) >= 100 or value == int(value) else f"{value:.3g}"


def time_plot(plot: TimePlot, width: int) -> str:
    """The SVG of values over time."""
    shown = [value / plot.scale for series in plot.series for value in series.values if value is not None]
    top = plot.top if plot.top is not None else max(shown, default=0.0) * 1.05
    top = top or 1.0
    inner, base = width - LEFT - RIGHT, plot.height - BOTTOM
    y = _linear(top, base)
    parts = [_bands(plot.bands, plot.seconds, inner, base)]
    for tick in ticks(top):
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{LEFT + inner}" y1="{y(tick):.1f}" y2="{y(tick):.1f}"/>')
        parts.append(f'<text class="tick" x="{LEFT - 6}" y="{y(tick) + 4:.1f}" text-anchor="end">{number(tick)}</text>')
    parts.append('<g class="clip"><g class="data">')
    parts += [_series(series, plot, inner, y, base) for series in plot.series]
    parts.append("</g></g>")
    parts += [_level(value, text, y, inner) for value, text in plot.levels]
    parts.append(_time_axis(plot.seconds, inner, base, plot.height))
    parts.append(_y_title(plot.unit, base))
    return _svg(plot, "time", width, plot.seconds, parts)


def strip(plot: Strip, width: int) -> str:
    """The SVG of kinds over time."""
    inner, base = width - LEFT - RIGHT, plot.height - BOTTOM
    parts = [_bands(plot.bands, plot.seconds, inner, base), '<g class="clip"><g class="data">']
    for begin, end, kind in _stretches(plot.kinds):
        x0, x1 = (min(edge * plot.bin_seconds / plot.seconds, 1.0) * inner for edge in (begin, end))
        style = plot.styles.get(kind, "none")
        box = f'x="{LEFT + x0:.1f}" y="{TOP + 4}" width="{max(x1 - x0, 0.5):.1f}" height="{base - TOP - 8}"'
        parts.append(f'<rect class="mark fill {style}" {box}><title>{escape(kind)}</title></rect>')
    parts.append("</g></g>")
    parts.append(_time_axis(plot.seconds, inner, base, plot.height))
    parts.append(_y_title(plot.title.split(" ")[0].lower(), base))
    return _svg(plot, "time", width, plot.seconds, parts)


def histogram(plot: Histogram, width: int) -> str:
    """The SVG of grouped columns."""
    inner, base = width - LEFT - RIGHT, plot.height - BOTTOM
    top = (
        max((value for series in plot.series for value in series.values if value is not None), default=0.0) * 105 or 1.0
    )
    y = _linear(top, base)
    parts = []
    for tick in ticks(top):
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{LEFT + inner}" y1="{y(tick):.1f}" y2="{y(tick):.1f}"/>')
        parts.append(f'<text class="tick" x="{LEFT - 6}" y="{y(tick) + 4:.1f}" text-anchor="end">{number(tick)}</text>')
    slot = inner / max(len(plot.labels), 1)
    column = slot * 0.8 / max(len(plot.series), 1)
    every = ceil(len(plot.labels) / max(1, floor(inner / (8 * CHARACTER))))
    for place, label in enumerate(plot.labels):
        for row, series in enumerate(plot.series):
            ratio = series.values[place] or 0.0
            x = LEFT + slot * (place + 0.1) + column * row
            text = f"{label}, {series.name}: {100 * ratio:.1f} %"
            edge = y(100 * ratio)
            box = f'x="{x:.1f}" y="{edge:.1f}" width="{column:.1f}" height="{base - edge:.1f}"'
            parts.append(f'<rect class="mark fill {series.style}" {box}><title>{escape(text)}</title></rect>')
        if place % every == 0:
            parts.append(f'<text class="tick" x="{LEFT + slot * (place + 0.5):.1f}" y="{base + 14}" '
                         f'text-anchor="middle">{escape(label)}</text>')  # fmt: skip
    parts.append(f'<line class="axis" x1="{LEFT}" x2="{LEFT + inner}" y1="{base}" y2="{base}"/>')
    parts.append(_x_title(plot.axis, inner, plot.height))
    parts.append(_y_title("% of requests", base))
    return _svg(plot, "bars", width, 0.0, parts)


def _svg(plot: TimePlot | Strip | Histogram, kind: str, width: int, seconds: float, parts: Sequence[str]) -> str:
    inner = width - LEFT - RIGHT
    geometry = f'data-left="{LEFT}" data-inner="{inner}" data-seconds="{seconds:g}"'
    name = f"clip-{plot.key}-{width}"
    clip = f'<clipPath id="{name}"><rect x="{LEFT}" y="0" width="{inner}" height="{plot.height}"/></clipPath>'
    body = clip + "".join(parts).replace('<g class="clip">', f'<g clip-path="url(#{name})">')
    return (
        f'<svg class="plot {kind}" viewBox="0 0 {width} {plot.height}" width="{width}" height="{plot.height}" '
        f'role="img" aria-label="{escape(plot.title)}" data-key="{escape(plot.key)}" {geometry}>{body}</svg>'
    )


def _linear(top: float, base: float) -> Callable[[float], float]:
    return lambda value: base - (base - TOP) * min(max(value, 0.0), top) / top


def _bands(bands: Sequence[Band], seconds: float, inner: float, base: float) -> str:
    """Phases behind the data, labelled above it where there is room."""
    parts = ['<g class="clip"><g class="data">']
    labels = []
    for band in bands:
        x0, x1 = (LEFT + inner * edge / max(seconds, 1e-9) for edge in (band.begin, band.end))
        parts.append(f'<rect class="band {band.style}" x="{x0:.1f}" y="{TOP}" width="{max(x1 - x0, 0):.1f}" '
                     f'height="{base - TOP}"/>')  # fmt: skip
        if (x1 - x0) > len(band.label) * CHARACTER:
            labels.append(f'<text class="tick phase" x="{x0 + 2:.1f}" y="{TOP - 6}">{escape(band.label)}</text>')
    return "".join([*parts, "</g></g>", *labels])


def _level(value: float, text: str, y: Callable[[float], float], inner: float) -> str:
    right, height = LEFT + inner, y(value)
    line = f'<line class="level" x1="{LEFT}" x2="{right}" y1="{height:.1f}" y2="{height:.1f}"/>'
    return (
        line + f'<text class="tick over" x="{right - 2}" y="{height - 3:.1f}" text-anchor="end">{escape(text)}</text>'
    )


def _series(series: Series, plot: TimePlot, inner: float, y: Callable[[float], float], base: float) -> str:
    def point(place: int, value: float) -> tuple[float, float]:
        part = min((place + 0.5) * plot.bin_seconds / plot.seconds, 1.0)
        return LEFT + inner * part, y(value / plot.scale)

    if series.bars:
        points = [point(place, value) for place, value in enumerate(series.values) if value is not None]
        path = "".join(f"M{x:.1f} {base}V{at:.1f}" for x, at in points)
        return f'<path class="mark stem {series.style}" d="{path}"/>'
    parts = []
    for begin, values in _runs(series.values):
        coordinates = [point(begin + place, value) for place, value in enumerate(values)]
        if len(coordinates) == 1:
            coordinates.append((coordinates[0][0] + inner * plot.bin_seconds / plot.seconds, coordinates[0][1]))
        line = _path(coordinates, steps=series.steps)
        if series.area:
            edge = f"L{coordinates[-1][0]:.1f} {base}L{coordinates[0][0]:.1f} {base}Z"
            parts.append(f'<path class="fill area {series.style}" d="{line}{edge}"/>')
        dashed = " dashed" if series.dashed else ""
        parts.append(f'<path class="mark line{dashed} {series.style}" d="{line}"/>')
    return "".join(parts)


def _path(points: Sequence[tuple[float, float]], *, steps: bool) -> str:
    first, *rest = points
    text = [f"M{first[0]:.1f} {first[1]:.1f}"]
    for x, y in rest:
        text.append(f"H{x:.1f}V{y:.1f}" if steps else f"L{x:.1f} {y:.1f}")
    return "".join(text)


def _runs(values: Values) -> list[tuple[int, list[float]]]:
    """(begin, values) of stretches without None; a single missing bin does not break a line."""
    runs: list[tuple[int, list[float]]] = []
    before: float | None = None
    for place, value in enumerate(values):
        following = values[place + 1] if place + 1 < len(values) else None
        shown = before if value is None and following is not None else value
        if shown is not None:
            if before is None:
                runs.append((place, []))
            runs[-1][1].append(shown)
        before = shown
    return runs


def _stretches(kinds: Sequence[str | None]) -> list[tuple[int, int, str]]:
    """(begin, end, kind) of equal neighbours."""
    found: list[tuple[int, int, str]] = []
    for place, kind in enumerate(kinds):
        if kind is None:
            continue
        if found and found[-1][2] == kind and found[-1][1] == place:
            found[-1] = (found[-1][0], place + 1, kind)
        else:
            found.append((place, place + 1, kind))
    return found


def _time_axis(seconds: float, inner: float, base: float, height: int) -> str:
    step = time_step(seconds, max(2, int(inner / (8 * CHARACTER))))
    parts = [f'<line class="axis" x1="{LEFT}" x2="{LEFT + inner}" y1="{base}" y2="{base}"/>', '<g class="ticks">']
    for place in range(int(seconds / step + 1e-9) + 1):
        x = LEFT + inner * place * step / max(seconds, 1e-9)
        parts.append(
            f'<text class="tick" x="{x:.1f}" y="{base + 14}" text-anchor="middle">{clock(place * step, step)}</text>'
        )
    unit = "h:min" if step >= 300 else "min:s"
    return "".join(parts) + "</g>" + _x_title(f"time since start ({unit})", inner, height)


def _x_title(text: str, inner: float, height: int) -> str:
    return (
        f'<text class="title x" x="{LEFT + inner / 2:.1f}" y="{height - 6}" text-anchor="middle">{escape(text)}</text>'
    )


def _y_title(text: str, base: float) -> str:
    middle = (TOP + base) / 2
    turned = f'transform="translate(12 {middle:.1f}) rotate(-90)" text-anchor="middle"'
    return f'<text class="title y" {turned}>{escape(text)}</text>'
