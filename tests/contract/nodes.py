"""A node as the contract suite needs it: cgroups to make, disks to write limits for, another writer. Fake or real."""

import contextlib
import os
import uuid
from pathlib import Path

from cgroup.files import KernelFiles
from cgroup.io_files import parse_io_max
from cgroup.lines import Line, Target, line_of
from tests.contract.fake import FakeFiles
from tests.lab.groups import remove


class FakeNode:
    """Everything in memory."""

    def __init__(self):
        self.files = FakeFiles(["8:0", "259:300"])
        self.devices = ("8:0", "259:300")
        self.top = "/contract"
        self.files.make(self.top)

    def make(self, name):
        path = f"{self.top}/{name}"
        return Target(self.files.make(path), path, self.devices[0])

    def remove(self, target):
        self.files.remove(target.path)

    def meddle(self, target, **limits):
        """Write as somebody else does."""
        self.files.write(line_of(target), limits)

    def limits(self, target, file="io.max"):
        return {key: value for key, value in self.files.read(line_of(target, file)).items() if value is not None}

    def toggle_io(self):
        self.files.toggle_io(self.top)

    def pull(self, device):
        self.files.pull(device)

    def plug(self, device):
        self.files.plug(device)

    def close(self):
        """Nothing to undo."""


class KernelNode:
    """The kernel's cgroup v2 and null_blk disks, which need no memory and can be pulled."""

    def __init__(self, root="/sys/fs/cgroup"):
        self.files = KernelFiles(root)
        self.root = Path(root)
        self.top = f"/contract-{uuid.uuid4().hex[:8]}"
        self._names = [f"contract{index}" for index in range(2)]
        with contextlib.ExitStack() as stack:
            for name in self._names:
                power_up(name)
                stack.callback(power_down, name)
            self.devices = tuple(number_of(name) for name in self._names)
            (self.root / "cgroup.subtree_control").write_text("+io")
            self._folder(self.top).mkdir()
            stack.callback(self._remove_top)
            (self._folder(self.top) / "cgroup.subtree_control").write_text("+io")
            self._made = stack.pop_all()

    def _folder(self, path):
        return self.root / path.strip("/")

    def make(self, name):
        folder = self._folder(f"{self.top}/{name}")
        folder.mkdir()
        return Target(folder.stat().st_ino, f"{self.top}/{name}", self.devices[0])

    def remove(self, target):
        self._folder(target.path).rmdir()

    def meddle(self, target, **limits):
        text = " ".join(f"{key}={'max' if value is None else value}" for key, value in limits.items())
        (self._folder(target.path) / "io.max").write_text(f"{target.device} {text}")

    def limits(self, target, file="io.max"):
        found = parse_io_max((self._folder(target.path) / file).read_text()).get(target.device)
        values = {key: getattr(found, key, None) for key in ("rbps", "wbps", "riops", "wiops")}
        return {key: value for key, value in values.items() if value is not None}

    def toggle_io(self):
        for text in ("-io", "+io"):
            (self._folder(self.top) / "cgroup.subtree_control").write_text(text)

    def pull(self, device):
        power_down(self._names[self.devices.index(device)])

    def plug(self, device):
        name = self._names[self.devices.index(device)]
        power_up(name)
        if number_of(name) != device:
            raise RuntimeError(f"{name} came back as {number_of(name)}, not as {device}")

    def _remove_top(self):
        if not remove(self._folder(self.top)):
            raise RuntimeError(f"the cgroup {self.top} stays")

    def close(self):
        self._made.close()


_CONFIG = Path("/sys/kernel/config/nullb")


def power_up(name, *, size_mib=64):
    """Make a null_blk disk through configfs."""
    if not _CONFIG.exists():
        os.system("modprobe null_blk nr_devices=0 && mount -t configfs none /sys/kernel/config 2>/dev/null")
    (_CONFIG / name).mkdir(exist_ok=True)
    (_CONFIG / name / "size").write_text(str(size_mib))
    (_CONFIG / name / "power").write_text("1")


def power_down(name):
    """Pull a null_blk disk."""
    with contextlib.suppress(FileNotFoundError):
        (_CONFIG / name / "power").write_text("0")
        (_CONFIG / name).rmdir()


def number_of(name):
    """Return a null_blk disk's maj:min. Older kernels name the disk by its index, newer ones by the folder."""
    index = (_CONFIG / name / "index").read_text().strip()
    for disk in (name, f"nullb{index}"):
        with contextlib.suppress(FileNotFoundError):
            return Path(f"/sys/block/{disk}/dev").read_text().strip()
    raise FileNotFoundError(f"no disk of {name}")


def subtree_line(node):
    """The line of `io` in the top's subtree_control."""
    return Line(node.files.cgroup_id(node.top), node.top, "", "cgroup.subtree_control")
