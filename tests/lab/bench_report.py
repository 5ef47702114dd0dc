"""The benchmark as one page that asks the network for nothing: plots and tables per scenario. Pure.

The style sheet, the axes and the plots over time are those of the report of a recording.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from importlib import resources
from statistics import fmean
from typing import Any

from agent.report.page import NARROW, WIDE
from agent.report.svg import CHARACTER, Series, TimePlot, number, ticks, time_plot
from agent.units import percent
from tests.lab.bench_plan import ALONE, POLICIES
from tests.lab.bench_results import Document
from tests.lab.bench_table import MIB, foundation, goals, wait_text

STYLES = dict(zip(POLICIES, ("none", "s7", "s4", "s5", "s0", "s6", "s1", "s3", "s2"), strict=False)) | {ALONE: ALONE}
_ROW, _HEAD, _NAMES, _VALUES = 22, 8, 74, 92
_PAGE = """<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>prefetchd: policies compared</title><style>
{style}
td.text {{ text-align: left; white-space: normal; }} .wide-table {{ overflow-x: auto; }}
.wide-table td:first-child, .wide-table th:first-child {{ width: auto; white-space: nowrap; }}
.fill.alone {{ fill: none; stroke: var(--ink); }} .line.alone {{ stroke: var(--ink); }}
.bg-alone {{ outline: 1px solid var(--ink); }}
.whisker {{ stroke: var(--ink); stroke-width: 1.2; }}</style></head><body>
{body}
</body></html>
"""


@dataclass(frozen=True)
class Bar:
    """One bar: a policy, its median, the lowest and the highest over seeds, and the text behind it."""

    policy: str
    value: float
    low: float
    high: float
    text: str


def render(document: Document) -> str:
    """The whole page."""
    sections = [_section(document, name, own) for name, own in document["scenarios"].items()]
    body = [*_head(document), *sections, *_foot(document)]
    style = resources.files("agent").joinpath("data", "report.css").read_text(encoding="utf-8")
    return _PAGE.format(style=style, body="\n".join(body))


def _head(document: Document) -> Iterator[str]:
    yield "<h1>Policies compared on a real kernel</h1>"
    yield f'<p class="soft">{escape(foundation(document))}</p>'
    yield '<p class="soft">Bars are medians over seeds, whiskers the lowest and highest seed.</p>'
    links = (f'<a href="#{escape(name)}">{escape(name)}</a>' for name in document["scenarios"])
    yield f"<nav>{' '.join(links)}</nav>"
    yield '<section id="goals"><h2>Goals of the default policy</h2><table><tbody>'
    for goal in goals(document):
        verdict = "met" if goal.met else "<strong>missed</strong>"
        measured = f'<td class="text">{escape(goal.measured)}</td>'
        yield f'<tr><td class="text">{escape(goal.text)}</td><td>{verdict}</td>{measured}</tr>'
    yield "</tbody></table></section>"


def _section(document: Document, name: str, own: Mapping[str, Any]) -> str:
    parts = [f'<section id="{escape(name)}"><h2>{escape(name)}</h2>']
    parts.append(_bars("Wait per iteration, mean", "ms", _wait_bars(own)))
    if any(figures["neighbour_bytes_per_second"] for figures in own.values()):
        parts.append(_bars("What the neighbours got", "MiB/s", _neighbour_bars(own)))
    parts += [_over_time(document, name, own), *_figures_table(own), "</section>"]
    return "\n".join(parts)


def _wait_bars(own: Mapping[str, Any]) -> list[Bar]:
    bars = []
    for policy, figures in own.items():
        value, (low, high) = figures["wait_ms"]["mean"], figures["spread"]["wait_ms"]["mean"]
        bars.append(Bar(policy, value, low, high, f"{wait_text(value)} ms"))
    return bars


def _neighbour_bars(own: Mapping[str, Any]) -> list[Bar]:
    bars = []
    for policy, figures in own.items():
        if policy == ALONE:
            continue
        low, high = figures["spread"]["neighbour_bytes_per_second"]
        value = figures["neighbour_bytes_per_second"] / MIB
        bars.append(Bar(policy, value, low / MIB, high / MIB, f"{value:.1f} MiB/s"))
    return bars


def _bars(title: str, unit: str, bars: Sequence[Bar]) -> str:
    narrow, wide = (bar_plot(title, unit, bars, width) for width in (NARROW, WIDE))
    caption = f"<figcaption><h3>{escape(title)}</h3></figcaption>"
    return f'<figure>{caption}<div class="narrow">{narrow}</div><div class="wide">{wide}</div></figure>'


def bar_plot(title: str, unit: str, bars: Sequence[Bar], width: int) -> str:
    """The SVG of horizontal bars with whiskers, their values in words at the right."""
    inner, base = width - _NAMES - _VALUES, _HEAD + _ROW * len(bars)
    top = max((bar.high for bar in bars), default=0.0) or 1.0
    parts = []
    for tick in ticks(top, max(2, int(inner / (9 * CHARACTER)))):
        x = _NAMES + inner * tick / top
        parts.append(f'<line class="grid" x1="{x:.1f}" x2="{x:.1f}" y1="{_HEAD}" y2="{base}"/>')
        parts.append(f'<text class="tick" x="{x:.1f}" y="{base + 14}" text-anchor="middle">{number(tick)}</text>')
    parts += [_bar(bar, _HEAD + _ROW * place, inner / top, width) for place, bar in enumerate(bars)]
    parts.append(
        f'<text class="title x" x="{_NAMES + inner / 2:.1f}" y="{base + 30}" text-anchor="middle">{unit}</text>'
    )
    height = base + 36
    return (
        f'<svg class="plot bars" viewBox="0 0 {width} {height}" width="{width}" height="{height}" role="img" '
        f'aria-label="{escape(title)}">{"".join(parts)}</svg>'
    )


def _bar(bar: Bar, y: float, scale: float, width: int) -> str:
    end, low, high = (_NAMES + scale * value for value in (bar.value, bar.low, bar.high))
    middle = y + _ROW / 2
    name = f'<text class="tick" x="{_NAMES - 6}" y="{middle + 4}" text-anchor="end">{escape(bar.policy)}</text>'
    box = f'x="{_NAMES}" y="{y + 4}" width="{max(end - _NAMES, 1):.1f}" height="{_ROW - 8}"'
    title = escape(f"{bar.policy}: {bar.text}")
    fill = f'<rect class="mark fill {STYLES[bar.policy]}" {box}><title>{title}</title></rect>'
    whisker = ""
    if high > low:
        ends = "".join(f"M{x:.1f} {middle - 4}v8" for x in (low, high))
        whisker = f'<path class="whisker" d="M{low:.1f} {middle}H{high:.1f}{ends}"/>'
    text = f'<text class="tick" x="{width - _VALUES + 8}" y="{middle + 4}">{escape(bar.text)}</text>'
    return name + fill + whisker + text


def _over_time(document: Document, name: str, own: Mapping[str, Any]) -> str:
    """Waits by the second in which they began, a line per policy: means over seeds."""
    series = []
    seconds = 1
    for policy in own:
        runs = [run for run in document["runs"] if (run["scenario"], run["policy"]) == (name, policy)]
        rows = [run["wait_ms_by_second"] for run in runs if run.get("wait_ms_by_second")]
        values = [_mean([value for value in bins if value is not None]) for bins in zip(*rows, strict=False)]
        seconds = max(seconds, len(values))
        series.append(Series(policy, STYLES[policy], values, dashed=policy in ("none", ALONE)))
    title = "Wait per iteration over time"
    plot = TimePlot(f"time-{name}", title, "ms", series, float(seconds), 1.0)
    keys = " ".join(
        f'<span class="key"><i class="bg-{one.style}"></i>{escape(one.name)}</span>' for one in series if one.values
    )
    narrow, wide = (time_plot(plot, width) for width in (NARROW, WIDE))
    caption = f"<figcaption><h3>{title}</h3>{keys}</figcaption>"
    return f'<figure>{caption}<div class="narrow">{narrow}</div><div class="wide">{wide}</div></figure>'


def _mean(values: Sequence[float]) -> float | None:
    return fmean(values) if values else None


_COLUMNS = (
    *("policy", "seeds", "wait ms", "p50", "p99", "events", "comp/(comp+wait)", "worst job", "samples/s"),
    *("others MiB/s", "writes", "agent cores", "agent MiB", "BPF cores", "÷ none", "÷ best peer"),
)


def _figures_table(own: Mapping[str, Any]) -> Iterator[str]:
    head = "".join(f"<th>{escape(name)}</th>" for name in _COLUMNS)
    yield f'<div class="wide-table"><table><thead><tr>{head}</tr></thead><tbody>'
    for policy, figures in own.items():
        yield f"<tr>{''.join(f'<td>{escape(text)}</td>' for text in _row(policy, figures))}</tr>"
    yield "</tbody></table></div>"


def _row(policy: str, figures: Mapping[str, Any]) -> list[str]:
    waits, (low, high) = figures["wait_ms"], figures["spread"]["wait_ms"]["mean"]
    spread = f" ({low:.2f} … {high:.2f})" if high > low else ""
    best = figures.get("ratio_to_best_peer") or {}
    memory = figures["agent_resident_bytes"]
    return [
        policy,
        ", ".join(map(str, figures["seeds"])),
        f"{waits['mean']:.2f}{spread}",
        f"{waits['p50']:.1f}",
        f"{waits['p99']:.1f}",
        f"{figures['starvation_events']:.0f}",
        percent(figures["utilisation"]),
        f"{percent(figures['worst_utilisation'])} {figures['worst_job']}",
        f"{figures['samples_per_second']:.0f}",
        f"{figures['neighbour_bytes_per_second'] / MIB:.1f}",
        f"{figures['control_writes']:.0f}",
        _known(figures["agent_cpu_ratio"], "{:.3f}"),
        _known(memory and memory / MIB, "{:.0f}"),
        _known(figures["bpf_ratio"], "{:.4f}"),
        _known((figures.get("ratio_to_none") or {}).get("wait"), "{:.3f}"),
        _known(best.get("wait"), "{:.2f}") + (f" {best['peer']}" if best else ""),
    ]


def _known(value: float | None, form: str) -> str:
    return "-" if value is None else form.format(value)


def _foot(document: Document) -> Iterator[str]:
    used = dict.fromkeys(run["policy"] for run in document["runs"])
    yield '<section id="policies"><h2>What each policy sets</h2><table><tbody>'
    for policy, text in document["policies"].items():
        if policy in used:
            yield f'<tr><td>{escape(policy)}</td><td class="text">{escape(text)}</td></tr>'
    yield '</tbody></table></section><section id="spoiled"><h2>Spoiled runs</h2>'
    for note in document["spoiled"]:
        text = f"{note['scenario']} {note['policy']} seed {note['seed']}, attempt {note['attempt']}: {note['why']}"
        yield f'<p class="soft">{escape(text)}</p>'
    if not document["spoiled"]:
        yield '<p class="soft">None.</p>'
    yield "</section>"
