"""What the agent exports while it looks after a simulated node: text that Prometheus can take in as history.

The simulated node, the agent's core and its metrics are the real ones; only devices and training loops are simulated.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from agent.core import Core, CoreResult
from agent.job_sample import JobSample
from agent.metrics import ReportCollector
from agent.simulate.closed_loop import Agent
from agent.simulate.node import SimulatedNode
from agent.simulate.run import simulate
from agent.simulate.scenario import load_scenario
from agent.types import JobId, TickReport
from bpf.samples import HISTOGRAM_BUCKETS, BlockKey, ProbeState, ProbeStatus, merge_samples
from bpf.samples import Sample as RawSample

SCRAPE_SECONDS = 1.0
INSTANCE = "node-1"


def history(scenario: Path, begin: float, policy: str = "adaptive", seed: int = 1) -> str:
    """OpenMetrics text of one run that began at Unix time `begin`, a scrape a second."""
    agent = Rehearsal(policy, begin)
    simulate(load_scenario(scenario), policy, seed, controller=agent)
    lines = [line for name in sorted(agent.scrapes) for line in agent.scrapes[name]]
    return "".join([*lines, "# EOF\n"])


class SeenCore:
    """The agent's core, with what went in and came out of its last step."""

    def __init__(self, core: Core) -> None:
        self._core = core
        self.samples: Mapping[JobId, JobSample] = {}
        self.result: CoreResult | None = None

    def step(self, now: float, samples: Mapping[JobId, JobSample], *more: Any) -> CoreResult:
        """One step of the core."""
        self.samples = samples
        self.result = self._core.step(now, samples, *more)
        return self.result


class Histograms:
    """Latency histograms of block requests, which the simulated node does not keep.

    The requests of one pass (a tenth of a second) stand at their mean.
    """

    def __init__(self) -> None:
        self.counts: dict[BlockKey, list[int]] = {}
        self._before: dict[BlockKey, tuple[int, int]] = {}

    def add(self, samples: Iterable[JobSample]) -> None:
        """Account what was completed since the last pass; cumulative, as the block probe tells it."""
        for key, now in ((key, now) for one in samples for key, now in one.blocks.items()):
            requests, spent = self._before.get(key, (0, 0))
            counts = self.counts.setdefault(key, [0] * HISTOGRAM_BUCKETS)
            fresh = now.requests - requests
            if fresh > 0:
                mean_us = (now.latency_ns - spent) / fresh / 1000
                counts[min(HISTOGRAM_BUCKETS - 1, int(max(mean_us, 1.0)).bit_length() - 1)] += fresh
            self._before[key] = (now.requests, now.latency_ns)


class Rehearsal(Agent):
    """The simulated loop, scraped as it goes; `scrapes` holds lines by metric name, as OpenMetrics wants them."""

    def __init__(self, policy: str, begin: float) -> None:
        super().__init__(policy)
        self.scrapes: dict[str, list[str]] = {}
        self._begin = begin
        self._policy = policy
        self._histograms = Histograms()
        self._seen = SeenCore(self.core)
        self.core = self._seen  # type: ignore[assignment]

    def step(self, node: SimulatedNode, now: float) -> None:
        """One pass, and every second a scrape."""
        super().step(node, now)
        self._histograms.add(self._seen.samples.values())
        if self.steps % round(SCRAPE_SECONDS / self.interval) == 1:
            self._scrape(node, now)

    def _scrape(self, node: SimulatedNode, now: float) -> None:
        report = self._report(node, now)
        for family in ReportCollector(lambda: report, "0.1.0").collect():
            for sample in family.samples:
                line = _line(sample.name, sample.labels, sample.value, self._begin + now)
                self.scrapes.setdefault(sample.name, []).append(line)
        process = (("cpu_seconds_total", self.busy_seconds), ("resident_memory_bytes", 120e6))
        for name, value in process:
            full = f"prefetchd_process_{name}"
            self.scrapes.setdefault(full, []).append(_line(full, {}, value, self._begin + now))

    def _report(self, node: SimulatedNode, now: float) -> TickReport:
        result = self._seen.result
        assert result is not None  # noqa: S101 - the core has stepped just before
        return TickReport(
            time=now,
            wall_time=self._begin + now,
            mode="enforce",
            policy=self._policy,
            jobs=result.reports,
            devices=node.views,
            decision=result.decision,
            applied={slot: (round(limits[0]), None, None, None) for slot, limits in _caps(node).items()},
            writes={"written": self.writes, "unchanged": self.steps},
            conflicts=0,
            restores=0,
            sample=_raw(now, self._seen.samples, self._histograms.counts),
            probes=(
                ProbeStatus("block", ProbeState.ATTACHED, map_fill_ratio=0.02),
                ProbeStatus("dataloader", ProbeState.ATTACHED, map_fill_ratio=0.01),
                ProbeStatus("nfs", ProbeState.ATTACHED, map_fill_ratio=0.0),
            ),
            ticks=self.steps,
            duration_seconds=self.busy_seconds / self.steps,
            seconds_total=self.busy_seconds,
        )


def _caps(node: SimulatedNode) -> Mapping[tuple[JobId, str], tuple[float, ...]]:
    """The read caps in force, in bytes a second."""
    limits = {slot: throttle.limits for slot, throttle in node.throttles().items()}
    return {slot: tuple(found) for slot, found in limits.items() if found[0] < float("inf")}


def _raw(now: float, samples: Mapping[JobId, JobSample], histograms: Mapping[BlockKey, Sequence[int]]) -> RawSample:
    time_ns = int(now * 1e9)
    parts = (
        RawSample(
            time_ns,
            {key: replace(one, histogram=tuple(histograms[key])) for key, one in job.blocks.items()},
            job.streams,
            job.nfs,
            job.objects,
        )
        for job in samples.values()
    )
    return merge_samples(time_ns, tuple(parts))


def _line(name: str, labels: Mapping[str, str], value: float, at: float) -> str:
    pairs = ",".join(_pairs({**labels, "instance": INSTANCE}.items()))
    return f"{name}{{{pairs}}} {value!r} {at:.3f}\n"


def _pairs(labels: Iterable[tuple[str, str]]) -> Iterator[str]:
    for key, text in labels:
        escaped = text.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
        yield f'{key}="{escaped}"'
