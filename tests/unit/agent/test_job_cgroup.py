"""A job's cgroup as files: whom a signal may reach."""

import os

from agent.job_cgroup import JobCgroup


def test_processes_of_another_pid_namespace_are_not_taken_for_our_own(tmp_path, monkeypatch):
    """The kernel lists them as 0, and kill(0, ...) signals the caller's own process group."""
    (tmp_path / "cgroup.procs").write_text("0\n0\n4194303\n")
    killed = []

    def kill(pid, number):
        killed.append((pid, number))
        (tmp_path / "cgroup.procs").write_text("0\n")

    monkeypatch.setattr(os, "kill", kill)
    cgroup = JobCgroup(tmp_path, own=True)
    assert cgroup.processes() == {4194303}
    assert cgroup.empty(grace_seconds=0.1) == 1
    assert {pid for pid, _ in killed} == {4194303}
