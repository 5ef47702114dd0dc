"""`make demo` from end to end: it passes by its own rule and leaves its page and its recording."""

import time

import pytest

from agent.recording.reader import read
from tests.lab import LabUnavailable, demo

pytestmark = [pytest.mark.lab, pytest.mark.nightly, pytest.mark.timeout(600)]


def test_the_demo_passes_and_leaves_its_page_and_its_recording(capsys):
    began = time.time()
    try:
        status = demo.demo()
    except LabUnavailable as error:
        pytest.skip(str(error))
    shown = capsys.readouterr().out
    assert status == 0, shown
    assert "every io.max is as it was before" in shown
    assert time.time() - began < 300
    page, recording = demo.REPORT, demo.REPORT.with_suffix(".rec")
    assert min(page.stat().st_mtime, recording.stat().st_mtime) >= began
    assert page.read_text().count("<svg") >= 5
    assert sum(1 for _ in read(recording)) > 100
