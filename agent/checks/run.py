"""All checks over one host, in the order in which an operator wants to mend things."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from agent.checks import agent as agent_checks
from agent.checks import cgroups, devices, kernel, pressure, remote, runtime, state
from agent.checks.finding import Finding, unknown
from agent.checks.host import Host
from agent.config import Config
from agent.jobs import PodLookup

log = logging.getLogger(__name__)


def run_checks(
    host: Host, config: Config, answer: Mapping[str, Any] | None, pods: PodLookup | None = None, silence: str = ""
) -> tuple[Finding, ...]:
    """Every finding; `answer` is the running agent's `/state`, None where none answers, and `silence` why.

    `pods` is what is known of pods. A subject that cannot be checked (a file that vanished, a right that is missing)
    gives one `unknown` finding and leaves the others alone.
    """
    answers = answer is not None
    subjects: dict[str, Callable[[], Iterable[Finding]]] = {
        "runtime": lambda: runtime.check(runtime.gather(host)),
        "kernel": lambda: kernel.check(kernel.gather(host)),
        "cgroup": lambda: cgroups.check(
            cgroups.gather(host, config, pods), agent_runs=answers or state.is_held(host, config)
        ),
        "device": lambda: devices.check(devices.gather(host, config)),
        "host": lambda: pressure.check(pressure.gather(host)),
        "remote": lambda: remote.check(remote.gather(host)),
        "state": lambda: state.check(state.gather(host, config), answers=answers),
        "agent": lambda: agent_checks.check(
            answer, runs=state.is_held(host, config), kprobes=kernel.has_kprobes(host), silence=silence
        ),
    }
    findings: list[Finding] = []
    for name, subject in subjects.items():
        try:
            findings.extend(subject())
        except (OSError, ValueError) as error:
            log.debug("subject %s", name, exc_info=True)
            findings.append(unknown(f"{name}.check", f"cannot be checked: {error}", "Run the doctor as root."))
    return tuple(findings)
