"""Copies of PyTorch's library over a made-up /proc: what is opened, and how long it is kept."""

import contextlib
import os
import threading
import time
from pathlib import Path

import pytest

from bpf.dataloader_libraries import HOOKS, LIBRARY, UNUSED_NS, Libraries
from bpf.library_file import WAIT_SECONDS
from bpf.loader import ProbeError
from bpf.regular_file import open_regular

PROCESS, OTHER = 7, 8


class Program:
    def __init__(self, *, refuses=()):
        self.attached, self.files, self._refuses = (), [], refuses

    def attach_uprobe(self, binary, symbol, function):
        assert binary.samefile(binary.readlink()), "what was opened is what is probed"
        if function in self._refuses:
            raise ProbeError(f"no {symbol}")
        self.files.append(binary.readlink())
        self.attached += (f"uprobe:{binary}:{symbol}:-1",)

    def detach(self, target):
        assert Path(target.split(":")[1]).exists(), "its symbols say where the probe is"
        self.attached = tuple(one for one in self.attached if one != target)


@pytest.fixture
def library(tmp_path):
    """Two processes that have one library."""
    found = tmp_path / "image" / LIBRARY
    found.parent.mkdir()
    strings = b"".join(b"\0" + prefix.encode() for prefix in HOOKS) + b"\0"
    header = b"\x7fELF\x02\x01" + bytes(34) + (64).to_bytes(8, "little") + bytes(10)
    header += b"".join(one.to_bytes(2, "little") for one in (64, 2, 0))
    section = bytes(4) + (11).to_bytes(4, "little") + bytes(32) + (1).to_bytes(4, "little") + bytes(20)
    names = bytes(24) + (192).to_bytes(8, "little") + len(strings).to_bytes(8, "little") + bytes(24)
    found.write_bytes(header + section + names + strings)
    for process in (PROCESS, OTHER):
        folder = tmp_path / str(process)
        folder.mkdir()
        (folder / "root").symlink_to("/")
        (folder / "maps").write_text(f"7f00-7f01 r-xp 00000000 fe:00 99                         {found}\n")
    return found


def open_files():
    """Paths that this process has open; sockets are other tests' servers', whose threads close them when they can."""
    found = []
    for descriptor in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            found.append(str(descriptor.readlink()))
    return sorted(path for path in found if path.startswith("/"))


def test_a_copy_is_kept_for_its_processes_and_a_while_longer(library, tmp_path):
    """Probes on it keep the container that it came with."""
    before, program = open_files(), Program()
    libraries = Libraries(program, tmp_path)
    assert libraries.look_into(PROCESS)
    assert libraries.look_into(OTHER)
    assert len(program.attached) == len(HOOKS)
    assert program.files == [library] * len(HOOKS)
    libraries.ended(PROCESS)
    for now_ns in (0, 2 * UNUSED_NS):
        libraries.release_unused(lambda _: True, now_ns)
    assert len(libraries) == 1, "the other one has it still"
    for now_ns in (0, UNUSED_NS - 1):
        libraries.release_unused(lambda process: process != OTHER, now_ns)
    assert len(libraries) == 1
    libraries.release_unused(lambda _: False, UNUSED_NS)
    assert (len(libraries), program.attached, open_files()) == (0, (), before)


def test_a_job_that_starts_over_finds_the_hooks_in_place(library, tmp_path):
    libraries = Libraries(Program(), tmp_path)
    libraries.look_into(PROCESS)
    libraries.ended(PROCESS)
    libraries.release_unused(lambda _: True, 0)
    libraries.look_into(OTHER)
    libraries.release_unused(lambda _: True, UNUSED_NS)
    assert len(libraries) == 1
    libraries.close()


def test_a_process_that_waits_for_storage_is_left_for_later(library, tmp_path):
    """Its maps cannot be read before its server answers, if ever."""
    libraries, maps = Libraries(Program(), tmp_path), tmp_path / str(PROCESS) / "maps"
    text = maps.read_text()
    maps.unlink()  # who reads them fails
    for thread, state in ((PROCESS, "S"), (PROCESS + 1, "D")):
        stat = tmp_path / str(PROCESS) / "task" / str(thread) / "stat"
        stat.parent.mkdir(parents=True)
        stat.write_text(f"{thread} (odd) R name) {state} 1 1 1\n")
    assert not libraries.look_into(PROCESS)
    maps.write_text(text)
    stat.write_text(f"{thread} (odd) D name) R 1 1 1\n")
    assert libraries.look_into(PROCESS)
    libraries.close()


@pytest.mark.parametrize("sign", ["\r", "\x0c", "\u2028"])
def test_a_path_that_looks_like_two_lines_is_one(library, tmp_path, sign):
    odd = library.with_name(f"a{sign}{LIBRARY}")
    library.rename(odd)
    (tmp_path / str(PROCESS) / "maps").write_bytes(f"7f00-7f01 r-xp 00000000 fe:00 99 {odd}\n".encode())
    program = Program()
    libraries = Libraries(program, tmp_path)
    assert libraries.look_into(PROCESS)
    assert program.files[0] == odd
    libraries.close()


def test_what_is_refused_halfway_leaves_nothing(library, tmp_path):
    before, program = open_files(), Program(refuses=["span_entered"])
    libraries = Libraries(program, tmp_path)
    assert libraries.look_into(PROCESS)
    assert (program.attached, open_files()) == ((), before)
    assert libraries.refusal.startswith("no _ZN5torch")


@pytest.fixture
def silent(monkeypatch):
    """Opening a file waits until this is set, as on a mount whose server hangs."""
    answer = threading.Event()

    def open_late(path):
        answer.wait()
        return open_regular(path)

    monkeypatch.setattr("bpf.library_file.open_regular", open_late)
    yield answer
    answer.set()


def wait_until(condition):
    deadline = time.monotonic() + 5
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.01)


@pytest.mark.usefixtures("library")
def test_storage_that_does_not_answer_holds_up_nobody(silent, tmp_path):
    program = Program()
    libraries, began = Libraries(program, tmp_path), time.monotonic()
    assert [libraries.look_into(process) for process in (PROCESS, OTHER) * 5] == [False] * 10
    assert time.monotonic() - began < 2 * WAIT_SECONDS, "one waits for it, and not for long"
    silent.set()
    wait_until(lambda: libraries.look_into(PROCESS))
    assert len(program.attached) == len(HOOKS)
    libraries.close()


@pytest.mark.usefixtures("library")
def test_what_answers_after_it_was_let_go_is_closed(silent, tmp_path):
    before, libraries = open_files(), Libraries(Program(), tmp_path)
    assert not libraries.look_into(PROCESS)
    libraries.close()
    silent.set()
    wait_until(lambda: "library" not in [thread.name for thread in threading.enumerate()])
    assert open_files() == before


@pytest.mark.parametrize("trick", ["pipe", "device", "folder", "too large"])
def test_what_stands_there_by_now_is_looked_at_before_it_is_opened(library, tmp_path, trick):
    """A job may put anything where its library was: a pipe held the agent up for ever, a watchdog ends the machine."""
    library.unlink()
    if trick == "pipe":
        os.mkfifo(library)
    elif trick == "device":
        library.symlink_to("/dev/null")
    elif trick == "folder":
        library.mkdir()
    else:
        with library.open("wb") as file:
            file.truncate(1 << 40)
    before, libraries = open_files(), Libraries(Program(), tmp_path)
    assert libraries.look_into(PROCESS)
    assert ("no library" if trick == "too large" else "not a regular file") in libraries.refusal
    assert open_files() == before
