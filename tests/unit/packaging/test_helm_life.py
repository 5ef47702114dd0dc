"""The README's way with Helm, typed line by line: the real engine installs, upgrades and removes through an API server.

There is no cluster here: `cluster.py` keeps what the engine applies, and refuses what the Kubernetes schemas refuse.
"""

import re
import shlex
import shutil
from pathlib import Path

import helm_python
import pytest
import yaml

from agent import config as agent_config
from agent.__main__ import build_parser
from agent.jobs import PodInfo, select_jobs
from cgroup.tree import Cgroup
from tests.unit.packaging.cluster import OPERATOR, RESOURCES, Cluster
from tests.unit.packaging.support import PACKAGING

PART = (PACKAGING / "README.md").read_text().split("\n## Kubernetes, with Helm\n")[1].split("\n## ")[0]
VARIANTS = sorted((PACKAGING / "helm" / "variants").glob("*.yaml"))
FLAGS = ("--create-namespace", "--reuse-values")
UID = "0a1b2c3d-0000-4000-8000-00000000beef"
POD_CGROUP = f"/kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod{UID.replace('-', '_')}.slice"


@pytest.fixture
def cluster():
    """A cluster without any object."""
    stand_in = Cluster()
    yield stand_in
    stand_in.close()
    assert stand_in.refused == []


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A source tree to type in."""
    (tmp_path / "packaging").symlink_to(PACKAGING)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def helm(cluster):
    """Helm, connected to the cluster; its own records stay in memory."""
    connection = {"kube_apiserver": cluster.url, "kubeconfig_content": "apiVersion: v1\nkind: Config\n"}
    with helm_python.Config(**connection, namespace="prefetchd", storage_driver="memory") as connected:
        yield connected


def command(verb):
    """The README's `helm VERB`, as (words, options)."""
    text = re.search(rf"helm {verb} (.*?)(?:\n\s*```|`)", PART, re.DOTALL)[1].replace("\\\n", " ")
    words, options = [], {}
    left = iter(shlex.split(text))
    for word in left:
        if word.startswith("--"):
            options[word] = True if word in FLAGS else next(left)
        else:
            words.append(word)
    assert options.pop("--namespace") == "prefetchd"
    return words, options


def values_of(options):
    values = yaml.safe_load(Path(options["--values"]).read_text())
    return helm_python.parse_set_string(options.get("--set", "")) | values


def install(helm):
    (name, chart), options = command("install")
    assert set(options) == {"--create-namespace", "--set", "--values"}
    helm.install(chart, name, values_of(options), create_namespace=True, timeout=20)


def upgrade(helm):
    (name, chart), options = command("upgrade")
    assert set(options) == {"--reuse-values", "--values"}
    (copied,) = re.findall(r"^ *cp (\S+) (\S+)$", PART, re.MULTILINE)
    shutil.copy(*copied)
    helm.upgrade(chart, name, values_of(options), reuse_values=True, timeout=20)


def uninstall(helm):
    (name,), options = command("uninstall")
    assert not options
    helm.uninstall(name, timeout=20)


def configuration(cluster):
    return agent_config.parse(cluster.the("ConfigMap")["data"]["prefetchd.toml"])


def test_the_written_way_from_install_to_removal(helm, cluster, folder):
    install(helm)
    everything = [
        "ClusterRole",
        "ClusterRoleBinding",
        "ConfigMap",
        "DaemonSet",
        "Namespace",
        "Service",
        "ServiceAccount",
    ]
    assert cluster.kinds() == everything
    assert configuration(cluster).mode == "observe"
    pod = cluster.the("DaemonSet")["spec"]["template"]["spec"]
    image = pod["containers"][0]["image"]
    assert image.startswith("YOUR-REGISTRY/prefetchd:")
    assert f"push {image}" in PART
    assert pod["nodeSelector"] == {"nvidia.com/gpu.present": "true"}

    upgrade(helm)
    assert cluster.kinds() == everything
    assert configuration(cluster).mode == "enforce"
    assert configuration(cluster).devices
    pod = cluster.the("DaemonSet")["spec"]["template"]["spec"]
    assert pod["containers"][0]["image"] == image, "what was set at the installation is forgotten"

    uninstall(helm)
    assert cluster.kinds() == ["Namespace"]


def test_a_labelled_pod_is_a_training_job_of_the_written_weight(helm, cluster, folder):
    install(helm)
    metadata = yaml.safe_load(re.search(r"```yaml\n(.*?)```", PART, re.DOTALL)[1])["metadata"]
    (job,) = jobs_of(cluster, metadata["labels"], metadata["annotations"])
    assert (job.training, job.weight, job.name) == (True, 200.0, "bert-0")
    label, value = re.search(r'carry `(\S+): "(\w+)"`', PART).groups()
    (neighbour,) = jobs_of(cluster, {label: value}, {})
    assert neighbour.training is False
    assert jobs_of(cluster, {}, {}) == ()


def jobs_of(cluster, labels, annotations):
    """What the installed configuration makes of one pod on a node whose kubelet uses systemd's cgroups."""
    pod = PodInfo("bert-0", "ml", labels, annotations)
    return select_jobs([Cgroup(11, POD_CGROUP)], configuration(cluster), lambda uid: pod if uid == UID else None)


def test_commands_in_the_pod_are_those_of_the_image():
    typed = re.findall(r"^ *kubectl -n prefetchd exec (?:-it )?ds/(\S+) -- (\S+) (\w+)$", PART, re.MULTILINE)
    containerfile = (PACKAGING / "container" / "Containerfile").read_text()
    assert [verb for _, _, verb in typed] == ["doctor", "top"]
    for name, program, verb in typed:
        assert name == "prefetchd"
        assert f'ENTRYPOINT ["{program}"]' in containerfile
        assert build_parser(verb).parse_args([verb]).command == verb


def test_agents_run_on_every_tainted_node_and_are_replaced_one_by_one(helm, cluster, folder):
    install(helm)
    spec = cluster.the("DaemonSet")["spec"]
    assert spec["updateStrategy"] == {"type": "RollingUpdate", "rollingUpdate": {"maxUnavailable": 1}}
    pod = spec["template"]["spec"]
    assert pod["priorityClassName"] == "system-node-critical"
    assert {"operator": "Exists"} in pod["tolerations"]
    asked = {
        kind: pod["containers"][0][f"{kind}Probe"]["httpGet"]["path"] for kind in ("startup", "liveness", "readiness")
    }
    assert asked == {"startup": "/healthz", "liveness": "/healthz", "readiness": "/readyz"}


@pytest.mark.parametrize("variant", VARIANTS, ids=lambda path: path.stem)
def test_every_variant_is_installed_and_leaves_nothing(variant, helm, cluster):
    values = yaml.safe_load(variant.read_text())
    helm.install(PACKAGING / "helm" / "prefetchd", "prefetchd", values, create_namespace=True, timeout=20)
    assert {"DaemonSet", "ConfigMap"} <= set(cluster.kinds())
    helm.uninstall("prefetchd", timeout=20)
    assert cluster.kinds() == ["Namespace"]


def test_dashboards_and_rules_arrive_whole(helm, cluster):
    values = yaml.safe_load((PACKAGING / "helm" / "variants" / "operator.yaml").read_text())
    helm.install(PACKAGING / "helm" / "prefetchd", "prefetchd", values, create_namespace=True, timeout=20)
    maps = [one["data"] for one in cluster.objects.values() if one["kind"] == "ConfigMap"]
    carried = {name: text for data in maps for name, text in data.items() if name.endswith(".json")}
    files = (PACKAGING / "grafana" / "dashboards").glob("*.json")
    assert {name: yaml.safe_load(text) for name, text in carried.items()} == {
        path.name: yaml.safe_load(path.read_text()) for path in files
    }
    assert set(RESOURCES[f"{OPERATOR}/v1"]) & set(cluster.kinds()) == {"PodMonitor", "PrometheusRule"}


def test_the_cluster_refuses_what_a_real_one_would(helm, cluster):
    with pytest.raises(helm_python.HelmError, match="not found"):
        helm.install(PACKAGING / "helm" / "prefetchd", "prefetchd", {}, timeout=20)
    assert any("namespaces" in why for why in cluster.refused)
    cluster.refused.clear()
