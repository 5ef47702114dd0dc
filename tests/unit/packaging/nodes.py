"""A throw-away copy of this machine's root file system."""

import os
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.unit.packaging.support import SOURCE

# /run and /tmp are empty as after a boot, the source tree is hidden, there is no network, not even a loopback address.
_ENTER = """
set -e
mount -t overlay overlay -o "lowerdir=/,upperdir=$BASE/upper,workdir=$BASE/work" "$BASE/root"
mount -t tmpfs tmpfs "$BASE/root$HIDDEN"
mount -t proc proc "$BASE/root/proc"
mount --rbind /sys "$BASE/root/sys"
mount --rbind /dev "$BASE/root/dev"
mount -t tmpfs -o mode=0755 tmpfs "$BASE/root/run"
mount -t tmpfs tmpfs "$BASE/root/tmp"
mkdir "$BASE/root/tmp/shared"
mount --bind "$BASE/shared" "$BASE/root/tmp/shared"
mount --bind "$BASE/run" "$BASE/root/run"
exec chroot "$BASE/root" /usr/bin/env -i HOME=/root LANG=C.UTF-8 \
    PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin /bin/sh -c "$COMMAND"
"""


@dataclass(frozen=True)
class FreshNode:
    """Runs commands on an overlay of this machine; what they wrote stays in `upper` until the test ends."""

    base: Path

    def run(self, command: str, check: bool = True) -> subprocess.CompletedProcess[str]:
        """Run a shell command line on the node, without a network; /tmp/shared is the folder `shared` of the test."""
        environment = {"PATH": os.environ["PATH"], "BASE": str(self.base), "HIDDEN": str(SOURCE), "COMMAND": command}
        done = subprocess.run(
            ["unshare", "--mount", "--net", "--propagation", "private", "sh", "-c", _ENTER],
            check=False,
            capture_output=True,
            text=True,
            env=environment,
            timeout=300,
        )
        assert not check or done.returncode == 0, f"{command!r}: {done.returncode}\n{done.stdout}{done.stderr}"
        return done

    @property
    def upper(self) -> Path:
        """Every file that differs from the machine's own."""
        return self.base / "upper"

    def leftovers(self) -> list[str]:
        """What the node has and the machine has not: files, links, new folders, whiteouts, and all of its /run."""
        changed = [path.relative_to(self.upper) for path in self.upper.rglob("*") if self._differs(path)]
        # systemd's tools make their own folder when they first run.
        state = [path.name for path in (self.base / "run").iterdir() if path.name != "systemd"]
        state = {str(name) for name in state} - {"mount"}  # made by mount(8) of util-linux for its own use
        return sorted(f"/{path}" for path in changed) + sorted(f"/run/{name}" for name in state)

    def _differs(self, path: Path) -> bool:
        original = Path("/") / path.relative_to(self.upper)
        return not (path.is_dir() and not path.is_symlink() and original.is_dir())


def make_fresh_node(base):
    """Such a node, with `base` for what is written to it; skips where there can be none."""
    if os.geteuid() != 0:
        pytest.skip("an overlay of the root file system needs root")
    for name in ("upper", "work", "root", "shared", "run"):
        (base / name).mkdir(mode=0o755)
    node = FreshNode(base)
    probe = node.run("true", check=False)
    if probe.returncode != 0:
        pytest.skip(f"no overlay of the root file system here: {probe.stderr.strip()}")
    if Path("/opt/prefetchd").exists():
        pytest.skip("prefetchd is installed on this machine, so no copy of it is fresh")
    return node
