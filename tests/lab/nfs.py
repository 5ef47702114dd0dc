"""An NFS server and its mount inside the guest, with a shaped link between the two.

The server lives in a network namespace of its own; its programs come from Debian packages that are unpacked into the
cache, never installed (`ensure_nfs`, called on the host before the boot).
"""

from __future__ import annotations

import contextlib
import functools
import os
import re
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from tests.lab.cache import cache_folder
from tests.lab.errors import LabBroken
from tests.lab.kernel import command_output, unpack_packages

SERVER, CLIENT = "10.213.0.2", "10.213.0.1"
EXPORT, MOUNT = Path("/run/lab-export"), Path("/run/lab-mount")

_SPACE = "lab-store"
_MODULES = ("nfsd", "nfs", "nfsv3", "nfsv4", "veth", "sch_tbf", "sch_netem")
_READY_SECONDS = 60.0
_USERS = ("_rpc:x:990:65534::/run/rpcbind:/usr/sbin/nologin", "statd:x:989:65534::/var/lib/nfs:/usr/sbin/nologin")


def ensure_nfs(progress: Callable[[str], None]) -> None:
    """Unpack what an NFS server needs and the host lacks into the cache; on the host, before the guest boots."""
    folder = cache_folder() / "nfs"
    if (folder / "complete").exists():
        return
    simulated = ["apt-get", "install", "--simulate", "--no-install-recommends", "nfs-kernel-server"]
    packages = packages_to_install(command_output(simulated))
    progress(f"downloads {' '.join(packages) or 'nothing: NFS is installed'} into {folder}")
    unpack_packages(packages, folder)
    (folder / "complete").touch()


def packages_to_install(simulation: str) -> list[str]:
    """Return the packages that `apt-get install --simulate` would add."""
    return re.findall(r"^Inst (\S+) \(", simulation, re.MULTILINE)


@contextlib.contextmanager
def served(bytes_per_second: float | None = None, round_trip_ms: float = 0.0, version: str = "4.2") -> Iterator[Path]:
    """Serve `EXPORT` (memory) and give the mount point while the body runs; a link rate of None means unshaped.

    What the body writes into `EXPORT` appears at the mount. `version` is 3, 4.0, 4.1 or 4.2. In the guest only.
    """
    _prepare()
    with contextlib.ExitStack() as stack:
        _link(stack, bytes_per_second, round_trip_ms)
        EXPORT.mkdir(exist_ok=True)
        run("mount", "-t", "tmpfs", "lab-export", str(EXPORT))
        stack.callback(run, "umount", "--lazy", str(EXPORT))
        stack.enter_context(_server())
        MOUNT.mkdir(exist_ok=True)
        source = f"{SERVER}:{EXPORT}" if version.startswith("3") else f"{SERVER}:/"
        run("mount.nfs", source, str(MOUNT), "-o", f"vers={version},nolock,rsize=131072,wsize=131072")
        stack.callback(run, "umount", "--force", str(MOUNT))
        yield MOUNT


def run(*argv: str) -> None:
    """Run a program with the unpacked packages on its paths; raises `LabBroken` with what it said."""
    done = subprocess.run(argv, check=False, capture_output=True, text=True, env=_environment())
    if done.returncode:
        raise LabBroken(f"`{' '.join(argv)}` failed in the guest: {(done.stderr or done.stdout).strip()}")


@functools.cache
def _environment() -> dict[str, str]:
    root = cache_folder() / "nfs"
    programs = f"{root}/usr/sbin:{root}/sbin:{root}/usr/bin"
    libraries = ":".join(str(folder) for part in ("lib", "usr/lib") for folder in root.glob(f"{part}/*-linux-gnu"))
    return {**os.environ, "PATH": f"{programs}:{os.environ['PATH']}", "LD_LIBRARY_PATH": libraries}


def _prepare() -> None:
    """Load modules and give the daemons the users and tables that the packages would have installed."""
    run("modprobe", "--all", *_MODULES)
    passwd = Path("/etc/passwd")
    known = passwd.read_text()
    missing = [line for line in _USERS if f"\n{line.partition(':')[0]}:" not in known]
    passwd.write_text(known + "".join(f"{line}\n" for line in missing))
    netconfig = cache_folder() / "nfs" / "etc" / "netconfig"
    if netconfig.exists() and not Path("/etc/netconfig").exists():
        Path("/etc/netconfig").write_bytes(netconfig.read_bytes())


def _link(stack: contextlib.ExitStack, bytes_per_second: float | None, round_trip_ms: float) -> None:
    run("ip", "netns", "add", _SPACE)
    stack.callback(run, "ip", "netns", "delete", _SPACE)
    run("ip", "link", "add", "lab-client", "type", "veth", "peer", "name", "lab-server", "netns", _SPACE)
    stack.callback(run, "ip", "link", "delete", "lab-client")
    run("ip", "address", "add", f"{CLIENT}/24", "dev", "lab-client")
    run("ip", "link", "set", "lab-client", "up")
    inside = ("ip", "-n", _SPACE)
    run(*inside, "address", "add", f"{SERVER}/24", "dev", "lab-server")
    run(*inside, "link", "set", "lab-server", "up")
    run(*inside, "link", "set", "lo", "up")
    if bytes_per_second:
        rate = f"{round(bytes_per_second * 8)}bit"
        shape = ("root", "tbf", "rate", rate, "burst", "256kb", "limit", "1000kb")
        run("tc", "-n", _SPACE, "qdisc", "add", "dev", "lab-server", *shape)
    if round_trip_ms:
        run("tc", "qdisc", "add", "dev", "lab-client", "root", "netem", "delay", f"{round_trip_ms}ms", "limit", "10000")


@contextlib.contextmanager
def _server() -> Iterator[None]:
    ready, log = Path("/run/lab-nfs-ready"), Path("/run/lab-nfs.log")
    ready.unlink(missing_ok=True)
    script = Path(__file__).with_name("nfs_server.sh")
    command = ["ip", "netns", "exec", _SPACE, "bash", str(script), str(EXPORT), CLIENT, str(ready)]
    with log.open("wb") as file:
        process = subprocess.Popen(command, stdout=file, stderr=file, env=_environment())
    try:
        deadline = time.monotonic() + _READY_SECONDS
        while not ready.exists():
            if process.poll() is not None or time.monotonic() > deadline:
                raise LabBroken(f"The NFS server in the guest did not start:\n{log.read_text().strip()}")
            time.sleep(0.1)
        yield
    finally:
        process.terminate()
        process.wait()
