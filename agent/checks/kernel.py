"""Does the kernel offer what the probes need: BPF, BTF, headers, tracepoints, kprobes, no lockdown."""

from __future__ import annotations

import gzip
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, field

from agent.checks.finding import Finding, failed, note, ok, unknown, warning
from agent.checks.host import Host
from bpf.headers import find_headers

BPF_SYSCTL = "/proc/sys/kernel/unprivileged_bpf_disabled"
"""Exists exactly where the kernel has the bpf system call (kernel/bpf/syscall.c)."""
JIT_SYSCTL = "/proc/sys/net/core/bpf_jit_enable"
BTF = "/sys/kernel/btf/vmlinux"
LOCKDOWN = "/sys/kernel/security/lockdown"
TRACE_FOLDERS = ("/sys/kernel/tracing", "/sys/kernel/debug/tracing")
KPROBE_SOURCE = "/sys/bus/event_source/devices/kprobe"
"""The perf event source of kprobes; exists exactly where the kernel can make them (kernel/events/core.c)."""
TRACEPOINTS = {
    "block/block_bio_queue": "measuring",
    "block/block_rq_issue": "measuring",
    "block/block_rq_complete": "measuring",
    "syscalls/sys_enter_write": "",
    "syscalls/sys_enter_poll": "",
}
"""Events that the probes cannot do without (`measuring`), or without which only the DataLoader probe is off."""


@dataclass(frozen=True, slots=True)
class KernelFacts:
    """What was seen. `events` holds the tracepoints that exist, None where tracefs is not mounted or not readable."""

    release: str
    bpf: bool
    jit: str | None
    btf_bytes: int | None
    headers: str | None
    trace_folder: bool
    events: frozenset[str] | None
    kprobes: bool
    lockdown: str | None
    config: dict[str, str] = field(default_factory=dict)


def gather(host: Host) -> KernelFacts:
    """Read the kernel's files; nothing is mounted or changed."""
    release = (host.read("/proc/sys/kernel/osrelease") or os.uname().release).strip()
    btf = host.at(BTF)
    return KernelFacts(
        release=release,
        bpf=host.exists(BPF_SYSCTL),
        jit=host.read(JIT_SYSCTL),
        btf_bytes=btf.stat().st_size if btf.is_file() else None,
        headers=_headers(host),
        trace_folder=any(host.exists(folder) for folder in TRACE_FOLDERS),
        events=_events(host),
        kprobes=has_kprobes(host),
        lockdown=host.read(LOCKDOWN),
        config=kernel_config(host, release),
    )


def has_kprobes(host: Host) -> bool:
    """Whether the kernel can make kprobes."""
    return host.exists(KPROBE_SOURCE)


def _headers(host: Host) -> str | None:
    """Where headers were found; a tree made for the search is removed again."""
    found = find_headers(host.root)
    if found is None:
        return None
    found.remove()
    return found.origin


def _events(host: Host) -> frozenset[str] | None:
    for folder in TRACE_FOLDERS:
        if host.names(f"{folder}/events"):
            return frozenset(event for event in TRACEPOINTS if host.exists(f"{folder}/events/{event}"))
    return None


def kernel_config(host: Host, release: str) -> dict[str, str]:
    """The options the kernel was built with, from /proc/config.gz or /boot; empty where neither is readable."""
    try:
        text = gzip.decompress(host.at("/proc/config.gz").read_bytes()).decode()
    except (OSError, EOFError):
        text = host.read(f"/boot/config-{release}") or ""
    return dict(re.findall(r"^(CONFIG_\w+)=(.*)$", text, re.MULTILINE))


def check(facts: KernelFacts) -> Iterator[Finding]:
    """Judge the facts."""
    yield _bpf(facts)
    yield _jit(facts)
    yield _btf(facts)
    yield _header_finding(facts)
    yield _tracefs(facts)
    yield from _tracepoints(facts)
    yield _ladder(facts)
    yield _lockdown(facts)


def _bpf(facts: KernelFacts) -> Finding:
    if facts.bpf:
        return ok("kernel.bpf", f"kernel {facts.release} has the bpf system call")
    fix = "Boot a kernel with CONFIG_BPF_SYSCALL=y and CONFIG_BPF_EVENTS=y; every distribution's stock kernel has them."
    return failed("kernel.bpf", f"kernel {facts.release} has no bpf system call ({BPF_SYSCTL} is missing)", fix,
                  "measuring")  # fmt: skip


def _jit(facts: KernelFacts) -> Finding:
    if facts.jit is None and facts.config.get("CONFIG_BPF_JIT_ALWAYS_ON") != "y":
        return unknown("kernel.bpf_jit", f"{JIT_SYSCTL} cannot be read", "Run as root.")
    if facts.jit == "0":
        fix = "sysctl -w net.core.bpf_jit_enable=1, and the same line in /etc/sysctl.d/prefetchd.conf"
        return warning("kernel.bpf_jit", "BPF programs are interpreted: every request costs several times more", fix)
    return ok("kernel.bpf_jit", "BPF programs are compiled")


def _btf(facts: KernelFacts) -> Finding:
    if facts.btf_bytes:
        return ok("kernel.btf", f"{BTF}, {facts.btf_bytes / 2**20:.1f} MiB")
    fix = "Boot a kernel with CONFIG_DEBUG_INFO_BTF=y (Debian 12, Ubuntu 22.04, RHEL 9 and later have it)."
    return failed("kernel.btf", f"{BTF} is missing, so the offsets of kernel fields are not known", fix, "measuring")


def _header_finding(facts: KernelFacts) -> Finding:
    if facts.headers:
        return ok("kernel.headers", f"headers for the BPF compiler: {facts.headers}")
    fix = f"apt-get install linux-headers-{facts.release}, or any linux-headers package: layouts come from BTF anyway"
    return failed("kernel.headers", f"no headers for {facts.release}, none in /usr/src, no kheaders.tar.xz", fix,
                  "measuring")  # fmt: skip


def _tracefs(facts: KernelFacts) -> Finding:
    if facts.events is not None:
        return ok("kernel.tracefs", "tracefs is mounted")
    if facts.trace_folder:
        return note("kernel.tracefs", "tracefs is not mounted or not readable; the agent mounts it while it runs",
                    "mount -t tracefs none /sys/kernel/tracing")  # fmt: skip
    fix = "Boot a kernel with CONFIG_FTRACE=y; in a container, mount the host's /sys/kernel/tracing."
    return failed("kernel.tracefs", f"neither of {' and '.join(TRACE_FOLDERS)} exists", fix, "measuring")


def _tracepoints(facts: KernelFacts) -> Iterator[Finding]:
    if facts.events is None:
        yield unknown("kernel.tracepoints", "tracepoints can be listed only where tracefs is mounted and readable",
                      "mount -t tracefs none /sys/kernel/tracing, then run the doctor again as root")  # fmt: skip
        return
    absent = [event for event in TRACEPOINTS if event not in facts.events]
    needed = [event for event in absent if TRACEPOINTS[event]]
    if needed:
        fix = "Boot a kernel with CONFIG_BLOCK=y, CONFIG_TRACEPOINTS=y and CONFIG_EVENT_TRACING=y."
        yield failed("kernel.tracepoints", f"missing: {', '.join(needed)}", fix, "measuring")
    elif absent:
        yield warning("kernel.tracepoints", f"missing: {', '.join(absent)}: PyTorch loaders are not seen by themselves",
                      "Boot a kernel with CONFIG_FTRACE_SYSCALLS=y, or let the training code send hints.")  # fmt: skip
    else:
        yield ok("kernel.tracepoints", f"all {len(TRACEPOINTS)} that are needed")


def _ladder(facts: KernelFacts) -> Finding:
    if facts.kprobes:
        return ok("kernel.kprobes", "kprobes are built in: latency is measured from submission, throttle wait included")
    evidence = "no kprobes: the block probe uses tracepoints, throttle wait comes from io.stat and io.pressure"
    return note("kernel.kprobes", evidence, "For the finer split boot a kernel with CONFIG_KPROBES=y.")


def _lockdown(facts: KernelFacts) -> Finding:
    chosen = re.search(r"\[(\w+)\]", facts.lockdown or "")
    level = chosen[1] if chosen else "none"
    if level == "confidentiality":
        fix = "Boot with lockdown=integrity (BPF stays allowed), or switch Secure Boot's lockdown to integrity."
        return failed("kernel.lockdown", "lockdown is at `confidentiality`: BPF may not read kernel memory", fix,
                      "measuring")  # fmt: skip
    return ok("kernel.lockdown", f"lockdown is at `{level}`, which allows BPF")
