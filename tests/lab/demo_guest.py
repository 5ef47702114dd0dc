"""The demo's part inside the guest: the scenario without control, then with the agent in enforce mode.

Prints one JSON object a line: `phase`, `state` (what the agent's /state said) and `summary` of each half.
"""

from __future__ import annotations

import json
import os
import sys
import urllib.error
import urllib.request
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
    say("phase", text="without control", seconds=scenario.duration_seconds)
    without = run_scenario(scenario, 1, out=out / "without", each=_progress)
    say("summary", half="without", summary=without)
    numbers = {device.name: find_disk(device.name).number for device in scenario.devices if device.kind != "remote"}
    config = write_configuration(out / "prefetchd.toml", scenario, numbers)
    agent = [str(PROJECT / ".venv/bin/prefetchd"), "run", "--mode", "enforce", "--config", str(config)]
    agent += ["--record", str(out / RECORDING)]
    say("phase", text="starting the agent (compiles its BPF programs)", seconds=0)
    with_agent = run_scenario(scenario, 1, out=out / "with", agent_argv=agent, each=_state)
    say("summary", half="with", summary=with_agent)
    return 0


def _progress(run: Run, elapsed: float) -> None:
    del run
    say("elapsed", seconds=round(elapsed, 1))


def _state(run: Run, elapsed: float) -> None:
    del run
    try:
        with urllib.request.urlopen(STATE_URL, timeout=1) as response:
            say("state", seconds=round(elapsed, 1), state=json.load(response))
    except (urllib.error.URLError, OSError, ValueError) as error:
        say("elapsed", seconds=round(elapsed, 1), why=str(error))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
