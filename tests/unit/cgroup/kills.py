"""Kill agents and measure how long their limits outlive them. Works for any command that enforces with a guardian."""

import os
import random
import signal
import subprocess
import time
from pathlib import Path

VARIANTS = ("agent", "agent while the guardian is new", "both")


class Agent:
    """A running agent; its guardians are found by the journal's path in their command line."""

    def __init__(self, argv, journal, **more):
        self.journal = str(journal)
        self.process = subprocess.Popen(argv, stdout=subprocess.PIPE, **more)

    def first_line(self):
        """Wait for what it says when its first limits stand."""
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(f"the agent ended with {self.process.wait()} before it was ready")
        return line

    def guardians(self):
        """Return the process ids of the guardians of this journal that are ready, zombies not included."""
        pids = [int(folder.name) for folder in Path("/proc").iterdir() if folder.name.isdigit()]
        return [pid for pid in pids if self._guards(pid)]

    def _guards(self, pid):
        """It gives itself its name when it is ready."""
        try:
            name = Path(f"/proc/{pid}/comm").read_text()
            words = Path(f"/proc/{pid}/cmdline").read_bytes()
        except OSError:
            return False
        return name == "prefetchd-guard\n" and b'"journal": "' + os.fsencode(self.journal) + b'"' in words

    def kill_guardian(self):
        for pid in self.guardians():
            os.kill(pid, signal.SIGKILL)

    def stop(self):
        """Have it stand still; the kernel stops a process a moment after the signal."""
        self.process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, self.process.pid, os.WSTOPPED)

    def kill(self):
        self.process.kill()
        self.process.wait()
        self.process.stdout.close()

    def end(self):
        """End it and whatever guards it."""
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        self.process.stdout.close()
        deadline = time.monotonic() + 5.0
        while self.guardians() and time.monotonic() < deadline:
            time.sleep(0.02)
        self.kill_guardian()


def wait_until(predicate, seconds):
    """Return after how long the predicate held, or None where it did not in time."""
    began = time.monotonic()
    while not predicate():
        if time.monotonic() - began > seconds:
            return None
        time.sleep(0.01)
    return time.monotonic() - began


def kill_once(agent, variant, is_prior, restore):
    """Kill a running agent; return how long its limits outlived it, in seconds, or None where they stayed.

    `agent`: alone, the guardian restores. `… new`: its guardian first, so that it starts another, then the agent.
    `both`: guardian and agent; `restore` (the next start) puts things back.
    """
    if variant == "agent while the guardian is new":
        old = agent.guardians()
        agent.kill_guardian()
        if wait_until(lambda: set(agent.guardians()) - set(old), 60.0) is None:
            raise RuntimeError("the agent started no other guardian")
        agent.kill()
    elif variant == "both":
        agent.stop()  # or it would start another guardian
        agent.kill_guardian()
        agent.kill()
        restore()
        return 0.0 if is_prior() else None
    else:
        agent.kill()
    return wait_until(is_prior, 5.0)


def kill_many(start, is_prior, restore, count):
    """Kill `count` agents at random instants, the variants in turn; return how long limits outlived each, in seconds.

    `start(number)` gives an Agent whose limits stand. Prints the count, the worst case and what is stale at the end.
    """
    rng = random.Random(count)
    lives = []
    for number in range(count):
        agent = start(number)
        assert not is_prior()
        time.sleep(rng.random() * 0.3)
        variant = VARIANTS[number % len(VARIANTS)]
        seconds = kill_once(agent, variant, is_prior, restore)
        assert seconds is not None, f"kill {number} ({variant}): limits stayed"
        assert seconds < 2.0, f"kill {number} ({variant}): limits stayed for {seconds:.2f} s"
        lives.append(seconds)
    stale = 0 if is_prior() else 1
    print(f"{count} SIGKILLs: limits back after {max(lives):.2f} s at most; {stale} stale limits at the end")
    assert not stale
    return lives
