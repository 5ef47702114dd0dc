"""The ways to install of `packaging/README.md`, typed line by line in fresh Debian root file systems.

(The third way, Helm, needs no root file system but a cluster: `test_helm_life.py`.)
"""

import os
import re
import shutil
import subprocess
import time

import pytest

from tests.unit.packaging.roots import DebianRoot, debootstrap
from tests.unit.packaging.support import PACKAGING, SOURCE

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(1800)]

CONSENT = "echo 'APT::Get::Assume-Yes \"true\";' >/etc/apt/apt.conf.d/yes"
"""What the newcomer answers when apt-get asks."""
WATCHDOG = "/etc/systemd/system/prefetchd.service.d/hurry.conf"
SYSTEM_FILES = (
    "find /etc /opt /usr /srv /root /home /run/prefetchd -xdev -not -path /etc/machine-id -not -name '*.pyc' "
    "-not -name __pycache__ -not -path '/root/prefetchd-*' 2>/dev/null | sort"
)


def part(title):
    """A part of the README, by its heading."""
    return (PACKAGING / "README.md").read_text().split(f"\n## {title}\n")[1].split("\n## ")[0]


def typed(title):
    """The first block of commands under a heading, line by line."""
    return re.search(r"```\n(.*?)```", part(title), re.DOTALL)[1].splitlines()


def command_after(word, title):
    """The command in the sentence that begins with a word."""
    return re.search(rf"^{word}: .*?`((?:\./|/)[^`]*)`", part(title), re.MULTILINE)[1]


@pytest.fixture(scope="module")
def debian(tmp_path_factory):
    """A root file system as the installer leaves it, for all tests here; overlays are laid on it."""
    if os.geteuid() != 0 or not shutil.which("debootstrap"):
        pytest.skip("a fresh root file system needs root and debootstrap")
    folder = tmp_path_factory.mktemp("debian") / "root"
    debootstrap(folder)
    yield folder
    shutil.rmtree(folder)


@pytest.fixture
def fresh(debian, tmp_path):
    """A newcomer's machine."""
    root = DebianRoot.make(tmp_path, debian)
    root.run(CONSENT)
    yield root
    shutil.rmtree(root.upper)


def test_by_hand(fresh):
    subprocess.run(["git", "clone", "--quiet", SOURCE, fresh.base / "shared" / "prefetchd"], check=True, timeout=60)
    packages, setup, *steps, endless = typed("By hand")
    fresh.run(f"cd /mnt/prefetchd\n{packages}\n{setup}")
    done = fresh.run("\n".join(["cd /mnt/prefetchd", *steps]), network=False)
    assert "checks:" in done.stdout
    assert "--duration 30 s is over" in done.stderr
    ended = fresh.run(
        f"cd /mnt/prefetchd; timeout --preserve-status --signal=INT 40 {endless}", network=False
    )  # Ctrl-C
    assert re.search("mode dry-run|cannot dry-run here, observing instead: .* hierarchy", ended.stderr), ended.stderr
    assert "answering on" in ended.stderr
    assert not list(fresh.upper.glob("etc/prefetchd*"))
    assert not (fresh.upper / "opt").exists()


def test_systemd(fresh, release):
    packages, unpack, install, doctor, start, ask = typed("systemd")
    fresh.run(packages)
    with fresh.booted() as node:
        before = node.run(SYSTEM_FILES).stdout
        shutil.copy(release, fresh.base / "shared")
        node.run("mv /mnt/prefetchd-*.tar.gz /root")
        typing = node.run(f"cd /root\n{unpack}\n{install}\n{doctor}")
        assert "prefetchd is installed, not started" in typing.stdout
        free = probes(node.run("prefetchd run --duration 1 --listen 127.0.0.1:9754").stderr)
        assert "prefetchd_build_info" in node.run(f"{start}\n{ask}").stdout
        confined = probes(node.run("journalctl --unit prefetchd --output cat").stdout)
        assert confined == free, "what the unit forbids costs a probe"
        assert "block" in confined
        survives_kills_and_hangs(node)
        takes_a_configuration_and_an_upgrade(node)
        node.run(command_after("Remove", "systemd"))
        assert node.run(SYSTEM_FILES).stdout == before
        assert node.run("systemctl is-enabled prefetchd", check=False).returncode != 0


def probes(log):
    """State by probe, from the lines that the agent logs as it starts."""
    return dict(re.findall(r"probe (\w+): (attached|degraded|unavailable)", log))


def survives_kills_and_hangs(node):
    """Killed: restored and started again. Stopped: the watchdog ends it, and it is started again."""
    node.run("systemctl kill --signal=KILL --kill-whom=main prefetchd")
    node.wait_for("test $(systemctl show -P NRestarts prefetchd) = 1 && systemctl is-active prefetchd", 30)
    assert "nothing to restore" in node.run("journalctl --unit prefetchd --output cat").stdout
    node.run(f"mkdir -p $(dirname {WATCHDOG}); printf '[Service]\\nWatchdogSec=4\\n' >{WATCHDOG}")
    node.run("systemctl daemon-reload; systemctl restart prefetchd")
    time.sleep(6)
    assert node.run("systemctl show -P NRestarts prefetchd").stdout == "0\n", "the loop does not feed the watchdog"
    node.run("systemctl kill --signal=STOP --kill-whom=main prefetchd")
    node.wait_for("test $(systemctl show -P NRestarts prefetchd) = 1 && systemctl is-active prefetchd", 60)
    assert "Watchdog timeout" in node.run("journalctl --unit prefetchd --output cat").stdout


def takes_a_configuration_and_an_upgrade(node):
    """What the README says of both."""
    node.run("sed -i 's/^mode = .*/mode = \"dry-run\"/' /etc/prefetchd/prefetchd.toml; systemctl restart prefetchd")
    node.run(f"cd /root/prefetchd-*/; {command_after('Upgrade', 'systemd')}")
    assert node.run("systemctl is-active prefetchd").stdout == "active\n"
    # A node that cannot limit observes, and says so.
    assert "dry-run" in node.run("journalctl --unit prefetchd --output cat --lines 20").stdout
    node.run("test -s /usr/local/share/man/man8/prefetchd.8")
