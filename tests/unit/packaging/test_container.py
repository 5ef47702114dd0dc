"""The container image: its commands, its program installed by its own steps and (nightly) its whole root file system.

Both live through start, health check and end with the mounts of the chart, on this machine and in the lab's guest.
"""

import json
import os
import re
import shlex
import shutil
import socketserver
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from tests.lab import Lab, LabUnavailable, Ssd
from tests.unit.packaging.nodes import make_fresh_node
from tests.unit.packaging.support import PACKAGING, SOURCE

FOLDER = PACKAGING / "container"
HEALTH_CHECK = FOLDER / "healthcheck.py"

ENGINES = {
    "buildah": ("buildah inspect --type image", "buildah mount $(buildah from {image})"),
    "podman": ("podman image inspect", "podman image mount {image}"),
}
"""By engine: what prints an image's configuration, what mounts the image. (Docker's needs its daemon.)"""
# Layers lie beside the overlay, which cannot carry another one; a root file system entered by chroot has no runtime.
ENGINE_HERE = """
mkdir -p /mnt/layers /var/lib/containers /etc/containers
mount --bind /mnt/layers /var/lib/containers
export BUILDAH_ISOLATION=chroot STORAGE_DRIVER=overlay
cd /mnt/prefetchd
"""
REGISTRY = "localhost:5000"
WITH_A_REGISTRY = f"""
cat >/etc/containers/registries.conf <<'END'
[[registry]]
location = "{REGISTRY}"
insecure = true
END
cat >/mnt/registry.yml <<'END'
version: 0.1
storage: {{filesystem: {{rootdirectory: /mnt/registry}}}}
http: {{addr: "{REGISTRY}"}}
END
docker-registry serve /mnt/registry.yml >/mnt/registry.log 2>&1 &
trap "kill $!" EXIT
for i in $(seq 100); do curl -sf http://{REGISTRY}/v2/ && break; sleep 0.2; done
"""

LIFE = Path(__file__).with_name("pod_life.sh")
STAND_IN = "#!/bin/sh\necho apt-get $* >>/tmp/shared/apt.log\n"


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


@pytest.mark.parametrize("url", ["agent", "http://[::/", "http://127.0.0.1:{port}/"])
def test_health_check_takes_no_rubbish_for_health(url):
    class Rubbish(socketserver.BaseRequestHandler):
        def handle(self):
            self.request.recv(65536)
            self.request.sendall(b"SSH-2.0-x\r\n")

    with socketserver.TCPServer(("127.0.0.1", 0), Rubbish) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        told = check(url.format(port=server.server_address[1]))
        server.shutdown()
    assert (told.returncode, told.stderr) == (1, "")
    assert told.stdout.count("\n") == 1


def test_the_image_starts_the_agent_as_the_unit_does():
    """So what the installation test sees of the unit's command on a fresh node holds for the image's as well."""
    unit = (PACKAGING / "systemd" / "prefetchd.service").read_text()
    (command,) = re.findall(r"^ExecStart=(.*)$", unit, re.MULTILINE)
    assert [*instruction("ENTRYPOINT"), *instruction("CMD")] == command.split()
    assert instruction("HEALTHCHECK")[-1] == "/opt/prefetchd/share/healthcheck.py"


@pytest.fixture(scope="module")
def program_layer(release, tmp_path_factory):
    """What the image adds to its Debian packages, made by the image's own steps on a copy of this machine.

    This machine has the packages already, so apt-get only notes what it was asked for.
    """
    node = make_fresh_node(tmp_path_factory.mktemp("image"))
    setup, programs = node.base / "shared" / "setup", node.base / "shared" / "bin"
    (setup / "release").mkdir(parents=True)
    subprocess.run(["tar", "xf", release, "-C", setup / "release", "--strip-components", "1"], check=True)
    programs.mkdir()
    (programs / "apt-get").write_text(STAND_IN)
    (programs / "apt-get").chmod(0o755)
    steps = "for step in program tidy; do sh /tmp/shared/setup/release/container/image.sh $step; done"
    node.run(f"cp -r /tmp/shared/setup /setup; set -e; PATH=/tmp/shared/bin:$PATH; {steps}; test ! -e /setup")
    assert "apt-get install" in (node.base / "shared" / "apt.log").read_text()
    layer = node.base / "layer"
    for folder in re.findall(r"^COPY --from=program (\S+) \1$", (FOLDER / "Containerfile").read_text(), re.MULTILINE):
        (layer / folder[1:]).parent.mkdir(parents=True, exist_ok=True)
        (node.upper / folder[1:]).rename(layer / folder[1:])
    yield layer
    shutil.rmtree(node.upper)
    shutil.rmtree(layer)


@pytest.fixture(scope="module")
def image_root(release, tmp_path_factory):
    """The image's whole root file system, from Debian's packages, without a container engine."""
    root = tmp_path_factory.mktemp("image") / "root"
    command = [FOLDER / "rootfs.sh", "--archive", release, root]
    built = subprocess.run(command, check=False, capture_output=True, text=True, timeout=1100)
    assert built.returncode == 0, built.stdout + built.stderr
    yield root
    shutil.rmtree(root)


def life(seconds, **folders):
    """The command that lives through the image's life, and its environment."""
    words = {name: " ".join(instruction(name)) for name in ("ENTRYPOINT", "CMD", "HEALTHCHECK")}
    environment = {**folders, "HIDDEN": SOURCE, "SECONDS_TO_RUN": seconds, **words}
    command = ["unshare", "--mount", "--net", "--propagation", "private", str(LIFE)]
    return command, {name: str(value) for name, value in environment.items()}


def live_here(tmp_path, **folders):
    (tmp_path / "pod").mkdir()
    command, environment = life(6, POINT=tmp_path / "pod", **folders)
    done = run(*command, env={"PATH": os.environ["PATH"], **environment})
    return done.stdout + done.stderr


def live_in_the_guest(**folders):
    """The same in the lab's guest, which sees this machine's files read-only below /run/lab-root."""
    command, environment = life(20, POINT="/run/pod", **{key: f"/run/lab-root{path}" for key, path in folders.items()})
    lab = Lab(devices=(Ssd(),), boot_timeout=300, timeout=900)
    try:
        with lab.boot() as guest:
            done = guest.run(["sh", "-c", f"mkdir /run/pod; exec {shlex.join(command)}"], env=environment)
            return done.output.read_text()
    except LabUnavailable as error:
        pytest.skip(str(error))


def assert_lived(log):
    told = dict(re.findall(r"^(doctor|health check|run|restore): (\d)$", log, re.MULTILINE))
    assert told == {"doctor": "0", "health check": "0", "run": "0", "restore": "0"}, log
    assert "the root can be written" not in log
    assert "headers" not in log
    assert set(re.findall(r"probe (\w+): (?:attached|degraded)", log)) >= {"block", "page_cache", "dataloader"}, log


def test_the_program_of_the_image_lives_here(program_layer, tmp_path):
    assert_lived(live_here(tmp_path, ROOT="/", LAYER=program_layer))
    assert not list(program_layer.glob("opt/prefetchd/lib/python3*/site-packages/pip"))
    assert (program_layer / "opt/prefetchd/share/debian-packages.txt").read_text().startswith("adduser ")


@pytest.mark.lab
@pytest.mark.timeout(1500)
def test_the_program_of_the_image_lives_in_the_guest(program_layer):
    log = live_in_the_guest(ROOT="/", LAYER=program_layer)
    assert_lived(log)
    assert re.search(r"probe block: attached \((?:fentry|kprobe)\)", log), log


@pytest.mark.nightly
@pytest.mark.timeout(1500)
def test_root_file_system_without_an_engine(image_root, tmp_path):
    assert not (image_root / "setup").exists()
    assert list((image_root / "usr/src").glob("linux-headers-*-common"))
    packages = (image_root / "opt/prefetchd/share/debian-packages.txt").read_text()
    assert re.search(r"^python3-bpfcc \S+$", packages, re.MULTILINE)
    assert_lived(live_here(tmp_path, ROOT=image_root))


@pytest.mark.nightly
@pytest.mark.lab
@pytest.mark.timeout(2000)
def test_root_file_system_without_an_engine_in_the_guest(image_root):
    log = live_in_the_guest(ROOT=image_root)
    assert_lived(log)
    assert re.search(r"probe block: attached \((?:fentry|kprobe)\)", log), log


@pytest.mark.nightly
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("engine", ENGINES)
def test_the_written_way_to_an_image(engine, fresh, release, tmp_path):
    """Debian's engine builds from a base without a registry's help, pushes to a registry, and what is there lives."""
    shared = fresh.base / "shared"
    base = "debian:bookworm-slim"
    subprocess.run(["git", "clone", "--quiet", SOURCE, shared / "prefetchd"], check=True, timeout=60)
    subprocess.run(["tar", "cf", shared / "base.tar", "-C", fresh.lower, "."], check=True)
    fresh.run(f"apt-get install --no-install-recommends {engine} docker-registry curl python3")
    imported = f"c=$({engine} from scratch); {engine} add $c /mnt/base.tar /; {engine} commit $c localhost/{base}"
    if engine == "podman":
        imported = f"podman import /mnt/base.tar localhost/{base}"
    build, push = (line.replace("YOUR-REGISTRY", REGISTRY) for line in written_way(engine))
    fresh.run(f"{ENGINE_HERE}{imported}\n{build} --base localhost/{base} --archive /mnt/{copied(release, shared)}")
    image = push.split()[-1]
    asked, mounted = (command.format(image=image) for command in ENGINES[engine])
    told = json.loads(fresh.run(f"{ENGINE_HERE}{asked} {image}", network=False).stdout)
    assert_configured(told["Docker"]["config"] if engine == "buildah" else {**told[0], **told[0]["Config"]})
    fetched = f"{engine} rmi --force {image}\n{engine} pull {image}\ncp -a $({mounted}) /mnt/image"
    fresh.run(f"{ENGINE_HERE}{WITH_A_REGISTRY}{push}\n{fetched}", network=False)
    assert_lived(live_here(tmp_path, ROOT=shared / "image"))


def written_way(engine):
    """The README's commands that build the image and push it."""
    part = (PACKAGING / "README.md").read_text().split("\n## Kubernetes, with Helm\n")[1]
    build, push = (line.strip() for line in re.search(r"```\n(.*?)```", part, re.DOTALL)[1].splitlines()[:2])
    assert push.startswith("podman push ")
    return build, push.replace("podman", engine, 1)


def copied(file, folder):
    return Path(shutil.copy(file, folder)).name


def assert_configured(config):
    """What the engine recorded in the image is what the Containerfile says."""
    assert config["Entrypoint"] == instruction("ENTRYPOINT")
    assert config["Cmd"] == instruction("CMD")
    assert config["Healthcheck"]["Test"] == ["CMD", *instruction("HEALTHCHECK")]
    assert (config["User"], config["StopSignal"]) == ("0", "SIGTERM")
