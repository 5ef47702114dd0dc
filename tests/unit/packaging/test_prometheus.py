"""The rules, checked and tested by Prometheus' own tool, and the runbook that every alert points at."""

import re
import subprocess

import pytest
import yaml
from prometheus_client import CollectorRegistry, ProcessCollector

from agent.metrics import ReportCollector
from tests.unit.packaging.support import PACKAGING

RULES = PACKAGING / "prometheus" / "prefetchd.rules.yml"
TESTS = PACKAGING / "prometheus" / "prefetchd.rules.test.yml"


def alerts():
    groups = yaml.safe_load(RULES.read_text())["groups"]
    return [rule for group in groups for rule in group["rules"] if "alert" in rule]


@pytest.mark.parametrize(
    "command",
    [
        ("check", "rules", str(RULES)),
        ("test", "rules", str(TESTS)),
        ("check", "config", str(PACKAGING / "prometheus" / "scrape.yml")),
    ],
    ids=lambda command: " ".join(command[:2]),
)
def test_promtool_accepts(command):
    done = subprocess.run(["promtool", *command], check=False, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_alert_has_a_firing_and_a_quiet_case():
    cases = [case for test in yaml.safe_load(TESTS.read_text())["tests"] for case in test["alert_rule_test"]]
    fires = {case["alertname"] for case in cases if case["exp_alerts"]}
    quiet = {case["alertname"] for case in cases if not case["exp_alerts"]}
    names = {rule["alert"] for rule in alerts()}
    assert fires == names
    assert quiet == names


def test_every_alert_points_at_an_entry_of_the_runbook():
    entries = {
        f"runbook.md#{title.lower()}"
        for title in re.findall(r"^## (\w+)$", (PACKAGING / "runbook.md").read_text(), re.MULTILINE)
    }
    assert {rule["annotations"]["runbook"] for rule in alerts()} == entries


def test_every_alert_says_how_urgent_it_is():
    assert {rule["labels"]["severity"] for rule in alerts()} == {"warning", "critical"}


def test_scraped_labels_survive():
    config = yaml.safe_load((PACKAGING / "prometheus" / "scrape.yml").read_text())["scrape_configs"][0]
    assert config["job_name"] == "prefetchd"
    assert config["honor_labels"] is True


def test_rules_use_only_metrics_that_the_agent_exports(report):
    registry = CollectorRegistry()
    ProcessCollector(namespace="prefetchd", registry=registry)
    registry.register(ReportCollector(lambda: report, "1"))
    exported = {sample.name for family in registry.collect() for sample in family.samples}
    used = set(re.findall(r"(?<![:\w])prefetchd_\w+", " ".join(rule_expressions())))
    assert used
    assert used <= exported


def rule_expressions():
    return [rule["expr"] for group in yaml.safe_load(RULES.read_text())["groups"] for rule in group["rules"]]
