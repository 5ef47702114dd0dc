"""Symbol names from a real library of this system and from broken files."""

import ctypes.util
import os
import struct
import subprocess
from pathlib import Path

import pytest

from bpf.elf import ElfError, find_symbols


def reader(image):
    return lambda at, size: image[at : at + size]


def made_up(*, strings=b"\0", start=None, length=None):
    """A library of a header, one section of dynamic symbols and one of strings; what is said of these may be wrong."""
    header = struct.pack("<16sHHIQQQIHHHHHH", b"\x7fELF\x02\x01", 3, 62, 1, 0, 0, 64, 0, 64, 0, 0, 64, 2, 0)
    symbols = struct.pack("<IIQQQQIIQQ", 0, 11, 0, 0, 0, 0, 1, 0, 0, 0)
    at, size = 192 if start is None else start, len(strings) if length is None else length
    return header + symbols + struct.pack("<IIQQQQIIQQ", 0, 3, 0, 0, at, size, 0, 0, 0, 0) + strings


@pytest.fixture(scope="module")
def library():
    """The C++ library: real mangled names, whatever this machine's architecture."""
    name = ctypes.util.find_library("stdc++")
    cache = subprocess.run(["/sbin/ldconfig", "-p"], capture_output=True, text=True, check=True).stdout
    return Path(next(line.split(" => ")[1] for line in cache.splitlines() if f"{name} " in line))


def test_whole_name_is_found_by_its_beginning(library):
    with library.open("rb") as file:
        found = find_symbols(
            lambda at, size: os.pread(file.fileno(), size, at), ["_ZNKSt5ctypeIcE8do_widen", "_ZNSt8no_such_thing"]
        )
    assert list(found) == ["_ZNKSt5ctypeIcE8do_widen"]
    assert found["_ZNKSt5ctypeIcE8do_widen"].startswith("_ZNKSt5ctypeIcE8do_widenE")


def test_name_must_begin_where_a_symbol_begins(library):
    assert find_symbols(reader(library.read_bytes()), ["NKSt5ctypeIcE8do_widen"]) == {}


@pytest.mark.parametrize("image", [b"", b"\x7fELF", b"#!/bin/sh\n" * 20, b"\x7fELF\x01\x01" + bytes(100)])
def test_other_files_are_refused(image):
    with pytest.raises(ElfError):
        find_symbols(reader(image), ["x"])


def test_library_cut_short_is_refused(library):
    with pytest.raises(ElfError):
        find_symbols(reader(library.read_bytes()[:5000]), ["x"])


@pytest.mark.parametrize("wrong", [{"start": 2**64 - 1}, {"length": 2**64 - 1}, {"length": 2**40}])
def test_a_table_of_names_that_no_library_has_is_refused(wrong):
    with pytest.raises(ElfError, match="which no library's do"):
        find_symbols(reader(made_up(**wrong)), ["x"])


def test_names_are_found_wherever_the_table_is_cut_for_reading():
    for at in range((1 << 20) - 3, (1 << 20) + 2):
        strings = b"\0" + b"a" * (at - 1) + b"\0_Zwanted_rest\0"
        assert find_symbols(reader(made_up(strings=strings)), ["_Zwanted"]) == {"_Zwanted": "_Zwanted_rest"}


def test_a_name_that_is_no_text_does_not_end_the_search():
    strings = b"\0_Zodd\xff\0_Zgood1\0"
    assert find_symbols(reader(made_up(strings=strings)), ["_Zodd", "_Zgood"]) == {
        "_Zodd": "_Zodd\ufffd",
        "_Zgood": "_Zgood1",
    }
