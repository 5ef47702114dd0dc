"""The lab: a guest with Debian's stock kernel on this machine's own root file system, read-only.

`Lab(...).run(argv)` boots a guest, runs one command in it as root and brings back its status; `Lab(...).boot()` gives
a guest that runs many. A broken lab (no boot, panic, time-out) raises `LabBroken`; a command that fails does not.
"""

from tests.lab.devices import Hdd, Ssd
from tests.lab.errors import LabBroken, LabTimeout, LabUnavailable
from tests.lab.machine import Guest, Lab, LabResult

__all__ = ["Guest", "Hdd", "Lab", "LabBroken", "LabResult", "LabTimeout", "LabUnavailable", "Ssd"]
