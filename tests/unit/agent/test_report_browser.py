"""The page in a real browser, at the width of a phone and of a desktop: marks, labels, no overflow, zoom, tooltips."""

import io
import json
import os
import re
import shutil
import subprocess
import tempfile
from html import unescape
from itertools import islice
from pathlib import Path

import pytest
from rich.console import Console
from rich.terminal_theme import MONOKAI

from agent.config import Config
from agent.recording import Recorder, read
from agent.report.gather import gather
from agent.report.page import render
from agent.snapshot import snapshot
from agent.top.canvas import Canvas
from agent.top.draw import draw
from agent.top.trace import Trace
from agent.top.view import View
from tests.unit.agent.made_reports import story

BROWSER = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
PHONE, DESKTOP = 360, 1280

MEASURE = """
<script>
const inside = (inner, outer) => inner.left >= outer.left - 1 && inner.right <= outer.right + 1 &&
  inner.top >= outer.top - 1 && inner.bottom <= outer.bottom + 1;
const visible = [...document.querySelectorAll("svg.plot")].filter((svg) => svg.getClientRects().length);
const plots = visible.map((svg) => {
  const box = svg.getBoundingClientRect();
  const texts = [...svg.querySelectorAll("text")].filter((one) => !one.closest("title"));
  const rows = [...svg.querySelectorAll("g.ticks text")].map((one) => one.getBoundingClientRect());
  return {
    key: svg.dataset.key, width: box.width, right: box.right,
    marks: [...svg.querySelectorAll(".mark")].filter((one) => one.getBoundingClientRect().width > 0.2).length,
    x: svg.querySelector("text.title.x")?.textContent, y: svg.querySelector("text.title.y")?.textContent,
    labels: svg.querySelectorAll("text.tick").length,
    outside: texts.filter((one) => !inside(one.getBoundingClientRect(), box)).map((one) => one.textContent),
    overlapping: rows.filter((one, place) => place && one.left < rows[place - 1].right).length,
    small: texts.filter((one) => one.getBoundingClientRect().height < 8).length,
  };
});
const wide = [...document.querySelectorAll("body *")].filter((one) => one.getClientRects().length &&
  !one.closest("svg") && one.getBoundingClientRect().right > innerWidth + 1).map((one) => one.outerHTML);
const result = { width: innerWidth, scroll: document.scrollingElement.scrollWidth, plots, wide, ready:
  document.documentElement.dataset.ready };
const svg = visible.find((one) => one.classList.contains("time"));
const box = svg.getBoundingClientRect();
const send = (kind, part) => svg.dispatchEvent(new PointerEvent(kind, { pointerId: 1, pointerType: "mouse",
  clientX: box.left + box.width * part, clientY: box.top + box.height / 2, bubbles: true }));
svg.setPointerCapture = () => {};
const tip = document.getElementById("tip");
const ticks = () => [...svg.querySelectorAll("g.ticks text")].map((one) => one.textContent);
send("pointermove", 0.4);
result.tip = tip.innerText;
result.tipBox = [tip.getBoundingClientRect().left, tip.getBoundingClientRect().right];
result.before = ticks();
send("pointerdown", 0.3); send("pointermove", 0.6); send("pointerup", 0.6);
result.zoomed = ticks();
result.moved = [...document.querySelectorAll("svg.time")].filter((one) =>
  one.querySelector("g.data").getAttribute("transform")?.startsWith("matrix(")).length;
result.reset = !document.getElementById("reset").hidden;
document.dispatchEvent(new KeyboardEvent("keydown", { key: "Escape" }));
result.after = ticks();
result.hidden = document.getElementById("reset").hidden;
parent.postMessage(JSON.stringify(result), "*");
</script>
"""
FRAME = """<!DOCTYPE html><body style="margin:0"><pre id="result"></pre><script>
addEventListener("message", (event) => { document.getElementById("result").textContent = event.data; });
</script><iframe src="page.html" style="border:0;width:{width}px;height:900px"></iframe></body>"""


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    path = tmp_path_factory.mktemp("browser") / "node.rec"
    recorder = Recorder(path, Config(), software="1.2.3")
    for report, samples in story(40.0):
        recorder.add(report, samples)
    recorder.close()
    return render(gather(read(path)), "a-recording-with-a-rather-long-name-of-a-node.rec")


def chromium(*arguments, drawn):
    """Run the browser; `drawn(process)` says whether it did what was asked."""
    if BROWSER is None:
        reason = "no Chromium is installed: apt-get install chromium"
        if os.environ.get("CI", "").lower() == "true":
            pytest.fail(reason, pytrace=False)
        pytest.skip(reason)
    flags = ["--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--no-first-run",
             "--disable-extensions", "--disable-background-networking", "--virtual-time-budget=8000",
             "--run-all-compositor-stages-before-draw"]  # fmt: skip
    for _ in range(3):  # on a busy machine a browser may give up before it has drawn
        with tempfile.TemporaryDirectory() as profile:
            done = subprocess.run([BROWSER, *flags, f"--user-data-dir={profile}", *arguments], capture_output=True,
                                  text=True, check=False, timeout=120)  # fmt: skip
        if done.returncode == 0 and drawn(done):
            return done
    raise AssertionError(f"the browser draws nothing: {done.stderr[-2000:]}")


@pytest.fixture(scope="module", params=[PHONE, DESKTOP], ids=["phone", "desktop"])
def measured(request, page, tmp_path_factory):
    """What the page says of itself at one width."""
    folder = tmp_path_factory.mktemp("page")
    (folder / "page.html").write_text(page.replace("</body>", MEASURE + "</body>"))
    (folder / "frame.html").write_text(FRAME.replace("{width}", str(request.param)))
    result = re.compile(r'<pre id="result">(.+?)</pre>', re.DOTALL)
    done = chromium("--dump-dom", f"--window-size={request.param + 40},1000", (folder / "frame.html").as_uri(),
                    drawn=lambda process: result.search(process.stdout))  # fmt: skip
    return request.param, json.loads(unescape(result.search(done.stdout)[1]))


def test_nothing_is_wider_than_the_screen(measured):
    width, result = measured
    assert result["width"] == width
    assert result["scroll"] <= width
    assert result["wide"] == []
    assert all(plot["right"] <= width for plot in result["plots"])


def test_each_plot_has_its_marks_and_axis_labels(measured):
    _, result = measured
    assert len(result["plots"]) == 3 * 5 + 3
    for plot in result["plots"]:
        assert plot["marks"] >= 1 or plot["key"].startswith("wait"), plot
        assert plot["x"], plot
        assert plot["y"], plot
        assert plot["labels"] >= 3, plot


def test_labels_are_inside_readable_and_apart(measured):
    _, result = measured
    for plot in result["plots"]:
        assert plot["outside"] == [], plot
        assert plot["overlapping"] == 0, plot
        assert plot["small"] == 0, plot


def test_tooltip_tells_time_and_value(measured):
    width, result = measured
    assert result["ready"] == "yes"
    assert re.match(r"\d+:\d\d", result["tip"])
    assert result["tipBox"][0] >= 0
    assert result["tipBox"][1] <= width


def test_dragging_zooms_every_plot_and_escape_goes_back(measured):
    _, result = measured
    assert result["zoomed"] != result["before"]
    assert result["zoomed"][0] != "0:00"
    assert result["moved"] >= 2 * 13
    assert result["reset"]
    assert result["after"] == result["before"]
    assert result["hidden"]


def picture(source, target, size):
    """A screenshot of a file."""
    chromium(f"--screenshot={target}", f"--window-size={size}", source.resolve().as_uri(),
             drawn=lambda _: target.exists() and target.stat().st_size > 10_000)  # fmt: skip
    return target.read_bytes()


def test_pictures_are_there_without_scripts(page, tmp_path):
    """Without a script the same pixels are drawn: a page whose scripts are gone looks the same."""
    (tmp_path / "with.html").write_text(page)
    (tmp_path / "without.html").write_text(re.sub(r"<script.*?</script>", "", page, flags=re.DOTALL))
    shots = [picture(tmp_path / f"{name}.html", tmp_path / f"{name}.png", "1280,1600") for name in ("with", "without")]
    assert len(shots[0]) > 50_000
    assert shots[0] == shots[1]


def test_it_can_be_printed(page, tmp_path):
    (tmp_path / "page.html").write_text(page)
    target = tmp_path / "page.pdf"
    chromium(f"--print-to-pdf={target}", "--no-pdf-header-footer", (tmp_path / "page.html").as_uri(),
             drawn=lambda _: target.exists())  # fmt: skip
    content = target.read_bytes()
    assert content.startswith(b"%PDF")
    pages = len(re.findall(rb"/Type\s*/Page\b", content))
    assert 2 <= pages <= 20


def top_as_html():
    """The live view in the middle of the story, as a page."""
    trace, shown = Trace(), {}
    for report, _ in islice(story(120.0), 728):
        shown = json.loads(json.dumps(snapshot(report)))
        trace.add(shown)
    console = Console(record=True, width=80, height=14, force_terminal=True, file=io.StringIO())
    for line in draw(shown, View(), trace, Canvas(80, 14)).lines:
        console.print(line)
    return console.export_html(inline_styles=True, theme=MONOKAI)


def test_screenshots_are_kept_where_asked(page, tmp_path):
    """PREFETCHD_SCREENSHOTS=DIR keeps pictures of the page at both widths and of `top`, for people to look at."""
    folder = Path(os.environ.get("PREFETCHD_SCREENSHOTS") or tmp_path)
    folder.mkdir(parents=True, exist_ok=True)
    (tmp_path / "top.html").write_text(top_as_html())
    assert len(picture(tmp_path / "top.html", folder.resolve() / "top.png", "800,300")) > 10_000
    (tmp_path / "page.html").write_text(page)
    (tmp_path / "frame.html").write_text(FRAME.replace("{width}", str(PHONE)).replace("900px", "2400px"))
    for name, source, size in (("desktop", "page.html", "1280,1500"), ("phone", "frame.html", "360,1500")):
        assert len(picture(tmp_path / source, folder.resolve() / f"report-{name}.png", size)) > 50_000
