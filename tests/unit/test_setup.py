"""The set-up script: quick and silent when nothing is to do, one sentence where it cannot work."""

import os
import shutil
import subprocess
import venv
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TOOLS = ("sh", "cat", "cut", "dirname", "id", "sed", "sha256sum", "sort", "tr", "mktemp", "tail", "rm")


@pytest.fixture
def bare(tmp_path):
    """A copy of what set-up reads, and a PATH with nothing but the shell's own tools."""
    for name in ("pyproject.toml", "packaging/setup.sh", "packaging/debian-run.txt", "packaging/debian-test.txt"):
        target = tmp_path / "tree" / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, target)
    tools = tmp_path / "bin"
    tools.mkdir()
    for tool in TOOLS:
        (tools / tool).symlink_to(shutil.which(tool))
    return tmp_path / "tree", tools


def run(tree, tools, tier="run", **environment):
    command = ["sh", "packaging/setup.sh", tier]
    return subprocess.run(
        command,
        cwd=tree,
        env={"PATH": str(tools), **environment},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_an_unknown_tier_installs_nothing(bare):
    done = run(*bare, tier="tset")
    assert (done.returncode, done.stderr) == (2, "setup: unknown tier 'tset'; use run or test.\n")


def test_a_machine_that_is_not_debian_like_gets_the_list(bare):
    done = run(*bare)
    assert done.returncode == 1
    assert done.stderr.startswith("setup: this machine is not Debian-like; install the equivalents of: ")
    assert "python3-bpfcc" in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert "qemu-system-x86" in run(*bare, tier="test").stderr


def test_without_root_and_sudo_it_says_so(bare):
    tree, tools = bare
    for name, text in (("apt-get", "exit 1"), ("dpkg-query", "exit 1")):
        (tools / name).write_text(f"#!/bin/sh\n{text}\n")
        (tools / name).chmod(0o755)
    (tools / "id").unlink()
    (tools / "id").write_text("#!/bin/sh\necho 1000\n")
    (tools / "id").chmod(0o755)
    done = run(tree, tools)
    assert done.returncode == 1
    assert "no sudo; run as root once to install:" in done.stderr


def test_an_environment_whose_making_was_interrupted_is_made_anew(bare):
    tree, tools = bare
    for name, text in (("apt-get", "exit 1"), ("dpkg-query", "echo install ok installed")):
        (tools / name).write_text(f"#!/bin/sh\n{text}\n")
        (tools / name).chmod(0o755)
    venv.create(tree / ".venv", symlinks=True, with_pip=False)
    done = run(tree, tools, PIP_NO_INDEX="1")
    assert "setup: creating .venv" in done.stdout
    assert "No module named pip" not in done.stderr
    assert (tree / ".venv" / "bin" / "pip").exists()


def test_running_it_again_is_silent_and_changes_nothing():
    if not (ROOT / ".venv" / "stamp-test").exists():
        pytest.skip("the project was not set up by packaging/setup.sh")
    before = {path: path.stat().st_mtime_ns for path in (ROOT / ".venv").iterdir()}
    done = subprocess.run(
        ["sh", "packaging/setup.sh", "test"], cwd=ROOT, capture_output=True, text=True, timeout=300, check=False
    )
    if "installing" in done.stdout:  # the lists changed since; the second time nothing is left to do
        done = subprocess.run(
            ["sh", "packaging/setup.sh", "test"], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
        )
        before = {path: path.stat().st_mtime_ns for path in (ROOT / ".venv").iterdir()}
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert before == {path: path.stat().st_mtime_ns for path in (ROOT / ".venv").iterdir()}


def test_every_listed_package_is_known_to_this_system():
    listed = {
        line.strip()
        for name in ("run", "test")
        for line in (ROOT / "packaging" / f"debian-{name}.txt").read_text().splitlines()
        if line.strip() and not line.startswith("#")
    }
    if shutil.which("dpkg-query") is None:
        pytest.skip("not a Debian-like machine")
    done = subprocess.run(
        ["dpkg-query", "-W", "-f", "${Package} ${Status}\n", *sorted(listed)],
        capture_output=True,
        text=True,
        env={**os.environ, "LC_ALL": "C"},
        check=False,
    )
    installed = {line.split()[0] for line in done.stdout.splitlines() if line.endswith("install ok installed")}
    assert installed == listed


def test_make_setup_ends_by_saying_what_to_do_now_and_what_needs_it_does_not():
    def steps(target):
        command = ["make", "--no-print-directory", "-n", target]
        return subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT).stdout

    assert steps("setup").splitlines()[-1] == 'echo "setup: done; now: sudo .venv/bin/prefetchd doctor"'
    assert "setup: done" not in steps("run") + steps("demo")
