"""`prefetchd calibrate` on this machine's disk: figures, refusals, and nothing left behind."""

import errno
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import tomllib
from pathlib import Path

import pytest

from agent import config
from agent.calibration import measure, place
from agent.calibration.measure import Figure, figure, lines, rounded
from agent.calibration.readers import KIB, Kind, OwnReader, choose_reader
from agent.errors import CannotEnforceError, PrefetchdError, UsageError
from cgroup.devices import BlockDevice, Devices
from cgroup.errors import DeviceRefused
from cgroup.mounts import Mounts
from tests.native.conftest import missing
from tests.native.processes import wait_until

pytestmark = pytest.mark.native

DISK = BlockDevice("254:0", "vda", "hdd", rotational=True, size_bytes=10**12, kind="disk")


@pytest.fixture
def folder(tmp_path):
    try:
        Mounts(Devices()).resolve(str(tmp_path))
    except DeviceRefused as error:
        missing(f"the tests' folder is on no disk: {error}")
    yield tmp_path
    assert [path.name for path in tmp_path.iterdir()] == []


def argv(*arguments):
    return [sys.executable, "-m", "agent", "calibrate", *map(str, arguments)]


def run(*arguments):
    return subprocess.run(argv(*arguments), capture_output=True, text=True, check=False, timeout=120)


def quick(target, *more):
    return (target, "--size", "64 MiB", "--seconds", "0.3", "--busy-ok", *more)


def test_lines_can_be_pasted_into_the_configuration(folder):
    done = run(*quick(folder, "--reader", "own"))
    assert done.returncode == 0, done.stderr
    parsed = config.parse(done.stdout)
    (rule,) = parsed.devices
    assert rule.read_bytes_per_second > 1e6
    assert rule.write_requests_per_second > 10
    assert rule.medium in ("ssd", "hdd")
    assert Path(rule.device).is_block_device()
    assert "confidence" in done.stdout
    assert "sequential reads" in done.stderr


@pytest.mark.skipif(not shutil.which("fio"), reason="fio is not installed")
def test_fio_and_our_own_reader_agree_on_what_they_measure(folder):
    kind = Kind("read_bytes_per_second", "read", 256 * KIB, 8, sequential=False)
    with place.nameless_file(folder) as descriptor:
        measure.fill(descriptor, 64 << 20, lambda *_: None)
        readers = [choose_reader(name) for name in ("fio", "own")]
        rates = [max(reader.run(descriptor, 64 << 20, kind, 0.7) for _ in range(3)) for reader in readers]
    assert min(rates) > max(rates) / 8


def test_json(folder):
    told = json.loads(run(*quick(folder, "--reader", "own", "--json")).stdout)
    assert set(told["figures"]) == {kind.name for kind in measure.KINDS}
    assert all(one["value"] > 0 and one["confidence"] in ("high", "medium", "low") for one in told["figures"].values())


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
@pytest.mark.parametrize("reader", ["own", "fio"])
def test_interruption_leaves_neither_file_nor_process(folder, number, reader):
    if reader == "fio" and not shutil.which("fio"):
        pytest.skip("fio is not installed")
    process = subprocess.Popen(
        argv(folder, "--size", "64 MiB", "--seconds", "60", "--busy-ok", "--reader", reader),
        stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip
    while "sequential reads" not in process.stderr.readline():
        assert process.poll() is None
    time.sleep(0.7)
    process.send_signal(number)
    out, _ = process.communicate(timeout=60)
    assert process.returncode == (-number if number == signal.SIGKILL else 130)
    assert out == ""
    wait_until(lambda: _left_of(process.pid) == [])


def _left_of(leader):
    """Processes of the session that are still alive, and those that use its file: a job of fio has its own session."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
            uses = f"/proc/{leader}/fd/".encode() in (stat.parent / "cmdline").read_bytes()
        except OSError:
            continue
        if (int(fields[3]) == leader and fields[0] != "Z") or uses:
            found.append(stat.parent.name)
    return found


@pytest.mark.parametrize(
    ("target", "status", "words"),
    [
        ("/sys", 3, "lives in memory; name a folder on a local disk."),
        ("/proc", 3, "lives in memory; name a folder on a local disk."),
        ("/dev/null", 3, "'/dev' is on devtmpfs, which lives in memory; name a folder on a local disk."),
        ("/dev/no-such-device", 3, "no block device"),
        ("/nonexistent", 2, "Path '/nonexistent' does not exist; name a device, or a folder or file that exists."),
        ("/nonexistent/x/y", 2, "Path '/nonexistent/x/y' does not exist; name a device"),
        ("/tmp/no-such-file", 2, "Path '/tmp/no-such-file' does not exist"),
        ("loop0", 3, "loop"),
    ],
)
def test_what_is_refused(target, status, words):
    done = run(target)
    assert done.returncode == status
    assert words in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--size", "1 KiB"), "Size '1 KiB' is too small; give at least 64 MiB."),
        (("--size", "16 MiB"), "Size '16 MiB' is too small; give at least 64 MiB."),
        (("--size", "90000 GB"), "another --size"),
        (("--size", "much"), "is no size"),
        (("--seconds", "0"), "not from 0.3 to 600"),
    ],
)
def test_options_that_cannot_be_used(folder, options, words):
    done = run(folder, "--busy-ok", *options)
    assert done.returncode == 2
    assert words in done.stderr


LOAD = """
import sys
from pathlib import Path
from agent.calibration import measure, place, readers
with place.nameless_file(Path(sys.argv[1])) as descriptor:
    measure.fill(descriptor, 64 << 20, lambda *_: None)
    print("ready", flush=True)
    kind = readers.Kind("load", "read", 1 << 20, 16, sequential=False)
    readers.OwnReader().run(descriptor, 64 << 20, kind, 60.0)
"""


def test_a_busy_device_is_refused(folder):
    load = subprocess.Popen([sys.executable, "-c", LOAD, folder], stdout=subprocess.PIPE, text=True)
    try:
        assert load.stdout.readline() == "ready\n"
        done = run(folder, "--seconds", "0.3", "--size", "64 MiB")
    finally:
        load.kill()
        load.communicate()
    assert done.returncode == 3
    assert re.search(r"busy for \d+% of the last 1.5 s", done.stderr)


def test_reader_errors_are_one_sentence(folder):
    kind = Kind("read_bytes_per_second", "read", 4 * KIB, 2, sequential=True)
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        with pytest.raises(PrefetchdError, match="cannot be measured"):
            OwnReader().run(descriptor, 1 << 20, kind, 0.2)
    finally:
        os.close(descriptor)


def test_reading_outside_of_linux_files(monkeypatch):
    monkeypatch.setenv("PATH", "/nonexistent")
    assert choose_reader("auto").name == OwnReader.name
    with pytest.raises(PrefetchdError, match="apt-get install fio"):
        choose_reader("fio")


def test_confidence_follows_the_spread():
    assert figure([100.0, 101.0, 99.0]).confidence == "high"
    assert figure([100.0, 120.0, 101.0]).confidence == "medium"
    assert figure([100.0, 200.0, 50.0]) == Figure(100.0, 1.5)
    assert figure([0.0, 0.0, 0.0]).confidence == "low"


@pytest.mark.parametrize(("value", "expected"), [(1_287_654_321.0, 1_280_000_000), (999.9, 999), (12.3, 12), (0.0, 0)])
def test_figures_are_rounded_down(value, expected):
    assert rounded(value) == expected


def test_random_reads_tell_the_medium():
    figures = {kind.name: Figure(5000.0, 0.02) for kind in measure.KINDS}
    text = lines(place.Place(DISK, None), figures, ["remark"])
    assert 'medium = "ssd"   # the kernel says hdd' in text
    assert tomllib.loads(text)["devices"][0]["read_requests_per_second"] == 5000
    figures["read_requests_per_second"] = Figure(180.0, 0.02)
    assert 'medium = "hdd"\n' in lines(place.Place(DISK, None), figures, [])


def test_raw_needs_a_device_and_is_read_only(monkeypatch, tmp_path):
    image = tmp_path / "vda"
    image.write_bytes(bytes(1 << 20))
    monkeypatch.setattr(place.Place, "node", property(lambda _: str(image)))
    with place.raw_device(place.Place(DISK, None)) as descriptor, pytest.raises(OSError):
        os.pwrite(descriptor, b"x" * 4096, 0)
    image.unlink()
    with pytest.raises(UsageError, match="run as root"), place.raw_device(place.Place(DISK, None)):
        pass
    with pytest.raises(CannotEnforceError):
        place.find_place("/dev/null", raw=True)
    with pytest.raises(UsageError, match="does not exist"):
        place.find_place("/nonexistent", raw=True)


def test_a_file_stands_for_the_folder_that_it_is_in(folder):
    file = folder / "shard"
    file.touch()
    assert place.find_place(str(file), raw=False) == place.find_place(str(folder), raw=False)
    file.unlink()


def test_the_file_never_has_a_name_so_that_no_end_can_leave_it(folder, monkeypatch):
    def ended(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "unlink", ended)
    with place.nameless_file(folder) as descriptor:
        assert os.fstat(descriptor).st_nlink == 0
        assert list(folder.iterdir()) == []


def test_where_every_file_has_a_name_it_loses_it_at_once(folder, monkeypatch):
    opened, real = [], os.open

    def refuse(path, flags, *more, **options):
        opened.append(path)
        if flags & os.O_TMPFILE == os.O_TMPFILE:
            raise OSError(errno.EOPNOTSUPP, "Operation not supported")
        return real(path, flags, *more, **options)

    monkeypatch.setattr(os, "open", refuse)
    with place.nameless_file(folder) as descriptor:
        assert os.fstat(descriptor).st_nlink == 0
    assert len(opened) == 2
