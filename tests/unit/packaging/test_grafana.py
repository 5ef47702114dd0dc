"""The dashboards: written by the generator, every query answered by a real Prometheus that scrapes a real endpoint."""

import contextlib
import importlib.util
import json
import os
import re
import socket
import subprocess
import sys
import time
import urllib.parse
import urllib.request
from dataclasses import replace

import pytest
import yaml
from prometheus_client import CollectorRegistry, ProcessCollector

from agent.config import MetricsSection
from agent.metrics import ReportCollector
from agent.server import Endpoint
from tests.unit.packaging.recorded import reports_of
from tests.unit.packaging.support import FIXTURES, PACKAGING, SOURCE, busy_report

FOLDER = PACKAGING / "grafana"
FILES = sorted((FOLDER / "dashboards").glob("*.json"))
WINDOW = "6s"
PATIENCE_S = 60.0  # a scrape that comes too late on a busy machine leaves a gap of a few seconds


def dashboards():
    return {path.stem: json.loads(path.read_text()) for path in FILES}


def panels(dashboard):
    return [panel for panel in dashboard["panels"] if panel["type"] != "row"]


def queries():
    for name, dashboard in dashboards().items():
        for panel in panels(dashboard):
            for target in panel["targets"]:
                yield pytest.param(target["expr"], id=f"{name}/{panel['title']}/{target['refId']}")


def every(expression):
    """The query with its variables filled in for all nodes, jobs and devices."""
    filled = expression.replace("$__rate_interval", WINDOW)
    for variable in ("$instance", "$job", "$device"):
        filled = filled.replace(f'"{variable}"', '".*"')
    assert "$" not in filled
    return filled


def names_of(latest):
    return {sample.name for family in registry_of(latest).collect() for sample in family.samples}


def exported():
    return names_of(busy_report)


def registry_of(latest):
    """What `prefetchd run` registers."""
    registry = CollectorRegistry()
    ProcessCollector(namespace="prefetchd", registry=registry)
    registry.register(ReportCollector(latest, "0.1.0"))
    return registry


def used(expression):
    return set(re.findall(r"prefetchd_\w+", expression))


@pytest.fixture(scope="module")
def generator():
    sys.path.insert(0, str(FOLDER))
    try:
        spec = importlib.util.spec_from_file_location("prefetchd_grafana_generate", FOLDER / "generate.py")
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        yield module
    finally:
        sys.path.remove(str(FOLDER))


@contextlib.contextmanager
def serving(latest):
    """The agent's own endpoint over the reports that `latest` gives."""
    served = Endpoint(MetricsSection(listen="127.0.0.1:0"), registry_of(latest), dict, dict)
    served.start()
    try:
        yield served
    finally:
        served.close()


@pytest.fixture(scope="module")
def endpoint():
    """Reports in which every metric has a value; their counters grow as time passes."""
    begun = time.time()

    def latest():
        now = time.time()
        return busy_report(step=1 + int((now - begun) * 10), at=now)

    with serving(latest) as served:
        yield served


@pytest.fixture(scope="module")
def recorded():
    """The last 20 s of the demo's enforcing half in which jobs trained; some starve in it."""
    reports = [report for report in reports_of(FIXTURES / "demo.rec") if report.mode == "enforce" and trains(report)]
    last = reports[-200:]
    assert starved(last[-1]) > starved(last[0])
    return last


def starved(report):
    return sum(sum(one.starvation_by_cause.values()) for one in report.jobs.values())


def trains(report):
    return all(one.signals.queue_depth is not None for one in report.jobs.values() if one.job.training)


@pytest.fixture(scope="module")
def demo(recorded, tmp_path_factory):
    """The address of a Prometheus that watches the recorded demo, as fast as it went."""
    begun = time.time()

    def latest():
        now = time.time()
        place = min(int((now - begun) * 10), len(recorded) - 1)
        return replace(recorded[place], wall_time=now)

    with serving(latest) as served, scraping(served, tmp_path_factory.mktemp("demo")) as base:
        yield base


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@pytest.fixture(scope="module")
def prometheus(endpoint, tmp_path_factory):
    """The address of a Prometheus that scrapes the reports with everything in them."""
    with scraping(endpoint, tmp_path_factory.mktemp("prometheus")) as base:
        yield base


@contextlib.contextmanager
def scraping(endpoint, folder):
    """The address of a Prometheus with the project's scrape configuration and rules, a few seconds into its life."""
    config = yaml.safe_load((PACKAGING / "prometheus" / "scrape.yml").read_text())
    (job,) = config["scrape_configs"]
    job |= {"scrape_interval": "500ms", "scrape_timeout": "500ms"}
    job["static_configs"] = [{"targets": [f"127.0.0.1:{endpoint.port}"]}]
    config["global"] = {"evaluation_interval": "500ms"}
    config["rule_files"] = [str(PACKAGING / "prometheus" / "prefetchd.rules.yml")]
    (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
    address = f"127.0.0.1:{free_port()}"
    command = [
        "prometheus",
        f"--config.file={folder / 'prometheus.yml'}",
        f"--storage.tsdb.path={folder / 'data'}",
        f"--web.listen-address={address}",
    ]
    with (folder / "log").open("w") as log, subprocess.Popen(command, stdout=log, stderr=log) as process:
        try:
            base = f"http://{address}"
            wait_until(lambda: len(ask(base, "count_over_time(prefetchd_ticks_total[1m]) >= 5")) > 0, folder / "log")
            yield base
        finally:
            process.terminate()
            process.wait(timeout=60)


def wait_until(condition, log, seconds=120):
    limit = time.monotonic() + seconds
    while time.monotonic() < limit:
        try:
            if condition():
                return
        except OSError:
            pass
        time.sleep(0.2)
    pytest.fail(f"Prometheus has nothing to show after {seconds} s:\n{log.read_text()[-3000:]}")


def get(base, path, **parameters):
    with urllib.request.urlopen(f"{base}{path}?{urllib.parse.urlencode(parameters)}", timeout=10) as answer:
        return json.load(answer)["data"]


def ask(base, expression):
    return get(base, "/api/v1/query", query=expression)["result"]


def found_once(look, is_right):
    """What a look finds as soon as it is right, or at last."""
    limit = time.monotonic() + PATIENCE_S
    while not is_right(found := look()) and time.monotonic() < limit:
        time.sleep(0.2)
    return found


def has_values(result):
    return bool(result) and all(series["value"][1] != "NaN" for series in result)


def answer(base, expression):
    """What a query gives once every series of it has a value."""
    return found_once(lambda: ask(base, expression), has_values)


@pytest.mark.parametrize("expression", list(queries()))
def test_every_query_returns_data(prometheus, expression):
    result = answer(prometheus, every(expression))
    assert has_values(result), (expression, result)


def test_the_recorded_demo_answers_every_query_of_what_it_had(demo, recorded):
    """Its jobs read from one NVMe drive: no network, FUSE, page cache, hint or disk that seeks is in it."""
    had = names_of(lambda: recorded[-1])
    everything = {parameter.values[0] for parameter in queries()}
    asked = {expression for expression in everything if used(expression) <= had}
    absent = {name for expression in everything - asked for name in used(expression) - had}
    assert all(re.search("nfs|object|fuse|rearrange|defragment|cache|interface|hints", name) for name in absent), absent
    assert len(asked) > 0.7 * len(everything)
    silent, limit = asked, time.monotonic() + PATIENCE_S
    while silent and time.monotonic() < limit:  # jobs do not starve at every moment
        silent = {expression for expression in silent if not ask(demo, every(expression))}
        time.sleep(0.2)
    assert silent == set()


def test_variables_find_nodes_jobs_and_devices(prometheus):
    for dashboard in dashboards().values():
        for variable in dashboard["templating"]["list"][1:]:
            metric, label = re.fullmatch(r"label_values\((.+), (\w+)\)", variable["query"]["query"]).groups()
            found = answer(prometheus, f"count by ({label}) ({metric.replace('$instance', '.*')})")
            assert found
            assert all(series["metric"][label] for series in found)


def test_rules_evaluate_over_the_same_metrics(prometheus):
    def look():
        rules = [rule for group in get(prometheus, "/api/v1/rules")["groups"] for rule in group["rules"]]
        begun = {rule["name"] for rule in rules if rule.get("state") in ("pending", "firing")}
        return {rule["health"] for rule in rules}, begun & {"PrefetchdAgentDown", "PrefetchdProbeDegraded"}

    expected = ({"ok"}, {"PrefetchdProbeDegraded"})
    assert found_once(look, lambda found: found == expected) == expected


def test_training_jobs_keep_their_names(prometheus):
    found = {series["metric"]["job"] for series in answer(prometheus, "prefetchd_health_score")}
    assert found == {"resnet", "bert"}


def test_committed_files_are_what_the_generator_writes(generator):
    written = {dashboard.name: generator.render(dashboard) for dashboard in generator.DASHBOARDS}
    assert written == {path.stem: path.read_text() for path in FILES}


def test_no_dashboard_asks_for_an_unknown_metric():
    for dashboard in dashboards().values():
        for panel in panels(dashboard):
            for target in panel["targets"]:
                assert used(target["expr"])
                known = exported()
                assert used(target["expr"]) <= known, panel["title"]


def test_every_metric_is_shown_somewhere():
    shown = set().union(*(used(query.values[0]) for query in queries()))
    hidden = {name for name in exported() if name.startswith("prefetchd_")} - shown
    of_every_process = {f"prefetchd_process_{name}" for name in ("open_fds", "max_fds", "start_time_seconds")}
    of_every_process.add("prefetchd_process_virtual_memory_bytes")
    assert {name for name in hidden if not name.endswith(("_sum", "_count", "_created"))} == of_every_process


def test_panels_do_not_overlap_and_ids_are_unique():
    for dashboard in dashboards().values():
        cells = set()
        for panel in dashboard["panels"]:
            grid = panel["gridPos"]
            assert grid["x"] + grid["w"] <= 24
            columns = range(grid["x"], grid["x"] + grid["w"])
            here = {(x, grid["y"] + line) for x in columns for line in range(grid["h"])}
            assert not cells & here
            cells |= here
        ids = [panel["id"] for panel in dashboard["panels"]]
        assert len(ids) == len(set(ids))


def test_chart_carries_every_dashboard():
    linked = PACKAGING / "helm" / "prefetchd" / "files" / "dashboards"
    assert sorted(path.name for path in linked.glob("*.json")) == [path.name for path in FILES]


@pytest.mark.nightly
def test_drawings_are_made_of_what_prometheus_answers(tmp_path):
    command = [sys.executable, str(FOLDER / "draw.py"), "--output", str(tmp_path)]
    environment = {**os.environ, "PYTHONPATH": str(SOURCE)}
    subprocess.run(command, check=True, env=environment, timeout=300)
    drawn = {path.stem: path.read_bytes() for path in tmp_path.glob("*.png")}
    assert set(drawn) == set(dashboards())
    assert all(picture.startswith(b"\x89PNG") and len(picture) > 20_000 for picture in drawn.values())
    assert {path.stem for path in (FOLDER / "drawings").glob("*.png")} == set(drawn)


@pytest.mark.parametrize("script", ["grafana/generate.py", "package.py"])
def test_a_folder_that_cannot_be_made_is_a_sentence(script):
    done = subprocess.run(
        [sys.executable, PACKAGING / script, "--output", "/proc/none"],
        capture_output=True, text=True, check=False, env={**os.environ, "PYTHONPATH": str(SOURCE)},
    )  # fmt: skip
    assert done.returncode == 1
    assert done.stderr.count("\n") == 1
    assert "'/proc/none'" in done.stderr
    assert "--output" in done.stderr
