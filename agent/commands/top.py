"""`prefetchd top`: a live view of the running agent, over its endpoint alone: no BPF and no root needed."""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import threading
import time
from dataclasses import dataclass, replace
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from agent.client import AgentClient, for_terminal
from agent.commands import options
from agent.commands.terminal import colours_wanted
from agent.errors import PrefetchdError, UsageError
from agent.top.canvas import Canvas
from agent.top.draw import draw
from agent.top.keys import raw_terminal, read_keys
from agent.top.trace import Trace
from agent.top.view import ORDERS, View, arranged, press
from agent.units import duration

EPILOG = """\
examples:
  prefetchd top
  prefetchd top --address node7:9753 --sort wait
  prefetchd top --once --filter resnet
  prefetchd top --json | jq '.jobs[] | {job, score, cause}'

keys: up/down choose, Enter look inside, s order, r turn round, / filter, f freeze, ? help, q quit
Without a terminal (or with TERM=dumb) frames are printed one after the other.

exit status:
  0  done    1  no agent answers    2  the command line cannot be used
"""
MAX_COLUMNS = 1000
REDRAW_SECONDS = 0.25
STALE_SECONDS = 5.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.description = "Watch the jobs of the running agent: who starves, why, and what is done about it."
    parser.epilog = EPILOG
    parser.add_argument("--interval", type=options.seconds, default=1.0, metavar="S", help="between two looks (1)")
    parser.add_argument("--sort", choices=tuple(ORDERS), default="hurt", help="order of the jobs (hurt)")
    parser.add_argument("--reverse", action="store_true", help="turn the order round")
    parser.add_argument("--filter", default="", metavar="TEXT", help="only jobs whose name, pod, cause … hold this")
    parser.add_argument("--once", action="store_true", help="print one frame and end")
    parser.add_argument("--count", type=options.count, metavar="N", help="without a terminal: end after N frames")
    parser.add_argument("--json", action="store_true", help="print the agent's state as JSON and end")
    parser.add_argument("--ascii", action="store_true", help="no block characters")
    options.add_config(parser)
    options.add_address(parser)


def main(args: argparse.Namespace) -> int:
    """Show until `q`, or one frame."""
    if args.interval < 0.1:
        raise UsageError(f"Interval {args.interval:g} s is below 0.1; the agent itself looks every 0.1 s.")
    client = options.client(args)
    view = View(order=args.sort, reverse=args.reverse, filter=args.filter)
    if args.json:
        state = client.state()
        with client.understood():
            jobs = arranged(state["jobs"], view)
        print(json.dumps(state | {"jobs": jobs}, indent=1))
        return 0
    console = Console(no_color=not colours_wanted() or None, highlight=False)
    live = sys.stdout.isatty() and sys.stdin.isatty() and not console.is_dumb_terminal
    if args.once or not live:
        return _frames(client, view, console, args)
    return _live(client, view, console, args)


def _ascii(args: argparse.Namespace, console: Console) -> bool:
    return bool(args.ascii) or "utf" not in (console.encoding or "").lower()


def _columns(console: Console) -> int:
    """Of the terminal; of what is no terminal 80, or more where COLUMNS says so."""
    columns = console.width if sys.stdout.isatty() else max(80, shutil.get_terminal_size().columns)
    return min(columns, MAX_COLUMNS)


def _frames(client: AgentClient, view: View, console: Console, args: argparse.Namespace) -> int:
    """Frames one after the other, each as long as it needs to be."""
    trace = Trace()
    left = 1 if args.once else args.count
    canvas = Canvas(_columns(console), 10_000, ascii_only=_ascii(args, console), keys=False)
    while True:
        state = for_terminal(client.state())
        with client.understood():
            trace.add(state)
            lines = draw(state, view, trace, canvas).lines
        for line in lines:
            console.print(line, soft_wrap=True)
        left = None if left is None else left - 1
        if left == 0:
            return 0
        console.print()
        sys.stdout.flush()
        time.sleep(args.interval)


@dataclass
class _Poll:
    """What the polling thread found last; replaced field by field, read by the drawing thread."""

    state: dict[str, Any]
    problem: str = ""
    seen: float = 0.0


def _poll(client: AgentClient, poll: _Poll, interval: float, stop: threading.Event) -> None:
    while not stop.wait(interval):
        try:
            poll.state, poll.problem, poll.seen = for_terminal(client.state()), "", time.monotonic()
        except PrefetchdError as error:
            poll.problem = str(error)


def _live(client: AgentClient, view: View, console: Console, args: argparse.Namespace) -> int:
    """The full-screen view."""
    poll = _Poll(for_terminal(client.state()), seen=time.monotonic())
    stop = threading.Event()
    thread = threading.Thread(target=_poll, args=(client, poll, args.interval, stop), daemon=True)
    thread.start()
    trace, shown = Trace(), poll.state
    trace.add(shown)
    try:
        with raw_terminal() as keyboard, Live(console=console, screen=True, auto_refresh=False) as screen:
            while not view.quit:
                if not view.frozen:
                    shown = poll.state
                    trace.add(shown)
                canvas = Canvas(_columns(console), console.height, _ascii(args, console))
                frame = draw(shown, view, trace, canvas, _problem(poll))
                view = replace(view, scroll=frame.scroll)
                screen.update(_unwrapped(frame.lines), refresh=True)
                for key in read_keys(keyboard, REDRAW_SECONDS):
                    view = press(view, key, arranged(shown.get("jobs", ()), view))
    finally:
        stop.set()
    return 0


def _problem(poll: _Poll) -> str:
    silent = time.monotonic() - poll.seen
    if poll.problem:
        return f"no answer for {duration(silent)}: {poll.problem}"
    old = float(time.time() - float(poll.state.get("time") or time.time()))
    return f"the agent's loop is silent for {duration(old)}" if old > STALE_SECONDS else ""


def _unwrapped(lines: list[Text]) -> Group:
    for line in lines:
        line.no_wrap = True
    return Group(*lines)
