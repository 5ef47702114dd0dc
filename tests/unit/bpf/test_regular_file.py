"""Opening what stands at a path that others choose."""

import fcntl
import os
import signal
import time

import pytest

from bpf.regular_file import NotRegular, open_regular
from tests.unit.waiting_writer import pipe_with_writer


def test_a_file_is_opened_and_a_link_only_where_it_may_be(tmp_path):
    (tmp_path / "file").write_text("x")
    (tmp_path / "link").symlink_to(tmp_path / "file")
    for name in ("file", "link"):
        descriptor = open_regular(tmp_path / name)
        assert os.read(descriptor, 2) == b"x"
        os.close(descriptor)
    with pytest.raises(NotRegular, match="not a regular file"):
        open_regular(str(tmp_path / "link"), os.O_NOFOLLOW)
    with pytest.raises(FileNotFoundError):
        open_regular(str(tmp_path / "other"))


def test_a_pipe_is_not_opened_and_a_folder_neither(tmp_path):
    with pipe_with_writer(tmp_path / "pipe") as writer:
        for path in (tmp_path / "pipe", tmp_path):
            with pytest.raises(NotRegular):
                open_regular(path)
        writer.join(0.1)
        assert writer.is_alive(), "its writer was let go"


def test_somebodys_lease_holds_nobody_up(tmp_path):
    path = tmp_path / "file"
    path.write_text("x")
    before = signal.signal(signal.SIGIO, signal.SIG_IGN)  # by which the holder is told
    holder = os.open(path, os.O_RDWR)
    try:
        fcntl.fcntl(holder, fcntl.F_SETLEASE, fcntl.F_WRLCK)
        began = time.monotonic()
        with pytest.raises(BlockingIOError):
            open_regular(path)
        assert time.monotonic() - began < 5
    finally:
        os.close(holder)
        signal.signal(signal.SIGIO, before)
