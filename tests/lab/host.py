"""What this machine offers the lab: rights, programs, and whether guests boot with KVM on it."""

from __future__ import annotations

import json
import os
import platform
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from tests.lab.cache import PROJECT, cache_folder
from tests.lab.devices import Device, Hdd
from tests.lab.errors import LabUnavailable


def virtme_program() -> Path:
    """Return virtme-ng's `virtme-run`: of this virtual environment, of the project's, or on PATH."""
    candidates = [Path(sys.executable).parent, PROJECT / ".venv" / "bin"]
    for folder in candidates:
        if (folder / "virtme-run").exists():
            return folder / "virtme-run"
    found = shutil.which("virtme-run")
    if found is None:
        raise LabUnavailable("The lab needs virtme-ng: run `make setup`, which installs it into .venv.")
    return Path(found)


def check_machine(devices: Sequence[Device]) -> None:
    """Raise `LabUnavailable`, in one sentence, where this machine lacks the rights or programs for the lab."""
    if os.geteuid() != 0:
        raise LabUnavailable("The lab needs root (for mount namespaces): run it as root or with sudo.")
    needed = ["qemu-system-x86_64", "unshare", "setpriv", "busybox", "modprobe", "dpkg", "file", "cc"]
    needed += ["nbdkit"] if any(isinstance(device, Hdd) for device in devices) else []
    missing = [program for program in needed if shutil.which(program) is None]
    if missing:
        raise LabUnavailable(
            f"The lab needs {', '.join(missing)}: run `make setup`, or install packaging/debian-test.txt."
        )
    virtme_program()


def remembered_accelerator() -> str | None:
    """Return `kvm` or `tcg`, or None where no boot with KVM was tried on this host kernel yet."""
    if not os.access("/dev/kvm", os.R_OK | os.W_OK):
        return "tcg"
    try:
        known = json.loads(_accelerator_file().read_text())
    except (FileNotFoundError, ValueError):
        return None
    return str(known["accelerator"]) if known.get("host") == _host_id() else None


def remember_accelerator(accelerator: str, why: str) -> None:
    """Remember how this host boots guests, so that the trial is made once."""
    text = json.dumps({"accelerator": accelerator, "host": _host_id(), "why": why.splitlines()[0]}, indent=1)
    _accelerator_file().write_text(text + "\n")


def _accelerator_file() -> Path:
    return cache_folder() / "accelerator.json"


def _host_id() -> str:
    """Return what a remembered accelerator depends on: the host's kernel and its CPU type."""
    return f"{platform.release()} {platform.machine()}"
