"""The rehearsal behind the pictures of the dashboards: what it scrapes answers the panels on request latency."""

import importlib.util
import re

import pytest

from agent.job_sample import JobSample
from bpf.samples import BlockCounters, BlockKey
from tests.unit.packaging.support import PACKAGING, SOURCE

KEY = BlockKey(7, "259:0", "read")


@pytest.fixture(scope="module")
def rehearse():
    spec = importlib.util.spec_from_file_location("prefetchd_grafana_rehearse", PACKAGING / "grafana" / "rehearse.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def sample(requests, milliseconds):
    counters = BlockCounters(requests, 4096 * requests, int(milliseconds * 1e6), 0, 0, ())
    return JobSample(7, 0, blocks={KEY: counters})


def test_requests_of_a_pass_stand_at_their_mean(rehearse):
    histograms = rehearse.Histograms()
    for seen in (sample(4, 4.0), sample(4, 4.0), sample(6, 4.0 + 2 * 20.0), sample(7, 44.0)):
        histograms.add([seen])
    counts = histograms.counts[KEY]
    assert {place: count for place, count in enumerate(counts) if count} == {9: 4, 14: 2, 0: 1}


def test_a_rehearsal_tells_the_request_latency_of_every_job(rehearse):
    text = rehearse.history(SOURCE / "tests/lab/scenarios/mixed.toml", 1e9)
    slots = {}
    for line in text.splitlines():
        if line.startswith("prefetchd_io_latency_seconds_count{"):
            labels, value, _ = line.rsplit(" ", 2)
            slots.setdefault(labels, []).append(float(value))
    assert {re.search(r'job="(\w+)"', labels)[1] for labels in slots} >= {"vision", "text", "speech"}
    for counts in slots.values():
        assert counts == sorted(counts), "a cumulative count falls"
        assert counts[-1] > 10
