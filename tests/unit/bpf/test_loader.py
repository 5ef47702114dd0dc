"""Closing programs, whatever became of them before."""

import atexit

from bpf.loader import Loader, Program


class Broken:
    """BCC's module after a signal has broken off a detach: it tries the closed descriptor again, and raises."""

    def __init__(self):
        self.tries = 0
        atexit.register(self.cleanup)

    def cleanup(self):
        self.tries += 1
        raise Exception("Failed to detach BPF from tracepoint")  # noqa: TRY002 - what BCC raises


def test_a_detach_that_a_signal_broke_off_ends_no_clean_up(monkeypatch):
    left = []
    monkeypatch.setattr(atexit, "register", left.append)
    monkeypatch.setattr(atexit, "unregister", left.remove)
    first, second = Broken(), Broken()
    loader = Loader()
    loader._programs += [Program(first, "a.c", loader), Program(second, "b.c", loader)]
    loader.close()
    assert (first.tries, second.tries) == (1, 1)
    assert not left, "it would be tried again at the end"
