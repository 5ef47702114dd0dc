"""The trainer program on this machine: what it logs, what it tells through the hint socket, how it obeys its times."""

import contextlib
import math
import socket
import subprocess
import threading
from itertools import pairwise

import pytest

from agent.hint_listener import _QUEUE_SYSCTL, _longer_queue
from agent.hint_wire import parse_hint
from agent.simulate.scenario import parse_scenario
from tests.lab.trainer import Extent, job_arguments, neighbour_arguments, trainer_program
from tests.lab.truth import read_truth

MIB = 1 << 20
ROUNDED_MS = 0.2
"""Of a difference of two times in the log, which gives them to 0.1 ms."""


@pytest.fixture(scope="module")
def program():
    return trainer_program()


@pytest.fixture
def data(tmp_path):
    path = tmp_path / "data"
    path.write_bytes(bytes(8 * MIB))
    return path


def train(program, data, *, environment=None, **options):
    log = data.with_name("log")
    options = {"path": data, "log": log, "span": data.stat().st_size, "buffered": 1, "stop_ms": 600} | options
    words = [word for name, value in options.items() for word in (f"--{name.replace('_', '-')}", str(value))]
    subprocess.run([str(program), *words], check=True, env=environment)
    return read_truth(log)


def test_iterations_take_their_compute_time(program, data):
    log = train(program, data, compute_us=20000, batch_reads=2, read_size=65536)
    assert 2 <= len(log.iterations) <= 32
    computed = [(after.time_s - row.time_s) * 1000 - row.wait_ms for row, after in pairwise(log.iterations)]
    assert all(ms >= 19 - ROUNDED_MS for ms in computed), "it draws from 19 to 21 ms"
    assert min(computed) <= 21  # a busy machine is late, never early
    assert all(row.taken for row in log.iterations)
    assert log.end["bytes"] == log.end["reads"] * 65536
    assert log.end["reads"] >= 2 * len(log.iterations)


def test_queue_is_bounded(program, data):
    log = train(program, data, compute_us=50000, queue=3, read_size=65536, batch_reads=1)
    assert max(row.depth_before for row in log.iterations) <= 3
    assert log.end["reads"] <= len(log.iterations) + 3


def test_restart_is_a_new_life_with_a_cold_start(program, data):
    log = train(
        program, data, compute_us=10000, stop_ms=2600, restart_ms=300, cold_batches=2, cold_factor=5, batch_reads=1,
        read_size=4096, workers=1, queue=1,
    )  # fmt: skip
    lives = [row.life for row in log.iterations]
    assert set(lives) == {0, 1}
    first_of_second = log.iterations[lives.index(1)]
    assert 1.3 <= first_of_second.time_s < 2.3, "it pauses for a second"
    assert log.end["lives"] == 2
    assert log.end["reads"] >= len(log.iterations) + 2 * 2 * 4


def test_slow_workers_starve_the_loop(program, data):
    log = train(program, data, prepare_cpu_us=40000, workers=1, queue=2, compute_us=1000, batch_reads=1)
    assert sum(row.starved for row in log.iterations) > 0.7 * len(log.iterations)


def test_hints_say_what_the_log_says(program, data, tmp_path):
    with listening(tmp_path / "hint.sock") as (environment, hints):
        log = train(
            program, data, hints=1, compute_us=10000, queue=4, batch_reads=3, read_size=4096, environment=environment,
        )  # fmt: skip
    assert None not in hints
    taken = [hint for hint in hints if hint.took_batch]
    assert len(taken) == len(log.iterations)
    assert {hint.capacity for hint in taken} == {4}
    assert {hint.next_batch_bytes for hint in taken} == {3 * 4096}
    waits = zip(taken, log.iterations, strict=True)
    assert all(hint.wait_ns / 1e6 == pytest.approx(row.wait_ms, abs=0.001) for hint, row in waits)


def test_stall_in_progress_is_told_once(program, data, tmp_path):
    """At 10 ms, in one run of ten: the loop of a busy machine wakes late, and tells no stall that is over by then."""
    delays_ns = []
    while not delays_ns or (len(delays_ns) < 10 and delays_ns[-1] >= 30e6):
        delays_ns.append(least_delay_ns(program, data, tmp_path / f"hint-{len(delays_ns)}.sock"))
    assert 0 <= delays_ns[-1] < 30e6, delays_ns


def least_delay_ns(program, data, path):
    """How late the stall that was told soonest was told, in a run with stalls of at least 60 ms."""
    with listening(path) as (environment, hints):
        log = train(
            program, data, hints=1, prepare_cpu_us=60000, workers=1, queue=1, compute_us=1000, batch_reads=1,
            environment=environment,
        )  # fmt: skip
    told = [(hint, after) for hint, after in pairwise(hints) if hint.waiting]
    assert all(not after.waiting for _, after in told), "once in a wait"
    assert all(hint.wait_ns <= after.wait_ns for hint, after in told if after.took_batch)
    assert len(told) <= sum(row.wait_ms >= 10 for row in log.iterations)
    return min((hint.wait_ns - 10_000_000 for hint, _ in told), default=math.inf)


@contextlib.contextmanager
def listening(path):
    """(environment of a program that tells, what it has told when the block is over)."""
    hints = []
    with _longer_queue(_QUEUE_SYSCTL):
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    with listener:
        listener.bind(str(path))
        listener.settimeout(60)
        thread = threading.Thread(target=lambda: hints.extend(map(parse_hint, iter_datagrams(listener))))
        thread.start()
        yield {"PREFETCHD_HINT_SOCKET": str(path)}, hints
        thread.join()


def iter_datagrams(listener):
    """Datagrams until the one that says the loop is over."""
    while True:
        datagram = listener.recv(100)
        yield datagram
        if datagram[4] & 1 << 6:
            return


def test_without_a_socket_nothing_happens(program, data):
    log = train(program, data, hints=1, compute_us=10000, environment={"PREFETCHD_HINT_SOCKET": "/nonexistent/socket"})
    assert log.iterations


@pytest.mark.parametrize("words", [["--path", "/dev/null"], ["--workers", "x"], ["--nonesuch", "1"]])
def test_bad_arguments_are_refused(program, words):
    done = subprocess.run([str(program), *words], check=False, capture_output=True)
    assert done.returncode != 0
    assert done.stderr


def test_arguments_of_a_scenario(data):
    text = """
name = "s"
description = "d."
duration_seconds = 9
[[devices]]
name = "ssd0"
kind = "ssd"
bytes_per_second = "100 MB"
[[jobs]]
name = "job"
device = "ssd0"
batch_reads = 4
read_size = "64 KiB"
compute_ms = 50.5
restarts_seconds = [2, 4.5]
[[best_effort]]
name = "scan"
device = "ssd0"
kind = "writer"
threads = 7
stop_seconds = 99
"""
    scenario = parse_scenario(text, "s")
    extents = {"ssd0": Extent(data, 4096, 8192)}
    words = job_arguments(scenario.jobs[0], scenario, extents)
    given = dict(zip(words[::2], words[1::2], strict=True))
    assert given["--offset"] == "4096"
    assert given["--compute-us"] == "50500"
    assert given["--stop-ms"] == "9000"
    assert given["--hints"] == "1"
    assert [words[i + 1] for i, word in enumerate(words) if word == "--restart-ms"] == ["2000", "4500"]
    words = neighbour_arguments(scenario.best_effort[0], scenario, extents)
    given = dict(zip(words[::2], words[1::2], strict=True))
    assert given["--write"] == "1"
    assert given["--workers"] == "7"
    assert given["--stop-ms"] == "9000"
    assert "--hints" not in given
