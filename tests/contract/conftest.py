"""The node under test: the fake. tests/lab/guest/test_cgroup_contract.py runs the same tests over the kernel."""

import pytest

from cgroup.journal import Journal
from tests.contract.nodes import FakeNode


@pytest.fixture
def node():
    return FakeNode()


@pytest.fixture
def journal(tmp_path):
    journal = Journal.open(str(tmp_path / "journal"))
    yield journal
    journal.close()
