"""The guest is what the lab promises: disks, controllers, kernel features, a read-only host."""

import mmap
import os
import time
from pathlib import Path

import pytest

from tests.lab.devices import block_content
from tests.lab.undo import undo

pytestmark = pytest.mark.guest


def test_ssd_is_not_rotational(ssd):
    assert not ssd.rotational
    assert int(Path(f"/sys/block/{ssd.name}/size").read_text()) * 512 == 1 << 30


def test_ssd_holds_real_data(ssd):
    with ssd.node.open("rb") as file:
        file.seek(777 * 4096)
        assert file.read(4096) == block_content(777)


def test_hdd_is_rotational(hdd):
    assert hdd.rotational
    assert "mq-deadline" in hdd.scheduler.read_text()


def test_io_controller_is_on():
    assert "io" in Path("/sys/fs/cgroup/cgroup.subtree_control").read_text().split()


def test_kprobes_and_types_of_the_kernel():
    assert Path("/sys/kernel/debug/kprobes/enabled").read_text().strip() == "1"
    assert Path("/sys/kernel/btf/vmlinux").stat().st_size > 1 << 20


def test_bcc_compiles_and_attaches_a_kprobe():
    from bcc import BPF  # noqa: PLC0415 -- collected on the host as well, where it is not needed

    began = time.monotonic()
    bpf = BPF(text=b"BPF_ARRAY(calls, u64, 1); int hit(void *ctx) { calls.increment(0); return 0; }")
    bpf.attach_kprobe(event=b"submit_bio_noacct", fn_name=b"hit")
    print(f"BCC compiled and attached in {time.monotonic() - began:.1f} s")
    descriptor = os.open("/dev/nvme0n1", os.O_RDONLY | os.O_DIRECT)
    buffer = mmap.mmap(-1, 4096)
    os.preadv(descriptor, [buffer], 0)
    os.close(descriptor)
    assert bpf[b"calls"][0].value >= 1


def test_host_files_are_read_only():
    with pytest.raises(OSError, match="Read-only"):
        Path(__file__).with_name("written-by-the-guest").write_text("x")


def test_null_blk_loads():
    assert os.system("modprobe null_blk nr_devices=1 gb=1") == 0
    assert Path("/sys/block/nullb0").is_dir()
    undo("modprobe", "-r", "null_blk")
