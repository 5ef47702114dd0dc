"""Fresh Debian root file systems, made by debootstrap: commands typed in them, and their own systemd as process 1."""

import contextlib
import os
import shutil
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path

from cgroup.hierarchy import detect_hierarchy

SUITE = "bookworm"
ENTER = Path(__file__).with_name("enter_root.sh")
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
CERTIFICATES = Path("/etc/ssl/certs/ca-certificates.crt")
BOOT_SECONDS = 400.0
"""An emulated CPU takes minutes."""


def debootstrap(folder: Path) -> None:
    """Make what the Debian installer leaves without any task selected."""
    command = ["debootstrap", SUITE, str(folder)]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=1000)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr


@dataclass(frozen=True)
class DebianRoot:
    """A copy of a root file system as it was made; `base` is a folder for what is written to it."""

    base: Path
    lower: Path

    @classmethod
    def make(cls, base: Path, lower: Path) -> "DebianRoot":
        """Make the folders; `shared` is /mnt in the root file system."""
        for name in ("upper", "work", "root", "shared"):
            (base / name).mkdir(mode=0o755)
        return cls(base, lower)

    @property
    def upper(self) -> Path:
        """Every file that differs from the one as it was made."""
        return self.base / "upper"

    def run(self, script: str, network: bool = True) -> subprocess.CompletedProcess[str]:
        """Run a shell script in it that ends with the first failure, with this machine's network or just a loopback."""
        command = ["unshare", "--mount", *([] if network else ["--net"]), "--propagation", "private", str(ENTER), "run"]
        command += ["/usr/bin/env", "-i", f"PATH={PATH}", "HOME=/root", "DEBIAN_FRONTEND=noninteractive"]
        command += [*self._way_to_registries(), "sh", "-e", "-c", script]
        return checked(command, script, self._environment())

    def _way_to_registries(self) -> list[str]:
        """A proxy, and the certificates that this machine trusts: the network is the machine's, not the newcomer's."""
        settings = [f"{name}={value}" for name, value in os.environ.items() if name.lower().endswith("_proxy")]
        if CERTIFICATES.exists():
            shutil.copy(CERTIFICATES, self.base / "shared" / "certificates.crt")
            settings += [f"{name}=/mnt/certificates.crt" for name in ("PIP_CERT", "SSL_CERT_FILE")]
        return settings

    def _environment(self) -> dict[str, str]:
        return {"PATH": PATH, "BASE": str(self.base), "LOWER": str(self.lower)}

    @contextlib.contextmanager
    def booted(self):
        """Give the root file system with its systemd running: `BootedRoot`."""
        group = Path(detect_hierarchy().root or "/sys/fs/cgroup") / f"prefetchd-test-{os.getpid()}"
        namespaces = ["--mount", "--pid", "--net", "--uts", "--ipc", "--propagation", "private"]
        command = ["unshare", *namespaces, "--fork", "--kill-child", str(ENTER), "boot"]
        log = self.base / "console.log"
        with log.open("w") as console:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=console,
                stderr=console,
                env={**self._environment(), "CGROUP": str(group)},
            )
        try:
            yield BootedRoot(_first_process(process, log), log)
        finally:
            process.kill()
            process.wait()
            _remove_group(group)


@dataclass(frozen=True)
class BootedRoot:
    """A root file system whose systemd is process `pid` here."""

    pid: int
    console: Path

    def run(self, script: str, check: bool = True) -> subprocess.CompletedProcess[str]:
        """Run a shell script in it that ends with the first failure; there is no network but the loopback address."""
        inside = ["nsenter", f"--target={self.pid}", "--mount", "--pid", "--net", "--uts", "--ipc", "--cgroup"]
        inside += [f"--root=/proc/{self.pid}/root", f"--wd=/proc/{self.pid}/root"]
        command = [*inside, "/usr/bin/env", "-i", f"PATH={PATH}", "HOME=/root", "sh", "-e", "-c", script]
        if not check:
            return subprocess.run(command, check=False, capture_output=True, text=True, timeout=300)
        return checked(command, script, dict(os.environ))

    def wait_for(self, script: str, seconds: float) -> str:
        """Run a script until it succeeds; returns what it printed then."""
        end = time.monotonic() + seconds
        while (done := self.run(script, check=False)).returncode != 0:
            assert time.monotonic() < end, f"not within {seconds} s: {script}\n{done.stdout}{done.stderr}"
            time.sleep(0.3)
        return done.stdout


def checked(command: list[str], script: str, environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    """Run a command that must succeed."""
    done = subprocess.run(
        command,
        check=False,
        capture_output=True,
        text=True,
        env=environment,
        timeout=900,
        stdin=subprocess.DEVNULL,
    )
    assert done.returncode == 0, f"{script}\nended with {done.returncode}\n{done.stdout[-4000:]}{done.stderr[-4000:]}"
    return done


def _first_process(process: subprocess.Popen, log: Path) -> int:
    """Wait until systemd has reached its target; returns its process id on this machine."""
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    end = time.monotonic() + BOOT_SECONDS
    while time.monotonic() < end and process.poll() is None:
        for pid in children.read_text().split():
            if Path(f"/proc/{pid}/comm").read_text() == "systemd\n":
                booted = BootedRoot(int(pid), log)
                state = booted.run("systemctl is-system-running", check=False).stdout.strip()
                if state in ("running", "degraded"):
                    return int(pid)
        time.sleep(0.3)
    raise AssertionError(f"systemd does not run after {BOOT_SECONDS} s:\n{log.read_text()[-3000:]}")


def _remove_group(group: Path) -> None:
    """Remove a cgroup and those below it once their processes are gone."""
    end = time.monotonic() + 20
    while group.exists() and time.monotonic() < end:
        for folder in [*sorted(group.rglob("*/"), key=lambda path: len(path.parts), reverse=True), group]:
            with contextlib.suppress(OSError):
                folder.rmdir()
        time.sleep(0.1)
