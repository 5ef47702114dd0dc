"""Rules for every test: under CI=true nothing is skipped, and the end says what ran where."""

import os
import signal
from collections import Counter
from pathlib import Path

import hypothesis
import pytest

IN_CI = os.environ.get("CI", "").lower() == "true"
TESTS = Path(__file__).parent

# Machines that share their CPUs make any deadline per example a lottery; in CI the examples are the same every time.
hypothesis.settings.register_profile("prefetchd", deadline=None, derandomize=IN_CI)
hypothesis.settings.load_profile("prefetchd")

TIERS = {
    "unit": "pure modules, lint and types",
    "contract": "one suite over every implementation",
    "native": "real BPF on this machine's kernel",
    "lab": "guest with Debian's kernel under QEMU",
    "bench": "costs",
}


# A shell has what it runs in the background ignore these, and children inherit that: no test of Ctrl-C would end.
for number, usual in (
    (signal.SIGINT, signal.default_int_handler),
    (signal.SIGHUP, signal.SIG_DFL),
    (signal.SIGQUIT, signal.SIG_DFL),
):
    if signal.getsignal(number) is signal.SIG_IGN:
        signal.signal(number, usual)


def pytest_addoption(parser):
    parser.addoption("--run-nightly", action="store_true", help="run the tests marked nightly as well")


def pytest_collection_modifyitems(config, items):
    if config.getoption("--run-nightly") or "nightly" in (config.getoption("-m") or ""):
        return
    for item in items:
        if item.get_closest_marker("nightly"):
            item.add_marker(pytest.mark.skip(reason="nightly: run `make test-nightly`"))


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item, call):
    report = (yield).get_result()
    if IN_CI and report.skipped and not hasattr(report, "wasxfail"):
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longrepr
        report.outcome = "failed"
        report.longrepr = f"skipped under CI=true, where nothing may be skipped: {reason}"


def pytest_terminal_summary(terminalreporter):
    counts: Counter = Counter()
    seconds: Counter = Counter()
    for outcome in ("passed", "failed", "skipped", "error"):
        for report in terminalreporter.stats.get(outcome, ()):
            tier = Path(report.nodeid).parts[1] if report.nodeid.startswith("tests/") else "unit"
            counts[tier, outcome] += 1
            seconds[tier] += getattr(report, "duration", 0.0)
    if not counts:
        return
    terminalreporter.write_sep("-", "what ran where")
    for tier, where in TIERS.items():
        row = {outcome: counts[tier, outcome] for outcome in ("passed", "failed", "skipped", "error")}
        if any(row.values()):
            text = ", ".join(f"{count} {outcome}" for outcome, count in row.items() if count)
            terminalreporter.write_line(f"{tier:9} {where:42} {text} in {seconds[tier]:.0f} s")
