"""The contract suite over the kernel's own cgroup file system and disks that can be pulled."""

import pytest

from cgroup.journal import Journal
from tests.contract.nodes import KernelNode
from tests.contract.test_enforcement import (  # noqa: F401  # the suite itself: pytest collects what stands here
    TestControllers,
    TestFiles,
    TestForeignWriters,
    TestModes,
    TestReconcile,
    TestRestore,
    enforcer,
)

pytestmark = pytest.mark.guest


@pytest.fixture
def node():
    node = KernelNode()
    yield node
    node.close()


@pytest.fixture
def journal(tmp_path):
    journal = Journal.open(str(tmp_path / "journal"))
    yield journal
    journal.close()
