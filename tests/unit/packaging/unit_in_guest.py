"""Run in the lab's guest: the unit, confined by a systemd of its own, limits a job; whatever ends it, no limit stays.

    python -m tests.unit.packaging.unit_in_guest LOWER

LOWER is a root file system in which prefetchd is installed, as overlayfs takes it.
"""

import sys
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
STAY_DEAD = "/run/systemd/system/prefetchd.service.d"
LOG = "journalctl --unit prefetchd --output cat"


def main() -> None:
    """Raise AssertionError where something is not as it should be."""
    device = find_disk("ssd0").node
    base = Path("/run/fresh-node")
    base.mkdir()
    with DebianRoot.make(base, Path(sys.argv[1])).booted() as node:
        node.run(f"cat >/etc/prefetchd/prefetchd.toml <<'END'\n{CONFIG.format(device=device)}\nEND")
        node.run(JOB.format(device=device))
        node.run("systemctl start prefetchd")
        limits(node)
        node.run("systemctl stop prefetchd")
        assert node.run(f"cat {LIMIT}").stdout == "", "a stop leaves a limit"
        node.run("systemctl start prefetchd")
        limits(node)
        print(node.run(LOG).stdout)
        kill(node)


def limits(node: BootedRoot) -> None:
    """Wait until the agent has limited the job."""
    try:
        print(node.wait_for(f"grep -E 'rbps=[0-9]+' {LIMIT}", 120))
    except AssertionError:
        print(node.run(LOG).stdout)
        raise


def kill(node: BootedRoot) -> None:
    """Kill agent and guardian at once, so that nothing but the unit's own command can restore."""
    node.run(f"mkdir -p {STAY_DEAD}; printf '[Service]\\nRestart=no\\n' >{STAY_DEAD}/stay-dead.conf")
    node.run("systemctl daemon-reload; systemctl kill --signal=KILL prefetchd")
    node.wait_for(f"test ! -s {LIMIT}", 60)
    print(node.run(f"{LOG} --lines 5").stdout)


main()
