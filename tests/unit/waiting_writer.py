"""A named pipe whose writer waits for a reader: who opens it, by mistake, lets the writer go."""

import contextlib
import os
import threading
import time
from pathlib import Path

WAITS_IN = ("wait_for_partner", "fifo_open")  # fs/pipe.c; the first is inlined into the second by some compilers


@contextlib.contextmanager
def pipe_with_writer(path):
    """Make the pipe; gives the thread of the writer once that waits in the kernel."""
    os.mkfifo(path)
    writer = threading.Thread(target=lambda: os.close(os.open(path, os.O_WRONLY)), daemon=True)
    writer.start()
    try:
        deadline = time.monotonic() + 30
        while Path(f"/proc/self/task/{writer.native_id}/wchan").read_text() not in WAITS_IN:
            assert time.monotonic() < deadline, "the writer does not wait"
            time.sleep(0.001)
        yield writer
    finally:
        reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
        writer.join(30)
        os.close(reader)
    assert not writer.is_alive()
