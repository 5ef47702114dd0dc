"""What tests with real BPF need: rights, a loader, cgroups of their own, a folder on a real disk."""

import contextlib
import itertools
import os
import tempfile
import time
from pathlib import Path

import pytest

from bpf.loader import Loader, ProbeError
from tests.native import workload

CGROUPS = itertools.count()


def missing(reason):
    """Skip on a user's machine; in CI a test that cannot run is a failure."""
    if os.environ.get("CI", "").lower() == "true":
        pytest.fail(reason, pytrace=False)
    pytest.skip(reason)


@pytest.fixture(scope="session")
def loader():
    if os.geteuid():
        missing("BPF needs root: run as root or with sudo")
    with Loader(cache=None) as made:
        try:
            made.headers  # noqa: B018  # raises where there are none
            made.btf.offset("bio.bi_next")
        except (ProbeError, LookupError) as error:
            missing(str(error))
        yield made


def cgroup_mount():
    """Where cgroup v2 is mounted; None where it is not."""
    for line in Path("/proc/self/mounts").read_text().splitlines():
        _, where, kind, *_ = line.split()
        if kind == "cgroup2":
            return Path(where)
    return None


@pytest.fixture
def make_cgroup():
    """Make cgroups below the v2 root, or below one made before; all are removed at the end."""
    root, made = cgroup_mount(), []
    if root is None:
        missing("no cgroup v2 hierarchy is mounted")

    def make(parent=None):
        folder = (parent or root) / f"prefetchd-test-{os.getpid()}-{next(CGROUPS)}"
        folder.mkdir()
        made.append(folder)
        return folder

    yield make
    with contextlib.ExitStack() as stack:  # each is tried, whatever becomes of the others
        for folder in made:
            stack.callback(remove_cgroup, folder)


def remove_cgroup(folder, seconds=30.0):
    """Remove a cgroup whose processes are about to be gone."""
    deadline = time.monotonic() + seconds
    while True:
        try:
            folder.rmdir()
        except FileNotFoundError:
            return
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.05)
        else:
            return


@pytest.fixture(scope="session")
def disk_folder():
    """A folder on a file system that stands on a block device and takes O_DIRECT."""
    for base in (tempfile.gettempdir(), "/var/tmp", Path.cwd()):
        if workload.whole_device(Path(base)) is None:
            continue
        with tempfile.TemporaryDirectory(prefix="prefetchd-test-", dir=base) as folder:
            yield Path(folder)
        return
    missing("no folder on a local disk: /tmp, /var/tmp and the current folder are not on a block device")
