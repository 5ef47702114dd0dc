"""The agent's configuration for a scenario: its devices and cgroups; all else is default."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from agent.simulate.scenario import Scenario

_GROUPS = """\
policy = "{policy}"

[[jobs]]
cgroup = "/train.slice/*"

[[best_effort]]
cgroup = "/batch.slice/*"

[metrics]
listen = "127.0.0.1:9753"

# Plain trainers tell their queues by hints; on an emulated CPU each further program costs 7 to 20 s of compilation.
[probes]
nfs = {nfs}
object_store = false
fuse = false
page_cache = {page_cache}
dataloader = {dataloader}
workers = {workers}
"""

_DEVICE = """
[[devices]]
device = "{number}"
medium = "{medium}"
read_bytes_per_second = {rate}
write_bytes_per_second = {rate}
read_requests_per_second = {iops}
write_requests_per_second = {iops}
"""

HDD_RANDOM_BYTES_PER_SECOND = 25 << 20
"""What the seek-time model delivers for random reads of 256 KiB; a share of a disk is of its rate under that mix."""
HDD_RANDOM_IOPS = 105


def configuration(
    scenario: Scenario, numbers: Mapping[str, str], policy: str = "adaptive", *, workers: bool = False
) -> str:
    """TOML for `prefetchd run --config`; `numbers` gives the `maj:min` of each of the scenario's devices.

    `workers`: whether to tell what the trainers' workers do with their time.
    """
    nfs = any(device.kind == "nfs" for device in scenario.devices)
    page_cache = any(job.access == "filesystem" for job in scenario.jobs)
    torch = any(job.trainer == "torch" for job in scenario.jobs)
    probes = {"nfs": nfs, "page_cache": page_cache, "dataloader": torch, "workers": workers}
    text = _GROUPS.format(policy=policy, **{name: _toml(on) for name, on in probes.items()})
    for device in scenario.devices:
        if device.name not in numbers:
            continue
        hdd = device.kind == "hdd"
        rate = HDD_RANDOM_BYTES_PER_SECOND if hdd else int(device.bytes_per_second)
        iops = HDD_RANDOM_IOPS if hdd else device.iops
        text += _DEVICE.format(number=numbers[device.name], medium=device.kind, rate=rate, iops=iops)
    return text


def _toml(value: bool) -> str:
    return "true" if value else "false"


def write_configuration(
    path: Path, scenario: Scenario, numbers: Mapping[str, str], policy: str = "adaptive", *, workers: bool = False
) -> Path:
    """Write `configuration(...)` to `path`."""
    path.write_text(configuration(scenario, numbers, policy, workers=workers))
    return path
