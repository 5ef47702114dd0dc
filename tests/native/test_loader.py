"""The loader on this machine's kernel: what attaches counts, what does not says why in one sentence."""

import os
import time
from pathlib import Path

import pytest

from bpf.loader import Loader, ProbeError
from tests.native.processes import wait_until

pytestmark = pytest.mark.native

PROGRAM = r"""
BPF_F_TABLE("array", u32, u64, seen, 2, BPF_F_MMAPABLE);
int on_switch(struct bpf_raw_tracepoint_args *ctx)
{
    u32 at = AT;
    u64 *count = seen.lookup(&at);
    if (count)
        __sync_fetch_and_add(count, 1);
    return 0;
}
int on_call(struct tracepoint__sched__sched_switch *args) { return args->prev_pid & 0; }
int beyond(void *ctx)
{
    u64 value;
    asm volatile("%0 = *(u64 *)(%1 + 8)\n\t%0 = *(u64 *)(%0 + 0x7ff8)" : "=&r"(value) : "r"(ctx));
    return value;
}
int unbounded(struct bpf_raw_tracepoint_args *ctx) { return *(int *)ctx->args[0]; }
"""


@pytest.fixture
def source(tmp_path):
    path = tmp_path / "sample.c"
    path.write_text(PROGRAM)
    return path


def count(view, at):
    return int.from_bytes(view[8 * at : 8 * at + 8], "little")


def stands_still(view):
    """Nothing has run for a while; some kernels detach a moment after they were told to."""
    before = count(view, 1)
    time.sleep(0.05)
    return count(view, 1) == before


def test_macros_attach_read_and_detach(loader, source):
    program = loader.load(source, {"AT": 1})
    view = program.view("seen", 16)
    program.attach_raw_tracepoint("sched_switch", "on_switch")
    program.attach_tracepoint("sched:sched_switch", "on_call")
    assert program.attached == ("raw_tracepoint:sched_switch", "tracepoint:sched:sched_switch")
    wait_until(lambda: count(view, 1) > 0)
    assert count(view, 0) == 0
    program.detach_all()
    wait_until(lambda: stands_still(view))
    assert program.attached == ()
    program.close()
    program.close()


def test_a_typed_tracepoint_runs_until_it_is_detached(loader, source):
    program = loader.load(source, {"AT": 1})
    view = program.view("seen", 16)
    for _ in range(2):  # the second time the program is loaded already
        before = count(view, 1)
        program.attach_btf_tracepoint("sched_switch", "on_switch")
        assert program.attached == ("btf_tracepoint:sched_switch",)
        wait_until(lambda before=before: count(view, 1) > before)
        assert program.run_statistics()["on_switch"][0] >= 0
        program.detach_all()
    wait_until(lambda: stands_still(view))
    assert program.attached == ()
    program.close()


def test_refusals_are_one_sentence(loader, source, capfd):
    program = loader.load(source, {"AT": 1})
    program.attach_raw_tracepoint("sched_switch", "on_switch")
    for attach, said in (
        (lambda: program.attach_raw_tracepoint("sched_switch", "on_switch"), "already attached"),
        (lambda: program.attach_raw_tracepoint("no_such_event", "on_switch"), "raw_tracepoint:no_such_event"),
        (
            lambda: program.attach_btf_tracepoint("no_such_event", "unbounded"),
            "btf_tracepoint:no_such_event: .*no_such_event",
        ),
        (lambda: program.attach_btf_tracepoint("sched_switch", "beyond"), "btf_tracepoint:sched_switch: .*beyond"),
        (lambda: program.attach_tracepoint("sched:no_such_event", "on_call"), "no_such_event"),
        (lambda: program.attach_kprobe("no_such_function", "on_switch"), "kprobe:no_such_function"),
        (lambda: program.attach_fentry("no_such_function"), "fentry:no_such_function"),
    ):
        with pytest.raises(ProbeError, match=said) as caught:
            attach()
        assert "\n" not in str(caught.value)
    program.close()
    assert capfd.readouterr().err == "", "the libraries' own noise stays out of the log"


def test_a_program_that_does_not_compile_names_file_and_error(loader, source):
    with pytest.raises(ProbeError, match=r"cannot compile sample\.c: .*error: .*AT"):
        loader.load(source)


def test_features_are_found_in_tracefs(loader):
    assert loader.tracepoint_exists("sched:sched_switch")
    assert not loader.tracepoint_exists("sched:no_such_event")
    assert loader.tracepoint_has_field("sched:sched_switch", "prev_pid")
    assert not loader.tracepoint_has_field("sched:sched_switch", "prev")
    assert not loader.tracepoint_has_field("sched:no_such_event", "prev_pid")


def test_a_loader_leaves_nothing_behind(source):
    def state():
        mounts = Path("/proc/self/mounts").read_text().splitlines()
        return Path.cwd(), [line for line in mounts if "tracefs" in line], os.environ.get("BCC_KERNEL_SOURCE")

    before = state()
    with Loader(cache=None) as own:
        tree = own.headers.tree if own.headers.temporary else None
        own.load(source, {"AT": 0}).attach_tracepoint("sched:sched_switch", "on_call")
    assert state() == before
    assert own.mounted == []
    assert tree is None or not tree.exists()
