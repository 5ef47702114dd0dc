"""The demo: training jobs and a greedy reader in the lab guest, first without control, then with the agent.

It shows a live table while it runs, both halves side by side at the end, and fails unless control made the training
jobs wait at least `REQUIRED_REDUCTION` less, the agent ended cleanly and every io.max is what it was before.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from agent.simulate.scenario import load_scenario
from tests.lab.cache import PROJECT
from tests.lab.demo_guest import RECORDING
from tests.lab.devices import devices_of
from tests.lab.machine import Lab

REPORT = PROJECT / "out" / "demo.html"
SCENARIO = Path(__file__).with_name("scenarios") / "demo.toml"
REQUIRED_REDUCTION = 0.5
MIB = 1 << 20
LEVEL_STYLES = {"healthy": "green", "tight": "yellow", "danger": "dark_orange", "critical": "red"}


@dataclass
class Screen:
    """What the demo knows so far, and how it looks."""

    console: Console
    phase: str = "boots the guest"
    elapsed: float = 0.0
    seconds: float = 0.0
    state: dict[str, Any] = field(default_factory=dict)
    summaries: dict[str, dict[str, Any]] = field(default_factory=dict)
    started: float = field(default_factory=time.monotonic)
    _rest: bytes = b""
    _said: str = ""

    def feed(self, piece: bytes) -> None:
        """Take output of the guest: JSON lines, and whatever else a failing program printed."""
        *lines, self._rest = (self._rest + piece).split(b"\n")
        for line in lines:
            try:
                message = json.loads(line)
                kind = message.pop("kind")
            except (ValueError, KeyError, AttributeError):
                self.console.print(Text(line.decode(errors="replace"), style="dim"))
                continue
            self.take(kind, message)

    def take(self, kind: str, message: dict[str, Any]) -> None:
        """Apply one message."""
        if kind == "phase":
            self.phase, self.seconds, self.elapsed, self.state = message["text"], message["seconds"], 0.0, {}
            self.say(f"{self.phase} …")
        elif kind == "summary":
            self.summaries[message["half"]] = message["summary"]
        else:
            self.elapsed = message["seconds"]
            if kind == "state":
                if not self.state:
                    self.phase, self.seconds = f"{message['half']} control", _duration()
                    self.say(f"{self.phase} …")
                self.state = message["state"]

    def progress(self, text: str) -> None:
        """A stage of the lab."""
        self.phase = text
        self.say(text.partition(",")[0])

    def say(self, text: str) -> None:
        """On a terminal the live view shows the phase; elsewhere each new one is a line."""
        if not self.console.is_terminal and text != self._said:
            self.console.print(f"demo: {text}")
        self._said = text

    def render(self) -> RenderableType:
        """The live view: a line on what happens, then the jobs."""
        of = f"/{self.seconds:.0f}" if self.seconds else ""
        line = f"[bold]{self.phase}[/bold]  {max(0.0, self.elapsed):.0f}{of} s   (total {self.total():.0f} s)"
        return Group(line, jobs_table(self.state)) if self.state else line

    def total(self) -> float:
        return time.monotonic() - self.started


def _duration() -> float:
    return float(load_scenario(SCENARIO).duration_seconds)


def jobs_table(state: dict[str, Any]) -> Table:
    """One row per training job, one per best-effort cgroup."""
    table = Table(box=None, pad_edge=False)
    for name in ("job", "iteration", "score", "level", "queue", "IO mean", "CV", "throttled", "quota", "loan", "cause"):
        table.add_column(name, justify="left" if name in ("job", "level", "cause") else "right")
    for row in state["jobs"]:
        device = row["devices"][0] if row["devices"] else {}
        table.add_row(
            row["job"],
            _number(row["iterations"], "{}"),
            _number(row["score"], "{:.0f}"),
            Text(row["level"] or "?", style=LEVEL_STYLES.get(row["level"] or "", "")),
            f"{_number(row['queue_depth'], '{:.0f}')}/{_number(row['queue_capacity'], '{:.0f}')}",
            _number(device.get("latency_seconds"), "{:.1f} ms", 1e3),
            _number(device.get("latency_cv"), "{:.2f}"),
            _number(device.get("throttle_ratio"), "{:.0%}"),
            _number(device.get("quota_bytes_per_second"), "{:.1f} MiB/s", 1 / MIB, unknown="max"),
            _number(device.get("loan_ratio"), "{:.1%}", unknown="-"),
            row["cause"] or "?",
        )
    for row in state["neighbours"]:
        quotas = [quota for quota in row["quota_bytes_per_second"].values() if quota is not None]
        quota = _number(quotas[0] if quotas else None, "{:.1f} MiB/s", 1 / MIB, unknown="max")
        table.add_row(f"{row['name']} (best effort)", *[""] * 7, quota, "", "", style="dim")
    return table


def _number(value: float | None, form: str, factor: float = 1.0, unknown: str = "?") -> str:
    return unknown if value is None else form.format(value * factor if factor != 1.0 else value)


def comparison(without: dict[str, Any], controlled: dict[str, Any]) -> Table:
    """Both halves side by side; the summary of the whole run."""
    table = Table(title="training jobs and a greedy reader on one SSD", title_justify="left")
    table.add_column("")
    for name in ("without control", "with prefetchd", "change"):
        table.add_column(name, justify="right")
    rows = (
        ("GPU wait per iteration, mean", "{:.1f} ms", lambda s: s["wait_ms"]["mean"]),
        ("GPU wait per iteration, p99", "{:.1f} ms", lambda s: s["wait_ms"]["p99"]),
        ("starvation events", "{:.0f}", lambda s: s["starvation_events"]),
        ("samples per second", "{:.0f}", lambda s: s["samples_per_second"]),
        ("greedy reader", "{:.1f} MiB/s", lambda s: s["neighbour_bytes_per_second"] / MIB),
    )
    for text, form, read in rows:
        before, after = read(without), read(controlled)
        change = f"{100 * (after - before) / before:+.0f} %" if before else ""
        table.add_row(text, form.format(before), form.format(after), change)
    for name in without["jobs"]:
        before, after = (half["jobs"][name]["wait_ms"]["mean"] for half in (without, controlled))
        change = f"{100 * (after - before) / before:+.0f} %" if before else ""
        table.add_row(f"  wait of {name}", f"{before:.1f} ms", f"{after:.1f} ms", change)
    writes = sum(len(user["io_max"]["changes"]) - 1 for user in _users(controlled))
    table.add_row("changes of io.max seen", "0", str(writes), "")
    agent = controlled["agent"]
    table.add_row("agent CPU", "", f"{agent['cpu_seconds'] / _duration():.3f} core", "")
    table.add_row("agent memory (RSS)", "", f"{agent['resident_bytes'] / MIB:.0f} MiB", "")
    return table


def _users(summary: dict[str, Any]) -> list[dict[str, Any]]:
    return [*summary["jobs"].values(), *summary["best_effort"].values()]


def failures(without: dict[str, Any], controlled: dict[str, Any]) -> list[str]:
    """What did not hold; empty means the demo succeeded."""
    problems = []
    before, after = without["wait_ms"]["mean"], controlled["wait_ms"]["mean"]
    if after > before * (1.0 - REQUIRED_REDUCTION):
        problems.append(f"waits fell from {before:.1f} to {after:.1f} ms only: less than {REQUIRED_REDUCTION:.0%}")
    for half, summary in (("without", without), ("with", controlled)):
        for name, why in summary["stuck"].items():
            problems.append(f"{name} hung in the half {half} control: {why}")
    if controlled["agent"]["status"] != 0:
        problems.append(f"the agent ended with status {controlled['agent']['status']}")
    for name, user in [*controlled["jobs"].items(), *controlled["best_effort"].items()]:
        if user["io_max"]["before"] != user["io_max"]["after"]:
            problems.append(f"io.max of {name} was {user['io_max']['before']!r}, is {user['io_max']['after']!r}")
    return problems


def demo() -> int:
    """Run it all; returns the exit status."""
    console = Console(width=None if sys.stdout.isatty() else 140)
    screen = Screen(console)
    scenario = load_scenario(SCENARIO)
    python = str(PROJECT / ".venv" / "bin" / "python")
    with tempfile.TemporaryDirectory(prefix="prefetchd-demo-") as out:
        with Live(get_renderable=screen.render, console=console, transient=True, refresh_per_second=4):
            lab = Lab(devices=devices_of(scenario), timeout=280.0, out_dir=Path(out), progress=screen.progress)
            result = lab.run([python, "-m", "tests.lab.demo_guest", str(SCENARIO)], on_output=screen.feed)
        return _conclude(console, screen, result.status, result.accelerator, Path(out))


def _conclude(console: Console, screen: Screen, status: int, accelerator: str, out: Path) -> int:
    halves = screen.summaries
    if status != 0 or set(halves) != {"without", "with"}:
        console.print(f"[red]demo failed[/red]: the guest's program ended with status {status}")
        for log in sorted(out.glob("*/lab-agent.log")):
            console.print(Text(log.read_text(errors="replace")[-2000:]))
        return 1
    if screen.state:
        console.print(jobs_table(screen.state))
    console.print(comparison(halves["without"], halves["with"]))
    _print_writes(console, halves["with"])
    console.print(f"real kernel {halves['with']['machine']['kernel']}, {accelerator}, {screen.total():.0f} s in all")
    problems = failures(halves["without"], halves["with"]) + _write_report(console, out / RECORDING)
    for problem in problems:
        console.print(f"[red]failed[/red]: {problem}")
    if not problems:
        console.print("[green]succeeded[/green]: the training jobs waited less, and every io.max is as it was before")
    return 1 if problems else 0


def _write_report(console: Console, recording: Path) -> list[str]:
    """Make the page of both halves; returns what went wrong."""
    REPORT.parent.mkdir(exist_ok=True)
    command = [str(PROJECT / ".venv" / "bin" / "prefetchd"), "report", str(recording), "-o", str(REPORT)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        return [f"the report could not be written: {done.stderr.strip()}"]
    kept = REPORT.with_suffix(".rec")
    shutil.copy(recording, kept)
    console.print(f"report of both halves: {REPORT.relative_to(PROJECT)} (open it in a browser)")
    console.print(f"its recording: {kept.relative_to(PROJECT)} (for `prefetchd replay` and `prefetchd report`)")
    return []


def _print_writes(console: Console, controlled: dict[str, Any]) -> None:
    """What stood in io.max, cgroup by cgroup, the first changes of each."""
    for name, user in [*controlled["jobs"].items(), *controlled["best_effort"].items()]:
        changes = user["io_max"]["changes"][1:]
        if changes:
            shown = "; ".join(f"{at:.1f} s {_short(text)}" for at, text in changes[:6])
            more = f"; … {len(changes)} changes" if len(changes) > 6 else ""
            console.print(f"io.max of {name}: {shown}{more}", soft_wrap=True)


def _short(text: str) -> str:
    """`rbps` of an io.max line in MiB/s; `max` where nothing is limited."""
    found = [word.partition("=")[2] for word in text.split() if word.startswith("rbps=")]
    if not found or found[0] == "max":
        return "max"
    return f"{int(found[0]) / MIB:.1f} MiB/s"
