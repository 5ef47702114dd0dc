"""The parser of /proc/diskstats, on lines as kernels from 2.6 to 6.x print them."""

from pathlib import Path

from cgroup.diskstats import parse_diskstats

TEXT = """\
   8       0 sda 100 5 2048 33 7 1 16 4 2 50 99
 259       0 nvme0n1 1 0 8 0 0 0 0 0 0 12 12 0 0 0 0 0 0
 253    1000 dm-3 9 0 72 1 0 0 0 0 0 1 1 0 0 0 0 0 0
   8       1 sda1 3 4 5 6
garbage
   8      16 sdb x 5 2048 33 7 1 16 4 2 50 99
"""


def test_fields_and_units():
    disks = parse_diskstats(TEXT)
    assert set(disks) == {"8:0", "259:0", "253:1000"}
    sda = disks["8:0"]
    assert (sda.name, sda.reads, sda.read_bytes, sda.writes, sda.write_bytes) == ("sda", 100, 1048576, 7, 8192)
    assert (sda.in_flight, sda.busy_ms) == (2, 50)


def test_this_machine_has_disks():
    assert parse_diskstats(Path("/proc/diskstats").read_text())
