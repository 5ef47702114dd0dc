"""The page in a real browser, at the width of a phone and of a desktop: marks, labels, no overflow, zoom, tooltips."""

import json
import os
import re
from html import unescape
from pathlib import Path

import pytest

from agent.recording import read
from agent.report.gather import gather
from agent.report.page import render
from tests.screens import BROWSER, DESKTOP, FRAME, PHONE, chromium, made_recording, picture, screens

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
const lines = (one) => { const range = document.createRange(); range.selectNodeContents(one);
  return new Set([...range.getClientRects()].map((box) => Math.round(box.top))).size; };
const cells = [...document.querySelectorAll("#jobs th, #jobs tr:not(.job) td")];
const torn = cells.map((one) => [one, one.textContent.trim()]).filter(([one, text]) => lines(one) >
  text.split(", ").length).map(([, text]) => text);
const result = { torn, width: innerWidth, scroll: document.scrollingElement.scrollWidth, plots, wide, ready:
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


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    path = made_recording(tmp_path_factory.mktemp("browser") / "node.rec")
    return render(gather(read(path)), "a-recording-with-a-rather-long-name-of-a-node.rec")


@pytest.fixture(scope="module", autouse=True)
def browser():
    if BROWSER is None:
        reason = "no Chromium is installed: apt-get install chromium"
        if os.environ.get("CI", "").lower() == "true":
            pytest.fail(reason, pytrace=False)
        pytest.skip(reason)


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
    assert result["torn"] == [], "words of the table are broken"
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


def test_screens_are_made_from_a_recording(tmp_path):
    """PREFETCHD_SCREENSHOTS=DIR keeps the pictures of the page at both widths and of `top`, for people to look at."""
    made = screens(Path(os.environ.get("PREFETCHD_SCREENSHOTS") or tmp_path))
    assert [path.name for path in made] == ["top.png", "report-desktop.png", "report-phone.png"]
    for path in made:
        assert len(path.read_bytes()) > 10_000
