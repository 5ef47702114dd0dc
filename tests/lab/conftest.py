"""Guest tests as tests of the host: all that are selected run in one guest, and each reports under its own name.

A test marked `guest` needs the lab's kernel. On the host its place is taken by an item that looks up what it did in the
guest; the first such item boots the guest and runs them all. In the guest they run as ordinary tests.
"""

import json
import os
import shlex
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.lab import Lab, LabBroken, LabUnavailable
from tests.lab.cache import PROJECT
from tests.lab.devices import TEST_DISKS
from tests.lab.nfs import ensure_nfs
from tests.lab.trainer import trainer_program

IN_GUEST = os.environ.get("PREFETCHD_LAB") == "1"
LAB_SECONDS = 1800
FIRST = "guest/test_machine.py"
GUESTS = 3
"""An emulated CPU locks up now and then; more than two in one session is no accident."""
REPORTS = "reports.jsonl"


@dataclass
class GuestRun:
    """What the guest tests did, by node id; `broken` says why the lab did not finish them."""

    reports: dict[str, list[dict]] = field(default_factory=dict)
    broken: str = ""
    unavailable: str = ""


class GuestItem(pytest.Item):
    """Stands on the host for a test that runs in the guest."""

    def __init__(self, *, original, **kwargs):
        super().__init__(**kwargs)
        self.original_location = original.location
        self.extra_keyword_matches.update({original.path.stem, getattr(original, "originalname", "") or original.name})
        self.add_marker(pytest.mark.lab)
        self.add_marker(pytest.mark.timeout(LAB_SECONDS * GUESTS))
        for marker in original.iter_markers():
            if marker.name not in {"guest", "timeout", "parametrize", "usefixtures"}:
                self.add_marker(marker.name if not marker.args else getattr(pytest.mark, marker.name)(*marker.args))

    def runtest(self):
        run = guest_run(self.session)
        if run.unavailable:
            pytest.skip(run.unavailable)
        reports = run.reports.get(self.nodeid, [])
        for report in reports:
            if report["outcome"] == "failed":
                raise GuestTestError(report["text"])
            if report["outcome"] == "skipped":
                pytest.skip(f"in the guest: {report['text']}")
        for report in reports:
            self.add_report_section("call", "stdout", report["output"]) if report["output"] else None
        if not any(report["when"] == "call" for report in reports):
            raise LabBroken(run.broken or f"The guest did not report on {self.nodeid}.")

    def repr_failure(self, excinfo):
        if isinstance(excinfo.value, GuestTestError | LabBroken):
            return f"{type(excinfo.value).__name__}: {excinfo.value}"
        return super().repr_failure(excinfo)

    def reportinfo(self):
        path, line, name = self.original_location
        return Path(path), line, name


class GuestTestError(Exception):
    """A test failed in the guest; the text is its own report."""


_RUN = pytest.StashKey[GuestRun]()


def guest_run(session) -> GuestRun:
    """Run the selected guest tests, once per session."""
    if _RUN not in session.config.stash:
        selected = [item for item in session.items if isinstance(item, GuestItem)]
        wanted = [item.nodeid for item in selected if not item.get_closest_marker("skip")]
        wanted.sort(key=lambda nodeid: FIRST not in nodeid)  # it looks at the machine as it boots: others write to it
        nightly = any(item.get_closest_marker("nightly") for item in selected)
        session.config.stash[_RUN] = run_in_guest(wanted, nightly, _teller(session.config))
    return session.config.stash[_RUN]


def run_in_guest(nodeids: list[str], nightly: bool, progress: Callable[[str], None]) -> GuestRun:
    """Run these tests in one guest. What a guest that breaks did not reach is run in another one, and that is said."""
    run = GuestRun()
    for attempt in range(1, GUESTS + 1):
        left = [nodeid for nodeid in nodeids if nodeid not in run.reports]
        if not left or run.unavailable:
            break
        if attempt > 1:
            progress(f"broken after {len(run.reports)} tests, boots guest {attempt} of {GUESTS} at most: {run.broken}")
        _run_once(run, left, nightly, progress)
    return run


def _run_once(run: GuestRun, nodeids: list[str], nightly: bool, progress: Callable[[str], None]) -> None:
    """Boot one guest and run these tests in it; a test that was under way when it broke counts as not reached."""
    lab = Lab(devices=TEST_DISKS, timeout=LAB_SECONDS, progress=progress)
    command = [str(PROJECT / ".venv" / "bin" / "python"), "-m", "pytest", "-p", "no:cacheprovider", "-q"]
    command += ["--run-nightly"] if nightly else []
    seen: dict[str, list[dict]] = {}
    try:
        trainer_program()
        ensure_nfs(progress)
        with lab.boot() as guest:
            reports = guest.out_dir / REPORTS
            try:
                result = guest.run([*command, *nodeids])
                run.broken = f"`{shlex.join(command)}` ended with {result.status}:\n{result.output.read_text()[-3000:]}"
            finally:
                for line in reports.read_text().splitlines() if reports.exists() else ():
                    report = json.loads(line)
                    seen.setdefault(report["nodeid"], []).append(report)
    except LabUnavailable as error:
        run.unavailable = str(error)
    except LabBroken as error:
        run.broken = f"{type(error).__name__}: {error}"
    run.reports.update({nodeid: found for nodeid, found in seen.items() if any(map(_ends_a_test, found))})


def _ends_a_test(report: dict) -> bool:
    return report["when"] == "call" or report["outcome"] != "passed"


def _teller(config) -> Callable[[str], None]:
    """Show when the guest has booted, whatever pytest captures."""
    terminal = config.pluginmanager.get_plugin("terminalreporter")

    def tell(text: str) -> None:
        if terminal and text.startswith(("booted", "broken", "downloads", "waits", "cannot")):
            terminal.write_line(f"\nlab: {text}")

    return tell


if IN_GUEST:

    def pytest_runtest_logreport(report):
        line = {
            "nodeid": report.nodeid,
            "when": report.when,
            "outcome": report.outcome,
            "seconds": report.duration,
            "text": report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longreprtext,
            "output": report.capstdout if report.when == "call" else "",
        }
        with Path(os.environ["PREFETCHD_LAB_OUT"], REPORTS).open("a") as file:
            file.write(json.dumps(line) + "\n")

else:

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection_modifyitems(session, items):
        items[:] = [_stand_in(session, item) if item.get_closest_marker("guest") else item for item in items]


def _stand_in(session, item):
    return GuestItem.from_parent(session, name=item.name, nodeid=item.nodeid, original=item)
