"""A job on two media whose reads move from the SSD to the disk with moving parts, and back: what the agent makes of it.

Two mounts, one per medium; nine tenths of the reads go to the one, then to the other. Each medium has a pool and a
controller of its own; the controllers' outputs are merged by the job's share of bytes on each (paper, section 4).
"""

import statistics
import time
from pathlib import Path

import pytest

from tests.lab import groups
from tests.lab.disks import mounted, write_file
from tests.lab.media import BLOCK_ALONE, DEVICES, by_medium, count_weighed, plan_of
from tests.lab.rearrange_data import MIB
from tests.lab.rearrange_runs import drop_caches, running_agent, started, state

pytestmark = [pytest.mark.guest, pytest.mark.nightly, pytest.mark.timeout(900)]

PHASES = [[32.0, 0.1], [45.0, 0.9], [35.0, 0.1]]
SETTLED_SECONDS = 30.0
"""Of a phase, before three time constants of the sliding window (10 s) have passed."""
CONFIG = (
    """
[[jobs]]
cgroup = "/train.slice/*"
"""
    + DEVICES
    + BLOCK_ALONE
)
PLAN = plan_of(PHASES)


@pytest.fixture(scope="module")
def seen(tmp_path_factory, ssd, hdd):
    """[seconds since the job began, its row in /state, the devices' rows], twice a second."""
    folder = tmp_path_factory.mktemp("tiers")
    config = folder / "agent.toml"
    config.write_text(CONFIG.format(ssd=ssd.number, hdd=hdd.number))
    looks = []
    with mounted(ssd) as fast, mounted(hdd) as slow:
        roots = [str(write_file(mount / "data", 384 * MIB).path) for mount in (fast, slow)]
        drop_caches()
        with running_agent(config, folder / "agent.log"), groups.cgroups(["job"], []) as folders:
            plan = PLAN | {"roots": roots, "root": str(fast), "seed": 1}
            with started(plan, folders["job"], Path("/run/tiers.log")) as job:
                began = time.monotonic()
                while job.poll() is None:
                    time.sleep(0.5)
                    now = state()
                    looks += [(time.monotonic() - began, row, now["devices"]) for row in now.get("jobs", ())]
    for at, row, _ in looks[::8]:
        print(
            f"{at:.0f} s: score {row['score']}",
            [(one["medium"], one["access_ratio"], one["pid"]) for one in row["devices"]],
        )
    return looks


def settled(seen, phase):
    """The looks of a phase in which it has lasted for long enough."""
    start = sum(length for length, _ in PHASES[:phase])
    return [row for at, row, _ in seen if start + SETTLED_SECONDS <= at < start + PHASES[phase][0] - 1.0]


def test_the_shares_of_the_media_follow_the_reads(seen):
    for phase, (_, slow_ratio) in enumerate(PHASES):
        shares = [by_medium(row)["hdd"]["access_ratio"] for row in settled(seen, phase)]
        print(f"phase {phase}: {slow_ratio:.0%} of the reads, {min(shares):.0%} to {max(shares):.0%} of the bytes seen")
        assert shares
        assert all(abs(share - slow_ratio) < 0.12 for share in shares)


def test_each_medium_has_a_pool_and_a_controller_of_its_own(seen):
    for _, row, devices in seen[-20:]:
        pools = {one["medium"]: one["pool_capacity_ratio"] for one in devices if one["pool_capacity_ratio"] is not None}
        assert pools == {"ssd": pytest.approx(0.15), "hdd": pytest.approx(0.15)}
        assert all(by_medium(row)[medium]["pid"] for medium in ("ssd", "hdd"))
    terms = [(by_medium(row)["ssd"]["pid"], by_medium(row)["hdd"]["pid"]) for row in settled(seen, 1)]
    assert any(fast["integral"] != slow["integral"] for fast, slow in terms), "gains differ by medium"


def test_the_merged_output_weighs_the_controllers_by_the_bytes_on_each_medium(seen):
    """Of every look at which the job had something to ask for."""
    checked = count_weighed(row for _, row, _ in seen)
    print(f"{checked} looks at which the two controllers differed")
    assert checked >= 5


def test_the_job_starves_only_while_its_reads_go_to_the_slow_medium(seen):
    """What makes the shares worth following: the score falls in the middle phase, and comes back."""
    scores = [[row["score"] for row in settled(seen, phase)] for phase in range(3)]
    print([f"{min(one):.0f} to {max(one):.0f}" for one in scores])
    assert statistics.median(scores[1]) < 60.0, "a single look may be above: it moves by ten points from batch to batch"
    assert max(scores[1]) < 75.0 < min(scores[0] + scores[2])
