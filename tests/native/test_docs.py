"""Every command of the documentation is run as it stands there, or says here why it cannot be and what covers it.

The commands run in one folder and in their order, as a newcomer would type them, beside an agent that observes this
machine. What is changed before they run is `SPARED`: short times, own folders, a device that exists.
"""

import getpass
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from functools import partial
from pathlib import Path

import pytest

from tests.native.conftest import cgroup_mount, missing

pytestmark = [pytest.mark.native, pytest.mark.timeout(240)]

ROOT = Path(__file__).parents[2]
JOB = f"docs-{os.getpid()}"
TRAINING = """
import time
for n in range(3000):
    open(__file__, "rb").read()
    time.sleep(0.05)
"""
PROGRAMS = (
    "prefetchd", ".venv/bin/prefetchd", ".venv/bin/python", "python", "sudo", "make", "source", "touch", "find", "helm",
    "kubectl", "systemctl", "systemd-analyze", "curl", "tar", "sha256sum",
)  # fmt: skip

NOT_RUN = {
    "make setup": (
        "installs packages",
        "tests/unit/test_setup.py::test_running_it_again_is_silent_and_changes_nothing",
    ),
    "make demo": (
        "a guest for two minutes",
        "tests/lab/test_demo.py::test_the_demo_passes_and_leaves_its_page_and_its_recording",
    ),
    "make test": ("is this suite", "tests/native/test_docs.py::test_a_command_does_what_it_says"),
    "make paper": (
        "simulates for minutes",
        "tests/unit/agent/simulate/test_paper.py::test_the_document_has_the_papers_figures_and_ours",
    ),
    "make bench-policies": ("a guest for an hour", "tests/lab/guest/test_bench.py"),
    "make bench": ("measures for minutes", "tests/bench/test_overhead.py::test_a_short_run_measures_everything"),
    ".venv/bin/python -m tests.bench overhead --lab": (
        "a guest for minutes; the program is the same",
        "tests/bench/test_overhead.py::test_a_short_run_measures_everything",
    ),
    "sudo .venv/bin/python -m tests.lab pytest": ("a guest for minutes", "tests/lab/guest/test_rearrange.py"),
    "sudo .venv/bin/python -m tests.lab causes": ("a guest for half an hour", "tests/lab/guest/test_causes.py"),
    "make package": ("builds an archive", "tests/unit/packaging/test_install.py::test_two_clones_give_the_same_bytes"),
    "packaging/container/build.sh": (
        "needs a container engine",
        "tests/unit/packaging/test_container.py::test_build_script_speaks_to_every_engine",
    ),
    "podman": ("needs a registry", "tests/unit/packaging/test_container.py::test_build_script_speaks_to_every_engine"),
    "helm install": (
        "needs a cluster",
        "tests/unit/packaging/test_helm_life.py::test_the_written_way_from_install_to_removal",
    ),
    "helm u": (
        "needs a cluster",
        "tests/unit/packaging/test_helm_life.py::test_the_written_way_from_install_to_removal",
    ),
    "kubectl": (
        "needs a cluster; the program is the same",
        "tests/unit/packaging/test_install.py::test_a_nodes_life_from_install_to_removal",
    ),
    "apt-get": ("installs packages", "tests/unit/packaging/test_install.py::test_a_nodes_life_from_install_to_removal"),
    "tar": ("needs a release", "tests/unit/packaging/test_install.py::test_a_nodes_life_from_install_to_removal"),
    "./install.sh": ("installs", "tests/unit/packaging/test_install.py::test_a_nodes_life_from_install_to_removal"),
    "systemctl": ("needs systemd", "tests/unit/packaging/test_install.py::test_a_nodes_life_from_install_to_removal"),
    "prefetchd calibrate /dev/nvme0n1 --raw": (
        "reads a whole disk, not a folder on one",
        "tests/native/test_calibrate.py::test_raw_needs_a_device_and_is_read_only",
    ),
    "systemd-analyze": (
        "is given an installed unit",
        "tests/unit/packaging/test_install.py::test_confinement_of_the_unit",
    ),
    "sha256sum": (
        "needs a release",
        "tests/unit/packaging/test_install.py::test_archive_lists_the_sum_of_every_file",
    ),
}
"""Beginning of a command: why it is not run here, and the test that covers it."""

SPARED = (
    (r"/usr/local/bin/", "bin/"),
    (r"/run/prefetchd/disable", "state/disable"),
    (r"\bresnet\b|\bJOB\b", JOB),
    (r"\bFILE --config NEW\b", "node.rec --config node.toml"),
    (r"--scenario FILE\b", f"--scenario {ROOT}/tests/lab/scenarios/skeleton.toml"),
    (r"calibrate /dev/nvme0n1", "calibrate disk --size '64 MiB' --seconds 0.3 --busy-ok --reader own"),
    (r"http://127\.0\.0\.1:9753/", "http://127.0.0.1:$PORT/"),
    (r"prefetchd run$", "prefetchd run --config agent.toml"),
    (r"prefetchd top$", "prefetchd top --count 2"),
    (r"prefetchd (doctor|top|explain)\b(?! --config)", r"prefetchd \1 --config agent.toml"),
    (r"prefetchd restore\b", "prefetchd restore --state-directory state"),
    (r"run --duration 30$", "run --config node.toml --duration 1"),
    (r"run --config packaging/prefetchd\.toml", "run --config node.toml --duration 1"),
    (r"run --mode (dry-run|enforce)", r"run --duration 1 --mode \1"),
    (r"make clean", "make --dry-run clean"),
)
"""What is replaced in a command before it runs."""

LEFT_RUNNING = ("sudo prefetchd run", 'sudo prefetchd exec --job resnet --user "$USER" -- python train.py')
MAY_SAY_NO = {"doctor": 3}
"""Commands whose verdict on this machine may be another."""


MENTION = re.compile(r"(sudo )?(prefetchd|helm|[a-z]+)|(prefetchd|helm) [a-z]+")
"""A program or a command that is only spoken of."""


def commands(document):
    """Lines of shell blocks, and commands in the text that have arguments, in their order."""
    text = (ROOT / document).read_text()
    plain = "" if document == "README.md" else "|"
    for block, inline in re.findall(rf"(?ms)^[ ]*```(?:sh{plain})\n(.*?)```|^[ ]*```.*?```|`([^`\n]+)`", text):
        for line in block.replace("\\\n", " ").splitlines():
            if command := line.partition(" #")[0].strip():
                yield " ".join(command.split())
        if inline.split(" ")[0] in PROGRAMS and not MENTION.fullmatch(inline):
            yield inline


LINES = list({line: (document, line) for document in ("README.md", "packaging/README.md")
              for line in commands(document)}.values())  # fmt: skip
"""(document, command), each command once."""


def not_run(line):
    return next((begin for begin in NOT_RUN if line.startswith(begin)), None)


def run_here(document, line):
    return not not_run(line) and line not in LEFT_RUNNING


def spared(line):
    for pattern, instead in SPARED:
        line = re.sub(pattern, instead, line)
    return line


class Desk:
    """A newcomer's folder and shell."""

    def __init__(self, folder, port):
        self.folder = folder
        path = f"{folder}/bin:{Path(sys.executable).parent}:{os.environ['PATH']}"
        self.environment = os.environ | {"PATH": path, "USER": getpass.getuser(), "PORT": str(port), "TERM": "dumb"}
        self.environment.pop("NO_COLOR", None)

    def start(self, line, **keywords):
        return subprocess.Popen(
            ["bash", "-c", f"exec {line}" if line in map(spared, LEFT_RUNNING) else line],
            cwd=self.folder, env=self.environment, stdin=subprocess.DEVNULL, text=True, **keywords,
        )  # fmt: skip

    def run(self, line):
        with self.start(line, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
            try:
                out, err = process.communicate(timeout=100)
            finally:
                process.kill()
        return process.returncode, out, err


@pytest.fixture(scope="module")
def desk(tmp_path_factory):
    if os.geteuid():
        missing("BPF and cgroups need root: run as root or with sudo")
    if cgroup_mount() is None:
        missing("no cgroup v2 hierarchy is mounted")
    folder = tmp_path_factory.mktemp("desk")
    for name in (".venv", "Makefile", "packaging", "tests", "agent", "bpf", "cgroup"):
        (folder / name).symlink_to(ROOT / name)
    (folder / "bin").mkdir()
    (folder / "bin" / "sudo").write_text('#!/bin/sh\nexec "$@"\n')
    (folder / "bin" / "sudo").chmod(0o755)
    (folder / "train.py").write_text(TRAINING)
    disk = Path("/var/tmp") / f"prefetchd-docs-{os.getpid()}"
    disk.mkdir()
    (folder / "disk").symlink_to(disk)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    for name in ("agent", "node"):
        (folder / f"{name}.toml").write_text(configuration(folder, name, port if name == "agent" else 0))
    yield Desk(folder, port)
    shutil.rmtree(disk)


def configuration(folder, name, port):
    """`node.toml` of the README, with folders of its own; the one of the observing agent says where it listens."""
    written = re.search(r"```toml\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)[1] if name == "node" else ""
    state = folder / ("state" if name == "agent" else "other-state")
    return f"""
{written.replace("/dev/nvme0n1", f"{folder}/disk")}
[metrics]
listen = "127.0.0.1:{port}"
[enforcement]
state_directory = "{state}"
kill_switch_file = "{state}/disable"
[hint]
socket = "{state}/hint.sock"
"""


@pytest.fixture(scope="module")
def at_work(desk):
    """The two commands that the README leaves running; both end well at the end."""
    processes, log = [], desk.folder / "log"
    try:
        for line in LEFT_RUNNING:
            with log.open("a") as stream:
                processes.append(desk.start(spared(line), stderr=stream))
            until(partial(answers, desk, line == LEFT_RUNNING[1]), processes[-1], log)
        yield
        statuses = []
        for process in reversed(processes):
            process.send_signal(signal.SIGTERM)
            statuses.append(process.wait(30))
        assert statuses == [128 + signal.SIGTERM, 0], log.read_text()
    finally:
        for process in processes:
            process.kill()
            process.wait()


def answers(desk, with_job):
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{desk.environment['PORT']}/state", timeout=3) as response:
            jobs = json.load(response).get("jobs")  # there is none before the first pass
    except (urllib.error.URLError, OSError):
        return False
    return jobs is not None and (not with_job or any(job["job"] == JOB for job in jobs))


def until(condition, process, log, seconds=90.0):
    deadline = time.monotonic() + seconds
    while not condition():
        assert process.poll() is None, log.read_text()
        assert time.monotonic() < deadline, log.read_text()
        time.sleep(0.2)


def test_the_documents_have_the_commands_that_this_file_speaks_of():
    lines = [line for _, line in LINES]
    assert set(LEFT_RUNNING) <= set(lines)
    assert [begin for begin in NOT_RUN if not any(line.startswith(begin) for line in lines)] == []
    assert sum(run_here(*one) for one in LINES) >= 20


@pytest.mark.parametrize("begin", NOT_RUN)
def test_what_is_not_run_is_covered_elsewhere(begin):
    reason, where = NOT_RUN[begin]
    file, _, name = where.partition("::")
    assert reason
    assert f"def {name or 'test_'}" in (ROOT / file).read_text()


@pytest.mark.usefixtures("at_work")
@pytest.mark.parametrize(("document", "line"), [one for one in LINES if run_here(*one)])
def test_a_command_does_what_it_says(desk, document, line):
    status, out, err = desk.run(spared(line))
    allowed = {0, *(code for name, code in MAY_SAY_NO.items() if f"prefetchd {name}" in line)}
    assert status in allowed, f"{document}: {spared(line)}\n{out[-2000:]}\n{err[-2000:]}"
    assert "Traceback" not in err
    (desk.folder / "state" / "disable").unlink(missing_ok=True)
