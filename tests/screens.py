"""Screenshots of `top` and of a report, made with Chromium from a recording: `python -m tests.plots screens`."""

import io
import json
import os
import shutil
import signal
import subprocess
import tempfile
from pathlib import Path

from rich.console import Console
from rich.terminal_theme import MONOKAI

from agent.config import Config
from agent.recording import Recorder, read
from agent.recording.outputs import CAPS
from agent.recording.replay import replay
from agent.report.gather import gather
from agent.report.page import render
from agent.snapshot import snapshot
from agent.top.canvas import Canvas
from agent.top.draw import draw
from agent.top.trace import Trace
from agent.top.view import View
from agent.types import TickReport
from bpf.samples import merge_samples
from tests.unit.agent.made_reports import story

BROWSER = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
PHONE, DESKTOP = 360, 1280
ROWS = 12
PATIENCE_SECONDS = 60.0
"""A browser with a tenth of a core takes 20 s for a page."""
FRAME = """<!DOCTYPE html><body style="margin:0"><pre id="result"></pre><script>
addEventListener("message", (event) => { document.getElementById("result").textContent = event.data; });
</script><iframe src="page.html" style="border:0;width:{width}px;height:900px"></iframe></body>"""


def chromium(*arguments, drawn):
    """Run the browser; `drawn(process)` says whether it did what was asked."""
    flags = ["--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--no-first-run",
             "--disable-extensions", "--disable-background-networking", "--virtual-time-budget=8000",
             "--run-all-compositor-stages-before-draw"]  # fmt: skip
    for _ in range(3):  # on a busy machine a browser may give up before it has drawn, or stand still
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
            done = _ended([BROWSER, *flags, f"--user-data-dir={profile}", *arguments])
        if done.returncode == 0 and drawn(done):
            return done
    raise AssertionError(f"the browser draws nothing: {done.stderr[-2000:]}")


def _ended(command):
    """What a command said; one that does not end is killed with all that it started."""
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, start_new_session=True) as process:
        try:
            out, err = process.communicate(timeout=PATIENCE_SECONDS)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            out, err = process.communicate()
    return subprocess.CompletedProcess(command, process.returncode, out, err)


def picture(source, target, size):
    """A screenshot of a file, once two in a row are alike: the browser does not wait until all of it is drawn."""
    before = None
    for _ in range(5):
        target.unlink(missing_ok=True)
        chromium(f"--screenshot={target}", f"--window-size={size}", source.resolve().as_uri(),
                 drawn=lambda _: target.exists() and target.stat().st_size > 10_000)  # fmt: skip
        before, shot = target.read_bytes(), before
        if before == shot:
            return shot
    raise AssertionError(f"no two pictures of {source} in a row are alike")


def made_recording(path):
    """A recording of the made-up run."""
    recorder = Recorder(path, Config(), software="1.2.3")
    for report, samples in story(40.0):
        recorder.add(report, samples)
    recorder.close()
    return path


def states(recording):
    """What `/state` would have said at each pass: decided anew, with the caps and the mode of then."""
    for step in replay(read(recording)):
        moment, node = step.moment, step.moment.node_outputs
        applied = {}
        for job, outputs in moment.job_outputs.items():
            for device in moment.devices:
                caps = tuple(outputs.get(("d", device, name)) for name in CAPS)
                if any(cap is not None for cap in caps):
                    applied[job, device] = caps
        report = TickReport(
            time=moment.time, wall_time=moment.wall, mode=node.get(("mode",), "?"), policy=node.get(("policy",), "?"),
            jobs=step.result.reports, devices=moment.devices, decision=step.result.decision, applied=applied, writes={},
            conflicts=0, restores=0, sample=merge_samples(int(moment.time * 1e9), ()), probes=(), ticks=0,
            duration_seconds=0.0, seconds_total=0.0,
        )  # fmt: skip
        yield json.loads(json.dumps(snapshot(report)))


def trouble(state):
    """How much there is to see: whether caps are in force, and how low the lowest score is of those well known."""
    known = [job["score"] for job in state["jobs"] if job["queue_depth"] is not None and job["confidence"] > 0.9]
    if state["mode"] != "enforce" or len(known) < len(state["jobs"]):
        return 0, -100.0
    lowest = min(known, default=100.0)
    caps = sum(cap is not None for one in state["neighbours"] for cap in one["quota_bytes_per_second"].values())
    caps += sum(one["quota_bytes_per_second"] is not None for job in state["jobs"] for one in job["devices"])
    return min(caps, 1), -lowest


def top_as_html(recording):
    """The live view at the moment of the recording with the most to see, as a page."""
    told = list(states(recording))
    shown = max(range(len(told)), key=lambda place: trouble(told[place]))
    trace = Trace()
    for state in told[: shown + 1]:
        trace.add(state)
    console = Console(record=True, width=80, height=ROWS, force_terminal=True, file=io.StringIO())
    for line in draw(told[shown], View(), trace, Canvas(80, ROWS)).lines:
        console.print(line)
    return console.export_html(inline_styles=True, theme=MONOKAI)


def screens(out, recording=None):
    """Pictures of `top` and of the report on a desktop and on a phone; returns their paths."""
    out = out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        recording = recording or made_recording(folder / "node7.rec")
        (folder / "top.html").write_text(top_as_html(recording))
        (folder / "page.html").write_text(render(gather(read(recording)), recording.name))
        (folder / "frame.html").write_text(FRAME.replace("{width}", str(PHONE)).replace("900px", "2400px"))
        made = {
            out / "top.png": ("top.html", "800,265"),
            out / "report-desktop.png": ("page.html", f"{DESKTOP},1500"),
            out / "report-phone.png": ("frame.html", f"{PHONE},1500"),
        }
        for target, (source, size) in made.items():
            picture(folder / source, target, size)
    return list(made)
