"""Throw-away root file systems (a copy of this machine's, a fresh Debian) and the release archive installed in them."""

import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from tests.unit.packaging.nodes import make_fresh_node
from tests.unit.packaging.roots import DebianRoot, debootstrap
from tests.unit.packaging.support import PACKAGING, SOURCE, busy_report


@pytest.fixture
def fresh_node(tmp_path):
    """A node that looks like this machine before prefetchd was installed."""
    return make_fresh_node(tmp_path)


@pytest.fixture(scope="session")
def debian(tmp_path_factory):
    """A root file system as the installer leaves it, for all tests; overlays are laid on it."""
    if os.geteuid() != 0 or not shutil.which("debootstrap"):
        pytest.skip("a fresh root file system needs root and debootstrap")
    folder = tmp_path_factory.mktemp("debian") / "root"
    debootstrap(folder)
    yield folder
    shutil.rmtree(folder)


@pytest.fixture
def fresh(debian, tmp_path):
    """A newcomer's machine, on which apt-get asks nothing."""
    root = DebianRoot.make(tmp_path, debian)
    root.run("echo 'APT::Get::Assume-Yes \"true\";' >/etc/apt/apt.conf.d/yes")
    yield root
    for folder in ("upper", "shared"):
        shutil.rmtree(root.base / folder)


@pytest.fixture(scope="session")
def release(tmp_path_factory):
    """The release archive, built once."""
    folder = tmp_path_factory.mktemp("release")
    command = [sys.executable, str(PACKAGING / "package.py"), "--output", str(folder)]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stdout + done.stderr
    return Path(done.stdout.splitlines()[-1])


@pytest.fixture(scope="session")
def release_folder(release, tmp_path_factory):
    """The unpacked release archive."""
    folder = tmp_path_factory.mktemp("unpacked")
    subprocess.run(["tar", "xf", release, "-C", folder], check=True)
    return next(folder.iterdir())


@pytest.fixture
def report():
    """A pass of the loop in which every metric has a value."""
    return busy_report()


@pytest.fixture(scope="session")
def project_version():
    """The version that pyproject.toml says."""
    return tomllib.loads((SOURCE / "pyproject.toml").read_text())["project"]["version"]
