"""What the NFS probe needs to know about mounts, and its counters."""

import numpy as np

from bpf.decode import NFS_COUNTERS, OBJECT_COUNTERS, decode_nfs, decode_object
from bpf.nfs import nfs_mounts

MOUNTINFO = """\
24 1 254:0 / / rw,relatime shared:1 - ext4 /dev/vda rw,discard
91 24 0:53 / /mnt/data rw,relatime shared:33 - nfs4 10.0.0.2:/export/data rw,vers=4.2,rsize=131072
92 24 0:54 / /mnt/old\\040one rw - nfs filer:/vol/old rw,vers=3
93 24 0:53 /sub /mnt/bind rw,relatime - nfs4 10.0.0.2:/export/data rw
94 24 0:60 / /mnt/broken
95 24 0:61 / /mnt/fuse rw - fuse.sshfs host:/x rw
"""


def test_sources_by_device_number():
    assert nfs_mounts(MOUNTINFO.splitlines()) == {"0:53": "10.0.0.2:/export/data", "0:54": "filer:/vol/old"}


def test_counters_of_a_call():
    value = np.zeros(1, NFS_COUNTERS)
    value[0] = (3, 4096, 10, 20, 40, 9, [3] + [0] * 31)
    found = decode_nfs(value.tobytes())
    assert (found.requests, found.bytes, found.backlog_ns, found.round_trip_ns, found.total_ns) == (3, 4096, 10, 20, 40)
    assert (found.total_us_squared, found.histogram) == (9, (3, *[0] * 31))


def test_connections_still_open():
    value = np.zeros(1, OBJECT_COUNTERS)
    value[0] = (1, 2, 3, 4, 5, 7, 4, [0] * 32)
    assert decode_object(value.tobytes()).open_connections == 3
