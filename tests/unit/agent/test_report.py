"""The page of a recording: sums that are right, pictures that are complete, names that cannot do harm."""

import json
import re
import subprocess
import sys
import tracemalloc
from dataclasses import replace
from xml.etree import ElementTree as ET

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agent.config import Config
from agent.recording import Recorder, read
from agent.report.bins import Bins, commonest, highs, lows, means
from agent.report.figures import CAUSE_STYLES, Clockwork
from agent.report.gather import Waits, gather
from agent.report.page import NARROW, WIDE, render
from agent.report.svg import (
    Band,
    Histogram,
    Series,
    Strip,
    TimePlot,
    clock,
    histogram,
    strip,
    ticks,
    time_plot,
    time_step,
)
from agent.types import Cause
from tests.unit.agent.made_reports import record_twice, story


@pytest.fixture(scope="module")
def told():
    return list(story(40.0))


@pytest.fixture(scope="module")
def file(told, tmp_path_factory):
    path = tmp_path_factory.mktemp("report") / "node.rec"
    recorder = Recorder(path, Config(), software="1.2.3")
    for report, samples in told:
        recorder.add(report, samples)
    recorder.close()
    return path


@pytest.fixture(scope="module")
def gathered(file):
    return gather(read(file))


@pytest.fixture(scope="module")
def page(gathered):
    return render(gathered, "node.rec")


@given(st.lists(st.tuples(st.floats(0, 5000), st.floats(-1e6, 1e6)), min_size=1, max_size=200))
def test_bins_keep_count_sum_and_ends_however_long_time_runs(points):
    bins = Bins(limit=16)
    for time, value in points:
        bins.add(time, value)
    kept = bins.coarsened(bins.seconds, 16)
    assert sum(one.count for one in kept) == len(points)
    assert sum(one.total for one in kept) == pytest.approx(sum(value for _, value in points), abs=1e-3)
    assert max(value for value in highs(kept) if value is not None) == max(value for _, value in points)
    assert min(value for value in lows(kept) if value is not None) == min(value for _, value in points)


def test_bins_of_texts_take_the_commonest():
    bins = Bins(limit=4, seconds=1.0)
    for time, kind in [(0, "a"), (0.5, "a"), (0.6, "b"), (2, "b"), (7, "c")]:
        bins.note(time, kind)
    assert bins.seconds == 2.0
    assert commonest(bins.coarsened(2.0, 4)) == ["a", "b", None, "c"]
    assert means(bins.coarsened(4.0, 2)) == [None, None]


@given(st.lists(st.floats(1e-5, 100.0), min_size=1, max_size=300))
def test_quantiles_are_within_five_per_cent(values):
    waits = Waits()
    for value in values:
        waits.add(value)
    exact = sorted(values)[max(0, -(-99 * len(values) // 100) - 1)]
    assert waits.quantile(0.99) == pytest.approx(exact, rel=0.05)
    assert waits.mean == pytest.approx(sum(values) / len(values))


def test_no_waits_have_no_quantile():
    assert Waits().quantile(0.99) is None
    assert Waits().mean is None


def test_sums_are_those_of_the_story(told, gathered):
    last = told[-1][0]
    assert gathered.passes == len(told)
    assert gathered.labels == ["observe", "enforce"]
    assert gathered.policy == "adaptive"
    assert gathered.seconds == pytest.approx(39.9, abs=0.05)
    for job in (11, 12, 13):
        signals, mine = last.jobs[job].signals, gathered.jobs[job]
        waits = [event.wait_ns / 1e9 for _, samples in told if job in samples for one in samples[job].streams
                 for event in one.recent]  # fmt: skip
        assert sum(phase.waits.count for phase in mine.phases.values()) == len(waits)
        assert sum(phase.waits.total for phase in mine.phases.values()) == pytest.approx(sum(waits), abs=1e-6)
        assert mine.lost_seconds == pytest.approx(signals.wait_seconds_total, abs=0.3)
        assert mine.iterations == signals.iterations
        first = next(report for report, _ in told if job in report.jobs)
        starved = sum(last.jobs[job].starvation_by_cause.values()) - sum(first.jobs[job].starvation_by_cause.values())
        assert sum(sum(phase.starved.values()) for phase in mine.phases.values()) == starved


def test_before_and_after_are_told_apart(gathered):
    before, after = (gathered.jobs[11].phases[label] for label in gathered.labels)
    assert before.lost_seconds / before.seconds > 0.2
    assert after.lost_seconds / after.seconds < 0.05
    assert before.waits.mean > 10 * after.waits.mean
    requests = sum(sum(counts.values()) for phase in (before, after) for counts in phase.latency.values())
    assert requests > 1000


def test_a_score_of_which_nothing_is_known_is_not_drawn(told, tmp_path):
    recorder = Recorder(tmp_path / "unknown.rec", Config())
    for report, samples in told[:20]:
        jobs = {number: one._replace(health=one.health._replace(score=75.0, confidence=0.0)) if one.health else one
                for number, one in report.jobs.items()}  # fmt: skip
        recorder.add(replace(report, jobs=jobs), samples)
    recorder.close()
    scores = gather(read(tmp_path / "unknown.rec")).jobs[11].score
    assert set(means(scores.coarsened(scores.seconds, 20))) == {None}


def test_policies_are_named_where_there_are_several(told, tmp_path):
    recorder = Recorder(tmp_path / "two.rec", Config())
    for place, (report, samples) in enumerate(told[:100]):
        recorder.add(replace(report, policy="paper") if place >= 50 else report, samples)
    recorder.close()
    two = gather(read(tmp_path / "two.rec"))
    assert (two.labels, two.policy) == (["observe, adaptive", "observe, paper"], "")
    assert list(two.jobs[11].phases) == two.labels


def test_restarts_and_pauses_begin_a_phase(told, tmp_path):
    path = tmp_path / "two.rec"
    for shift in (0.0, 100.0):
        recorder = Recorder(path, Config())
        for report, samples in told[:50]:
            recorder.add(replace(report, wall_time=report.wall_time + shift), samples)
        recorder.close()
    two = gather(read(path))
    assert len(two.phases) == 2
    assert two.phases[1].begin - two.phases[0].end > 90
    assert two.jobs[11].phases["observe"].seconds < 12


def test_a_slow_loop_leaves_no_gaps_but_a_pause_does(told, tmp_path):
    path = tmp_path / "slow.rec"
    recorder = Recorder(path, Config())
    for place, (report, samples) in enumerate(told[:200]):
        if place % 8 == 0 or place < 10:
            wall = report.wall_time + (30.0 if place >= 100 else 0.0)
            recorder.add(replace(report, wall_time=wall), samples)
    recorder.close()
    gathered = gather(read(path))
    axis = Clockwork(gathered)
    score = axis.held(means(axis.bins(gathered.jobs[11].score)))
    first, last = int(12 / axis.width), int(32 / axis.width)
    assert None not in score[2 : int(9 / axis.width)]
    assert None in score[first + int(6 / axis.width) : last]


def drawings(page):
    return [ET.fromstring(text) for text in re.findall(r"<svg.*?</svg>", page, re.DOTALL)]


def test_every_picture_has_marks_and_named_axes(page):
    found = drawings(page)
    assert len(found) >= 2 * (3 * 5 + 3)
    for svg in found:
        classes = " ".join(one.get("class", "") for one in svg.iter())
        assert "mark" in classes, svg.get("aria-label")
        assert "title x" in classes
        assert "title y" in classes
        assert svg.get("aria-label")
    assert {svg.get("width") for svg in found} == {str(NARROW), str(WIDE)}


def test_the_page_asks_the_network_for_nothing(page):
    assert "default-src 'none'" in page
    outside = re.findall(r"(?:src|href|url)\s*[=(]\s*[\"']?(?!#)(\w+:)?//[^\s\"')]+", page)
    assert outside == []
    assert set(re.findall(r"https?://[^\s\"'<]+", page)) <= {"http://www.w3.org/2000/svg"}


def test_tooltips_know_every_picture_over_time(page):
    facts = json.loads(re.search(r'id="facts">(.*?)</script>', page, re.DOTALL)[1])
    keys = {svg.get("data-key") for svg in drawings(page) if "time" in svg.get("class")}
    assert set(facts) == keys
    for fact in facts.values():
        assert all(len(one["values"]) <= fact["count"] for one in fact["series"])


def test_the_page_says_it_in_words(page):
    assert re.search(r"<strong>resnet50</strong> lost \d+ % of its time in mode <em>observe</em>, ", page)
    assert "starved" in page
    assert re.search(r"<th title=\"[^\"]*counts once\">episodes</th>", page)
    assert re.search(r"<span>\d+ %,</span> <span>[\d.,]+ (?:m?s|min)[^<]*</span></td>", page)
    assert "nightly-scan" in page


def test_names_cannot_do_harm(told, tmp_path):
    evil = "<script>alert(1)</script>\"'&</style>"
    path = tmp_path / "evil.rec"
    recorder = Recorder(path, Config(), software=evil)
    for report, samples in told[:120]:
        jobs = {job: entry._replace(job=replace(entry.job, name=f"{evil}{job}")) for job, entry in report.jobs.items()}
        recorder.add(replace(report, jobs=jobs, notes=(evil,)), samples)
    recorder.close()
    page = render(gather(read(path)), evil)
    assert "<script>alert" not in page
    assert page.count("<script") == 2
    assert page.count("</style>") == 1
    for svg in re.findall(r"<svg.*?</svg>", page, re.DOTALL):
        ET.fromstring(svg)


def test_jobs_beyond_the_limit_are_only_in_the_table(gathered):
    page = render(gathered, "x", max_jobs=1)
    assert page.count("<h2>Job ") == 1
    assert page.count('<tr class="job">') == 3


def test_a_recording_without_jobs_is_a_page_too(told, tmp_path):
    path = tmp_path / "idle.rec"
    recorder = Recorder(path, Config())
    for report, _ in told[:30]:
        recorder.add(replace(report, jobs={}), {})
    recorder.close()
    assert "No training job is in this recording" in render(gather(read(path)), "idle")


@pytest.mark.parametrize(
    ("top", "expected"),
    [(0.0, [0.0]), (1.0, [0.0, 0.25, 0.5, 0.75, 1.0]), (7.0, [0.0, 2.0, 4.0, 6.0]), (1234.0, [0.0, 500.0, 1000.0])],
)
def test_axes_have_round_numbers(top, expected):
    assert ticks(top) == expected


@given(st.floats(1e-9, 1e15))
def test_axes_never_have_too_many_ticks(top):
    found = ticks(top)
    assert 2 <= len(found) <= 6
    assert found[-1] <= top * 1.001


@given(st.floats(0.5, 3e6), st.integers(2, 20))
def test_time_axes_fit(seconds, count):
    step = time_step(seconds, count)
    assert seconds / step <= count + 1
    assert re.fullmatch(r"\d+:\d\d", clock(seconds, step))


VALUES = st.lists(st.none() | st.floats(0, 1e12), min_size=1, max_size=60)


@settings(max_examples=60)
@given(VALUES, VALUES, st.sampled_from([NARROW, WIDE]), st.booleans(), st.booleans())
def test_any_values_draw_inside_the_picture(first, second, width, steps, bars):
    series = [Series("a", "s0", first, area=True, steps=steps), Series("b", "s1", second, bars=bars)]
    bands = [Band(0, 30, "one", "p0"), Band(30, 60, "two", "p1")]
    plot = TimePlot("k", "t", "MB/s", series, 60.0, 1.0, scale=1e6, bands=bands)
    svg = ET.fromstring(time_plot(plot, width))
    for path in svg.iter("path"):
        for x, y in re.findall(r"[ML]([-\d.]+) ([-\d.]+)", path.get("d")):
            assert 0 <= float(x) <= width
            assert 0 <= float(y) <= plot.height
    assert "nan" not in ET.tostring(svg, encoding="unicode")


def test_strips_and_histograms_are_complete():
    kinds = ["none", "none", None, "device_contention"]
    svg = ET.fromstring(strip(Strip("k", "Cause", kinds, {"none": "none", "device_contention": "s3"}, 4.0, 1.0), WIDE))
    titles = [one.text for one in svg.iter("title")]
    assert titles == ["none", "device_contention"]
    bars = ET.fromstring(
        histogram(Histogram("k", "t", "latency", ["1ms", "2ms"], [Series("a", "s0", [0.25, 0.75])]), NARROW)
    )
    assert [one.text for one in bars.iter("title")] == ["1ms, a: 25.0 %", "2ms, a: 75.0 %"]


def test_every_cause_has_a_colour():
    assert set(CAUSE_STYLES) == set(Cause)
    assert len(set(CAUSE_STYLES.values())) == len(CAUSE_STYLES)


def run(*arguments):
    command = [sys.executable, "-m", "agent", "report", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)


def test_command(file, page, gathered, tmp_path):
    target = tmp_path / "out.html"
    done = run(file, "-o", target, "--title", "node.rec")
    assert done.returncode == 0, done.stderr
    assert target.read_text() == page
    training = sum(told.training for told in gathered.jobs.values())
    assert training < len(gathered.jobs)
    assert f"{training} training job(s)," in done.stdout
    assert [path.name for path in tmp_path.iterdir()] == ["out.html"]
    assert run(file, "-o", "-", "--title", "node.rec").stdout == page


def test_command_errors_are_one_sentence(file, tmp_path):
    for arguments, status in (
        ((tmp_path / "missing",), 1),
        ((file, "-o", tmp_path / "no/such/folder.html"), 2),
        ((file, "--jobs", "-2"), 2),
    ):
        done = run(*arguments)
        assert (done.returncode, done.stderr.count("\n")) == (status, 1)
    empty = tmp_path / "empty.rec"
    Recorder(empty, Config()).close()
    assert "holds no pass yet" in run(empty).stderr


def test_a_restarted_job_is_told_with_the_one_that_is_gone(told, tmp_path):
    """Its cgroup is another one then; two of one name that live side by side stay two."""
    path = tmp_path / "restarted.rec"
    record_twice(path, told[:50], 100.0, 1011)
    two = gather(read(path))
    assert 1011 not in two.jobs
    assert two.jobs[11].iterations == 2 * told[49][0].jobs[11].signals.iterations


def test_a_file_whose_name_is_no_utf8_has_a_page(file, tmp_path):
    odd = tmp_path / "node\udcff.rec"
    odd.write_bytes(file.read_bytes())
    done = run(odd, "-o", tmp_path / "page.html")
    assert done.returncode == 0, done.stderr
    assert "<h1>node\\udcff.rec</h1>" in (tmp_path / "page.html").read_text(encoding="utf-8")


def test_the_story_of_hundreds_of_jobs_fits_the_memory():
    """Each has some ten rows of bins."""
    tracemalloc.start()
    bins = Bins(limit=512)
    for place in range(512):
        bins.add(place * bins.seconds, 1.5 + place)
    used = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    assert used < 90_000
