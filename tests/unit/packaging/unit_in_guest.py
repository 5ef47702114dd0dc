"""Run in the lab's guest: the unit, confined by a systemd of its own, limits a job; whatever ends it, no limit stays.

    python -m tests.unit.packaging.unit_in_guest LOWER

LOWER is a root file system in which prefetchd is installed, as overlayfs takes it.
"""

import re
import sys
import time
from pathlib import Path

from tests.lab.disks import find_disk
from tests.unit.packaging.roots import BootedRoot, DebianRoot

CONFIG = """
mode = "enforce"
policy = "paper"
[[jobs]]
cgroup = "/prefetchd.slice/*"
[[devices]]
device = "{device}"
medium = "ssd"
read_bytes_per_second = "120 MB"
write_bytes_per_second = "120 MB"
read_requests_per_second = 4000
write_requests_per_second = 4000
"""
JOB = (
    "systemd-run --quiet --slice=prefetchd.slice --unit=job --property=IOAccounting=yes "
    "sh -c 'while :; do dd if={device} of=/dev/null bs=1M count=64 iflag=direct; done'"
)
LIMIT = "/sys/fs/cgroup/prefetchd.slice/job.service/io.max"
LOG = "journalctl --unit prefetchd --output cat"
BEGAN = time.monotonic()


def main() -> None:
    """Raise AssertionError where something is not as it should be."""
    device = find_disk("ssd0").node
    base = Path("/run/fresh-node")
    base.mkdir()
    with DebianRoot.make(base, Path(sys.argv[1])).booted() as node:
        tell("booted")
        node.run(f"cat >/etc/prefetchd/prefetchd.toml <<'END'\n{CONFIG.format(device=device)}\nEND")
        node.run(JOB.format(device=device))
        free = probes(
            node.run("prefetchd run --mode observe --duration 1 --config /etc/prefetchd/prefetchd.toml").stderr
        )
        tell(f"probes unconfined: {free}")
        start(node)
        confined = probes(node.run(LOG).stdout)
        assert confined == free, f"what the unit forbids costs a probe: {confined}"
        kill(node)
        stop(node)


def tell(text: str) -> None:
    """Print what was reached, and when."""
    print(f"{time.monotonic() - BEGAN:.0f} s: {text}", flush=True)


def probes(log: str) -> dict[str, str]:
    """State and tier by probe, from the lines that the agent logs as it starts."""
    return dict(re.findall(r"probe (\w+): ((?:attached|degraded|unavailable)(?: \w+)?)", re.sub("[()]", "", log)))


def start(node: BootedRoot) -> None:
    """Start the unit; it limits the job."""
    try:
        node.run("systemctl start prefetchd")
        tell("the unit is up")
        tell(f"limits: {node.wait_for(limited(), 60)}")
    finally:
        print(node.run(LOG).stdout, flush=True)


def limited() -> str:
    """Succeeds while the agent's limit stands at the job."""
    return f"grep -E 'rbps=[0-9]+' {LIMIT}"


def kill(node: BootedRoot) -> None:
    """Kill agent and guardian at once: the unit's own command restores, and the agent is started again and limits."""
    node.wait_for(f"{limited()} && systemctl kill --signal=KILL prefetchd", 30)
    node.wait_for(f"test ! -s {LIMIT}", 20)
    restored = node.wait_for(f"{LOG} | grep '^1 restored, '", 20)
    tell(f"nothing stays of a killed agent: {restored}")
    node.wait_for("sleep 3; test $(systemctl show -P NRestarts prefetchd) = 1 && systemctl is-active prefetchd", 200)
    tell(f"limits again: {node.wait_for(limited(), 60)}")


def stop(node: BootedRoot) -> None:
    """Stop the unit while a limit stands: none does afterwards."""
    node.wait_for(f"{limited()} && systemctl stop prefetchd", 60)
    assert node.run(f"cat {LIMIT}").stdout == "", "a stop leaves a limit"
    tell(f"stopped: {node.run(f'{LOG} --lines 6').stdout}")


main()
