"""The reports of a recording: what its counters and the control core give again, and what was written then."""

from collections.abc import Iterator
from itertools import count
from pathlib import Path

from agent.recording import read
from agent.recording.outputs import CAPS
from agent.recording.reader import Moment
from agent.recording.replay import replay
from agent.types import TickReport
from bpf.samples import ProbeState, ProbeStatus, Sample, merge_samples

PROBES = (ProbeStatus("block", ProbeState.ATTACHED, tier="fentry", lost_events=0, map_fill_ratio=0.01),)
"""A recording says nothing of the probes; the demo's guest attaches the block layer's."""


def reports_of(path: Path) -> Iterator[TickReport]:
    """One report per pass of the recording."""
    for number, step in zip(count(1), replay(read(path)), strict=False):
        moment, node = step.moment, step.moment.node_outputs
        yield TickReport(
            time=moment.time,
            wall_time=moment.wall,
            mode=node["mode",],
            policy=node["policy",],
            jobs=step.result.reports,
            devices=moment.devices,
            decision=step.result.decision,
            applied=_applied(moment),
            writes={path[1]: value for path, value in node.items() if path[0] == "writes"},
            conflicts=node["conflicts",],
            restores=node["restores",],
            sample=merge_samples(
                int(moment.time * 1e9),
                tuple(Sample(one.time_ns, one.blocks, one.streams) for one in moment.samples.values()),
            ),
            probes=PROBES,
            ticks=number,
            duration_seconds=node["tick_seconds",],
            seconds_total=number * node["tick_seconds",],
        )


def _applied(moment: Moment):
    caps = {}
    for job, outputs in moment.job_outputs.items():
        for device in {path[1] for path in outputs if path[0] == "d" and path[-1] in CAPS}:
            caps[job, device] = tuple(outputs.get(("d", device, name)) for name in CAPS)
    return caps
