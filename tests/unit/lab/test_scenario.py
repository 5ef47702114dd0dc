"""Scenario files: what is shipped loads, what is misspelt is refused in one sentence."""

from pathlib import Path

import pytest

from agent.simulate.scenario import ByteSize, ScenarioError, load_scenario, parse_scenario
from tests.lab.devices import Hdd, Ssd, devices_of
from tests.lab.disks import divide

SHIPPED = sorted((Path(__file__).parents[2] / "lab" / "scenarios").glob("*.toml"))
GOOD = """
name = "small"
description = "text"
duration_seconds = 5
[[devices]]
name = "ssd0"
kind = "ssd"
bytes_per_second = "100 MiB"
[[jobs]]
name = "job"
device = "ssd0"
batch_reads = 8
read_size = "128 KiB"
compute_ms = 50
"""
NEEDED = {
    *("ssd-greedy", "ssd-writer", "ssd-flood", "ssd-95", "ssd-over", "ssd-cold", "hdd-hot", "hdd-greedy"),
    *("cpu-bound", "demo", "skeleton"),
}


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_shipped_scenario_loads(path):
    scenario = load_scenario(path)
    assert scenario.name == path.stem
    assert scenario.description.endswith(".")
    assert all(scenario.users_of(device.name) for device in scenario.devices)


def test_readme_names_every_scenario():
    listed = (SHIPPED[0].parent / "README.md").read_text()
    assert {path.stem for path in SHIPPED} >= NEEDED
    assert not [path.stem for path in SHIPPED if path.stem not in listed]


def test_values():
    scenario = parse_scenario(GOOD, "small")
    job = scenario.jobs[0]
    assert job.read_size == 131072
    assert scenario.device("ssd0").bytes_per_second == 100 * 2**20
    assert job.need_bytes_per_second == pytest.approx(8 * 131072 / 0.050)
    assert [job.batch_factor(n) for n in (0, 9, 10, 1000)] == [4, 4, 1, 1]


def test_burst_comes_again():
    job = parse_scenario(GOOD + "cold_batches = 0\nburst = { every = 10, length = 2, factor = 3 }", "s").jobs[0]
    assert [job.batch_factor(n) for n in (0, 1, 2, 9, 10, 11, 12)] == [3, 3, 1, 1, 3, 3, 1]


def test_job_without_compute_needs_everything():
    text = GOOD.replace("compute_ms = 50", "compute_ms = 0")
    assert parse_scenario(text, "s").jobs[0].need_bytes_per_second == float("inf")


@pytest.mark.parametrize(
    ("change", "quoted"),
    [
        (("batch_reads", "batch_read"), "jobs[0].batch_read"),
        (('"128 KiB"', '"128 Kib/h"'), "128 Kib/h"),
        (('"128 KiB"', "1000"), "1000"),
        (('device = "ssd0"', 'device = "ssd9"'), "ssd9"),
        (('name = "job"', 'name = "ssd0"'), "'ssd0' is used twice"),
        (('name = "job"', 'name = "Job 1"'), "jobs[0].name"),
        (("duration_seconds = 5", "duration_seconds = 0"), "duration_seconds"),
        (('description = "text"', ""), "description"),
        (("compute_ms = 50", 'compute_ms = 50\nslow_device = "ssd0"'), "slow_ratio"),
        (('kind = "ssd"', 'kind = "tape"'), "tape"),
        (('kind = "ssd"', 'kind = "nfs"'), "filesystem"),
        (('kind = "ssd"', "kind = ssd"), "not valid TOML"),
    ],
)
def test_bad_scenario_is_refused_in_one_sentence(change, quoted):
    with pytest.raises(ScenarioError) as caught:
        parse_scenario(GOOD.replace(*change), "small.toml")
    message = str(caught.value)
    assert message.startswith("small.toml")
    assert quoted in message
    assert message.endswith(".")
    assert "\n" not in message


def test_missing_file_is_refused(tmp_path):
    with pytest.raises(ScenarioError, match="cannot be read"):
        load_scenario(tmp_path / "nonesuch.toml")


@pytest.mark.parametrize(("text", "size"), [("256 KiB", 262144), ("1 GB", 10**9), (4096, 4096), ("1.5 MiB", 1572864)])
def test_sizes(text, size):
    assert ByteSize.parse(text) == size


@pytest.mark.parametrize("value", ["", "KiB", "-1", True, None, 0])
def test_no_sizes(value):
    with pytest.raises(ValueError, match="is no size"):
        ByteSize.parse(value)


def test_disks_of_a_scenario():
    scenario = load_scenario(SHIPPED[0].with_name("mixed.toml"))
    assert devices_of(scenario) == (Ssd("ssd0"), Hdd("hdd0"))


def test_direct_users_share_a_device_without_overlap():
    parts = divide(Path("/dev/x"), 1 << 30, ("a", "b", "c"))
    ends = [part.offset + part.length for part in parts.values()]
    assert [part.offset for part in parts.values()] == [0, *ends[:-1]]
    assert ends[-1] <= 1 << 30
    assert all(part.offset % (1 << 20) == 0 for part in parts.values())
