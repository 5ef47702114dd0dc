"""The demo's part inside the guest: the scenario with an agent that only observes, then with one that enforces.

Prints one JSON object a line: `phase`, `state` (what the agent's /state said) and `summary` of each half. Both agents
append to one recording, so that the report has both halves.
"""

from __future__ import annotations

import json
import os
import sys
import urllib.error
import urllib.request
from functools import partial
from pathlib import Path
from typing import Any

from agent.simulate.scenario import load_scenario
from tests.lab.agent_config import write_configuration
from tests.lab.cache import PROJECT
from tests.lab.disks import find_disk
from tests.lab.scenario_run import Run, run_scenario

RECORDING = "demo.rec"
STATE_URL = "http://127.0.0.1:9753/state"


def say(kind: str, **values: Any) -> None:
    """Print one line for the host."""
    print(json.dumps({"kind": kind, **values}), flush=True)


def main(argv: list[str]) -> int:
    scenario = load_scenario(Path(argv[0]))
    out = Path(os.environ["PREFETCHD_LAB_OUT"])
    numbers = {device.name: find_disk(device.name).number for device in scenario.devices if device.kind != "nfs"}
    config = write_configuration(out / "prefetchd.toml", scenario, numbers)
    agent = [str(PROJECT / ".venv/bin/prefetchd"), "run", "--config", str(config), "--record", str(out / RECORDING)]
    for half, mode in (("without", "observe"), ("with", "enforce")):
        say("phase", text=f"starting the agent, --mode {mode} (compiles its BPF programs)", seconds=0)
        show = partial(_state, half)
        summary = run_scenario(scenario, 1, out=out / half, agent_argv=[*agent, "--mode", mode], each=show)
        say("summary", half=half, summary=summary)
    return 0


def _state(half: str, run: Run, elapsed: float) -> None:
    """What the agent says of the jobs while they train; at the very end there is nothing more to say of them."""
    if not 0 <= elapsed < run.scenario.duration_seconds - 0.5:
        return
    try:
        with urllib.request.urlopen(STATE_URL, timeout=1) as response:
            say("state", half=half, seconds=round(elapsed, 1), state=json.load(response))
    except (urllib.error.URLError, OSError, ValueError) as error:
        say("elapsed", seconds=round(elapsed, 1), why=str(error))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
