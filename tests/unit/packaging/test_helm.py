"""The chart: rendered and linted by Helm's own engine, every manifest held against the Kubernetes schemas."""

import importlib.util
import json
import subprocess
from itertools import chain

import helm_python
import kubernetes_validate
import pytest
import yaml

from agent import config as agent_config
from agent.__main__ import build_parser
from agent.commands import options
from agent.commands.restore import RELEASE_SECONDS
from agent.pid import GAINS_BY_MEDIUM
from agent.settings import policy_settings
from tests.unit.packaging.support import PACKAGING

CHART = PACKAGING / "helm" / "prefetchd"
VARIANTS = {path.stem: path for path in (PACKAGING / "helm" / "variants").glob("*.yaml")}
KUBERNETES = ("1.25", "1.30", "1.33")
OPERATOR_KINDS = {"ServiceMonitor", "PodMonitor", "PrometheusRule"}


def values_of(name):
    return yaml.safe_load(VARIANTS[name].read_text()) if name != "default" else {}


def render(values, name="prefetchd"):
    with helm_python.Chart.load(CHART) as chart:
        chart.validate_schema(values)
        rendered = chart.render(values, name=name, namespace="prefetchd")
    texts = [text for path, text in rendered.items() if path.endswith(".yaml")]
    return list(filter(None, chain.from_iterable(yaml.safe_load_all(text) for text in texts)))


def one(manifests, kind):
    (found,) = [manifest for manifest in manifests if manifest["kind"] == kind]
    return found


def agent_configuration(manifests):
    maps = [m for m in manifests if m["kind"] == "ConfigMap" and "prefetchd.toml" in m["data"]]
    return agent_config.parse(maps[0]["data"]["prefetchd.toml"])


def container(manifests):
    return one(manifests, "DaemonSet")["spec"]["template"]["spec"]["containers"][0]


every_variant = pytest.mark.parametrize("variant", ["default", *sorted(VARIANTS)])


@every_variant
def test_lint_finds_nothing(variant):
    found = helm_python.lint(CHART, values_of(variant), strict=True)
    worse_than_info = [message for message in found["messages"] if message["severity"] > 1]
    assert not found["errors"]
    assert not worse_than_info


@every_variant
def test_manifests_fit_the_kubernetes_schemas(variant):
    manifests = render(values_of(variant))
    assert one(manifests, "DaemonSet")
    for manifest in manifests:
        if manifest["kind"] not in OPERATOR_KINDS:
            for version in KUBERNETES:
                kubernetes_validate.validate(manifest, version, strict=True)


@every_variant
def test_the_agent_reads_the_rendered_configuration(variant):
    values = values_of(variant)
    read = agent_configuration(render(values))
    assert read.mode == values.get("config", {}).get("mode", "observe")
    assert read.jobs


def test_every_variant_is_documented():
    text = (PACKAGING / "README.md").read_text()
    assert all(f"variants/{name}.yaml" in text for name in VARIANTS)


def test_schema_is_what_the_generator_writes():
    spec = importlib.util.spec_from_file_location("prefetchd_helm_schema", PACKAGING / "helm" / "schema.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    same = (CHART / "values.schema.json").read_text() == module.render()
    assert same, "the configuration has changed: run PYTHONPATH=. packaging/helm/schema.py"


def test_schema_knows_every_default():
    schema = json.loads((CHART / "values.schema.json").read_text())
    assert set(yaml.safe_load((CHART / "values.yaml").read_text())) | {"global"} == set(schema["properties"])


@pytest.mark.parametrize(
    "values",
    [
        {"config": {"mode": "enforced"}},
        {"config": {"pools": {}}},
        {"config": {"devices": [{"device": "/dev/sda", "medium": "tape"}]}},
        {"config": {"devices": [{"device": "/dev/sda", "read_bytes_per_second": "6.5 GBit"}]}},
        {"port": 0},
        {"hostNetwork": "yes"},
        {"tolerances": []},
    ],
)
def test_wrong_values_are_refused_before_anything_is_installed(values):
    with pytest.raises(helm_python.HelmValuesError):
        render(values)


@pytest.mark.parametrize(
    "rate", ["6.5 GB", "120 MiB", "1.5e9", "7", "2GB/s", "3 gib", "4.", "5 B/s", "6.5 parsecs", ""]
)
def test_the_schema_takes_the_rates_that_the_agent_takes(rate):
    try:
        agent_config.ByteRate.parse(rate)
    except ValueError:
        with pytest.raises(helm_python.HelmValuesError):
            render({"config": {"devices": [{"device": "/dev/sda", "read_bytes_per_second": rate}]}})
    else:
        render({"config": {"devices": [{"device": "/dev/sda", "read_bytes_per_second": rate}]}})


@pytest.mark.parametrize(
    "values",
    [
        {"networkPolicy": {"enabled": True}},
        {"serviceMonitor": {"enabled": True}, "service": {"enabled": False}},
        {"tls": {"requireClientCertificate": True}},
        {"podMonitor": {"enabled": True}, "basicAuth": {"secretName": "users"}},
        {"serviceMonitor": {"enabled": True}, "tls": {"secretName": "tls", "requireClientCertificate": True}},
    ],
)
def test_values_that_contradict_each_other_are_refused(values):
    with pytest.raises(helm_python.HelmError, match="needs"):
        render(values)


def test_the_agent_gets_what_it_needs_of_the_node_and_a_root_it_cannot_write():
    manifests = render({})
    pod = one(manifests, "DaemonSet")["spec"]["template"]["spec"]
    assert pod["hostPID"]
    assert pod["hostNetwork"]
    assert container(manifests)["securityContext"] == {
        "privileged": True,
        "readOnlyRootFilesystem": True,
        "runAsUser": 0,
    }
    mounts = {mount["mountPath"]: mount.get("readOnly", False) for mount in container(manifests)["volumeMounts"]}
    assert {path for path, read_only in mounts.items() if not read_only} == {"/run/prefetchd", "/sys", "/tmp"}


def test_the_guardian_lives_outside_the_pod():
    assert agent_configuration(render({})).enforcement.guardian_cgroup == "/prefetchd-guardian"


def test_limits_are_released_before_the_pod_ends():
    """The hook is a command line that the program takes, and no shell is needed for it."""
    daemon_set = one(render({}), "DaemonSet")
    program, *words = container(render({}))["lifecycle"]["preStop"]["exec"]["command"]
    assert program == container(render({}))["command"][0]
    arguments = build_parser("restore").parse_args(words)
    assert (arguments.command, arguments.running) == ("restore", True)
    assert daemon_set["spec"]["template"]["spec"]["terminationGracePeriodSeconds"] > RELEASE_SECONDS


@pytest.mark.parametrize("address", ["192.0.2.7", "2001:db8::7"])
def test_the_endpoint_listens_on_the_pods_address_of_either_family(address):
    listen = container(render({}))["args"][-1].replace("$(POD_IP)", address)
    assert agent_config.split_address(listen) == (address, 9753)


@pytest.mark.parametrize("address", ["192.0.2.7", "2001:db8::7"])
@pytest.mark.parametrize(("variant", "scheme"), [("default", "http"), ("secure", "https")])
def test_commands_run_in_the_pod_ask_where_the_agent_listens(monkeypatch, tmp_path, variant, scheme, address):
    manifests = render(values_of(variant) | {"port": 9000})
    variables = {variable["name"]: variable.get("value", "") for variable in container(manifests)["env"]}
    monkeypatch.setenv("PREFETCHD_ADDRESS", variables["PREFETCHD_ADDRESS"].replace("$(POD_IP)", address))
    file = tmp_path / "prefetchd.toml"
    file.write_text(one(manifests, "ConfigMap")["data"]["prefetchd.toml"])
    asked = options.client(build_parser("doctor").parse_args(["doctor", "--config", str(file)]))
    host = f"[{address}]" if ":" in address else address
    assert asked.url == f"{scheme}://{host}:9000"


def test_the_values_to_begin_enforcing_with_leave_the_controller_as_it_was_tuned():
    config = agent_configuration(render(values_of("enforce")))
    assert policy_settings(config).gains == GAINS_BY_MEDIUM


def test_rights_are_those_of_reading_pods_only():
    manifests = render({})
    assert one(manifests, "ClusterRole")["rules"] == [
        {"apiGroups": [""], "resources": ["pods"], "verbs": ["list", "watch"]}
    ]
    account = one(manifests, "ClusterRoleBinding")["subjects"][0]
    assert account["name"] == one(manifests, "ServiceAccount")["metadata"]["name"]


def test_without_pod_labels_there_is_neither_a_right_nor_a_token():
    manifests = render({"podLabels": {"enabled": False}})
    kinds = {manifest["kind"] for manifest in manifests}
    assert not kinds & {"ClusterRole", "ClusterRoleBinding"}
    assert one(manifests, "DaemonSet")["spec"]["template"]["spec"]["automountServiceAccountToken"] is False


def test_a_changed_configuration_restarts_the_agents():
    def checksum(values):
        template = one(render(values), "DaemonSet")["spec"]["template"]
        return template["metadata"]["annotations"]["checksum/config"]

    assert checksum({}) == checksum({"maxUnavailable": 2})
    assert checksum({}) != checksum({"config": {"mode": "dry-run"}})


def test_secrets_end_up_where_the_configuration_points():
    manifests = render(values_of("secure"))
    metrics = agent_configuration(manifests).metrics
    mounts = {mount["mountPath"] for mount in container(manifests)["volumeMounts"]}
    for path in (metrics.certificate, metrics.key, metrics.client_ca, metrics.basic_auth_file):
        assert path.rpartition("/")[0] in mounts
    assert "tcpSocket" in container(manifests)["livenessProbe"]


@pytest.mark.parametrize(("variant", "kind"), [("operator", "PodMonitor"), ("service-monitor", "ServiceMonitor")])
def test_scraping_keeps_the_training_jobs_name_and_calls_the_target_prefetchd(variant, kind):
    spec = one(render(values_of(variant)), kind)["spec"]
    (endpoint,) = spec.get("endpoints") or spec["podMetricsEndpoints"]
    assert endpoint["honorLabels"] is True
    assert {"targetLabel": "job", "replacement": "prefetchd"} in endpoint["relabelings"]
    selector = spec["selector"]["matchLabels"].items()
    assert selector <= one(render({}), "DaemonSet")["spec"]["template"]["metadata"]["labels"].items()


def test_prometheus_shows_what_a_secured_endpoint_asks_for():
    (endpoint,) = one(render(values_of("secure")), "PodMonitor")["spec"]["podMetricsEndpoints"]
    assert endpoint["scheme"] == "https"
    assert {"cert", "keySecret"} <= set(endpoint["tlsConfig"])
    assert set(endpoint["basicAuth"]) == {"username", "password"}


def test_rules_in_the_cluster_are_those_of_the_file(tmp_path):
    spec = one(render(values_of("operator")), "PrometheusRule")["spec"]
    assert spec == yaml.safe_load((PACKAGING / "prometheus" / "prefetchd.rules.yml").read_text())
    (tmp_path / "rules.yml").write_text(yaml.safe_dump(spec))
    command = ["promtool", "check", "rules", str(tmp_path / "rules.yml")]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def test_a_release_of_another_name_keeps_its_objects_apart():
    names = {manifest["metadata"]["name"] for manifest in render({}, name="blue")}
    assert names == {"blue-prefetchd"}


def test_chart_and_program_have_one_version(project_version):
    metadata = yaml.safe_load((CHART / "Chart.yaml").read_text())
    assert metadata["version"] == metadata["appVersion"] == project_version
