"""Taking away what was made in the guest, where something may hold it for a moment: udev looks at every new device."""

from __future__ import annotations

import subprocess
import time
from pathlib import Path

PATIENCE_S = 10.0  # for the kernel to let go of what a command that has ended had open


def undo(*command: str | Path) -> None:
    """Run a command that takes something away, again and again while something still holds it; raises what it said."""
    by = time.monotonic() + PATIENCE_S
    while (ended := subprocess.run(command, check=False, capture_output=True, text=True)).returncode:
        if time.monotonic() > by:
            arrays = Path("/proc/mdstat")
            held = arrays.read_text() if arrays.exists() else "no software RAID"
            raise AssertionError(f"{command} failed for {PATIENCE_S:g} s: {ended.stderr.strip()}; {held}")
        time.sleep(0.1)
