import pytest

from cgroup.actuators import ACTUATORS, BfqWeight, DeviceCapacity, IoMax, IoWeight, detect, pick, preview
from cgroup.errors import DeviceRefused
from cgroup.lines import Limit, Weight
from tests.unit.cgroup.trees import Tree

CAPACITY = DeviceCapacity(rbps=1000.0, wbps=500.0, riops=100.0)


def test_io_max_takes_the_share_of_every_known_dimension():
    assert IoMax().desired(0.25, CAPACITY) == Limit(rbps=250, wbps=125, riops=25)
    assert IoMax().desired(0.0, CAPACITY) == Limit(rbps=1, wbps=1, riops=1), "zero would stop the cgroup for good"


def test_no_share_is_no_cap_of_ours():
    assert IoMax().desired(None, CAPACITY) == Limit()
    assert IoWeight().desired(None, CAPACITY) == Weight(None)
    assert BfqWeight().desired(None, CAPACITY) == Weight(None, "io.bfq.weight")


@pytest.mark.parametrize(("share", "weight"), [(0.1, 100), (1.0, 1000), (0.0, 1), (3.0, 3000)])
def test_weights_are_proportions_and_a_tenth_is_the_default(share, weight):
    assert IoWeight().desired(share, CAPACITY) == Weight(weight)
    assert BfqWeight().desired(share, CAPACITY).weight == min(weight, 1000)


def test_every_actuator_writes_the_file_it_is_named_after():
    assert {name: actuator.file for name, actuator in ACTUATORS.items()} == {name: name for name in ACTUATORS}
    assert all(a.desired(0.5, CAPACITY).file == name for name, a in ACTUATORS.items())


def test_preview():
    assert preview("8:0", Weight(300, "io.bfq.weight")) == "8:0 300"
    assert preview("8:0", Limit(rbps=7)) == "8:0 rbps=7 wbps=max riops=max wiops=max"


def test_detect_uses_only_what_the_host_is_set_up_for(tmp_path):
    tree = Tree(tmp_path)
    found = lambda: detect("8:0", str(tree.root), str(tree.sys))  # noqa: E731
    assert found() == {"io.max"}
    (tree.root / "io.cost.qos").write_text("8:0 enable=0 ctrl=auto\n8:16 enable=1 ctrl=auto\n")
    (tree.sys / "dev/block/8:0/queue/scheduler").write_text("none mq-deadline [bfq]\n")
    assert found() == {"io.max", "io.bfq.weight"}
    (tree.root / "io.cost.qos").write_text("8:0 enable=1 ctrl=auto\n")
    (tree.root / "cgroup.controllers").write_text("cpu\n")
    assert found() == {"io.weight", "io.bfq.weight"}
    assert detect("8:99", str(tree.root), str(tmp_path / "none")) == frozenset()


def test_pick():
    assert pick("auto", "8:0", frozenset(("io.max", "io.weight"))).file == "io.max"
    assert pick("io.weight", "8:0", frozenset(("io.max", "io.weight"))).file == "io.weight"
    with pytest.raises(DeviceRefused, match="8:0 enable=1"):
        pick("io.weight", "8:0", frozenset(("io.max",)))
    with pytest.raises(DeviceRefused, match="queue/scheduler"):
        pick("io.bfq.weight", "8:0", frozenset(("io.max",)))
    with pytest.raises(DeviceRefused, match="io controller"):
        pick("auto", "8:0", frozenset())
