"""The README keeps step with the code: the metrics table is generated, commands exist, files it names are there."""

import re
from pathlib import Path

from prometheus_client import CollectorRegistry

from agent.__main__ import COMMANDS, build_parser
from agent.metrics import ReportCollector
from tests.unit.agent.made_reports import story

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
OUTSIDE = {"ln", "make", "curl", "kill", "python", "git", "cd"}


def metric_rows():
    """One row per family in the order of exposition, made by the collector itself over a made-up report."""
    report, _ = next(story(4.0))
    registry = CollectorRegistry()
    registry.register(ReportCollector(lambda: report, "0"))
    rows = []
    for family in registry.collect():
        suffix = {"counter": "_total", "info": "_info"}.get(family.type, "")
        labels = ", ".join(getattr(family, "_labelnames", ()) or ())
        rows.append(f"| `{family.name}{suffix}` | {family.type} | {labels} | {family.documentation} |")
    return rows


def table_in_readme():
    found = re.search(r"<!-- metrics: begin -->\n(.*?)<!-- metrics: end -->", README, re.DOTALL)
    return found[1].splitlines()[2:]


def test_metrics_table_is_what_the_collector_exports():
    assert table_in_readme() == metric_rows(), "\n" + "\n".join(metric_rows())


def shell_lines():
    for block in re.findall(r"```sh\n(.*?)```", README, re.DOTALL):
        for line in block.splitlines():
            command = line.partition("#")[0].strip()
            if command:
                yield command


def test_every_command_in_the_readme_parses():
    """prefetchd commands go through the real parser, make targets through the Makefile, modules through their files."""
    targets = set(re.findall(r"(?m)^([a-z-]+):", (ROOT / "Makefile").read_text()))
    seen = 0
    for line in shell_lines():
        words = [word for word in line.removeprefix("sudo ").split() if "=" not in word.split("/")[0] or "--" in word]
        program = words[0].removeprefix(".venv/bin/")
        if program == "prefetchd":
            chosen = next(word for word in words[1:] if not word.startswith("-"))
            assert chosen in COMMANDS, line
            build_parser(chosen).parse_args(words[1:])
        elif program == "make":
            assert set(words[1:]) <= targets, line
        elif program == "python":
            assert words[1] == "-m", line
            assert (ROOT / words[2].replace(".", "/") / "__main__.py").exists(), line
        else:
            assert program in OUTSIDE, line
        seen += 1
    assert seen > 10


def test_every_command_is_in_the_table():
    for name in COMMANDS:
        assert f"| `{name}` |" in README, name


def test_files_that_are_linked_exist():
    for target in re.findall(r"\]\(([^)#]+)\)", README):
        if "://" not in target:
            assert (ROOT / target).exists(), target
