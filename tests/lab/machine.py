"""Boots the guest and runs commands in it: QEMU in mount and process namespaces of its own, virtme-ng for the rest."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from math import inf
from pathlib import Path

from tests.lab.cache import PROJECT, cache_folder, work_folder
from tests.lab.devices import Device, Hdd, Ssd
from tests.lab.errors import LabBroken, LabTimeout
from tests.lab.host import check_machine, remember_accelerator, remembered_accelerator, virtme_program
from tests.lab.kernel import Kernel, ensure_kernel

KVM_TRIAL_SECONDS = 20.0
"""A boot with KVM that has not come up by then never does: nested virtualisation that hangs is common."""

LOCKED_UP_SECONDS = 60
"""Well above what a busy host causes: an emulated CPU then only says that it is late."""

_POLL_SECONDS = 0.1
_CONSOLE_SECONDS = 2.0
_EMULATED_CLOCK = "tsc=reliable"
"""Both emulated CPUs count the host's time, but the kernel's test of that fails under emulation; without it every time
stamp goes through the HPET and its lock, and a guest with probes on every switch of tasks may never get out of it."""
_OVERLAYS = ("/etc", "/lib", "/home", "/opt", "/srv", "/usr", "/var", "/tmp")
_ROOT_SHARE = (
    *("-fsdev", "local,id=lab-root,path=/,security_model=none,readonly=on,multidevs=remap"),
    *("-device", "virtio-9p-pci,fsdev=lab-root,mount_tag=lab-root"),
)

# The host's /lib/modules stays as it is: only this namespace sees the unpacked kernel's modules there.
_NAMESPACE_SCRIPT = """set -eu
mount -t tmpfs lab-modules /lib/modules
mkdir "/lib/modules/$1"
mount --bind "$2" "/lib/modules/$1"
"""


def silent(text: str) -> None:
    """Show nothing: the default progress."""


@dataclass(frozen=True)
class LabResult:
    """What one command did: its exit status, the folder with the files it left, its time in the guest (s)."""

    status: int
    out_dir: Path
    seconds: float
    accelerator: str
    output: Path
    boot_seconds: float


@dataclass(frozen=True)
class Lab:
    """A machine to boot. `timeout` (s) bounds one command, `boot_timeout` (s) the boot; `progress` gets lines to show.

    Files that commands write to the folder named by `PREFETCHD_LAB_OUT` in their environment are in `out_dir` on the
    host; without one they are in a temporary folder that goes with the guest.
    """

    devices: Sequence[Device] = (Ssd(), Hdd())
    memory_mib: int = 4096
    cpus: int = 2
    timeout: float = 600.0
    boot_timeout: float = 180.0
    kernel: Kernel | None = None
    out_dir: Path | None = None
    progress: Callable[[str], None] = silent

    def run(
        self,
        argv: Sequence[str],
        env: Mapping[str, str] | None = None,
        on_output: Callable[[bytes], None] | None = None,
    ) -> LabResult:
        """Boot, run one command as root, end the guest. Raises `LabBroken`; a failed command is only a status."""
        with self.boot() as guest:
            return guest.run(argv, env=env, on_output=on_output)

    @contextmanager
    def boot(self) -> Iterator[Guest]:
        """Give a running guest that ends with the body. Raises `LabBroken` when none comes up."""
        check_machine(self.devices)
        with work_folder(self.progress) as work:
            out_dir = self.out_dir or work / "out"
            out_dir.mkdir(parents=True, exist_ok=True)
            kernel = self.kernel or ensure_kernel(self.progress)
            guest = self._first_that_boots(kernel, work, out_dir.resolve())
            try:
                yield guest
            finally:
                guest.end()

    @contextmanager
    def interactive(self) -> Iterator[Sequence[str]]:
        """Give the command line that opens a root shell in a guest on this terminal."""
        check_machine(self.devices)
        with work_folder(self.progress) as work:
            kernel = self.kernel or ensure_kernel(self.progress)
            boot = _Boot(self, kernel, work, work, remembered_accelerator() or "tcg")
            shell = work / "shell"
            script = Path(__file__).with_name("guest_shell.sh")
            words = shlex.join(["bash", str(script), str(PROJECT), str(cache_folder())])
            shell.write_text(f"#!/bin/bash\nexec {words}\n")
            shell.chmod(0o755)
            yield boot.command_line(["--shell", str(shell)])

    def _first_that_boots(self, kernel: Kernel, work: Path, out_dir: Path) -> Guest:
        accelerator = remembered_accelerator()
        if accelerator is None:
            trial = _Boot(self, kernel, work / "kvm", out_dir, "kvm")
            try:
                guest = trial.start(min(KVM_TRIAL_SECONDS, self.boot_timeout))
            except LabBroken as error:
                remember_accelerator("tcg", str(error))
                self.progress("cannot boot with KVM here, emulates instead (remembered)")
            else:
                remember_accelerator("kvm", "booted in time")
                return guest
        chosen = _Boot(self, kernel, work / "boot", out_dir, accelerator or "tcg")
        return chosen.start(self.boot_timeout)


@dataclass
class Guest:
    """A running guest. Not for several threads at once; after `LabTimeout` or `LabBroken` it is gone."""

    control: Path
    out_dir: Path
    accelerator: str
    timeout: float
    boot_seconds: float = 0.0
    process: subprocess.Popen[bytes] = field(kw_only=True)
    console: Path = field(kw_only=True)
    _next: int = 0

    def run(
        self,
        argv: Sequence[str],
        env: Mapping[str, str] | None = None,
        on_output: Callable[[bytes], None] | None = None,
        timeout: float | None = None,
        silence: float = inf,
    ) -> LabResult:
        """Run one command as root in the project folder; its standard output and error go to one file.

        `on_output` gets that output in pieces while the command runs. Raises `LabTimeout` after `timeout` seconds
        (default: the lab's) or `silence` seconds without output, and `LabBroken` when the guest ends meanwhile.
        """
        number, self._next = self._next, self._next + 1
        started = time.monotonic()
        self._submit(number, argv, env or {})
        output = self.control / f"{number}.out"
        follower = _Follower(output, on_output or (lambda _: None), silence)
        status = self.control / f"{number}.status"
        kept = self.out_dir / f"command-{number}.log"
        try:
            self.wait_for(status, timeout or self.timeout, f"running `{shlex.join(argv)}`", follower.poll)
        finally:
            follower.read()
            if output.exists():
                shutil.copyfile(output, kept)
        seconds = time.monotonic() - started
        return LabResult(int(status.read_text()), self.out_dir, seconds, self.accelerator, kept, self.boot_seconds)

    def _submit(self, number: int, argv: Sequence[str], env: Mapping[str, str]) -> None:
        exports = {**guest_environment(self.out_dir, self.accelerator), **env}
        lines = [f"cd {shlex.quote(str(PROJECT))}"]
        lines += [f"export {name}={shlex.quote(value)}" for name, value in exports.items()]
        lines.append(f"exec {shlex.join(argv)}")
        part = self.control / f"{number}.part"
        part.write_text("\n".join(lines) + "\n")
        part.rename(self.control / f"{number}.run")

    def wait_for(self, path: Path, seconds: float, doing: str, poll: Callable[[], object]) -> None:
        """Wait until the guest has made `path`; call `poll` meanwhile. Ends the guest where it does not."""
        deadline = time.monotonic() + seconds
        look_at_console = time.monotonic() + _CONSOLE_SECONDS
        while not path.exists():
            poll()
            if time.monotonic() > look_at_console:
                look_at_console = time.monotonic() + _CONSOLE_SECONDS
                self._end_if_locked_up(doing)
            if self.process.poll() is not None and not path.exists():
                raise LabBroken(f"The guest ended while {doing}. Its console said last:\n{self.console_tail()}")
            if time.monotonic() > deadline:
                self.end()
                raise LabTimeout(
                    f"The guest was still {doing} after {seconds:.0f} s. Its console said last:\n{self.console_tail()}"
                )
            time.sleep(_POLL_SECONDS)

    def _end_if_locked_up(self, doing: str) -> None:
        """A virtual CPU that the guest's own watchdog calls stuck for this long does not come back."""
        text = self.console.read_text(errors="replace") if self.console.exists() else ""
        if locked_up_seconds(text) >= LOCKED_UP_SECONDS:
            self.end()
            raise LabBroken(f"A CPU of the guest locked up while {doing}. Its console said last:\n{last_words(text)}")

    def console_tail(self) -> str:
        """Return the end of the serial console, led by what the kernel itself calls a panic or a bug."""
        return last_words(self.console.read_text(errors="replace") if self.console.exists() else "")

    def end(self) -> None:
        """End QEMU and its servers at once: they share a process namespace that dies with its first process."""
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


def locked_up_seconds(console: str) -> int:
    """Return for how long a CPU was stuck by the kernel's own account (kernel/watchdog.c), 0 where none was."""
    return max((int(found) for found in re.findall(r"soft lockup - CPU#\d+ stuck for (\d+)s", console)), default=0)


def last_words(console: str, lines: int = 15) -> str:
    """Return the last lines of a console, preceded by those that name a panic or bug where they are older."""
    shown = [line.rstrip() for line in console.splitlines()]
    named = [line for line in shown[:-lines] if "Kernel panic" in line or "BUG:" in line]
    return "\n".join(named[-2:] + shown[-lines:]) or "(nothing)"


@dataclass
class _Follower:
    """Hands the new part of a growing file to a function at every poll."""

    path: Path
    on_output: Callable[[bytes], None]
    silence: float
    _seen: int = 0
    _heard_at: float = field(default_factory=time.monotonic)

    def poll(self) -> None:
        """Hand over what is new. Raises `LabTimeout` after `silence` seconds without any."""
        if self.read():
            self._heard_at = time.monotonic()
        elif time.monotonic() - self._heard_at > self.silence:
            raise LabTimeout(f"The guest printed nothing for {self.silence:g} s; its last words are in {self.path}.")

    def read(self) -> bool:
        """Hand over what is new; returns whether there was any."""
        if not self.path.exists():
            return False
        with self.path.open("rb") as file:
            file.seek(self._seen)
            piece = file.read()
        if piece:
            self._seen += len(piece)
            self.on_output(piece)
        return bool(piece)


@dataclass(frozen=True)
class _Boot:
    """One attempt to start the guest with one accelerator, with a work folder of its own."""

    lab: Lab
    kernel: Kernel
    work: Path
    out_dir: Path
    accelerator: str

    def start(self, seconds: float) -> Guest:
        """Start the guest and wait until it serves commands. Raises `LabBroken` where it does not in time."""
        control = self.work / "control"
        control.mkdir(parents=True)
        began = time.monotonic()
        script = Path(__file__).with_name("guest_entry.sh")
        entry = shlex.join(["bash", str(script), str(control), str(self.out_dir), str(PROJECT), str(cache_folder())])
        argv = self.command_line(["--script-sh", f"exec {entry}", "--show-boot-console"], (control, self.out_dir))
        console = self.work / "console.log"
        guest = Guest(
            control,
            self.out_dir,
            self.accelerator,
            self.lab.timeout,
            process=self._spawn(argv, console),
            console=console,
        )
        ticker = self._ticker(began)
        try:
            guest.wait_for(control / "ready", seconds, "booting", ticker)
        except BaseException:
            guest.end()
            raise
        guest.boot_seconds = time.monotonic() - began
        self.lab.progress(f"booted {self.kernel.release} with {self.accelerator} in {guest.boot_seconds:.0f} s")
        return guest

    def command_line(self, mode: Sequence[str], writable: Sequence[Path] = ()) -> Sequence[str]:
        """Return the command that starts the servers of the disks and QEMU in namespaces of their own."""
        self.work.mkdir(parents=True, exist_ok=True)
        script = _NAMESPACE_SCRIPT + self._server_lines() + f"exec {shlex.join(self._virtme(mode, writable))}\n"
        namespaces = ["--mount", "--propagation", "private", "--pid", "--fork", "--kill-child"]
        command = ["unshare", *namespaces, "sh", "-c", script, "sh", self.kernel.release, str(self.kernel.modules)]
        # The guest must not outlive this program. The kernel ties the two together by thread (prctl(2),
        # PR_SET_PDEATHSIG), so only the main thread, which lives as long as the program, may ask for it.
        in_main = threading.current_thread() is threading.main_thread()
        return [*(["setpriv", "--pdeathsig", "KILL"] if in_main else []), *command]

    def _virtme(self, mode: Sequence[str], writable: Sequence[Path]) -> list[str]:
        argv = [str(virtme_program()), "--kimg", str(self.kernel.image), "--mods", "auto", "--user", "root"]
        argv += ["--memory", f"{self.lab.memory_mib}M", "--cpus", str(self.lab.cpus), "--cwd", str(PROJECT)]
        # 9p, not virtiofs: its daemon would be one more thing that differs from machine to machine.
        argv += ["--force-9p", "--disable-microvm", "--name", "prefetchd-lab"]
        argv += ["--disable-kvm", "--kopt", _EMULATED_CLOCK] if self.accelerator == "tcg" else []
        argv += [f"--overlay-rwdir={folder}" for folder in _OVERLAYS if Path(folder).is_dir()]
        argv += [f"--rwdir={folder}" for folder in writable]
        options = [option for device in self.lab.devices for option in device.qemu_options(self.work)]
        return [*argv, *(f"--qemu-opt={option}" for option in (*_ROOT_SHARE, *options)), *mode]

    def _server_lines(self) -> str:
        lines = ""
        for device in self.lab.devices:
            for server in device.servers(self.work):
                lines += f"{shlex.join(server)} >>{shlex.quote(str(self.work / 'servers.log'))} 2>&1 &\n"
                lines += _wait_line(self.work / f"{device.name}.sock")
        return lines

    def _spawn(self, argv: Sequence[str], console: Path) -> subprocess.Popen[bytes]:
        with console.open("wb") as log:
            return subprocess.Popen(
                argv,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=PROJECT,
                env={**os.environ, "TMPDIR": str(self.work)},
                start_new_session=True,
            )

    def _ticker(self, began: float) -> Callable[[], None]:
        last = -1

        def tick() -> None:
            nonlocal last
            seconds = int(time.monotonic() - began)
            if seconds != last:
                last = seconds
                self.lab.progress(f"boots {self.kernel.release} with {self.accelerator}, {seconds} s")

        return tick


def _wait_line(socket: Path) -> str:
    quoted = shlex.quote(str(socket))
    return f"i=0; while [ ! -S {quoted} ] && [ $i -lt 100 ]; do sleep 0.1; i=$((i+1)); done\n"


def guest_environment(out_dir: Path, accelerator: str) -> dict[str, str]:
    """Return what every command in the guest finds in its environment."""
    return {
        "PREFETCHD_LAB": "1",
        "PREFETCHD_LAB_OUT": str(out_dir),
        "PREFETCHD_LAB_ACCELERATOR": accelerator,
        "PREFETCHD_LAB_CACHE": str(cache_folder()),
        "PYTHONDONTWRITEBYTECODE": "1",
        "PYTHONUNBUFFERED": "1",
        "HOME": "/run/lab-home",
        "LC_ALL": "C.UTF-8",
        "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
        "CI": os.environ.get("CI", ""),
    }
