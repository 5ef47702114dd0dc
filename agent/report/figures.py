"""Which pictures the page has, made from the story. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from math import ceil
from typing import TypeVar

from agent.report.bins import Bin, Bins, commonest, highs, means
from agent.report.gather import GAP_SECONDS, DeviceStory, JobDevice, JobStory, Story
from agent.report.svg import Band, Histogram, Series, Strip, TimePlot
from agent.types import Cause, JobId
from agent.units import duration

Plot = TimePlot | Strip | Histogram
Value = TypeVar("Value")

CAUSE_STYLES = {
    Cause.NONE: "none",
    Cause.COLD_START: "s5",
    Cause.CACHE_THRASH: "s4",
    Cause.REMOTE_CONGESTION: "s1",
    Cause.DEVICE_CONTENTION: "s3",
    Cause.SELF_THROTTLED: "s6",
    Cause.CPU_BOUND: "s2",
}
LEVELS = ((60.0, "healthy from 60"), (40.0, "tight from 40"), (20.0, "danger from 20"))
LARGEST = 5
"""Users of a device that get a line of their own; the rest are one."""


@dataclass(frozen=True, slots=True)
class Figure:
    """A picture with its heading and what its colours mean: (style, name) pairs."""

    plot: Plot
    legend: Sequence[tuple[str, str]] = field(default_factory=tuple)
    remark: str = ""


class Clockwork:
    """The time axis that all pictures share: bins of `width` seconds, `count` of them."""

    def __init__(self, story: Story) -> None:
        self.seconds = max(story.seconds, 1.0)
        self.width = story.seen.seconds
        self.count = ceil(self.seconds / self.width)
        self._seen = means(story.seen.coarsened(self.width, self.count))
        styles = {label: f"p{place % 4}" for place, label in enumerate(story.labels)}
        self.bands = [Band(one.begin, one.end, one.label, styles[one.label]) for one in story.phases]

    def bins(self, bins: Bins) -> list[Bin]:
        """The values by the bins of the axis."""
        return bins.coarsened(self.width, self.count)

    def held(self, values: list[Value]) -> list[Value]:
        """The values, each held over bins in which no pass was made: a slow loop is no gap, a pause is one."""
        patience = ceil(GAP_SECONDS / self.width)
        result, since = list(values), 0
        for place in range(1, len(result)):
            since = 0 if self._seen[place] is not None else since + 1
            if since and since <= patience and result[place] is None:
                result[place] = result[place - 1]
        return result


def job_figures(job: JobId, told: JobStory, story: Story, clock: Clockwork) -> Iterator[Figure]:
    """All pictures of one job."""
    yield _waits(job, told, clock)
    yield _score(job, told, clock)
    yield _causes(job, told, clock)
    for device, here in told.devices.items():
        if device in story.devices:
            yield _bandwidth(job, here, story.devices[device], clock)
    for device in story.devices:
        figure = _latency(job, told, device, story)
        if figure is not None:
            yield figure


def _waits(job: JobId, told: JobStory, clock: Clockwork) -> Figure:
    values = highs(clock.bins(told.wait))
    plot = TimePlot(f"wait-{job}", "Wait per iteration", "milliseconds", [Series("wait", "s3", values, bars=True)],
                    clock.seconds, clock.width, scale=1e-3, bands=clock.bands)  # fmt: skip
    return Figure(plot, remark="the longest in each moment")


def _score(job: JobId, told: JobStory, clock: Clockwork) -> Figure:
    series = [Series("score", "s0", clock.held(means(clock.bins(told.score))))]
    plot = TimePlot(f"score-{job}", "Health score", "points", series, clock.seconds, clock.width, top=100.0,
                    bands=clock.bands, levels=LEVELS)  # fmt: skip
    return Figure(plot)


def _causes(job: JobId, told: JobStory, clock: Clockwork) -> Figure:
    kinds = clock.held(commonest(clock.bins(told.cause)))
    styles = {str(cause): style for cause, style in CAUSE_STYLES.items()}
    plot = Strip(f"cause-{job}", "Cause", kinds, styles, clock.seconds, clock.width, bands=clock.bands)
    present = [cause for cause in styles if cause in kinds]
    return Figure(plot, [(styles[cause], cause.replace("_", " ")) for cause in present])


def _bandwidth(job: JobId, here: JobDevice, device: DeviceStory, clock: Clockwork) -> Figure:
    rows: tuple[tuple[str, str, Bins, dict[str, bool]], ...] = (
        ("reads", "s0", here.read, {"area": True}),
        ("needs", "s2", here.need, {}),
        ("entitled to", "s4", here.entitled, {"steps": True, "dashed": True}),
        ("cap", "s3", here.cap, {"steps": True}),
    )
    series = [Series(name, style, clock.held(means(clock.bins(bins))), **how) for name, style, bins, how in rows]
    shown = [one for one in series if any(value is not None for value in one.values)]
    highest = max((value for one in shown for value in one.values if value is not None), default=1.0)
    limit = min(highest, 1.1 * device.capacity) if device.capacity else highest
    key, title = f"bandwidth-{job}-{device.name}", f"Bandwidth on {device.name}"
    plot = TimePlot(key, title, "MB/s", shown, clock.seconds, clock.width, scale=1e6,
                    top=1.05 * limit / 1e6, bands=clock.bands)  # fmt: skip
    return Figure(plot, [(one.style, one.name) for one in shown], "no cap line: uncapped")


def _latency(job: JobId, told: JobStory, device: str, story: Story) -> Figure | None:
    counts = {label: phase.latency.get(device) for label, phase in told.phases.items()}
    present = {label: one for label, one in counts.items() if one}
    if not present:
        return None
    low = min(bucket for one in present.values() for bucket in one)
    high = max(bucket for one in present.values() for bucket in one)
    buckets = range(low, high + 1)
    labels = [duration(2.0**bucket / 1e6).replace(" ", "") for bucket in buckets]
    series = []
    for place, label in enumerate(label for label in story.labels if label in present):
        total = sum(present[label].values())
        series.append(Series(label, f"s{place % 6}", [present[label][bucket] / total for bucket in buckets]))
    name = story.devices[device].name
    plot = Histogram(f"latency-{job}-{name}", f"Read latency on {name}", "latency, from", labels, series)
    return Figure(plot, [(one.style, one.name) for one in series])


def device_figures(device: str, told: DeviceStory, story: Story, clock: Clockwork) -> Iterator[Figure]:
    """All pictures of one device."""
    yield _use(device, told, story, clock)
    if told.pool is not None:
        yield _pool(told, clock)
        yield _gate(told, clock)


def _use(device: str, told: DeviceStory, story: Story, clock: Clockwork) -> Figure:
    users = [(one.name, one.devices[device].read) for one in story.jobs.values() if device in one.devices]
    rows = [(name, clock.held(means(clock.bins(bins)))) for name, bins in users]
    rows.sort(key=lambda row: -sum(value or 0.0 for value in row[1]))
    series = [Series(name, f"s{place}", values) for place, (name, values) in enumerate(_joined(rows))]
    if told.capacity:
        series.append(Series("capacity", "s7", [told.capacity] * clock.count, dashed=True))
        unmanaged = [
            None if one is None else one * told.capacity for one in clock.held(means(clock.bins(told.unmanaged)))
        ]
        if any((value or 0.0) > 0.01 * told.capacity for value in unmanaged):
            series.append(Series("unmanaged", "none", unmanaged))
    key, title = f"use-{told.name}", f"Who reads from {told.name}"
    plot = TimePlot(key, title, "MB/s", series, clock.seconds, clock.width, scale=1e6, bands=clock.bands)
    return Figure(plot, [(one.style, one.name) for one in series])


def _joined(rows: list[tuple[str, list[float | None]]]) -> list[tuple[str, list[float | None]]]:
    """Rows of the same name as one, and all beyond the largest as `others`."""
    named: dict[str, list[float | None]] = {}
    for name, values in rows:
        key = name if name in named or len(named) < LARGEST else "others"
        named[key] = _sum(named[key], values) if key in named else values
    return list(named.items())


def _sum(first: list[float | None], second: list[float | None]) -> list[float | None]:
    return [a if b is None else b if a is None else a + b for a, b in zip(first, second, strict=True)]


def _pool(told: DeviceStory, clock: Clockwork) -> Figure:
    values = clock.held(means(clock.bins(told.lent)))
    pool = told.pool or 0.0
    plot = TimePlot(f"pool-{told.name}", f"Elastic pool of {told.name}", "% of the device",
                    [Series("lent", "s4", values, area=True, steps=True)], clock.seconds, clock.width, scale=0.01,
                    top=max(100 * pool * 1.1, 1.0), bands=clock.bands, levels=((100 * pool, "all of it"),))  # fmt: skip
    return Figure(plot)


def _gate(told: DeviceStory, clock: Clockwork) -> Figure:
    values = clock.held(means(clock.bins(told.gate)))
    kinds = [None if one is None else "on" if one >= 0.5 else "off" for one in values]
    styles = {"on": "s3", "off": "none"}
    plot = Strip(f"gate-{told.name}", f"Limits on {told.name}", kinds, styles, clock.seconds, clock.width, clock.bands)
    legend = [("s3", "on: somebody starves for lack of its part"), ("none", "off")]
    return Figure(plot, legend, "outside of mode enforce: what would be")
