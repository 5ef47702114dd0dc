"""The benchmark itself, made short: it measures, compares and cleans up."""

import json
from pathlib import Path

import pytest

from tests.bench.__main__ import main
from tests.native.conftest import cgroup_mount, loader  # noqa: F401  # the fixture skips where there are no rights

pytestmark = pytest.mark.native


def test_a_short_run_measures_everything(loader, tmp_path, capsys):  # noqa: F811
    report_file = tmp_path / "cost.json"
    cgroups_before = set(cgroup_mount().glob("prefetchd-bench-*"))
    statistics = Path("/proc/sys/kernel/bpf_stats_enabled")
    counted_before = statistics.read_text()
    arguments = ["overhead", "--pairs", "2", "--seconds", "0.5", "--jobs", "1", "8", "--json", str(report_file)]
    assert main(arguments) == 0
    report = json.loads(report_file.read_text())
    for name in ("managed", "unmanaged", "reference"):
        assert 0 < report["per_io"][name]["net_ns"] < report["per_io"][name]["measured_ns"] < 20_000
    assert report["per_io"]["losses"]["in_flight_full"] == report["per_io"]["losses"]["slots_full"] == 0
    lost = report["iops"]["lost"]["block probe"]
    assert lost["low"] <= lost["mean"] <= lost["high"]
    slices = report["slices"]
    assert (slices["pairs"], slices["low"] <= slices["median"] <= slices["high"]) == (50, True)
    for tool in ("biolatency", "biosnoop"):
        assert report["per_io"][tool].get("net_ns", 1) > 0
        assert ("why_not" in report["per_io"][tool]) == (tool not in report["iops"]["lost"])
    assert [row["jobs"] for row in report["jobs"]] == [1, 8]
    assert report["startup"]["anonymous_bytes"] < report["startup"]["rss_bytes"]
    assert "IOPS lost with block probe, 2 rounds" in capsys.readouterr().out
    assert statistics.read_text() == counted_before
    assert set(cgroup_mount().glob("prefetchd-bench-*")) <= cgroups_before
