"""Pressure-stall information: how long tasks waited for IO, the agent's witness where BPF cannot see throttling."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from agent.checks.finding import Finding, note, ok, warning
from agent.checks.host import Host
from cgroup.errors import IoFileError
from cgroup.io_files import IoPressure, parse_io_pressure

FILE = "/proc/pressure/io"


@dataclass(frozen=True, slots=True)
class PressureFacts:
    """`pressure` is None where the kernel has no PSI or it is switched off; `problem` where the file is odd."""

    pressure: IoPressure | None
    problem: str = ""


def gather(host: Host) -> PressureFacts:
    """Read the node's own file."""
    text = host.read(FILE)
    if not text:
        return PressureFacts(None)
    try:
        return PressureFacts(parse_io_pressure(text))
    except IoFileError as error:
        return PressureFacts(None, str(error))


def check(facts: PressureFacts) -> Iterator[Finding]:
    """Judge the facts."""
    if facts.problem:
        yield warning("host.psi", facts.problem, "Report this line: the kernel prints it in an unknown form.")
    elif facts.pressure is None or facts.pressure.some is None:
        fix = "Boot with psi=1 (and CONFIG_PSI=y)."
        yield note("host.psi", f"{FILE} says nothing: throttle wait is estimated without it", fix)
    else:
        yield ok("host.psi", f"IO pressure now (10 s): {facts.pressure.some.avg10_percent:.1f} % of the time")
