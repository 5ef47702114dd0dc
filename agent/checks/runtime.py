"""Can this process do the work: rights, BCC, memory, clock."""

from __future__ import annotations

import importlib.util
import re
import sys
from collections.abc import Iterator
from ctypes.util import find_library
from dataclasses import dataclass
from pathlib import Path

from agent.checks.finding import Finding, failed, note, ok, unknown, warning
from agent.checks.host import Host

CAPABILITIES = {"CAP_SYS_ADMIN": 21, "CAP_BPF": 39, "CAP_PERFMON": 38, "CAP_DAC_OVERRIDE": 1}
"""Capability numbers (include/uapi/linux/capability.h); SYS_ADMIN stands in for BPF and PERFMON."""
CLOCK = "/sys/devices/system/clocksource/clocksource0/current_clocksource"
SLOW_CLOCKS = frozenset({"hpet", "acpi_pm", "jiffies", "refined-jiffies", "pit"})
AGENT_MIB = 200
"""What the agent takes with BCC loaded, MiB (measured: about 170)."""


@dataclass(frozen=True, slots=True)
class RuntimeFacts:
    """`capabilities` is the effective set as a bit mask; `bcc` is the module's file, None where it is missing."""

    capabilities: int
    bcc: str | None
    bcc_is_real: bool
    libbcc: str | None
    available_mib: float | None
    clock: str | None
    python: str


def gather(host: Host) -> RuntimeFacts:
    """Look at our own process and at the host; BCC is not imported (that takes 100 MB)."""
    status = host.read("/proc/self/status") or ""
    mask = re.search(r"^CapEff:\s*([0-9a-f]+)", status, re.MULTILINE)
    available = re.search(r"^MemAvailable:\s*(\d+) kB", host.read("/proc/meminfo") or "", re.MULTILINE)
    spec = importlib.util.find_spec("bcc")
    origin = spec.origin if spec else None
    return RuntimeFacts(
        capabilities=int(mask[1], 16) if mask else 0,
        bcc=origin,
        bcc_is_real=bool(origin) and Path(origin or "").with_name("libbcc.py").is_file(),
        libbcc=find_library("bcc"),
        available_mib=int(available[1]) / 1024 if available else None,
        clock=host.read(CLOCK),
        python=f"{sys.version_info.major}.{sys.version_info.minor}.{sys.version_info.micro}",
    )


def check(facts: RuntimeFacts) -> Iterator[Finding]:
    """Judge the facts."""
    yield _rights(facts)
    yield _bcc(facts)
    yield _memory(facts)
    yield _clock(facts)


def _has(facts: RuntimeFacts, name: str) -> bool:
    return bool(facts.capabilities >> CAPABILITIES[name] & 1)


def _rights(facts: RuntimeFacts) -> Finding:
    if _has(facts, "CAP_SYS_ADMIN"):
        return ok("runtime.rights", "CAP_SYS_ADMIN is held")
    if _has(facts, "CAP_BPF") and _has(facts, "CAP_PERFMON"):
        evidence = "CAP_BPF and CAP_PERFMON are held: enough to measure"
        return ok("runtime.rights", evidence) if _has(facts, "CAP_DAC_OVERRIDE") else note("runtime.rights", evidence)
    evidence = "neither CAP_SYS_ADMIN nor CAP_BPF with CAP_PERFMON is held"
    return failed("runtime.rights", evidence, "Run the agent as root (and the doctor with it: sudo prefetchd doctor).",
                  "measuring")  # fmt: skip


def _bcc(facts: RuntimeFacts) -> Finding:
    fix = "apt-get install python3-bpfcc, and run prefetchd from a virtual environment of /usr/bin/python3 made with \
--system-site-packages"
    if facts.bcc is None:
        return failed("runtime.bcc", f"Python {facts.python} cannot find the module bcc", fix, "measuring")
    if not facts.bcc_is_real:
        evidence = f"{facts.bcc} is not the BPF Compiler Collection (PyPI has an unrelated package of that name)"
        return failed("runtime.bcc", evidence, f"pip uninstall bcc; {fix}", "measuring")
    if facts.libbcc is None:
        return failed("runtime.bcc", "the library libbcc.so is missing", "apt-get install libbpfcc", "measuring")
    return ok("runtime.bcc", f"{Path(facts.bcc).parent} with {facts.libbcc}, Python {facts.python}")


def _memory(facts: RuntimeFacts) -> Finding:
    if facts.available_mib is None:
        return unknown("runtime.memory", "/proc/meminfo names no MemAvailable")
    evidence = f"{facts.available_mib:,.0f} MiB available, the agent takes about {AGENT_MIB}"
    if facts.available_mib < 2 * AGENT_MIB:
        return warning("runtime.memory", evidence, "Free memory on this node before starting the agent.")
    return ok("runtime.memory", evidence)


def _clock(facts: RuntimeFacts) -> Finding:
    if facts.clock is None:
        return unknown("runtime.clock", f"{CLOCK} cannot be read")
    if facts.clock in SLOW_CLOCKS:
        fix = "Find out why the kernel left tsc (dmesg | grep -i clocksource), or boot with tsc=reliable."
        return warning("runtime.clock", f"the clock source is {facts.clock}: every time stamp costs about 1 µs", fix)
    return ok("runtime.clock", f"the clock source is {facts.clock}")
