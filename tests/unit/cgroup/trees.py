"""A folder that looks like cgroup v2 to one writer: plain files, so one device per cgroup and whole lines only."""


class Tree:
    """Makes cgroups below a temporary folder, and a disk in a made-up sysfs."""

    def __init__(self, folder, device="8:0"):
        self.root = folder / "cgroup"
        self.sys = folder / "sys"
        self.device = device
        self.root.mkdir()
        (self.root / "cgroup.subtree_control").write_text("io\n")
        (self.root / "cgroup.controllers").write_text("cpu io\n")
        disk = self.sys / "dev/block" / device
        (disk / "queue").mkdir(parents=True)
        (disk / "queue/read_ahead_kb").write_text("128\n")
        (disk / "queue/scheduler").write_text("none [mq-deadline]\n")

    def make(self, path, io_max=""):
        """Make a cgroup; return its id."""
        folder = self.root / path.strip("/")
        folder.mkdir(parents=True, exist_ok=True)
        for file, text in (("io.max", io_max), ("cgroup.subtree_control", ""), ("cgroup.procs", "")):
            (folder / file).write_text(text)
        return folder.stat().st_ino

    def text(self, path):
        """The text of a cgroup's io.max."""
        return (self.root / path.strip("/") / "io.max").read_text().strip()
