"""Signals of the operator: they end a start half-way, a wait at once, and leave the way out alone."""

import os
import signal
import threading
import time

import pytest

from agent.stopping import DISARM, STOP, SignalFlags, StoppedEarlyError


def kill(number):
    os.kill(os.getpid(), number)


@pytest.mark.parametrize("number", STOP)
def test_a_stop_interrupts_the_start_once_and_then_only_sets_a_flag(number):
    with SignalFlags() as flags:
        with pytest.raises(StoppedEarlyError, match=number.name):
            kill(number)
        kill(number)
        assert flags.stop == number.name


def test_a_stop_is_no_exception_that_a_failing_probe_could_be_taken_for():
    assert not issubclass(StoppedEarlyError, Exception)


def test_disarming_never_interrupts():
    with SignalFlags() as flags:
        kill(DISARM)
        assert flags.disarm
        assert not flags.stop


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, DISARM])
def test_a_signal_ends_a_wait_at_once(number):
    with SignalFlags() as flags:
        flags.started()
        began = time.monotonic()
        threading.Timer(0.1, kill, (number,)).start()
        flags.wait(began + 60.0)
        assert 0.1 <= time.monotonic() - began < 50.0


def test_a_descriptor_ends_a_wait_and_absent_ones_are_passed_over():
    reading, writing = os.pipe()
    try:
        with SignalFlags() as flags:
            flags.started()
            os.write(writing, b".")
            began = time.monotonic()
            flags.wait(began + 60.0, (-1, reading))
            assert time.monotonic() - began < 50.0
    finally:
        os.close(reading)
        os.close(writing)


def test_without_anything_a_wait_lasts():
    with SignalFlags() as flags:
        flags.started()
        began = time.monotonic()
        flags.wait(began + 0.1)
        assert time.monotonic() - began >= 0.099


def test_what_was_there_before_comes_back():
    before = {number: signal.getsignal(number) for number in (*STOP, DISARM)}
    with SignalFlags():
        assert signal.getsignal(signal.SIGHUP) != before[signal.SIGHUP]
    assert {number: signal.getsignal(number) for number in before} == before
    assert signal.set_wakeup_fd(-1) == -1
