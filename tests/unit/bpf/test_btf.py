"""The BTF reader on blobs written by hand, and on the running kernel's where there is one."""

import json
import shutil
import subprocess

import pytest

from bpf.btf import VMLINUX, Btf, BtfError, KernelBtf
from tests.unit.bpf import btf_blob
from tests.unit.bpf.btf_blob import BlobWriter


def small():
    """A struct with nameless members, a typedef, a bit field, an array and a pointer; enums; a tracepoint."""
    w = BlobWriter()
    w.add(btf_blob.FLOAT, "float", size_or_type=4)
    integer, long = w.integer("int", 4), w.integer("long", 8)
    inner = w.record("inner", 16, [("x", integer, 0, 0), ("y", long, 64, 0)])
    alias = w.add(btf_blob.TYPEDEF, "inner_t", size_or_type=w.add(btf_blob.CONST, size_or_type=inner))
    union = w.record("", 8, [("b", long, 0, 0)], kind=btf_blob.UNION)
    nameless = w.record("", 8, [("", union, 0, 0)])
    fields = [("a", integer, 0, 0), ("", nameless, 64, 0), ("c", alias, 128, 0), ("bits", integer, 259, 3)]
    fields += [("d", integer, 288, 0), ("e", w.array(integer, 4), 320, 0), ("p", w.pointer(0), 448, 0)]
    w.record("outer", 64, fields, flag=1)
    w.add(btf_blob.VAR, "variable", size_or_type=integer, extra=b"\0" * 4)
    w.add(btf_blob.DATASEC, ".data", entries=1, size_or_type=4, extra=b"\0" * 12)
    w.add(btf_blob.DECL_TAG, "tag", size_or_type=integer, extra=b"\0" * 4)
    w.enum("colour", {"RED": 0, "GREEN": 7})
    w.enum("wide", {"HUGE": 1 << 40}, kind=btf_blob.ENUM64)
    request = w.pointer(w.record("request", 8, [("q", long, 0, 0)]))
    proto = w.prototype([w.pointer(0), long, request, integer])
    w.add(btf_blob.TYPEDEF, "btf_trace_issue", size_or_type=w.pointer(proto))
    return w


@pytest.fixture
def btf():
    return Btf(small().blob())


@pytest.mark.parametrize(
    ("path", "offset", "size"),
    [
        ("outer.a", 0, 4),
        ("outer.b", 8, 8),
        ("outer.c", 16, 16),
        ("outer.c.y", 24, 8),
        ("outer.d", 36, 4),
        ("outer.e", 40, 16),
        ("outer.p", 56, 8),
        ("inner_t.x", 0, 4),
        ("outer", 0, 64),
    ],
)
def test_offsets_and_sizes(btf, path, offset, size):
    assert (btf.offset(path), btf.size(path)) == (offset, size)


@pytest.mark.parametrize("path", ["outer.z", "nothing.a", "outer.a.b", "out", "uter.a", "outer.c.z"])
def test_what_is_missing_is_named(btf, path):
    with pytest.raises(BtfError, match=path):
        btf.offset(path)


def test_a_bit_field_has_no_byte_offset(btf):
    with pytest.raises(BtfError, match="bit field"):
        btf.offset("outer.bits")


def test_enumerators_of_both_widths(btf):
    assert [btf.enumerator(name) for name in ("RED", "GREEN", "HUGE")] == [0, 7, 1 << 40]
    with pytest.raises(BtfError, match="BLUE"):
        btf.enumerator("BLUE")


def test_position_of_a_tracepoint_argument(btf):
    assert btf.tracepoint_argument("issue", "request") == 1
    for tracepoint, struct_name in (("issue", "bio"), ("nothing", "request")):
        with pytest.raises(BtfError, match=tracepoint):
            btf.tracepoint_argument(tracepoint, struct_name)


def test_type_of_a_tracepoint(btf):
    assert btf.tracepoint_type("issue") > 0
    with pytest.raises(BtfError, match="nothing"):
        btf.tracepoint_type("nothing")


@pytest.mark.parametrize(
    ("blob", "complaint"),
    [
        (b"", "shorter than its header"),
        (small().blob(magic=0x9FEB), "magic 0x9feb"),
        (small().blob(version=2), "version 2"),
        (small().blob()[:-5], "cut short"),
    ],
)
def test_malformed_blobs_are_refused(blob, complaint):
    with pytest.raises(BtfError, match=complaint):
        Btf(blob)


def test_an_unknown_kind_is_refused_rather_than_misread():
    w = small()
    w.add(25, "later")
    with pytest.raises(BtfError, match="kind 25"):
        Btf(w.blob())


def test_a_modules_types_go_on_where_the_kernels_end(tmp_path):
    kernel = small()
    module = kernel.module()
    own = module.record("own", 24, [("first", 3, 0, 0), ("second", 3, 64, 0)])
    module.record("user", 32, [("pointer", module.pointer(own), 0, 0), ("kept", own, 64, 0)])
    (tmp_path / "vmlinux").write_bytes(kernel.blob())
    (tmp_path / "fuse").write_bytes(module.blob())
    btf = KernelBtf(tmp_path / "vmlinux", tmp_path / "run")
    assert not btf.has("user.kept")
    extended = btf.of_module("fuse")
    assert (extended.offset("user.kept.second"), extended.offset("outer.d")) == (16, 36)
    assert not btf.has("own.second"), "answers of the two are kept apart"
    with pytest.raises(BtfError, match="missing"):
        btf.of_module("missing").offset("own.first")


def test_answers_are_kept_for_the_boot(tmp_path):
    path, cache = tmp_path / "vmlinux", tmp_path / "run"
    path.write_bytes(small().blob())
    first = KernelBtf(path, cache)
    assert (first.offset("outer.d"), first.has("outer.z"), first.enumerator("GREEN")) == (36, False, 7)
    path.write_bytes(b"\0" * path.stat().st_size)
    again = KernelBtf(path, cache)
    assert (again.offset("outer.d"), again.has("outer.z"), again.enumerator("GREEN")) == (36, False, 7)
    with pytest.raises(BtfError, match="magic"):
        again.offset("outer.a")


@pytest.mark.parametrize("rubbish", ["", "[1]", "{", json.dumps("text")])
def test_a_spoilt_cache_is_ignored(tmp_path, rubbish):
    path, cache = tmp_path / "vmlinux", tmp_path / "run"
    path.write_bytes(small().blob())
    KernelBtf(path, cache).offset("outer.d")
    (stored,) = cache.iterdir()
    stored.write_text(rubbish)
    assert KernelBtf(path, cache).offset("outer.d") == 36


def test_a_cache_that_cannot_be_written_costs_only_time(tmp_path):
    path = tmp_path / "vmlinux"
    path.write_bytes(small().blob())
    (tmp_path / "file").write_text("")
    assert KernelBtf(path, tmp_path / "file").offset("outer.d") == 36


def test_a_kernel_without_btf_is_told_in_one_sentence(tmp_path):
    with pytest.raises(BtfError, match="build the kernel with BTF"):
        KernelBtf(tmp_path / "missing").offset("bio.bi_next")


@pytest.mark.native
def test_the_running_kernel_agrees_with_bpftool():
    if not VMLINUX.exists() or not (tool := shutil.which("bpftool") or shutil.which("/usr/sbin/bpftool")):
        pytest.skip("needs /sys/kernel/btf/vmlinux and bpftool")
    dump = subprocess.run([tool, "-j", "btf", "dump", "file", VMLINUX], capture_output=True, check=True).stdout
    types = {entry["id"]: entry for entry in json.loads(dump)["types"]}
    btf = Btf(VMLINUX.read_bytes())
    checked = 0
    for entry in types.values():
        if entry["kind"] == "STRUCT" and entry["name"] in {"bio", "request", "gendisk", "task_struct", "cgroup"}:
            for member in entry["members"]:
                if member["name"] != "(anon)" and not member.get("bitfield_size"):
                    assert btf.offset(f"{entry['name']}.{member['name']}") * 8 == member["bits_offset"]
                    checked += 1
    assert checked > 100
