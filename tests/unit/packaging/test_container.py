"""The container image: its commands on a fresh node, and (nightly) its root file system built without an engine."""

import json
import os
import re
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from tests.unit.packaging.support import PACKAGING

FOLDER = PACKAGING / "container"
HEALTH_CHECK = FOLDER / "healthcheck.py"

# The mounts of the chart: a root that cannot be written, the host's /sys and /dev, state and scratch folders.
_AS_IN_A_POD = """
set -e
mount --bind "$ROOT" "$ROOT"
mount -o remount,ro,bind "$ROOT"
mount --rbind /sys "$ROOT/sys"
mount --rbind -o ro /dev "$ROOT/dev"
mount -t proc proc "$ROOT/proc"
mount -t tmpfs tmpfs "$ROOT/run"
mount -t tmpfs tmpfs "$ROOT/tmp"
exec chroot "$ROOT" /usr/bin/env -i PATH=/usr/sbin:/usr/bin "$@"
"""


def instruction(name):
    """The exec form of the last instruction of this name in the Containerfile, as a list of words."""
    text = (FOLDER / "Containerfile").read_text().replace("\\\n", " ")
    found = re.findall(rf"^{name}\s.*?(\[.*\])\s*$", text, re.MULTILINE)
    return json.loads(found[-1])


def run(*command, **more):
    return subprocess.run(command, check=False, capture_output=True, text=True, timeout=120, **more)


@pytest.mark.parametrize(
    ("engine", "begins"),
    [
        ("buildah", "buildah build --format docker"),
        ("podman", "podman build --format docker"),
        ("docker", "docker build"),
    ],
)
def test_build_script_speaks_to_every_engine(engine, begins, project_version):
    done = run(FOLDER / "build.sh", "--engine", engine, "--print")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"{begins} --tag prefetchd:{project_version} --build-arg BASE=debian:bookworm-slim")


def test_build_script_takes_a_name_a_base_and_nothing_it_does_not_know():
    done = run(FOLDER / "build.sh", "--engine", "docker", "--tag", "shop/p:1", "--base", "mirror/debian:12", "--print")
    assert "--tag shop/p:1 --build-arg BASE=mirror/debian:12" in done.stdout
    wrong = run(FOLDER / "build.sh", "--fast")
    assert (wrong.returncode, "unknown option '--fast'" in wrong.stderr) == (2, True)
    unknown = run(FOLDER / "build.sh", "--engine", "rkt", "--print")
    assert (unknown.returncode, "unknown engine 'rkt'" in unknown.stderr) == (2, True)


def test_rootfs_script_refuses_a_folder_in_use(tmp_path):
    (tmp_path / "precious").write_text("data")
    done = run(FOLDER / "rootfs.sh", tmp_path)
    assert done.returncode == 1
    assert re.search("not empty|run as root|debootstrap is missing", done.stderr)
    assert (tmp_path / "precious").read_text() == "data"


def test_every_step_of_the_containerfile_is_one_of_the_script():
    steps = re.findall(r'image\.sh", "(\w+)"', (FOLDER / "Containerfile").read_text())
    assert steps == ["packages", "program", "tidy"]
    assert run("sh", FOLDER / "image.sh", "other").returncode == 2
    assert {"packages", "program"} == set(re.findall(r"\b(packages|program)\b(?= program|; do)", rootfs_loop()))


def rootfs_loop():
    return re.search(r"for step in .*", (FOLDER / "rootfs.sh").read_text())[0]


@pytest.fixture
def health():
    """A /healthz whose answer the test chooses; gives the address and the settable status."""

    class Handler(BaseHTTPRequestHandler):
        status = 200

        def do_GET(self):
            body = b"ok\n" if self.status == 200 else b"the loop is silent for 9.0 s\n"
            self.send_response(self.status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *args):
            """Quiet."""

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}/healthz", Handler
        server.shutdown()
        thread.join(timeout=5)


def check(url):
    return run(sys.executable, HEALTH_CHECK, env={**os.environ, "PREFETCHD_HEALTH_URL": url})


def test_health_check_tells_well_unwell_and_away(health):
    url, handler = health
    assert check(url).returncode == 0
    handler.status = 503
    unwell = check(url)
    assert unwell.returncode == 1
    assert "silent for 9.0 s" in unwell.stdout
    away = check("http://127.0.0.1:9/healthz")
    assert away.returncode == 1
    assert "refused" in away.stdout


def test_the_image_starts_the_agent_as_the_unit_does():
    """So what the installation test sees of the unit's command on a fresh node holds for the image's as well."""
    unit = (PACKAGING / "systemd" / "prefetchd.service").read_text()
    (command,) = re.findall(r"^ExecStart=(.*)$", unit, re.MULTILINE)
    assert [*instruction("ENTRYPOINT"), *instruction("CMD")] == command.split()
    assert instruction("HEALTHCHECK")[-1] == "/opt/prefetchd/share/healthcheck.py"


@pytest.mark.nightly
@pytest.mark.timeout(1200)
def test_root_file_system_without_an_engine(release, tmp_path):
    root = tmp_path / "root"
    built = subprocess.run(
        [FOLDER / "rootfs.sh", "--archive", release, root], check=False, capture_output=True, text=True, timeout=1100
    )
    assert built.returncode == 0, built.stdout + built.stderr
    assert not (root / "setup").exists()
    assert list((root / "usr/src").glob("linux-headers-*-common"))
    assert re.search(
        r"^python3-bpfcc \S+$", (root / "opt/prefetchd/share/debian-packages.txt").read_text(), re.MULTILINE
    )
    doctor = in_pod(root, *instruction("ENTRYPOINT"), "doctor")
    assert doctor.returncode in (0, 1, 3), doctor.stderr
    assert "headers" not in doctor.stdout
    ran = in_pod(root, *instruction("ENTRYPOINT"), *instruction("CMD"), "--duration", "3", "--listen", "127.0.0.1:0")
    assert ran.returncode == 0, ran.stderr
    assert "answering on" in ran.stderr


def in_pod(root, *command):
    environment = {**os.environ, "ROOT": str(root)}
    inside = ["unshare", "--mount", "--propagation", "private", "sh", "-c", _AS_IN_A_POD, "sh", *command]
    return run(*inside, env=environment)
