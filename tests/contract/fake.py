"""cgroup v2 in memory, with the semantics of the kernel's files as far as the enforcer can see them.

Semantics: tg_set_limit and blkg_conf_prep in block/, cgroup_subtree_control_write and kernfs in kernel/cgroup and fs/.
"""

import errno
from dataclasses import replace

from cgroup.errors import ControllerMissing, Vanished
from cgroup.io_files import parse_io_max
from cgroup.lines import IO_MAX, KEYS, READ_AHEAD, SUBTREE_CONTROL, format_line

MAX = {IO_MAX: dict.fromkeys(("rbps", "wbps"), 2**64 - 1) | dict.fromkeys(("riops", "wiops"), 2**32 - 1)}


class Folder:
    """One cgroup: its limits by (file, device), whether it hands `io` on, and when its io files were made."""

    def __init__(self, number):
        self.id = number
        self.values = {}
        self.hands_on_io = False
        self.made = number


class FakeFiles:
    """Implements LineFiles. `fail` makes the next calls of a method raise: {"write": [OSError(...)]}."""

    def __init__(self, devices):
        self._next = 100
        self.devices = {device: self._number() for device in devices}
        self.read_ahead = dict.fromkeys(devices, 128)
        self.folders = {"/": Folder(self._number())}
        self.folders["/"].hands_on_io = True
        self.writes = []
        self.fail = {}
        self.before_write = None

    def _number(self):
        self._next += 1
        return self._next

    def make(self, path, *, hands_on_io=True):
        above = ""
        for name in path.strip("/").split("/"):
            above += f"/{name}"
            self.folders.setdefault(above, Folder(self._number()))
        parent = path.rpartition("/")[0] or "/"
        self.folders[parent].hands_on_io = self.folders[parent].hands_on_io or hands_on_io
        return self.folders[path].id

    def remove(self, path):
        del self.folders[path]

    def pull(self, device):
        """Remove a disk; its limits go with it."""
        del self.devices[device]
        for folder in self.folders.values():
            folder.values = {key: values for key, values in folder.values.items() if key[1] != device}

    def plug(self, device):
        self.devices[device] = self._number()

    def toggle_io(self, path):
        """Disable and enable the controller for the children: their files are made anew, their limits are lost."""
        for child in self._children(path):
            child.values, child.made = {}, self._number()

    def _children(self, path):
        base = path.rstrip("/")
        return [f for p, f in self.folders.items() if p != "/" and p.rpartition("/")[0] == base]

    def _folder(self, line):
        folder = self.folders.get(line.path)
        if folder is None or folder.id != line.cgroup_id:
            raise Vanished(f"{line.path} is gone")
        if line.file != SUBTREE_CONTROL and not self.folders[line.path.rpartition("/")[0] or "/"].hands_on_io:
            raise ControllerMissing(f"{line.path} has no {line.file}")
        return folder

    def _fail(self, method):
        if self.fail.get(method):
            raise self.fail[method].pop(0)

    def read(self, line):
        self._fail("read")
        if line.file == READ_AHEAD:
            self._disk(line)
            return {"kilobytes": self.read_ahead[line.device]}
        folder = self._folder(line)
        if line.file == SUBTREE_CONTROL:
            return {"io": 1 if folder.hands_on_io else None}
        return dict(folder.values.get((line.file, line.device), dict.fromkeys(KEYS[line.file])))

    def _disk(self, line):
        if line.device not in self.devices:
            raise Vanished(f"no device {line.device}")

    def write(self, line, changes):
        self._fail("write")
        if self.before_write:
            self.before_write(line)
        text = format_line(line, changes)
        if line.file == READ_AHEAD:
            self._disk(line)
            self.read_ahead[line.device] = changes["kilobytes"] // 4 * 4
        elif line.file == SUBTREE_CONTROL:
            self._hand_on(self._folder(line), line.path, enable=changes["io"] is not None)
        else:
            folder = self._folder(line)
            self._disk(line)
            self._set(folder, line, text, changes)
        self.writes.append((line, dict(changes)))

    def _hand_on(self, folder, path, *, enable):
        if not enable and any(child.hands_on_io for child in self._children(path)):
            raise OSError(errno.EBUSY, "Device or resource busy")
        if not enable:
            self.toggle_io(path)
        folder.hands_on_io = enable

    def _set(self, folder, line, text, changes):
        if line.file == IO_MAX:
            changes = {key: getattr(parse_io_max(text)[line.device], key) for key in changes}
        greatest = 10_000 if line.file == "io.weight" else 1_000
        if line.file != IO_MAX and not 1 <= (changes["weight"] or 100) <= greatest:
            raise OSError(errno.ERANGE, "Numerical result out of range")
        values = {**self.read(line), **changes}
        top = MAX.get(line.file, {})
        values = {
            key: None if value is None or value >= top.get(key, value + 1) else value for key, value in values.items()
        }
        if any(value is not None for value in values.values()):
            folder.values[line.file, line.device] = values
        else:
            folder.values.pop((line.file, line.device), None)

    def generation(self, line):
        return self._folder(line).made, self.devices.get(line.device, 0)

    def locate(self, line):
        if line.file == READ_AHEAD:
            return line
        for path, folder in self.folders.items():
            if folder.id == line.cgroup_id:
                return replace(line, path=path)
        raise Vanished(f"no cgroup {line.cgroup_id}")

    def cgroup_id(self, path):
        if path not in self.folders:
            raise Vanished(f"{path} is gone")
        return self.folders[path].id

    def in_use(self, line):
        return any(child.values or child.hands_on_io for child in self._children(line.path))
