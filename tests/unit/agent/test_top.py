"""The live view: order and keys, pictures of the last minute, frames that fit any terminal, and the command itself."""

import contextlib
import fcntl
import json
import os
import pty
import re
import select
import struct
import subprocess
import sys
import termios
import time
from itertools import islice, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry

from agent.client import for_terminal
from agent.config import MetricsSection
from agent.history import History
from agent.server import Endpoint
from agent.snapshot import snapshot
from agent.top.canvas import Canvas
from agent.top.draw import draw
from agent.top.keys import names
from agent.top.trace import Trace, bar, sparkline
from agent.top.view import ORDERS, View, arranged, lost_ratio, press
from tests.unit.agent.made_reports import story

ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|\x1b[()][A-Z0-9]")


def row(job, number, **values):
    base = {"id": number, "job": job, "namespace": "", "pod": "", "cause": "none", "level": "healthy", "score": 90.0}
    base |= {"wait_seconds": 0.0, "compute_seconds": 0.1, "blocked_seconds": 0.0, "queue_depth": 4.0, "devices": []}
    return base | values


ROWS = [
    row("calm", 1),
    row("starved", 2, wait_seconds=0.3, score=20.0, level="danger", cause="device_contention", queue_depth=0.0),
    row("new", 3, score=None, wait_seconds=None, compute_seconds=None, level=None, cause=None, queue_depth=None),
]


@pytest.fixture(scope="module")
def states():
    """The state after each pass of a made-up node: quiet, starving, enforcing."""
    history = History()
    found = []
    for report, _ in islice(story(40.0), 300):
        history.add(report)
        found.append(json.loads(json.dumps(snapshot(report, history))))
    return found


def plain(lines):
    return [line.plain for line in lines]


def shown(state, view=None, canvas=None, trace=None, problem=""):
    return plain(draw(state, view or View(), trace or Trace(), canvas or Canvas(), problem).lines)


def test_who_hurts_most_comes_first():
    assert [one["job"] for one in arranged(ROWS, View())] == ["starved", "calm", "new"]
    assert lost_ratio(ROWS[1]) == pytest.approx(0.75)


def test_a_device_that_is_observed_only_shows_what_is_read():
    device = {"device": "vda", "medium": "hdd", "read_bytes_per_second": None, "write_bytes_per_second": None}
    device |= {"used_read_bytes_per_second": 41e6, "used_write_bytes_per_second": 1e6, "unmanaged_ratio": 0.0}
    device |= {"pool_capacity_ratio": None, "pool_lent_ratio": None, "gate_open": None}
    lines = shown({"devices": [device], "jobs": []})
    titles = next(line for line in lines if line.startswith("DEVICE"))
    line = next(line for line in lines if line.startswith("vda"))
    assert line[titles.index("IN USE") :].split() == ["42", "MB/s", "never"]
    assert line.index("never") == titles.index("LIMITS")


def test_a_blocked_job_without_an_iteration_hurts_most():
    blocked = row("blocked", 4, wait_seconds=None, compute_seconds=None, blocked_seconds=3.0)
    assert arranged([*ROWS, blocked], View())[0]["job"] == "blocked"


BY_TIMER = {"iteration_source": "timer", "wait_seconds": None, "blocked_seconds": 0.0, "starvation_events": 0,
            "cause": "none", "queue_depth": None, "queue_capacity": None, "queue_takeable": None}  # fmt: skip


def by_timer(states):
    """A moment in which the first job's iterations cannot be seen."""
    first, *others = states[-1]["jobs"]
    device = first["devices"][0] | {"throttle_ratio": None, "queueing_ratio": 0.25}
    return states[-1] | {"jobs": [first | BY_TIMER | {"devices": [device]}, *others]}


def test_a_wait_that_cannot_be_seen_is_no_wait_of_zero(states):
    state = by_timer(states)
    hidden = state["jobs"][0]
    lines = shown(state | {"jobs": [hidden]})
    assert "1 job, ? starving" in lines[0]
    titles = next(line for line in lines if line.startswith("JOB"))
    line = next(line for line in lines if line.startswith(hidden["job"][:8]))
    assert line[titles.index("WAIT") :].split()[:2] == ["?", "?/?"]
    assert "starving, 1 unknown" in shown(state)[0]
    assert line[titles.index("CAUSE") :].split()[0] == "?"
    text = "\n".join(shown(state, View(selected=hidden["id"], inside=True), Canvas(120, 60)))
    assert "cause      ?" in text
    assert "wait ? (? lost)" in text
    assert "starved ? times" in text
    assert re.search(r"blk-throttle +\S* +\?\n", text), text
    assert re.search(r"    queue .* 25 %", text)


@pytest.mark.parametrize("order", ORDERS)
def test_every_order_takes_unknown_values(order):
    assert sorted(one["id"] for one in arranged(ROWS, View(order=order))) == [1, 2, 3]
    turned = arranged(ROWS, View(order=order, reverse=True))
    assert turned == arranged(ROWS, View(order=order))[::-1]


def test_filter_finds_cause_and_level():
    assert [one["id"] for one in arranged(ROWS, View(filter="CONTENTION"))] == [2]
    assert [one["id"] for one in arranged(ROWS, View(filter="healthy"))] == [1]
    assert [one["id"] for one in arranged(ROWS, View(filter="x", typed="cal"))] == [1]


def keys(*pressed, view=None):
    view = view or View()
    for key in pressed:
        view = press(view, key, arranged(ROWS, view))
    return view


def test_keys_choose_enter_and_come_back():
    assert keys("down").selected == 2
    assert keys("down", "down", "down", "down", "down").selected == 3
    assert keys("up").selected == 3
    inside = keys("down", "enter")
    assert (inside.inside, inside.selected) == (True, 2)
    assert keys("down", "down", view=inside).scroll == 2
    assert keys("down", "down", "up", "up", "up", view=inside).scroll == 0
    assert not keys("escape", view=inside).inside


def test_enter_without_a_choice_takes_the_first():
    assert keys("enter").selected == 2
    assert press(View(), "enter", []) == View()


def test_typing_a_filter():
    typing = keys("/", "s", "q", "backspace")
    assert (typing.typed, typing.quit) == ("s", False)
    assert keys("enter", view=typing).filter == "s"
    assert keys("escape", view=typing).typed is None
    assert keys("enter", "escape", view=typing).filter == ""


def test_other_keys():
    assert keys("q").quit
    assert keys("f").frozen
    assert not keys("f", " ").frozen
    assert keys("?").help
    assert not keys("?", "x").help
    assert keys("s").order == "score"
    assert keys(*["s"] * len(ORDERS)) == View()
    assert keys("r").reverse
    assert keys("ö", "unknown") == View()


@given(st.lists(st.sampled_from(["up", "down", "enter", "escape", "/", "a", "s", "r", "f", "?", "backspace", "left"])))
def test_no_sequence_of_keys_breaks_the_view(pressed):
    view = keys(*pressed)
    assert view.order in ORDERS
    assert view.selected in {None, 1, 2, 3}


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (b"q", ["q"]),
        (b"\x1b[A\x1bOB", ["up", "down"]),
        (b"\x1b", ["escape"]),
        (b"\x1b[15~s", ["s"]),
        (b"\x1b[1;5C/", ["/"]),
        ("ä\n".encode(), ["ä", "enter"]),
        (b"\xff\xfe", []),
        (b"\x03", ["q"]),
    ],
)
def test_bytes_become_keys(data, expected):
    assert names(data) == expected


@given(st.binary(max_size=40))
def test_any_bytes_are_read_to_their_end(data):
    assert all(isinstance(name, str) for name in names(data))


def test_sparkline_shows_the_worst_of_each_part_of_the_minute():
    trace = Trace()
    for second in range(120):
        score = 10.0 if second == 100 else 90.0
        trace.add({"time": float(second), "jobs": [{"id": 1, "score": score}, {"id": 2, "score": None}]})
    cells = trace.cells(1, 119.0, 6)
    assert [cell < 50 for cell in cells] == [False, False, False, False, True, False]
    assert sparkline(cells) == "████▁█"
    assert sparkline(cells, ascii_only=True).isascii()
    assert trace.cells(2, 119.0, 3) == [None, None, None]
    trace.add({"time": 121.0, "jobs": []})
    assert trace.cells(1, 121.0, 3) == [None, None, None]


@given(st.floats(allow_nan=False, allow_infinity=False), st.integers(0, 50))
def test_bars_have_their_width(ratio, width):
    assert len(bar(ratio, width)) == width


def test_frame_fits_80_by_24(states):
    for state in states[::10]:
        for view in (View(), View(inside=True, selected=11), View(help=True), View(typed="res")):
            lines = shown(state, view)
            assert len(lines) == 24
            assert max(map(len, lines)) <= 80


@given(st.integers(20, 200), st.integers(4, 60), st.booleans(), st.booleans())
def test_frame_fits_any_terminal(states, width, height, inside, ascii_only):
    view = View(inside=inside, selected=11, scroll=5)
    lines = shown(states[250], view, Canvas(width, height, ascii_only=ascii_only))
    assert len(lines) == height
    assert max(map(len, lines)) <= width


def test_frame_tells_what_matters(states):
    text = "\n".join(shown(states[70]))
    assert "1 starving" in text
    assert re.search(r"resnet50 .*!.* 0/8 .*contention", text)
    assert "nightly-scan" in text
    assert "probe nfs unavailable: sunrpc is not loaded" in text


def test_a_probe_that_only_waits_for_its_module_takes_no_line(states):
    waiting = {"name": "nfs", "state": "unavailable", "why": "nfs is missing: the module is not loaded", "tier": ""}
    assert "probe nfs" not in "\n".join(shown(states[70] | {"probes": [waiting]}))


def capped(states):
    """(state, id) of the first pass in which a job had a cap."""
    return next(
        (state, one["id"])
        for state in states
        for one in state["jobs"]
        if one["devices"] and one["devices"][0]["quota_bytes_per_second"]
    )


def test_cap_and_loan_have_their_columns(states):
    state, _ = capped(states)
    assert re.search(r" \d[\d.]*[kMG]/s +(-|\d+%/\d)", "\n".join(shown(state)))
    lent = next(s for s in states for one in s["jobs"] if one["devices"] and one["devices"][0]["loan_ratio"])
    assert re.search(r" \d+%/\d", "\n".join(shown(lent)))


def test_look_inside_shows_the_numbers(states):
    state, job = capped(states)
    text = "\n".join(shown(state, View(inside=True, selected=job), Canvas(100, 60)))
    for words in (
        "weight 100",
        "confidence",
        "iteration",
        "cause",
        "latency",
        "blk-throttle",
        "cap ",
        "PID",
        "last decisions",
    ):
        assert words in text


def test_look_inside_shows_what_is_in_order_and_the_way_to_the_store(states):
    """An agent of an earlier version tells neither."""
    one = states[-1]["jobs"][0]
    link = {"endpoint": "192.0.2.1:443", "connections": 4, "round_trip_seconds": 0.002, "retransmits": 3}
    told = one | {"queue_depth": 4.0, "queue_takeable": 1.0, "queue_capacity": 8.0, "links": [link]}
    told["batch_note"] = "tells 3 MB a batch, reads 12 MB"
    untold = {key: value for key, value in told.items() if key not in ("queue_takeable", "links", "batch_note")}
    texts = [
        "\n".join(shown(states[-1] | {"jobs": [job]}, View(inside=True, selected=one["id"]), Canvas(100, 60)))
        for job in (told, untold)
    ]
    for words in (
        "queue 4/8 (1 in order)",
        "it tells 3 MB a batch, reads 12 MB",
        "192.0.2.1:443  4 open, round trip 2 ms, 3 sent again",
    ):
        assert [words in text for text in texts] == [True, False]


def test_a_job_that_ended_while_looking_inside_gives_the_overview(states):
    assert any("JOB" in line for line in shown(states[10], View(inside=True, selected=4711)))


def test_many_jobs_keep_the_chosen_one_in_sight(states):
    template = states[250]["jobs"][0]
    jobs = [template | {"id": i, "job": f"job-{i:03}"} for i in range(100)]
    state = states[250] | {"jobs": jobs}
    for chosen in (0, 5, 50, 98, 99):
        lines = shown(state, View(order="name", selected=chosen))
        assert any(f"job-{chosen:03}" in line for line in lines), chosen
        assert any("more" in line for line in lines)


def test_empty_states_are_shown_too(states):
    assert any("no training job" in line for line in shown({}))
    assert any("no job matches" in line for line in shown(states[100], View(filter="zzz")))
    assert any("silent" in line for line in shown(states[100], problem="the agent's loop is silent"))


@pytest.fixture
def agent(states):
    """An endpoint that answers with the starving node."""
    endpoint = Endpoint(MetricsSection(listen="127.0.0.1:0"), CollectorRegistry(), lambda: states[260], dict)
    endpoint.start()
    yield f"127.0.0.1:{endpoint.port}"
    endpoint.close()


def command(agent, *options):
    return [sys.executable, "-m", "agent", "top", "--address", agent, *options]


def run(agent, *options, **environment):
    kept = {"PATH": os.environ["PATH"], "LANG": "C.UTF-8", "http_proxy": "http://127.0.0.1:1"}
    return subprocess.run(
        command(agent, *options), capture_output=True, text=True, check=False, timeout=60, env=kept | environment
    )


def test_once_prints_one_frame_without_control_characters(agent):
    done = run(agent, "--once")
    assert done.returncode == 0, done.stderr
    assert "resnet50" in done.stdout
    assert "\x1b" not in done.stdout
    assert "█" in done.stdout


EVIL = "\x1b]0;evil\x07\x1b[2J\udcff"


def test_names_steer_no_terminal_whoever_made_them(states):
    node = {**states[260], "notes": [EVIL], "jobs": [{**one, "cgroup": EVIL} for one in states[260]["jobs"]]}
    endpoint = Endpoint(MetricsSection(listen="127.0.0.1:0"), CollectorRegistry(), lambda: node, dict)
    endpoint.start()
    try:
        address = f"127.0.0.1:{endpoint.port}"
        once = run(address, "--once")
        told = subprocess.run(
            [sys.executable, "-m", "agent", "explain", "resnet50", "--address", address],
            capture_output=True, check=False, timeout=60,
        )  # fmt: skip
        raw = json.loads(run(address, "--json").stdout)
    finally:
        endpoint.close()
    assert (once.returncode, told.returncode) == (0, 0), (once.stderr, told.stderr)
    for output in (once.stdout.encode(), told.stdout):
        assert b"evil" in output
        assert not {0x1B, 0x07} & set(output)
    assert raw["notes"] == [EVIL]
    inside = shown(for_terminal(node), View(inside=True, selected=11))
    assert any("evil" in line for line in inside)
    assert all(line.isprintable() for line in inside)


def test_once_in_ascii(agent):
    assert run(agent, "--once", "--ascii").stdout.isascii()
    assert run(agent, "--once", PYTHONIOENCODING="ascii", PYTHONUTF8="0").stdout.isascii()


def test_json_is_the_state_in_order(agent):
    told = json.loads(run(agent, "--json", "--sort", "name").stdout)
    assert [one["job"] for one in told["jobs"]] == ["bert-large", "clip", "resnet50"]


def test_count_ends_a_stream_of_frames(agent):
    done = run(agent, "--count", "3", "--interval", "0.1")
    assert done.stdout.count("prefetchd enforce/adaptive") == 3


@pytest.mark.parametrize(
    ("options", "status", "words"),
    [(("--interval", "0.01"), 2, "below 0.1"), (("--address", "127.0.0.1:1"), 1, "start it with `prefetchd run`")],
)
def test_errors_are_one_sentence(agent, options, status, words):
    done = run(agent, *options)
    assert done.returncode == status
    assert words in done.stderr
    assert "Traceback" not in done.stderr


class Terminal:
    """A terminal of 80 by 24 in which the command runs."""

    def __init__(self, argv, **environment):
        self.pid, self.fd = pty.fork()
        if self.pid == 0:
            os.environ.pop("NO_COLOR", None)
            os.environ.update({"TERM": "xterm-256color", "LANG": "C.UTF-8"} | environment)
            os.execv(argv[0], argv)
        fcntl.ioctl(self.fd, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
        self.text = ""

    def until(self, words, seconds=60.0):
        deadline = time.monotonic() + seconds
        while words not in self.text:
            assert time.monotonic() < deadline, self.text[-2000:]
            if select.select([self.fd], [], [], 0.1)[0]:
                try:
                    self.text += os.read(self.fd, 65536).decode(errors="replace")
                except OSError:
                    break
        seen, self.text = self.text, ""
        return seen

    def press(self, data):
        os.write(self.fd, data)

    def end(self):
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            if select.select([self.fd], [], [], 0.05)[0]:
                with contextlib.suppress(OSError):
                    self.text += os.read(self.fd, 65536).decode(errors="replace")
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                os.close(self.fd)
                return os.waitstatus_to_exitcode(status)
        raise AssertionError("does not end")


def test_live_view_obeys_keys_and_ends_cleanly(agent):
    terminal = Terminal(command(agent))
    first = terminal.until("q quit")
    assert "\x1b[?1049h" in first
    assert "resnet50" in first
    terminal.press(b"/")
    terminal.until("filter:")
    terminal.press(b"bert\r")
    terminal.until("only 'bert'")
    terminal.press(b"\r")
    assert "bert-large" in terminal.until("up/down scroll")
    terminal.press(b"f")
    terminal.until("FROZEN")
    terminal.press(b"q")
    assert terminal.end() == 0
    assert "\x1b[?1049l" in terminal.text


def test_live_view_without_colour(agent):
    terminal = Terminal(command(agent), NO_COLOR="1")
    seen = terminal.until("q quit")
    assert not re.search(r"\x1b\[[0-9;]*3[1-7]m", seen)
    terminal.press(b"\x03")
    assert terminal.end() == 130
    assert "\x1b[?1049l" in terminal.text


def test_dumb_terminal_gets_frames(agent):
    terminal = Terminal(command(agent, "--count", "2", "--interval", "0.1"), TERM="dumb")
    assert terminal.end() == 0
    assert terminal.text.count("starving") == 2
    assert "\x1b" not in terminal.text


def test_history_keeps_events_not_moments():
    history = History(rows=10)
    for report, _ in story(40.0):
        history.add(report)
    rows = history.rows(11)
    assert 2 <= len(rows) <= 10
    assert [one["since"] for one in rows] == sorted(one["since"] for one in rows)
    assert all(before["until"] < after["since"] for before, after in pairwise(rows))
    assert rows[-1]["passes"] > 20
    assert {one["devices"][0]["device"] for one in rows if one["devices"]} == {"nvme0n1"}
    assert history.rows(4711) == []
    assert history.rows(90) == []


def test_a_score_of_which_nothing_is_known_is_a_question_mark(states):
    state = states[100] | {"jobs": [one | {"score": 75.0, "confidence": 0.0} for one in states[100]["jobs"]]}
    trace = Trace()
    trace.add(state)
    lines = shown(state, trace=trace)
    assert sum("   ?  " in line for line in lines) == len(state["jobs"])
    assert not any("75" in line for line in lines if "resnet50" in line)
    assert "not known yet" in "\n".join(shown(state, View(inside=True, selected=11), Canvas(100, 60)))
