"""Symbol names from a real library of this system and from broken files."""

import ctypes.util
import mmap
import subprocess
from pathlib import Path

import pytest

from bpf.elf import ElfError, find_symbols


@pytest.fixture(scope="module")
def library():
    """The C++ library: real mangled names, whatever this machine's architecture."""
    name = ctypes.util.find_library("stdc++")
    cache = subprocess.run(["/sbin/ldconfig", "-p"], capture_output=True, text=True, check=True).stdout
    return Path(next(line.split(" => ")[1] for line in cache.splitlines() if f"{name} " in line))


def test_whole_name_is_found_by_its_beginning(library):
    with library.open("rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as image:
        found = find_symbols(image, ["_ZNKSt5ctypeIcE8do_widen", "_ZNSt8no_such_thing"])
    assert list(found) == ["_ZNKSt5ctypeIcE8do_widen"]
    assert found["_ZNKSt5ctypeIcE8do_widen"].startswith("_ZNKSt5ctypeIcE8do_widenE")


def test_name_must_begin_where_a_symbol_begins(library):
    assert find_symbols(library.read_bytes(), ["NKSt5ctypeIcE8do_widen"]) == {}


@pytest.mark.parametrize("image", [b"", b"\x7fELF", b"#!/bin/sh\n" * 20, b"\x7fELF\x01\x01" + bytes(100)])
def test_other_files_are_refused(image):
    with pytest.raises(ElfError):
        find_symbols(image, ["x"])


def test_library_cut_short_is_refused(library):
    with pytest.raises(ElfError):
        find_symbols(library.read_bytes()[:5000], ["x"])
