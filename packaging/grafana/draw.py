#!/usr/bin/env python3
"""Draws the dashboards from what Prometheus answers to their queries, for the documentation.

Without --url it rehearses a scenario on the simulated node, hands the metrics to a Prometheus of its own (Debian's
package `prometheus`) and draws that.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import socket
import subprocess
import sys
import tempfile
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("Agg")
from generate import document
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from panels import DASHBOARDS, RATE, Dashboard
from rehearse import history

HERE = Path(__file__).resolve().parent
SCENARIO = HERE.parents[1] / "tests" / "lab" / "scenarios" / "mixed.toml"
WINDOW = "5s"
UNITS = {"Bps": (1e6, "MB/s"), "bytes": (1e6, "MB"), "percentunit": (0.01, "%"), "s": (1e-3, "ms"), "ops": (1, "1/s")}
COLOURS = {"green": "#4c9f50", "yellow": "#d9b310", "orange": "#e0752d", "red": "#bf1b00", "text": "#9a9a9a"}
LEGENDS = 6
"""Series named below a panel; more would cover the next one."""
INCHES_A_COLUMN, INCHES_A_LINE = 0.55, 0.34
Series = list[tuple[str, list[tuple[float, float]]]]


def main() -> int:
    """Write one PNG per dashboard."""
    parser = argparse.ArgumentParser(
        description="Draw the dashboards.",
        epilog="example: PYTHONPATH=. packaging/grafana/draw.py --output /tmp --seconds 300 --url http://127.0.0.1:9090",
    )
    parser.add_argument("--output", type=Path, default=HERE / "drawings", help="folder for the pictures")
    parser.add_argument("--url", help="an existing Prometheus; default: one that rehearses --scenario")
    parser.add_argument("--seconds", type=float, default=300, help="how far to look back, with --url (default: 300)")
    parser.add_argument("--scenario", type=Path, default=SCENARIO, help="what to rehearse")
    options = parser.parse_args()
    options.output.mkdir(parents=True, exist_ok=True)
    with contextlib.ExitStack() as stack:
        if options.url:
            end = time.time()
            url, begin = options.url, end - options.seconds
        else:
            url, begin, end = stack.enter_context(rehearsed(options.scenario))
        for dashboard in DASHBOARDS:
            draw(dashboard, url, (begin, end), options.output / f"{dashboard.name}.png")
    return 0


@contextlib.contextmanager
def rehearsed(scenario: Path) -> Iterator[tuple[str, float, float]]:
    """A Prometheus that holds one rehearsal; gives its address and the first and last moment (Unix seconds)."""
    with tempfile.TemporaryDirectory(prefix="prefetchd-draw-") as scratch:
        folder = Path(scratch)
        begin = time.time() // 60 * 60 - 600
        text = history(scenario, begin)
        end = max(float(line.rsplit(" ", 1)[1]) for line in text.splitlines()[:-1])
        (folder / "history").write_text(text, encoding="utf-8")
        take_in = [
            "promtool",
            "tsdb",
            "create-blocks-from",
            "openmetrics",
            str(folder / "history"),
            str(folder / "data"),
        ]
        subprocess.run(take_in, check=True, capture_output=True)
        with prometheus(folder) as url:
            yield url, begin, end


@contextlib.contextmanager
def prometheus(folder: Path) -> Iterator[str]:
    """A Prometheus over `folder/data` on a free loopback port, which scrapes nothing."""
    (folder / "prometheus.yml").write_text("scrape_configs: []\n", encoding="utf-8")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    options = {"config.file": folder / "prometheus.yml", "storage.tsdb.path": folder / "data"}
    command = ["prometheus", f"--web.listen-address={address}", *(f"--{key}={value}" for key, value in options.items())]
    with (folder / "log").open("w") as log, subprocess.Popen(command, stdout=log, stderr=log) as process:
        try:
            wait_for(f"http://{address}/-/ready")
            yield f"http://{address}"
        finally:
            process.terminate()


def wait_for(url: str, seconds: float = 30.0) -> None:
    """Return when the address answers; raises TimeoutError when it does not."""
    limit = time.monotonic() + seconds
    while time.monotonic() < limit:
        with contextlib.suppress(OSError), urllib.request.urlopen(url, timeout=2):  # noqa: S310 - loopback
            return
        time.sleep(0.1)
    raise TimeoutError(f"{url} did not answer within {seconds:g} s")


def ask(url: str, expression: str, span: tuple[float, float], legend: str) -> Series:
    """The series of one query over the span, each with its legend as Grafana would write it; times from its begin."""
    filled = expression.replace(RATE, WINDOW)
    for variable in ("$instance", "$job", "$device"):
        filled = filled.replace(f'"{variable}"', '".*"')
    step = max(1.0, (span[1] - span[0]) / 300)
    query = urllib.parse.urlencode({"query": filled, "start": span[0], "end": span[1], "step": step})
    with urllib.request.urlopen(f"{url}/api/v1/query_range?{query}", timeout=30) as answer:  # noqa: S310 - the user's own
        found = json.load(answer)["data"]["result"]
    return [(_legend(legend, one["metric"]), _points(one["values"], span[0])) for one in found]


def _legend(pattern: str, labels: dict[str, str]) -> str:
    for key, text in labels.items():
        pattern = pattern.replace("{{" + key + "}}", text)
    return pattern


def _points(values: list[list[Any]], begin: float) -> list[tuple[float, float]]:
    pairs = ((at - begin, float(value)) for at, value in values)
    return [(at, value) for at, value in pairs if value == value]  # noqa: PLR0124 - leaves out NaN


def draw(dashboard: Dashboard, url: str, span: tuple[float, float], target: Path) -> None:
    """Lay the panels out as Grafana does and write the picture."""
    model = [panel for panel in document(dashboard)["panels"] if panel["type"] != "row"]
    known = [panel for row in dashboard.rows for panel in row.panels]
    lines = max(panel["gridPos"]["y"] + panel["gridPos"]["h"] for panel in model)
    size = (24 * INCHES_A_COLUMN, lines * INCHES_A_LINE)
    figure = plt.figure(figsize=size, dpi=70)
    for placed, panel in zip(model, known, strict=True):
        grid = placed["gridPos"]
        left, bottom = (grid["x"] + 1.2) / 24, 1 - (grid["y"] + grid["h"] - 1.2) / lines
        axes = figure.add_axes((left, bottom, (grid["w"] - 1.8) / 24, (grid["h"] - 2.6) / lines))
        axes.set_title(panel.title, fontsize=10, loc="left")
        series = [one for query in panel.queries for one in ask(url, query.expr, span, query.legend)]
        _PAINTERS[panel.kind](axes, panel, [one for one in series if one[1]])
    figure.savefig(target)
    plt.close(figure)


def _paint_number(axes: Axes, panel: Any, series: Series) -> None:
    scale, unit = UNITS.get(panel.unit, (1, ""))
    text = f"{series[0][1][-1][1] / scale:.3g} {unit}" if series else "no data"
    axes.axis("off")
    axes.text(0.0, 0.3, text, fontsize=18, transform=axes.transAxes)


def _paint_curves(axes: Axes, panel: Any, series: Series) -> None:
    scale, unit = UNITS.get(panel.unit, (1, ""))
    base: dict[float, float] = {}
    for name, points in series:
        times = [at for at, _ in points]
        values = [value / scale for _, value in points]
        if panel.stacked:
            lower = [base.get(at, 0.0) for at in times]
            values = [value + below for value, below in zip(values, lower, strict=True)]
            axes.fill_between(times, lower, values, alpha=0.4, label=name)
            base |= dict(zip(times, values, strict=True))
        else:
            axes.plot(times, values, linewidth=1, label=name)
    _finish(axes, series, unit)
    if not series:
        axes.text(0.5, 0.5, "no data in this run", fontsize=8, color="grey", ha="center", transform=axes.transAxes)
        axes.set_xticks([])
    if panel.maximum is not None:
        axes.set_ylim(0, panel.maximum / scale * 1.03)


def _paint_states(axes: Axes, panel: Any, series: Series) -> None:
    for row, (name, points) in enumerate(series):
        for at, value in points:
            _, colour = panel.states.get(int(value), ("", "text"))
            axes.broken_barh([(at, 1.0)], (row - 0.4, 0.8), color=COLOURS[colour])
        axes.text(0, row, f" {name}", fontsize=7, va="center")
    _finish(axes, [], "")
    axes.set_yticks([])
    handles = [plt.Rectangle((0, 0), 1, 1, color=COLOURS[colour]) for _, colour in panel.states.values()]
    axes.legend(handles, [text for text, _ in panel.states.values()], fontsize=7, loc="upper right", frameon=False)


def _finish(axes: Axes, series: Series, unit: str) -> None:
    axes.tick_params(labelsize=7)
    axes.set_ylabel(unit, fontsize=7)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.25)
    if series:
        shown = axes.get_legend_handles_labels()[0][:LEGENDS]
        axes.legend(handles=shown, fontsize=6, ncols=3, loc="upper center", bbox_to_anchor=(0.5, -0.12), frameon=False)


_PAINTERS = {"stat": _paint_number, "timeseries": _paint_curves, "state-timeline": _paint_states}


if __name__ == "__main__":
    sys.exit(main())
