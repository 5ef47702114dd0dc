"""Fixtures of the tests that run in the guest."""

import uuid

import pytest

from tests.lab import groups
from tests.lab.disks import find_disk


@pytest.fixture(scope="session")
def ssd():
    return find_disk("ssd0")


@pytest.fixture(scope="session")
def hdd():
    return find_disk("hdd0")


@pytest.fixture
def cgroup():
    """An empty cgroup with the io controller, removed with all that is in it."""
    folder = groups.ROOT / f"test-{uuid.uuid4().hex[:8]}"
    folder.mkdir()
    yield folder
    assert groups.remove(folder), (folder / "cgroup.procs").read_text()
