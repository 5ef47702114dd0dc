"""A made-up host's /sys and /dev in a temporary folder: disks, partitions, stacks, hidden NVMe paths."""

import os


class Host:
    """Adds devices as the kernel lays them out: folders below sys/devices, links to them from class and by number."""

    def __init__(self, root):
        self.root = root
        self.sys = root / "sys"
        self.dev = root / "dev"
        for folder in (
            "sys/class/block",
            "sys/dev/block",
            "sys/fs/btrfs",
            "dev/disk/by-id",
            "dev/disk/by-path",
            "dev/mapper",
        ):
            (root / folder).mkdir(parents=True)

    def add(
        self, name, number, *, bus="pci0000:00/ata1", rotational=0, size=2048, parent=None, slaves=(), **attributes
    ):
        """Add a device; keyword names have `__` for `/`. Returns its folder."""
        top = self.sys / "devices" / (f"{bus}/block" if parent is None else self._folder(parent))
        folder = top / name
        texts = {"dev": number, "size": size} | {key.replace("__", "/"): text for key, text in attributes.items()}
        if parent is None:
            texts["queue/rotational"] = rotational
            texts.setdefault("queue/scheduler", "[none] mq-deadline")
            texts.setdefault("queue/read_ahead_kb", 128)
        for file, text in texts.items():
            if text is not None:
                (folder / file).parent.mkdir(parents=True, exist_ok=True)
                (folder / file).write_text(f"{text}\n")
        (self.sys / "class/block" / name).symlink_to(folder)
        if number is not None:
            (self.sys / "dev/block" / number).symlink_to(folder)
        (self.dev / name.replace("!", "/")).parent.mkdir(parents=True, exist_ok=True)
        (self.dev / name.replace("!", "/")).write_text("")
        for slave in slaves:
            (folder / "slaves").mkdir(exist_ok=True)
            (folder / "slaves" / slave).symlink_to(self._folder(slave))
        return folder

    def _folder(self, name):
        return (self.sys / "class/block" / name).resolve()

    def link(self, link, target):
        """Make a link below /dev, as udev does."""
        (self.dev / link).parent.mkdir(parents=True, exist_ok=True)
        (self.dev / link).symlink_to(os.path.relpath(self.dev / target, (self.dev / link).parent))
