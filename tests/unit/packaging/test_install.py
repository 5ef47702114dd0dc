"""The release archive, installed, upgraded and removed on a fresh node without a network; the unit read by systemd."""

import hashlib
import os
import re
import shlex
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from tests.unit.packaging.support import PACKAGING, SOURCE

UNIT = PACKAGING / "systemd" / "prefetchd.service"
PYTHON = "/opt/prefetchd/bin/python"
COMPLETIONS = "/usr/local/share/bash-completion/completions"
NEIGHBOUR = f"{COMPLETIONS}/another-program"
DROP_IN = "/etc/systemd/system/prefetchd.service.d"
FAKE_SYSTEMCTL = """#!/bin/sh
echo "$1" >>/tmp/asked
[ "$1" != is-active ] || { echo activating; exit 3; }"""
SYSTEMD_IS_TOLD = ["is-active", "stop", "daemon-reload", "enable", "reset-failed", "restart"]
MANUAL = "/usr/local/man/man8/prefetchd.8"  # /usr/local/man is a link to share/man
EXPOSURE_LIMIT = 5.0
"""What `systemd-analyze security` may at most say of 10.0 for no confinement; a root daemon that loads BPF has 5.0."""


@pytest.fixture
def node(fresh_node, release):
    """A fresh node with the release archive in /tmp/shared."""
    shutil.copy2(release, fresh_node.base / "shared")
    return fresh_node


def written_steps():
    """The commands of the README's part on systemd, line by line."""
    part = (PACKAGING / "README.md").read_text().split("\n## systemd\n")[1]
    return re.search(r"```\n(.*?)```", part, re.DOTALL)[1].splitlines()


def follow(node, steps):
    node.run("\n".join(["set -e", "cd /tmp/shared", *steps]))


def test_a_nodes_life_from_install_to_removal(node, project_version):
    packages, *steps, start, ask = written_steps()
    assert set(packages.removeprefix("apt-get install ").split()) <= {*listed_packages(), "curl"}
    # `doctor` ends with 3 on a node that cannot enforce, as this one may be.
    follow(node, ["umask 077", *(step if step != "prefetchd doctor" else f"{step} || [ $? = 3 ]" for step in steps)])
    node.run("setpriv --reuid nobody --clear-groups prefetchd --version")
    verified = node.run("systemd-analyze verify prefetchd.service")
    assert "prefetchd" not in verified.stdout + verified.stderr
    assert start == "systemctl enable --now prefetchd"
    follow(node, ["systemctl enable prefetchd"])  # no systemd runs here that could start it now
    assert (node.upper / "etc/systemd/system/multi-user.target.wants/prefetchd.service").is_symlink()
    node.run(f"cp /tmp/shared/prefetchd-{project_version}/container/healthcheck.py /opt/prefetchd/share/")
    assert "prefetchd_build_info" in answers(node, ask)
    assert shells_and_manual(node) == [
        "complete -F _prefetchd prefetchd",
        "_prefetchd",
        "/usr/local/man/man8/prefetchd.8",
    ]
    node.run("prefetchd restore")
    assert node.run(f"{PYTHON} -c 'import agent.kube_client'", check=False).returncode != 0
    assert unmet_requirements(node) == []

    node.run("echo 'mode = \"dry-run\"' > /etc/prefetchd/prefetchd.toml")
    node.run(f"/tmp/shared/prefetchd-{project_version}/install.sh --no-start --with-kube")
    assert node.run("cat /etc/prefetchd/prefetchd.toml").stdout == 'mode = "dry-run"\n'
    node.run(f"{PYTHON} -c 'import agent.kube_client'")
    assert unmet_requirements(node) == []
    node.run(
        f"cd /tmp/shared/prefetchd-{project_version} && mv wheels/prefetchd-*.whl . && ! ./install.sh --no-start && "
        "mv prefetchd-*.whl wheels && test -x /opt/prefetchd/share/uninstall.sh -a -s /opt/prefetchd/share/made-folders"
    )
    assert upgraded_beside_systemd(node, project_version) == SYSTEMD_IS_TOLD
    node.run(f"{PYTHON} -c 'import agent.kube_client'")

    node.run(f"touch {NEIGHBOUR}; mkdir {DROP_IN}; touch {DROP_IN}/ours.conf")
    node.run("/opt/prefetchd/share/uninstall.sh --keep-config")
    kept = {"/etc/prefetchd", "/etc/prefetchd/prefetchd.toml", DROP_IN, f"{DROP_IN}/ours.conf"}
    assert set(node.leftovers()) - kept == with_new_folders(NEIGHBOUR)
    node.run(f"rm {NEIGHBOUR}; cd /usr/local/share && rmdir -p --ignore-fail-on-non-empty bash-completion/completions")
    node.run(f"/tmp/shared/prefetchd-{project_version}/uninstall.sh")
    assert node.leftovers() == []


def upgraded_beside_systemd(node, version):
    """What the installer asks of systemd where the agent fails and is started again and again; its link stays one."""
    return node.run(
        "set -e; mkdir -p /run/systemd/system /usr/local/sbin; rm /etc/prefetchd/prefetchd.toml; "
        "ln -s /later/prefetchd.toml /etc/prefetchd/prefetchd.toml; "
        f"printf '%s\\n' {shlex.quote(FAKE_SYSTEMCTL)} >/usr/local/sbin/systemctl; chmod 755 /usr/local/sbin/*; "
        f"/tmp/shared/prefetchd-{version}/install.sh >/dev/null; "
        "test $(readlink /etc/prefetchd/prefetchd.toml) = /later/prefetchd.toml; "
        "rm -r /usr/local/sbin/systemctl /run/systemd/system; cat /tmp/asked"
    ).stdout.splitlines()


def shells_and_manual(node):
    """What bash, zsh and man(1) find of the command."""
    node.run("test $(stat -c %a /usr/local/share/man/man8/prefetchd.8) = 644")
    commands = (
        f"bash -c 'source {COMPLETIONS}/prefetchd && complete -p prefetchd'",
        "zsh -c 'autoload -U compinit; compinit -D; echo $_comps[prefetchd]'",
        "man --where prefetchd",
    )
    return [node.run(command).stdout.strip() for command in commands]


def with_new_folders(path):
    """The path, and those of its parents that this machine has not."""
    parents = [str(parent) for parent in Path(path).parents if not parent.exists()]
    return {path, *parents}


def listed_packages():
    lines = (PACKAGING / "debian-run.txt").read_text().splitlines()
    return [line for line in lines if line and not line.startswith("#")]


def answers(node, ask):
    """What the unit's command answers to the README's question, once the image's health check finds it well."""
    (command,) = directives()["ExecStart"]
    return node.run(
        f"ip link set lo up; {command} 2>/tmp/log & agent=$!; "
        f"for i in $(seq 300); do {PYTHON} /opt/prefetchd/share/healthcheck.py >/dev/null && break; sleep 0.2; done; "
        f"{ask} -sf >/tmp/answer; kill $agent; wait $agent || exit 1; cat /tmp/answer"
    ).stdout


def unmet_requirements(node):
    """What `pip check` says of our own packages; the system's own are visible in the environment too."""
    pins = re.findall(r"^([\w.-]+)==", (PACKAGING / "constraints.txt").read_text(), re.MULTILINE)
    ours = {"prefetchd", *(name.lower() for name in pins)}
    lines = node.run("/opt/prefetchd/bin/pip check", check=False).stdout.splitlines()
    return [line for line in lines if line.split(" ")[0].lower() in ours]


@pytest.mark.parametrize("script", ["install.sh", "uninstall.sh"])
def test_scripts_explain_themselves_and_refuse_what_they_do_not_know(script):
    helped = subprocess.run([PACKAGING / script, "--help"], check=False, capture_output=True, text=True, timeout=10)
    assert helped.returncode == 0
    assert "example:" in helped.stdout
    wrong = subprocess.run([PACKAGING / script, "--fast"], check=False, capture_output=True, text=True, timeout=10)
    assert wrong.returncode == 2
    assert "unknown option '--fast'" in wrong.stderr


def test_install_from_a_source_tree_says_what_to_do():
    done = subprocess.run([PACKAGING / "install.sh"], check=False, capture_output=True, text=True, timeout=10)
    assert done.returncode == 1
    assert "make package" in done.stderr


def test_confinement_of_the_unit(tmp_path):
    command = ["systemd-analyze", "security", "--offline=true", "--no-pager", str(UNIT)]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=60)
    exposure = re.search(r"Overall exposure level for prefetchd\.service: ([\d.]+)", done.stdout)
    assert exposure, done.stdout + done.stderr
    assert float(exposure[1]) <= EXPOSURE_LIMIT


def directives():
    pairs = [line.split("=", 1) for line in UNIT.read_text().splitlines() if "=" in line and not line.startswith("#")]
    return {key: [value for name, value in pairs if name == key] for key, _ in pairs}


def test_the_unit_leaves_the_agent_what_it_writes():
    unit = directives()
    assert unit["Type"] == ["notify"]
    assert unit["WatchdogSec"] == ["30"]
    assert unit["ExecStopPost"] == ["/opt/prefetchd/bin/prefetchd restore"]
    assert unit["RuntimeDirectoryPreserve"] == ["yes"]
    taken_away = {"ProtectControlGroups", "ProtectKernelTunables", "ProtectKernelModules", "PrivateDevices"}
    assert not taken_away & set(unit)
    assert {"CAP_SYS_ADMIN", "CAP_BPF", "CAP_PERFMON"} <= set(" ".join(unit["CapabilityBoundingSet"]).split())


def test_archive_lists_the_sum_of_every_file(release_folder):
    sums = dict(reversed(line.split("  ", 1)) for line in (release_folder / "SHA256SUMS").read_text().splitlines())
    files = {str(path.relative_to(release_folder)) for path in release_folder.rglob("*") if path.is_file()}
    assert set(sums) == files - {"SHA256SUMS"}
    for name, digest in sums.items():
        assert hashlib.sha256((release_folder / name).read_bytes()).hexdigest() == digest, name


def test_archive_carries_probe_sources_and_the_whole_chart(release, release_folder, project_version):
    wheel = next((release_folder / "wheels").glob("prefetchd-*.whl"))
    with zipfile.ZipFile(wheel) as packed:
        shipped = set(packed.namelist())
    sources = [path for path in (SOURCE / "bpf").iterdir() if path.suffix in (".c", ".h")]
    assert {f"bpf/{path.name}" for path in sources if path.stat().st_mtime < release.stat().st_mtime} <= shipped
    assert "bpf/block.c" in shipped
    with tarfile.open(release_folder / "helm" / f"prefetchd-{project_version}.tgz") as chart:
        inside = set(chart.getnames())
    assert {"prefetchd/Chart.yaml", "prefetchd/files/prefetchd.rules.yml"} <= inside
    assert "prefetchd/files/dashboards/node.json" in inside


def test_packed_chart_is_a_chart(release_folder, project_version):
    helm_python = pytest.importorskip("helm_python")
    with helm_python.Chart.load(release_folder / "helm" / f"prefetchd-{project_version}.tgz") as chart:
        assert (chart.name, chart.version) == ("prefetchd", project_version)


def test_two_clones_give_the_same_bytes(tmp_path):
    """What is committed, whatever the folder, the modes that a user's umask leaves and the time zone."""
    archives = [
        clone_and_package(tmp_path / "one", umask=0o022, TZ="UTC"),
        clone_and_package(tmp_path / "another" / "place", umask=0o077, TZ="Asia/Tokyo", LC_ALL="C.UTF-8"),
    ]
    sums = {hashlib.sha256(archive.read_bytes()).hexdigest() for archive in archives}
    assert len(sums) == 1, archives


def clone_and_package(folder, umask, **environment):
    """Run `make package` in a clone, with the environment that is set up already; returns the archive's path."""
    subprocess.run(["git", "clone", "--quiet", SOURCE, folder], check=True, timeout=60, umask=umask)
    done = subprocess.run(
        ["make", "--silent", "--old-file=setup-test", "package", f"PYTHON={sys.executable}"],
        cwd=folder,
        env={**os.environ, **environment},
        check=False,
        capture_output=True,
        text=True,
        timeout=300,
        umask=umask,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return Path(done.stdout.splitlines()[-1])
