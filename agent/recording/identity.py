"""Which cgroups of a recording are one job: a job that was restarted has another cgroup, with another id. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from agent.types import Job, JobId


class Identities:
    """Under which id a job is told: a restarted one is told with the one of its name that is gone."""

    def __init__(self) -> None:
        self._told_as: dict[JobId, JobId] = {}
        self._names: dict[JobId, str] = {}

    def of(self, job: Job, present: Iterable[Job]) -> JobId:
        """The id of the first run of the job; `present` are all jobs of this pass."""
        if job.id not in self._told_as:
            here = {self._told_as.get(one.id, one.id) for one in present}
            gone = [number for number, name in self._names.items() if name == job.name and number not in here]
            self._told_as[job.id] = gone[-1] if gone else job.id
            self._names[self._told_as[job.id]] = job.name
        return self._told_as[job.id]
