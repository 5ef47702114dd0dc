"""What the block probe costs, beside none and beside bcc's tools: ns per IO, IOPS lost, CPU, memory, start-up."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

from bpf.block import BlockProbe
from bpf.dataloader import DataLoaderProbe
from bpf.fuse import FuseProbe
from bpf.loader import Loader
from bpf.nfs import NfsProbe
from bpf.object_store import ObjectStoreProbe
from bpf.page_cache import PageCacheProbe
from bpf.probes import Probe
from bpf.workers import WorkersProbe
from tests.bench import peers
from tests.bench.load import CannotMeasureError, Load, null_block, scratch_cgroups, scratch_file

__all__ = ["CannotMeasureError", "add_arguments", "run", "set_defaults"]

REFERENCE = Path(__file__).with_name("reference.c")
STATS = Path("/proc/sys/kernel/bpf_stats_enabled")
READS_PER_SECOND = 10
"""The loop's passes, however long the jobs' iterations are (agent/loop.py)."""

SLICE_SECONDS = 0.25
SETTLE_SECONDS = 0.05
SLICES_PER_PAIR = 25
_PROBES: tuple[Callable[[Loader], Probe], ...] = (
    BlockProbe, NfsProbe, FuseProbe, PageCacheProbe, ObjectStoreProbe, DataLoaderProbe, WorkersProbe,
)  # fmt: skip
_NOBODY = 1 << 40
"""No cgroup has this id."""
_COST_ROUNDS = 5
_DEFAULTS = {"pairs": 8, "seconds": 3.0, "target": None, "null_block": False, "jobs": [1, 32, 1000]}
_STARTUP = """
import json, time
began = time.perf_counter()
from bpf.loader import Loader
from bpf.block import BlockProbe
with Loader(cache=None) as loader:
    probe = BlockProbe(loader)
    status = dict(line.split(":", 1) for line in open("/proc/self/status"))
    print(json.dumps({"seconds": time.perf_counter() - began, "tier": probe.status().tier,
                      "rss_bytes": int(status["VmRSS"].split()[0]) * 1024,
                      "anonymous_bytes": int(status["RssAnon"].split()[0]) * 1024}))
"""

_T95 = {1: 12.71, 2: 4.30, 3: 3.18, 4: 2.78, 5: 2.57, 6: 2.45, 7: 2.36, 8: 2.31, 9: 2.26, 11: 2.20, 15: 2.13, 19: 2.09}
"""Student's t for 95 %, by degrees of freedom."""

Report = dict[str, Any]


class Measured(Protocol):
    """Something with BPF programs: ours or a tool of bcc."""

    def run_statistics(self) -> dict[str, tuple[int, int]]: ...


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--pairs", type=int, help="rounds of runs without and with each probe (default 8)")
    parser.add_argument("--seconds", type=float, help="length of one run (default 3)")
    parser.add_argument("--target", type=Path, help="device or file to read (default: a scratch file in /tmp)")
    parser.add_argument("--null-block", action="store_true", help="read a null_blk device, made for the run")
    parser.add_argument("--jobs", type=int, nargs="+", help="numbers of jobs to read (default 1 32 1000)")
    set_defaults(parser)


def set_defaults(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(**_DEFAULTS)


def run(arguments: argparse.Namespace) -> Report:
    """Measure everything and print it."""
    with contextlib.ExitStack() as stack:
        target = arguments.target or stack.enter_context(null_block() if arguments.null_block else scratch_file(None))
        (cgroup,) = stack.enter_context(scratch_cgroups(1))
        loader = stack.enter_context(Loader())
        load = Load(cgroup, target, arguments.seconds)
        what = "null_blk" if arguments.null_block else str(arguments.target or "scratch file")
        report: Report = {"kernel": os.uname().release, "target": what}
        slices = ("slices", lambda: iops_lost_in_slices(loader, load, arguments.pairs * SLICES_PER_PAIR))
        for name, measure in (
            ("per_io", lambda: per_io(loader, load, max(1, min(_COST_ROUNDS, arguments.pairs)))),
            ("iops", lambda: iops_lost(loader, load, arguments.pairs)),
            *(() if arguments.null_block else (slices,)),  # fio never waits there: who counts would never run
            ("jobs", lambda: cpu_of_jobs(loader, target, arguments.jobs)),
            ("startup", startup),
        ):
            print(f"measures {name}…", file=sys.stderr, flush=True)
            report[name] = measure()
    show(report)
    return report


@contextlib.contextmanager
def kernel_statistics() -> Iterator[None]:
    """Let the kernel time every BPF program while the body runs."""
    before = STATS.read_text()
    STATS.write_text("1")
    try:
        yield
    finally:
        STATS.write_text(before)


def timed_runs(program: Measured, load: Load) -> tuple[int, dict[str, tuple[int, int]]]:
    """IOs done and, by function, how often it ran and for how long (ns)."""
    before = program.run_statistics()
    with kernel_statistics():
        ios, _ = load.run()
    after = program.run_statistics()
    return ios, {name: (after[name][0] - before[name][0], after[name][1] - before[name][1]) for name in after}


def per_io(loader: Loader, load: Load, rounds: int) -> Report:
    """Nanoseconds per IO: the block probe on a managed and an unmanaged job, the reference histogram, bcc's tools.

    Of several rounds over all of them the median counts: what other CPUs do to shared memory changes from run to run.
    The kernel's clock reads cost time themselves: a program that does nothing tells how much, and that is taken off.
    """
    empty = loader.load(REFERENCE)
    empty.attach_raw_tracepoint("block_rq_issue", "nothing")
    _, runs = timed_runs(empty, load)
    clock_ns = runs["nothing"][1] / max(1, runs["nothing"][0])
    empty.close()
    costs: dict[str, list[Report]] = {"managed": [], "unmanaged": [], "reference": []}
    found: Report = {"clock_ns_per_run": clock_ns, "rounds": rounds}
    for _ in range(rounds):
        probe = BlockProbe(loader)
        for name, managed in (("managed", load.cgroup.stat().st_ino), ("unmanaged", _NOBODY)):
            probe.manage([managed])
            costs[name].append(cost_per_io(*timed_runs(probe.program, load), clock_ns))
        found["tier"], found["losses"] = probe.status().tier, probe.losses()
        probe.close()
        reference = loader.load(REFERENCE)
        reference.attach_tracepoint("block:block_rq_issue", "reference_issue")
        reference.attach_tracepoint("block:block_rq_complete", "reference_complete")
        costs["reference"].append(cost_per_io(*timed_runs(reference, load), clock_ns))
        reference.close()
    tools = {name: [_tool_cost(name, load, clock_ns)] for name in peers.TOOLS}
    for name in (name for name, (first,) in tools.items() if "why_not" not in first):
        tools[name] += [_tool_cost(name, load, clock_ns) for _ in range(rounds - 1)]
    return found | {name: _median(several) for name, several in (costs | tools).items()}


def _median(costs: list[Report]) -> Report:
    """The measurement in the middle, by its net cost."""
    return sorted(costs, key=lambda cost: cost.get("net_ns", 0.0))[(len(costs) - 1) // 2]


def _tool_cost(name: str, load: Load, clock_ns: float) -> Report:
    """A tool's nanoseconds per IO, CPU of its process and memory; why not, where it does not start here."""
    try:
        with peers.running(name) as tool:
            before, began = tool.cpu_seconds(), time.monotonic()
            cost = cost_per_io(*timed_runs(tool, load), clock_ns)
            cores = (tool.cpu_seconds() - before) / (time.monotonic() - began)
            return cost | {"cores": cores, "rss_bytes": tool.rss_bytes()}
    except CannotMeasureError as error:
        return {"why_not": str(error)}


def cost_per_io(ios: int, runs: dict[str, tuple[int, int]], clock_ns: float) -> Report:
    """Nanoseconds per IO by function and in all, as measured and without the clock's own cost."""
    parts = {name: ns / ios for name, (count, ns) in runs.items() if count}
    clock = sum(count for count, _ in runs.values()) * clock_ns / ios
    return {"parts": parts, "measured_ns": sum(parts.values()), "net_ns": sum(parts.values()) - clock}


def iops_lost(loader: Loader, load: Load, rounds: int) -> Report:
    """Share of IOPS lost against no probe of the same round, with the 95 % confidence interval of the mean.

    Every round makes one run without and one with each probe, each time beginning with another, so that a drift of the
    machine favours none.
    """
    starts: dict[str, Callable[[], contextlib.AbstractContextManager[object]]] = {
        "none": contextlib.nullcontext,
        "block probe": lambda: _managing(loader, load),
    }
    starts |= {name: lambda name=name: peers.running(name) for name in peers.TOOLS if _starts(name)}
    rates: dict[str, list[float]] = {name: [] for name in starts}
    for at in range(rounds):
        names = list(starts)
        for name in (names[(at + place) % len(names)] for place in range(len(names))):
            with starts[name]():
                rates[name].append(load.run()[1])
    without = rates.pop("none")
    lost = {name: _interval([1 - a / b for a, b in zip(seen, without, strict=True)]) for name, seen in rates.items()}
    return {"iops": statistics.median(without), "rounds": rounds, "lost": lost}


def iops_lost_in_slices(loader: Loader, load: Load, pairs: int) -> Report:
    """Share of IOPS lost to the block probe, from short slices of one running load with it attached and detached.

    What else the machine does changes little from one slice to the next, so many of them tell a per cent. Half of the
    pairs begin with the probe, the others without.
    """
    lost: list[float] = []
    with _managing(loader, load) as probe, load.running(pairs * 2 * (SLICE_SECONDS + SETTLE_SECONDS) * 3) as count:
        for at in range(pairs):
            rates = {}
            for is_attached in (at % 2 == 0, at % 2 != 0):
                with contextlib.nullcontext() if is_attached else probe.program.paused():
                    rates[is_attached] = _rate(count)
            lost.append(1 - rates[True] / rates[False])
    return median_interval(lost) | {"pairs": pairs}


def median_interval(values: Sequence[float]) -> Report:
    """Median and its 95 % confidence interval by order statistics, whatever the distribution; from 6 values on.

    >>> median_interval([4.0, 1.0, 2.0, 90.0, 3.0, 5.0, 6.0])
    {'median': 4.0, 'low': 1.0, 'high': 90.0}
    """
    ordered = sorted(values)
    rank = max(0, int((len(ordered) - 1.96 * len(ordered) ** 0.5) / 2))
    return {"median": statistics.median(ordered), "low": ordered[rank], "high": ordered[-1 - rank]}


def _rate(count: Callable[[], int]) -> float:
    """Bytes a second over one slice."""
    time.sleep(SETTLE_SECONDS)
    before, began = count(), time.monotonic()
    time.sleep(SLICE_SECONDS)
    return (count() - before) / (time.monotonic() - began)


@contextlib.contextmanager
def _managing(loader: Loader, load: Load) -> Iterator[BlockProbe]:
    probe = BlockProbe(loader)
    probe.manage([load.cgroup.stat().st_ino])
    try:
        yield probe
    finally:
        probe.close()


def _starts(name: str) -> bool:
    try:
        with peers.running(name):
            return True
    except CannotMeasureError:
        return False


def _interval(values: Sequence[float]) -> Report:
    """Mean and its 95 % confidence interval, by Student's t with few values (normal beyond the table)."""
    mean = statistics.fmean(values)
    if len(values) < 2:
        return {"mean": mean, "low": float("nan"), "high": float("nan")}
    half = _T95.get(len(values) - 1, 1.96) * statistics.stdev(values) / len(values) ** 0.5
    return {"mean": mean, "low": mean - half, "high": mean + half}


def cpu_of_jobs(loader: Loader, target: Path, counts: Sequence[int]) -> list[Report]:
    """CPU that reading every probe takes for so many jobs, and of that the block probe's part, as the loop reads."""
    with contextlib.ExitStack() as stack:
        probes: list[Probe] = []
        for make in _PROBES:
            probes.append(make(loader))
            stack.callback(probes[-1].close)
        return [_cpu_of(probes, target, count) for count in counts]


def _cpu_of(probes: Sequence[Probe], target: Path, count: int) -> Report:
    with scratch_cgroups(count) as folders:
        for probe in probes:
            probe.manage([folder.stat().st_ino for folder in folders])
        _touch_from(folders, target)
        repeats = max(20, 2000 // count)
        block_s = _cpu_seconds(lambda: probes[0].read(time.monotonic_ns()), repeats)
        every_s = _cpu_seconds(lambda: [(one.read(time.monotonic_ns()), one.status()) for one in probes], repeats)
        jobs = len({key.cgroup_id for key in probes[0].read(time.monotonic_ns()).blocks} - {0})
        for probe in probes:
            probe.manage([])
    cores = {"block_cores": block_s * READS_PER_SECOND, "cores": every_s * READS_PER_SECOND}
    return {"jobs": jobs, "seconds_per_read": every_s} | cores


def _touch_from(folders: list[Path], target: Path) -> None:
    """One direct read from inside each cgroup, by a process that moves through them."""
    script = (
        "import mmap, os, sys\n"
        "file, page = os.open(sys.argv[1], os.O_RDONLY | os.O_DIRECT), mmap.mmap(-1, 4096)\n"
        "for folder in sys.stdin.read().split():\n"
        "    open(folder + '/cgroup.procs', 'w').write(str(os.getpid()))\n"
        "    os.preadv(file, [page], 0)\n"
    )
    names = "\n".join(map(str, folders))
    subprocess.run([sys.executable, "-c", script, str(target)], input=names, text=True, check=True)


def _cpu_seconds(call: Callable[[], object], repeats: int) -> float:
    began = time.process_time()
    for _ in range(repeats):
        call()
    return (time.process_time() - began) / repeats


def startup() -> Report:
    """Time from nothing to an attached probe, and the memory of a process with just that, in a fresh interpreter."""
    done = subprocess.run([sys.executable, "-c", _STARTUP], capture_output=True, text=True, check=True)
    found: Report = json.loads(done.stdout)
    return found


def show(report: Report) -> None:
    """Print the figures as tables."""
    per, iops, start = report["per_io"], report["iops"], report["startup"]
    print(
        f"kernel {report['kernel']}, tier {per['tier']}, {report['target']}, {iops['iops']:,.0f} IOPS without a probe"
    )
    print(
        f"\n{'ns per IO':32}{'measured':>10}{'net':>10}{'ratio':>8}    (clock: {per['clock_ns_per_run']:.0f} ns a run)"
    )
    for title, name in (
        ("block probe, managed job", "managed"),
        ("block probe, unmanaged job", "unmanaged"),
        ("latency histogram, no owner", "reference"),
        *((f"bcc's {name}", name) for name in peers.TOOLS),
    ):
        _show_cost(title, per[name], per["managed"]["net_ns"])
    for name, lost in iops["lost"].items():
        print(
            f"\nIOPS lost with {name}, {iops['rounds']} rounds: {lost['mean']:.1%} "
            f"(95 %: {lost['low']:.1%} to {lost['high']:.1%})",
            end="",
        )
    if slices := report.get("slices"):
        print(
            f"\nIOPS lost with block probe, median of {slices['pairs']} pairs of {SLICE_SECONDS} s in one run: "
            f"{slices['median']:.2%} (95 %: {slices['low']:.2%} to {slices['high']:.2%})",
            end="",
        )
    print(
        f"\n\njobs    CPU per read of all probes    cores at {READS_PER_SECOND} reads a second    of it the block probe"
    )
    for row in report["jobs"]:
        milliseconds, all_cores, block_cores = row["seconds_per_read"] * 1e3, row["cores"], row["block_cores"]
        print(f"{row['jobs']:4}    {milliseconds:23.2f} ms    {all_cores:28.4f}    {block_cores:.4f}")
    for name in (name for name in peers.TOOLS if "cores" in per[name]):
        print(f"bcc's {name}: {per[name]['cores']:.3f} cores, {per[name]['rss_bytes'] / 1e6:.0f} MB")
    print(
        f"\nstart-up {start['seconds']:.2f} s; memory {start['rss_bytes'] / 1e6:.0f} MB, "
        f"{start['anonymous_bytes'] / 1e6:.0f} MB of it anonymous"
    )


def _show_cost(title: str, cost: Report, ours_ns: float) -> None:
    """One line; the ratio is to the block probe on a managed job."""
    if "why_not" in cost:
        print(f"{title:32}{'-':>10}{'-':>10}{'-':>8}    {cost['why_not']}")
        return
    parts = ", ".join(f"{part} {ns:.0f}" for part, ns in sorted(cost["parts"].items()))
    ratio = cost["net_ns"] / ours_ns
    print(f"{title:32}{cost['measured_ns']:10.0f}{cost['net_ns']:10.0f}{ratio:8.2f}    {parts}")
