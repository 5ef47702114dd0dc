"""The ways to install of `packaging/README.md`, typed line by line in fresh Debian root file systems.

(The third way, Helm, needs no root file system but a cluster: `test_helm_life.py`.)
"""

import re
import shutil
import subprocess
import time

import pytest

from tests.lab import Lab, LabBroken, LabTimeout, LabUnavailable, Ssd
from tests.unit.packaging.support import PACKAGING, SOURCE

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(1800)]

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


@pytest.mark.lab
def test_the_unit_limits_and_restores_on_a_stock_kernel(fresh, release):
    """In the lab's guest, whose kernel has io.max, kprobes and trampolines: nothing that the unit forbids is needed."""
    packages, unpack, install, *_ = typed("systemd")
    shutil.copy(release, fresh.base / "shared")
    fresh.run(f"{packages}\ncd /mnt\n{unpack}\n{install}")
    lower = f"/run/lab-root{fresh.upper}:/run/lab-root{fresh.lower}"
    command = [str(SOURCE / ".venv" / "bin" / "python"), "-m", "tests.unit.packaging.unit_in_guest", lower]
    status, log = in_the_guest(command)
    assert status == 0, log
    assert re.search(r"probe block: attached \((?:fentry|kprobe)\)", log), log
    assert "s: stopped: " in log
    print("\n".join(re.findall(r"^\d+ s: .*", log, re.MULTILINE)))


def in_the_guest(command, attempts=2):
    """Status and output of a command there; a guest that breaks has said nothing of the unit, so another is booted."""
    try:
        with Lab(devices=(Ssd(),), boot_timeout=300, timeout=900).boot() as guest:
            done = guest.run(command)
            return done.status, done.output.read_text()
    except LabUnavailable as error:
        pytest.skip(str(error))
    except LabBroken as error:
        if attempts == 1 or isinstance(error, LabTimeout):
            raise
    return in_the_guest(command, attempts - 1)


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
