"""NFS server and client in the guest, with a shaped link between them."""

import os
import time

import pytest

from tests.lab import nfs

pytestmark = pytest.mark.guest
MIB = 1 << 20


@pytest.mark.parametrize("version", ["3", "4.2"])
def test_reads_what_the_server_has(version):
    content = os.urandom(3 * MIB)
    with nfs.served(version=version) as mount:
        (nfs.EXPORT / "data").write_bytes(content)
        assert (mount / "data").read_bytes() == content
    assert not os.path.ismount(mount)


def test_link_limits_the_rate():
    content = os.urandom(20 * MIB)
    with nfs.served(bytes_per_second=5 * MIB, round_trip_ms=2) as mount:
        (nfs.EXPORT / "data").write_bytes(content)
        began = time.monotonic()
        assert (mount / "data").read_bytes() == content
        rate = len(content) / (time.monotonic() - began)
    print(f"{rate / MIB:.2f} MiB/s over a link of 5")
    assert 0.7 * 5 * MIB < rate < 1.3 * 5 * MIB
