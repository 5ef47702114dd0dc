"""The page: one HTML text that asks the network for nothing. Pure."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from html import escape
from importlib import resources
from typing import Any

from agent.report.figures import Clockwork, Figure, device_figures, job_figures
from agent.report.gather import JobPhase, JobStory, Story
from agent.report.svg import Histogram, Strip, TimePlot, histogram, strip, time_plot
from agent.types import JobId
from agent.units import duration, percent, rate

NARROW, WIDE = 336, 1076
"""Widths of the two renditions of every picture, in CSS pixels: a phone of 360, and a desktop."""
MAX_JOBS = 24
"""Jobs with pictures, those that lost most first; the rest are in the table."""
OBSERVED_ONLY = "observed only: its capacity is not declared, or this node could not limit it"


def render(story: Story, name: str, max_jobs: int = MAX_JOBS) -> str:
    """The whole page for a recording called `name`."""
    clock = Clockwork(story)
    jobs = _by_loss(story)
    figures: list[Figure] = []
    sections = []
    for job, told in jobs[:max_jobs]:
        own = list(job_figures(job, told, story, clock))
        figures += own
        sections.append(_section(f"job-{job}", f"Job {told.name}", _job_line(told), own))
    for number, device in story.devices.items():
        own = list(device_figures(number, device, story, clock))
        figures += own
        text = f"{device.medium}, {f'capacity {rate(device.capacity)}' if device.capacity else OBSERVED_ONLY}"
        sections.append(_section(f"device-{device.name}", f"Device {device.name}", text, own))
    body = [
        *_head(story, name),
        *_findings(story, jobs),
        *_bars(story, jobs),
        *_table(story, jobs),
        *sections,
        *_foot(story),
    ]
    return _PAGE.format(
        title=escape(f"prefetchd report: {name}"),
        style=_data("report.css"),
        body="\n".join(body),
        facts=_embedded(_facts(figures)),
        script=_data("report.js"),
    )


_PAGE = """<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8">
<meta http-equiv="Content-Security-Policy"
 content="default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title><style>
{style}</style></head><body>
{body}
<div id="tip" role="status" hidden></div><button id="reset" class="tool" hidden>Show all of the time</button>
<script type="application/json" id="facts">{facts}</script>
<script>
{script}</script></body></html>
"""


def _data(name: str) -> str:
    return resources.files("agent").joinpath("data", name).read_text(encoding="utf-8")


def _embedded(value: Any) -> str:
    """JSON that cannot end the element it stands in."""
    return json.dumps(value, separators=(",", ":")).replace("<", "\\u003c")


def _by_loss(story: Story) -> list[tuple[JobId, JobStory]]:
    training = [(job, told) for job, told in story.jobs.items() if told.training]
    return sorted(training, key=lambda one: (-one[1].lost_seconds, one[1].name))


def _head(story: Story, name: str) -> Iterator[str]:
    begun = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(story.start))
    yield f"<h1>{escape(name)}</h1>"
    made = f"{story.passes:,} passes, prefetchd {escape(story.software or 'of unknown version')}"
    made += f", policy {escape(story.policy)}" if story.policy else ""
    yield f'<p class="soft">{begun}, {duration(story.seconds)}, {made}.</p>'
    yield '<p class="soft tool">Drag across a picture to zoom all of them; Esc goes back.</p>'


def _findings(story: Story, jobs: Sequence[tuple[JobId, JobStory]]) -> Iterator[str]:
    """The story in a few sentences."""
    labels = story.labels
    for _, told in jobs[:5]:
        known = [
            (label, told.phases[label]) for label in labels if label in told.phases and told.phases[label].seconds > 0
        ]
        parts = [f"{percent(_lost(phase))} of its time in mode <em>{escape(label)}</em>" for label, phase in known]
        if parts:
            yield f"<p><strong>{escape(told.name)}</strong> lost {', '.join(parts)}.</p>"
    if not jobs:
        yield "<p>No training job is in this recording.</p>"


def _lost(phase: JobPhase) -> float | None:
    return min(1.0, phase.lost_seconds / phase.seconds) if phase.seconds > 0 else None


def _bars(story: Story, jobs: Sequence[tuple[JobId, JobStory]]) -> Iterator[str]:
    """Mean wait per iteration, a bar per job and kind of phase."""
    waits = [phase.waits.mean or 0.0 for _, told in jobs for phase in told.phases.values()]
    longest = max(waits, default=0.0) or 1.0
    if not jobs:
        return
    yield '<section id="waits"><h2>Wait per iteration, mean</h2>'
    for _, told in jobs:
        yield f'<div class="row"><div>{escape(told.name)}</div><div>'
        for place, label in enumerate(story.labels):
            phase = told.phases.get(label)
            if phase is not None and phase.waits.mean is not None:
                width = 60 * phase.waits.mean / longest
                yield (f'<div class="bar"><b class="bg-s{place % 6}" style="width:{width:.1f}%"></b>'
                       f"<span>{duration(phase.waits.mean)}</span></div>")  # fmt: skip
        yield "</div></div>"
    yield _legend([(f"s{place % 6}", label) for place, label in enumerate(story.labels)])
    yield "</section>"


def _table(story: Story, jobs: Sequence[tuple[JobId, JobStory]]) -> Iterator[str]:
    if not jobs:
        return
    yield '<section id="jobs"><h2>Jobs</h2><table><thead><tr><th>job, phase</th><th>wait</th><th>p99</th>'
    yield '<th>lost</th><th title="runs of waits, each of which, however long, counts once">episodes</th></tr></thead>'
    yield "<tbody>"
    for job, told in jobs:
        yield f'<tr class="job"><td colspan="5"><a href="#job-{job}">{escape(told.name)}</a></td></tr>'
        for label in story.labels:
            phase = told.phases.get(label)
            if phase is not None:
                yield (f"<tr><td>{escape(label)}</td><td>{duration(phase.waits.mean)}</td>"
                       f"<td>{duration(phase.waits.quantile(0.99))}</td><td class='pair'>{_time_lost(phase)}</td>"
                       f"<td>{sum(phase.starved.values())}</td></tr>")  # fmt: skip
    yield "</tbody></table></section>"


def _time_lost(phase: JobPhase) -> str:
    """Part of the phase and time of all waits in it: a single episode may last for minutes."""
    if not phase.lost_seconds:
        return percent(_lost(phase))
    return f"<span>{percent(_lost(phase))},</span> <span>{duration(phase.lost_seconds)}</span>"


def _job_line(told: JobStory) -> str:
    starved: Counter[str] = Counter()
    for phase in told.phases.values():
        starved.update(phase.starved)
    causes = ", ".join(f"{count} by {cause.replace('_', ' ')}" for cause, count in starved.most_common() if count)
    often = {0: "never starved", 1: "starved once"}.get(total := sum(starved.values()), f"starved {total:,} times")
    return f"{told.iterations:,} iterations; {often}{f' ({causes})' if causes else ''}"


def _section(anchor: str, title: str, text: str, figures: Sequence[Figure]) -> str:
    pictures = "\n".join(_figure(figure) for figure in figures)
    head = f'<h2>{escape(title)}</h2><p class="soft">{escape(text)}</p>'
    return f'<section id="{escape(anchor)}">{head}\n{pictures}</section>'


def _figure(figure: Figure) -> str:
    remark = f'<span class="key">{escape(figure.remark)}</span>' if figure.remark else ""
    caption = f"<figcaption><h3>{escape(figure.plot.title)}</h3>{_legend(figure.legend)}{remark}</figcaption>"
    narrow, wide = (_draw(figure.plot, width) for width in (NARROW, WIDE))
    return f'<figure>{caption}<div class="narrow">{narrow}</div><div class="wide">{wide}</div></figure>'


def _draw(plot: TimePlot | Strip | Histogram, width: int) -> str:
    if isinstance(plot, TimePlot):
        return time_plot(plot, width)
    return strip(plot, width) if isinstance(plot, Strip) else histogram(plot, width)


def _legend(entries: Sequence[tuple[str, str]]) -> str:
    return " ".join(f'<span class="key"><i class="bg-{style}"></i>{escape(name)}</span>' for style, name in entries)


def _facts(figures: Sequence[Figure]) -> dict[str, Any]:
    """What the tooltips tell, by key of the picture."""
    facts: dict[str, Any] = {}
    for plot in (figure.plot for figure in figures):
        if isinstance(plot, TimePlot):
            series = [
                {"name": one.name, "values": [_three(value, plot.scale) for value in one.values]} for one in plot.series
            ]
            count = max((len(one.values) for one in plot.series), default=0)
            facts[plot.key] = {"bin": plot.bin_seconds, "count": count, "unit": plot.unit, "series": series}
        elif isinstance(plot, Strip):
            series = [{"name": plot.title.lower(), "values": list(plot.kinds)}]
            facts[plot.key] = {"bin": plot.bin_seconds, "count": len(plot.kinds), "unit": "", "series": series}
    return facts


def _three(value: float | None, scale: float) -> float | None:
    return None if value is None else float(f"{value / scale:.3g}")


def _foot(story: Story) -> Iterator[str]:
    yield '<section id="node"><h2>Node</h2>'
    writes = ", ".join(f"{count} {result}" for result, count in story.writes.items() if count)
    yield f'<p class="soft">Writes to control files: {escape(writes) or "none"}.</p>'
    for text, count in story.notes.most_common(10):
        yield f'<p class="soft">Note in {count:,} passes: {escape(text)}</p>'
    yield "</section>"
