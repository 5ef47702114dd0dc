"""What the metric families have in common: prefix, labels, and that an unknown value has no series."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from agent.types import JobReport, TickReport

JOB_LABELS = ("job", "namespace", "pod")
DEVICE_LABELS = (*JOB_LABELS, "device", "medium")

Families = Iterator[Metric]


def labels_of(entry: JobReport) -> list[str]:
    """Values of `JOB_LABELS`."""
    return [entry.job.name, entry.job.namespace, entry.job.pod]


def new_gauge(name: str, text: str, labels: Iterable[str]) -> GaugeMetricFamily:
    """A gauge without values; the name lacks the prefix."""
    return GaugeMetricFamily(f"prefetchd_{name}", text, labels=list(labels))


def new_counter(name: str, text: str, labels: Iterable[str]) -> CounterMetricFamily:
    """A counter without values; the name lacks the prefix and `_total`."""
    return CounterMetricFamily(f"prefetchd_{name}", text, labels=list(labels))


def add(family: GaugeMetricFamily | CounterMetricFamily, labels: list[str], value: float | None) -> None:
    """Add a value; an unknown one has no series."""
    if value is not None:
        family.add_metric(labels, float(value))


def counted(name: str, text: str, causes: Iterable[str], counts: Mapping[str, int]) -> CounterMetricFamily:
    """A counter with a value for each cause, 0 where nothing was counted."""
    family = new_counter(name, text, ("cause",))
    for cause in causes:
        add(family, [cause], counts.get(cause, 0))
    return family


def slot_labels(report: TickReport, entry: JobReport, device: str) -> list[str]:
    """Values of `DEVICE_LABELS`."""
    return [*labels_of(entry), *device_labels(report, device)]


def device_labels(report: TickReport, device: str) -> list[str]:
    """Name and medium of a device; of one that the report does not know its number."""
    view = report.devices.get(device)
    return [view.info.name, view.info.medium] if view else [device, ""]
