"""The life around the loop: what looks on never ends it, and weights left by exec are read."""

import os

import pytest

from agent import loop
from agent.node import LocalNode
from agent.types import Job


def test_a_follower_that_fails_is_logged_and_the_loop_goes_on(caplog):
    def broken(report):
        raise RuntimeError("disk gone")

    loop._call(broken, None)
    assert "a follower of the loop failed" in caplog.text
    assert "disk gone" in caplog.text


def test_the_weight_that_exec_left_counts(tmp_path):
    folder = tmp_path / "prefetchd.slice" / "resnet"
    folder.mkdir(parents=True)
    try:
        os.setxattr(folder, "user.prefetchd.weight", b"300")
    except OSError as error:
        pytest.skip(f"no extended attributes in {tmp_path}: {error}")
    node = object.__new__(LocalNode)
    node._root = str(tmp_path)
    job = Job(1, "resnet", "/prefetchd.slice/resnet", training=True)
    assert node._weighed(job).weight == 300.0
    assert node._weighed(Job(2, "x", "/prefetchd.slice", training=True)).weight == 100.0
    assert node._weighed(Job(1, "resnet", "/prefetchd.slice/resnet", training=False)).weight == 100.0
