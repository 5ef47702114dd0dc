"""The guardian with real processes over a folder that looks like cgroup v2."""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from cgroup.enforce import Enforcer
from cgroup.errors import GuardianError
from cgroup.files import KernelFiles
from cgroup.guardian import Guardian
from cgroup.journal import Journal
from cgroup.lines import Limit, Target
from cgroup.restore import restore
from tests.unit.cgroup.kills import VARIANTS, Agent, kill_once, wait_until
from tests.unit.cgroup.trees import Tree

MIB = 1 << 20
FIXED = {"rbps": 4000 * MIB}
"""For a driver that wants every limit at every pass."""
PROJECT = Path(__file__).parents[3]


@pytest.fixture
def tree(tmp_path):
    tree = Tree(tmp_path)
    tree.make("/a")
    tree.make("/b")
    return tree


@pytest.fixture
def journal_path(tmp_path):
    return str(tmp_path / "run" / "journal")


@pytest.fixture
def start(tree, journal_path):
    """Start drivers; end them and their guardians afterwards."""
    agents = []

    def launch(**options):
        settings = {"journal": journal_path, "root": str(tree.root), "sys_root": str(tree.sys)}
        settings |= {"targets": [["/a", "8:0"], ["/b", "8:0"]], "status": journal_path + ".status", **options}
        argv = [sys.executable, "-m", "tests.unit.cgroup.driver", json.dumps(settings)]
        agents.append(Agent(argv, journal_path, cwd=PROJECT, stderr=subprocess.DEVNULL))
        agents[-1].ready = json.loads(agents[-1].first_line())
        return agents[-1]

    yield launch
    for agent in agents:
        agent.end()


def status(journal_path):
    return json.loads(Path(journal_path + ".status").read_text())


def limits(tree, path):
    return tree.text(path).replace(" wbps=max riops=max wiops=max", "").removesuffix("rbps=max").removesuffix("8:0 ")


def is_prior(tree):
    """Plain files are cut before they are written: an agent killed in between leaves an empty one, which is `max`."""
    return limits(tree, "/a") == limits(tree, "/b") == ""


def test_the_guardian_is_small(start):
    agent = start()
    print(f"guardian RSS: {agent.ready['rss'] / 2**20:.1f} MiB")
    assert 0 < agent.ready["rss"] < 20 * 2**20
    maps = Path(f"/proc/{agent.ready['guardian']}/maps").read_text()
    files = {line.split(maxsplit=5)[5] for line in maps.splitlines() if len(line.split(maxsplit=5)) == 6}
    assert any("libc" in file for file in files)
    assert not [file for file in files if "numpy" in file or "bcc" in file]
    assert Path(f"/proc/{agent.ready['guardian']}/comm").read_text() == "prefetchd-guard\n"
    expected = "-1000\n" if may_lower_oom_score() else "0\n"
    assert Path(f"/proc/{agent.ready['guardian']}/oom_score_adj").read_text() == expected


def may_lower_oom_score():
    """CAP_SYS_RESOURCE is bit 24; a container's root may lack it."""
    fields = dict(line.split(":\t") for line in Path("/proc/self/status").read_text().splitlines())
    return bool(int(fields["CapEff"], 16) >> 24 & 1)


@pytest.mark.parametrize("variant", VARIANTS)
def test_kills_at_random_instants(start, tree, journal_path, variant):
    rng = random.Random(variant)
    for round_number in range(3):
        agent = start(seed=round_number)
        assert wait_until(lambda: not is_prior(tree), 30.0) is not None  # now and then it wants no limit
        time.sleep(rng.random() * 0.2)
        seconds = kill_once(
            agent, variant, lambda: is_prior(tree), lambda: restore(journal_path, str(tree.root), str(tree.sys))
        )
        assert seconds is not None
        assert seconds < 2.0
        assert wait_until(lambda agent=agent: not agent.guardians(), 30.0) is not None, "it ends with its work"


def test_the_next_start_restores_what_both_left(start, tree):
    first = start(fixed=FIXED)
    first.stop()
    first.kill_guardian()
    first.kill()
    assert not is_prior(tree)
    second = start()
    assert second.ready["recovered"].startswith("2 restored")
    second.process.terminate()
    second.process.wait(60)
    assert is_prior(tree), "what was there before the first is what the second puts back"


def test_what_stands_is_put_back_where_the_folder_was_removed_meanwhile(start, tree, journal_path):
    """Nothing is written for a long time, and then the agent dies."""
    agent = start(fixed=FIXED, status="")
    shutil.rmtree(Path(journal_path).parent)
    assert wait_until(lambda: Path(journal_path).exists(), 30.0) is not None
    agent.kill()
    assert wait_until(lambda: is_prior(tree), 2.0) is not None


def test_a_report_is_left_beside_the_journal(start, tree, journal_path):
    start(fixed=FIXED).kill()
    assert wait_until(lambda: Path(journal_path + ".restored").exists(), 30.0) is not None
    assert json.loads(Path(journal_path + ".restored").read_text())["summary"].startswith("2 restored")


def test_sigterm_to_all_of_a_service_ends_the_agent_in_order(start, tree):
    agent = start()
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        os.kill(agent.ready["guardian"], number)
    agent.process.terminate()
    assert agent.process.wait(60) == 0
    assert is_prior(tree)
    assert wait_until(lambda: not agent.guardians(), 30.0) is not None


def test_a_killed_guardian_is_replaced(start, journal_path):
    agent = start()
    agent.kill_guardian()
    assert wait_until(lambda: status(journal_path)["starts"] == 2, 30.0) is not None
    assert status(journal_path)["guardian"] != agent.ready["guardian"]


def test_a_stopped_guardian_is_replaced(start, journal_path):
    agent = start(limit_seconds=0.5)
    os.kill(agent.ready["guardian"], signal.SIGSTOP)
    assert wait_until(lambda: status(journal_path)["starts"] == 2, 30.0) is not None
    assert agent.ready["guardian"] not in agent.guardians()


def test_a_guardian_that_is_never_ready_is_replaced(monkeypatch, tmp_path):
    """The agent does not wait for it: its passes go on meanwhile."""
    guardian = Guardian(str(tmp_path / "journal"))
    guardian.start()
    monkeypatch.setattr("cgroup.guardian._START_SECONDS", 0.5)
    program = tmp_path / "sleeps"
    program.write_text("#!/bin/sh\nexec sleep 60\n")
    program.chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(program))
    os.kill(guardian.status.pid, signal.SIGKILL)
    assert wait_until(lambda: guardian.check().starts == 2, 30.0) is not None
    passes = [seconds_of(guardian.check) for _ in range(5)]
    assert guardian.status.alive
    assert min(passes) < 0.1, "each of them waits until it is ready, or 0.5 s"
    assert wait_until(lambda: guardian.check().starts == 3, 30.0) is not None
    assert "was not ready after" in guardian.status.note
    guardian.beat()
    monkeypatch.undo()
    os.kill(guardian.status.pid, signal.SIGKILL)
    assert wait_until(lambda: guardian.check().resident_bytes > 0, 60.0) is not None
    guardian.close()


def seconds_of(call):
    began = time.monotonic()
    call()
    return time.monotonic() - began


def test_a_stopped_agent_is_put_back_and_goes_on_when_it_wakes(start, tree, journal_path):
    agent = start(limit_seconds=0.5)
    agent.stop()
    seconds = wait_until(lambda: is_prior(tree), 5.0)
    assert seconds is not None
    assert seconds < 0.5 + 2.0
    agent.process.send_signal(signal.SIGCONT)
    assert wait_until(lambda: not is_prior(tree), 30.0) is not None, "it enforces again"
    assert wait_until(lambda: status(journal_path)["restores"] >= 1, 30.0) is not None
    assert status(journal_path)["conflicts"] == []
    agent.kill()
    assert wait_until(lambda: is_prior(tree), 2.0) is not None


def test_values_of_others_are_left_alone(start, tree):
    agent = start(fixed=FIXED)
    agent.stop()
    (tree.root / "a/io.max").write_text("8:0 rbps=123 wbps=max riops=max wiops=max\n")
    agent.kill()
    assert wait_until(lambda: not agent.guardians(), 30.0) is not None
    assert limits(tree, "/b") == ""
    assert limits(tree, "/a") == "8:0 rbps=123"


def test_a_new_agent_keeps_the_old_guardian_out(start, tree, journal_path):
    old = start()
    old.stop()
    old_guardian = old.ready["guardian"]
    os.kill(old_guardian, signal.SIGSTOP)
    old.kill()
    new = start(fixed=FIXED)
    assert not is_prior(tree)
    os.kill(old_guardian, signal.SIGCONT)
    time.sleep(0.5)
    assert old_guardian in new.guardians(), "it waits, in case the new one dies before it can restore"
    assert status(journal_path)["conflicts"] == [], "it took nothing away"
    assert not is_prior(tree)
    new.kill()
    assert wait_until(lambda: is_prior(tree), 2.0) is not None
    assert wait_until(lambda: not new.guardians(), 30.0) is not None


def test_it_moves_to_a_cgroup_of_its_own_where_it_can(start, tree):
    agent = start(guardian_cgroup="/prefetchd-guardian")
    assert (agent.ready["moved"], agent.ready["note"]) == (True, "")
    assert (tree.root / "prefetchd-guardian/cgroup.procs").read_text() == "0"


def test_it_says_why_it_could_not_move(start, tree):
    (tree.root / "file").write_text("")
    agent = start(guardian_cgroup="/file/x")
    assert not agent.ready["moved"]
    assert "Not a directory" in agent.ready["note"]


def test_a_guardian_that_cannot_start_is_an_error(monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(GuardianError, match=r"the guardian \(pid \d+\) died with 1; its messages are in the log"):
        Guardian(str(tmp_path / "journal")).start()
    monkeypatch.setattr(sys, "executable", str(tmp_path / "nothing"))
    with pytest.raises(GuardianError, match="cannot be started"):
        Guardian(str(tmp_path / "journal")).start()


def test_a_guardian_that_keeps_failing_is_told_and_not_started_in_a_storm(monkeypatch, tmp_path):
    guardian = Guardian(str(tmp_path / "journal"))
    guardian.start()
    first = guardian.status.pid
    os.kill(first, signal.SIGKILL)
    assert wait_until(lambda: not guardian.status.alive, 30.0) is not None
    monkeypatch.setattr(sys, "executable", "/bin/false")
    assert guardian.check().note == f"the guardian (pid {first}) died with -9"
    second = guardian.status.pid
    assert wait_until(lambda: not guardian.status.alive, 30.0) is not None
    for _ in range(5):
        assert guardian.check().starts == 2
    assert wait_until(lambda: guardian.check().starts == 3, 30.0) is not None
    assert guardian.status.note == f"the guardian (pid {second}) died with 1"
    guardian.beat()
    assert guardian.take_restores() == 0
    guardian.close()


def test_in_one_process_everything_fits_together(tree, journal_path, tmp_path):
    files = KernelFiles(str(tree.root), str(tree.sys))
    guardian = Guardian(journal_path, str(tree.root), str(tree.sys))
    guardian.start()
    journal = Journal.open(journal_path)
    enforcer = Enforcer(files, journal, "enforce", guardian=guardian)
    target = Target(files.cgroup_id("/a"), "/a", "8:0")
    enforcer.reconcile({target: (Limit(rbps=MIB), "test")}, 0.0)
    assert limits(tree, "/a") == f"8:0 rbps={MIB}"
    enforcer.close()
    guardian.close()
    assert is_prior(tree)
    assert not guardian.status.alive
