"""The lab itself, from the host: statuses and files come back, a broken guest is told from a failed command."""

import os
import pty
import select
import subprocess
import sys
import time

import pytest

from tests.lab import Lab, LabBroken, LabTimeout, LabUnavailable
from tests.lab.cache import PROJECT

pytestmark = [pytest.mark.lab, pytest.mark.nightly, pytest.mark.timeout(1800)]  # four boots; guest tests boot by day


@pytest.fixture
def lab(tmp_path):
    return Lab(devices=(), out_dir=tmp_path, boot_timeout=300)


def boot(lab):
    try:
        return lab.boot()
    except LabUnavailable as error:
        pytest.skip(str(error))


def test_one_guest_runs_many_commands_until_one_hangs(lab, tmp_path):
    pieces = []
    with boot(lab) as guest:
        failed = guest.run(["sh", "-c", "echo one; sleep 0.5; echo two >&2; exit 3"], on_output=pieces.append)
        assert failed.status == 3
        assert failed.output.read_text() == b"".join(pieces).decode() == "one\ntwo\n"
        left = guest.run(["sh", "-c", 'echo "$WORD" >"$PREFETCHD_LAB_OUT/file"; id -u'], env={"WORD": "it's"})
        assert left.status == 0
        assert (tmp_path / "file").read_text() == "it's\n"
        assert left.output.read_text() == "0\n"
        assert guest.run(["/nonexistent"]).status == 127
        with pytest.raises(LabTimeout, match="still running `sleep 60` after 2 s"):
            guest.run(["sleep", "60"], timeout=2)
        with pytest.raises(LabBroken):
            guest.run(["true"])


def test_panic_is_a_broken_lab_with_its_console(lab):
    with boot(lab) as guest, pytest.raises(LabBroken, match="Kernel panic") as caught:
        guest.run(["sh", "-c", "echo c >/proc/sysrq-trigger"], timeout=60)
    assert not isinstance(caught.value, LabTimeout)


def test_boot_that_takes_too_long_is_a_broken_lab(tmp_path):
    with pytest.raises(LabTimeout, match="still booting after 1 s"), Lab(devices=(), boot_timeout=1).boot():
        pass


def read_until(terminal, word, seconds):
    """What a terminal shows until `word` appears (or its program ends)."""
    shown, deadline = b"", time.monotonic() + seconds
    while word not in shown and time.monotonic() < deadline:
        if select.select([terminal], [], [], 1)[0]:
            try:
                shown += os.read(terminal, 4096)
            except OSError:  # the other side is closed
                break
    return shown


def test_shell_opens_in_the_project_and_ends_with_exit(lab):
    with boot(lab):
        pass  # skips where there is no lab, and waits for its turn
    terminal, other = pty.openpty()
    shell = subprocess.Popen(
        [sys.executable, "-m", "tests.lab", "shell"], cwd=PROJECT, stdin=other, stdout=other, stderr=other
    )
    os.close(other)
    try:
        assert b"# " in read_until(terminal, b"prefetchd-lab:" + str(PROJECT).encode() + b"# ", 600)
        os.write(terminal, b'echo "<$((6 * 7)) $(id -u) $(lsblk -ndo SERIAL | sort | xargs)>"; exit\n')
        assert b"<42 0 hdd0 ssd0>" in read_until(terminal, b"hdd0 ssd0>\r", 60)
        read_until(terminal, b"never", 30)
        assert shell.wait(60) == 0
    finally:
        shell.kill()
        shell.wait()
        os.close(terminal)
