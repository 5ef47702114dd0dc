"""Small files are read whole; what has no end, or nobody to write it, is refused at once wherever one is named."""

import os
import threading
from pathlib import Path

import pytest

from agent import config
from agent.client import AgentClient
from agent.config import MetricsSection
from agent.errors import PrefetchdError
from agent.server import refuse_unusable
from agent.small_file import MAX_BYTES, read_small


@pytest.fixture
def pipe(tmp_path):
    path = tmp_path / "pipe"
    os.mkfifo(path, 0o600)
    return path


@pytest.fixture
def endless(tmp_path):
    path = tmp_path / "endless"
    path.touch(0o600)
    os.truncate(path, 10 * 2**30)
    return path


def test_a_file_is_read_whole_up_to_the_limit(tmp_path):
    file = tmp_path / "file"
    for data in (b"", b"x", b"y" * MAX_BYTES):
        file.write_bytes(data)
        assert read_small(file) == data
    file.write_bytes(b"y" * (MAX_BYTES + 1))
    with pytest.raises(OSError, match="more than 4 MiB"):
        read_small(file)


def test_a_folder_is_none(tmp_path):
    with pytest.raises(IsADirectoryError):
        read_small(tmp_path)


def test_a_pipe_is_read_while_its_writer_takes_its_time():
    """So does bash's `<(command)`."""
    reader, writer = os.pipe()
    late = threading.Timer(0.2, lambda: (os.write(writer, b"mode = 'dry-run'\n"), os.close(writer)))
    late.start()
    try:
        assert config.load(Path(f"/proc/self/fd/{reader}")).mode == "dry-run"
    finally:
        late.join()
        os.close(reader)


def test_a_pipe_without_a_writer_is_not_waited_for(pipe):
    with pytest.raises(config.ConfigError, match="a pipe that nobody writes to"):
        config.load(pipe)


@pytest.mark.parametrize(("file", "why"), [("pipe", "a pipe that nobody writes to"), ("endless", "more than 4 MiB")])
def test_passwords_are_read_from_small_files_alone(file, why, request):
    path = request.getfixturevalue(file)
    with pytest.raises(PrefetchdError, match=rf"Password file '{path}' cannot be read \({why}\); check --auth"):
        AgentClient("http://127.0.0.1:1", auth_file=str(path)).get("/state")
    with pytest.raises(PrefetchdError, match=rf"\({why}\); check metrics.basic_auth_file"):
        refuse_unusable(MetricsSection(listen="127.0.0.1:0", basic_auth_file=str(path)))
