"""Trainers under watch: starts them, reads the probe as the agent does, compares with their books."""

import bisect
import contextlib
import json
import select
import socket
import statistics
import struct
import subprocess
import sys
import time
from dataclasses import dataclass, field, replace
from pathlib import Path

from agent.job_sample import SignalSettings
from agent.stream_signals import LoaderState, derive_loaders

TRAINER = Path(__file__).with_name("trainer_torch.py")
READ_SECONDS = 0.1


@dataclass
class Seen:
    """What the probe told of one stream until its process ended."""

    last: object = None
    events: list = field(default_factory=list)


class Trainer:
    """One training process in a cgroup, forked by the `farm`."""

    def __init__(self, farm, cgroup, out, **plan):
        self.out = out
        self.processes = cgroup / "cgroup.procs"
        self.cgroup_id = cgroup.stat().st_ino
        with socket.socket(socket.AF_UNIX) as door:
            door.bind(str(out.with_suffix(".sock")))
            door.listen()
            order = {"cgroup": str(cgroup), "out": str(out), "socket": door.getsockname(), "plan": plan}
            farm.stdin.write(json.dumps(order) + "\n")
            farm.stdin.flush()
            door.settimeout(120)
            self.talk, _ = door.accept()
        assert self.talk.recv(6) == b"ready\n"

    def say(self):
        self.talk.send(b"\n")

    def is_done(self):
        readable, _, _ = select.select([self.talk], [], [], 0)
        return bool(readable)

    def close(self):
        self.talk.close()
        deadline = time.monotonic() + 60
        while self.processes.read_text():
            assert time.monotonic() < deadline, "the trainer does not end"
            time.sleep(0.02)

    def books(self, loader="training"):
        """For each batch (epoch, asked ns, got ns)."""
        return [tuple(record[1:]) for record in json.loads(self.out.read_text()) if record[0] == loader]

    def has_ready(self, count):
        """Whether so many batches have been ready by now."""
        file = Path(f"{self.out}.training")
        return file.exists() and file.stat().st_size >= 8 * count

    def ready(self, loader="training"):
        """When batches were ready, in ns, in order; of all epochs."""
        times = Path(f"{self.out}.{loader}").read_bytes()
        return sorted(time_ns for (time_ns,) in struct.iter_unpack("=q", times))


class Watch:
    """Reads the probe as the agent's loop does."""

    def __init__(self, probe):
        self.probe = probe
        self.seen: dict[str, Seen] = {}

    def read(self):
        streams = self.probe.read(time.monotonic_ns()).streams
        for stream in streams:
            seen = self.seen.setdefault(stream.stream, Seen())
            seen.last = stream
            seen.events += stream.recent
        return streams

    def until(self, condition, seconds=300):
        deadline = time.monotonic() + seconds
        while not condition():
            time.sleep(READ_SECONDS)
            self.read()
            assert time.monotonic() < deadline, "the trainer takes too long"

    def run(self, *trainers):
        """Let trainers train to their end; the processes stay."""
        for trainer in trainers:
            trainer.say()
        self.finish(*trainers)

    def finish(self, *trainers):
        self.until(lambda: all(trainer.is_done() for trainer in trainers))
        quiet = time.monotonic() + 1.2  # what shows only by its absence
        self.until(lambda: time.monotonic() > quiet)

    def only(self):
        (seen,) = self.seen.values()
        return seen


@contextlib.contextmanager
def farm_of_trainers():
    """The process that has PyTorch loaded and forks trainers."""
    command = [sys.executable, "-W", "ignore", str(TRAINER)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, text=True) as process:
        yield process


def find_hooks(probe, trainer):
    """Let a first trainer train until the library with the hooks has been found in it."""
    probe.manage([trainer.cgroup_id])
    watch = Watch(probe)
    trainer.say()
    watch.until(lambda: probe._libraries)
    probe.manage([])


def train(probe, start, /, **plan):
    """Train once under watch."""
    trainer = start(**plan)
    probe.manage([trainer.cgroup_id])
    watch = Watch(probe)
    watch.run(trainer)
    return trainer, watch


def depth_error(events, ready, taken=0):
    """Mean absolute difference of the batches that were ready and not taken; `taken` of them before the first event.

    Each at the moment that the probe gives for it: at the end of `next()` another batch may be ready already.
    """
    differences = [
        abs(event.depth - (bisect.bisect(ready, event.time_ns) - number))
        for number, event in enumerate(events, taken + 1)
    ]
    return sum(differences) / len(differences)


def lateness_ns(events, books):
    """Median distance of the probe's moments from those at which the loop got its batches."""
    return statistics.median(abs(event.time_ns - got) for event, (_, _, got) in zip(events, books, strict=True))


def long_waits(seen):
    """(seconds, of them judged to starve) of the waits that are long enough to starve, as the agent judges each.

    Batches that the probe counts at one moment are told a nanosecond apart: alone, the later ones would be old news.
    """
    settings, state = SignalSettings(), LoaderState()
    waited = starved = 0.0
    time_ns = 0
    for number, event in enumerate(seen.events, 1):
        time_ns = max(event.time_ns, time_ns + 1)
        one = replace(
            seen.last, iterations=number, recent=(event._replace(time_ns=time_ns),), last_iteration_ns=time_ns,
            waiting_since_ns=None, depth=event.depth, takeable=event.takeable,
        )  # fmt: skip
        state, loop = derive_loaders([one], state, settings, time_ns, reading=True)
        seconds = event.wait_ns * 1e-9
        if seconds >= settings.starvation_seconds:
            waited += seconds
            starved += 0.0 if loop.fed else seconds
    return waited, starved


def wait_error(seen, books):
    """Relative error of the time that the loop waited, and the share of its time that it did."""
    waited = sum(got - asked for _, asked, got in books)
    return (seen.last.wait_ns - waited) / waited, waited / (books[-1][2] - books[0][1])
