"""What the FUSE probe needs to know about mounts and modules, and its counters."""

import numpy as np

from bpf.decode import FUSE_COUNTERS, decode_fuse
from bpf.fuse import fuse_mounts, is_loaded

MOUNTINFO = """\
24 1 254:0 / / rw,relatime shared:1 - ext4 /dev/vda rw,discard
91 24 0:53 / /mnt/s3 rw,relatime shared:33 - fuse.s3fs s3fs rw,user_id=0,group_id=0
92 24 0:53 /sub /srv/bind rw,relatime - fuse.s3fs s3fs rw
93 24 0:54 / /mnt/old\\040one rw - fuse host rw
94 24 8:17 / /mnt/stick rw - fuseblk /dev/sdb1 rw
95 24 0:60 / /mnt/broken
96 24 0:61 / /sys/fs/fuse/connections rw - fusectl fusectl rw
"""


def test_mount_points_by_device_number():
    found = fuse_mounts(MOUNTINFO.splitlines())
    assert found == {"0:53": "/mnt/s3", "0:54": "/mnt/old\\040one", "8:17": "/mnt/stick"}


def test_the_file_system_may_not_be_loaded(tmp_path):
    listing = tmp_path / "filesystems"
    assert not is_loaded(listing)
    listing.write_text("nodev\tsysfs\nnodev\tfusectl\n\text4\n")
    assert not is_loaded(listing)
    listing.write_text("nodev\tsysfs\n\tfuseblk\nnodev\tfuse\n")
    assert is_loaded(listing)


def test_counters_of_a_mount():
    value = np.zeros(1, FUSE_COUNTERS)
    value[0] = (3, 4096, 30_000, 300, [0, 3] + [0] * 30)
    found = decode_fuse(value.tobytes())
    assert (found.requests, found.bytes, found.total_ns, found.total_us_squared) == (3, 4096, 30_000, 300)
    assert found.histogram == (0, 3, *[0] * 30)
