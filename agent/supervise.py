"""Running one command in a cgroup: start it there, pass signals on, wait, and clean up whatever happens.

Three processes: the command; the caller, which passes signals on and waits; and a keeper in a session of its own, which
holds one end of a pipe and cleans up should the caller be killed.
"""

from __future__ import annotations

import contextlib
import os
import pwd
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from agent.job_cgroup import POLL_SECONDS, ExecError, JobCgroup, making, scope_of

PASSED_ON = frozenset(
    {signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGCONT}
)
SI_KERNEL = 0x80
"""si_code of a signal that the kernel made: the terminal's, which the command got as well (asm-generic/siginfo.h)."""
SCOPE_SECONDS = 10.0
"""How long systemd may take to make a scope."""


@dataclass(frozen=True, slots=True)
class Order:
    """What to run: as which user (None: the caller), with which weight (None: the rule's), seconds before SIGKILL."""

    name: str
    argv: Sequence[str]
    account: pwd.struct_passwd | None = None
    weight: float | None = None
    grace_seconds: float = 5.0


def run_plain(root: str, order: Order) -> int:
    """Run the command in a plain cgroup; returns its status as a shell would. Raises ExecError, OSError of exec."""
    with _signals_blocked() as mask, contextlib.ExitStack() as stack:
        with making(root, order.name) as cgroup:
            stack.enter_context(_cleaned_up(cgroup, order))
            if order.weight is not None:
                cgroup.set_weight(order.weight)
            child = _start(order.argv, mask, order.account, cgroup.join)
        return _wait(child)


def run_scope(root: str, order: Order) -> int:
    """Run the command in a scope of systemd's; as `run_plain`."""
    cgroup = scope_of(root, order.name)
    options = ["--scope", "--quiet", "--collect", "--slice=prefetchd.slice", "--property=IOAccounting=yes"]
    options += [f"--unit={order.name}.scope"]
    options += [f"--uid={order.account.pw_name}"] if order.account else []
    with _signals_blocked() as mask, _cleaned_up(cgroup, order):
        child = _start(["systemd-run", *options, "--", *order.argv], mask, None, lambda: None)
        if order.weight is not None and _scope_appeared(child, cgroup):
            cgroup.set_weight(order.weight)
        return _wait(child)


def _scope_appeared(child: subprocess.Popen[bytes], cgroup: JobCgroup) -> bool:
    """Wait until systemd has put the command into its scope; False where the command ended before."""
    deadline = time.monotonic() + SCOPE_SECONDS
    while time.monotonic() < deadline and child.poll() is None:
        if child.pid in cgroup.processes():
            return True
        time.sleep(POLL_SECONDS)
    return False


@contextlib.contextmanager
def _signals_blocked() -> Iterator[set[signal.Signals]]:
    """Hold the signals that are passed on until somebody waits for them; yields the mask for the command."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    mask: set[signal.Signals] = {
        signal.Signals(one) for one in signal.pthread_sigmask(signal.SIG_BLOCK, PASSED_ON | {signal.SIGCHLD})
    }
    try:
        yield mask
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def _start(
    argv: Sequence[str], mask: set[signal.Signals], account: pwd.struct_passwd | None, enter: Callable[[], None]
) -> subprocess.Popen[bytes]:
    """Start the command with the caller's own descriptors, after `enter` has moved it. Raises ExecError, OSError."""

    def prepare() -> None:
        enter()
        if account is not None:
            os.initgroups(account.pw_name, account.pw_gid)
            os.setgid(account.pw_gid)
            os.setuid(account.pw_uid)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)

    environment = dict(os.environ)
    if account is not None:
        environment |= {"HOME": account.pw_dir, "USER": account.pw_name, "LOGNAME": account.pw_name}
    # No thread runs in this process, so Python code between fork and exec is safe.
    try:
        return subprocess.Popen(argv, env=environment, close_fds=False, preexec_fn=prepare)  # noqa: PLW1509
    except subprocess.SubprocessError:  # whatever `prepare` raised, this is all that comes through
        user = f" or become user {account.pw_name!r}" if account else ""
        raise ExecError(
            f"Command {argv[0]!r} was not started: it cannot enter its cgroup{user}; run as root, outside of a "
            "container."
        ) from None


def _wait(child: subprocess.Popen[bytes]) -> int:
    """Pass signals on until the command has ended; its status, 128 + N where signal N ended it.

    The terminal sends its own signals to the whole foreground group, so the command already has them.
    """
    while True:
        info = signal.sigwaitinfo(PASSED_ON | {signal.SIGCHLD})
        if info.si_signo != signal.SIGCHLD and info.si_code != SI_KERNEL:
            child.send_signal(info.si_signo)
        status = child.poll()
        if status is not None:
            return status if status >= 0 else 128 - status


@contextlib.contextmanager
def _cleaned_up(cgroup: JobCgroup, order: Order) -> Iterator[None]:
    """End what is left in the cgroup and remove it, by ourselves or, if we are killed, by the keeper."""
    keeper, pipe = _keep(cgroup, order.grace_seconds)
    try:
        yield
    finally:
        left = cgroup.empty(order.grace_seconds)
        if left:
            sys.stderr.write(f"prefetchd: ended {left} process(es) that job {order.name!r} had left running\n")
        cgroup.remove()
        with contextlib.suppress(BrokenPipeError):  # the keeper was killed: all is done without it
            os.write(pipe, b".")
        os.close(pipe)
        os.waitpid(keeper, 0)


def _keep(cgroup: JobCgroup, grace: float) -> tuple[int, int]:
    """Fork the keeper; returns its pid and the pipe: a byte says that all is done, its end that we were killed."""
    reading, writing = os.pipe()
    keeper = os.fork()
    if keeper:
        os.close(reading)
        return keeper, writing
    try:
        os.setsid()
        os.chdir("/")
        _close_all_but(reading)
        if not os.read(reading, 1):
            cgroup.empty(grace)
            cgroup.remove()
    finally:
        os._exit(0)


def _close_all_but(kept: int) -> None:
    """Give up the caller's descriptors: a reader of its output must not have to wait for the keeper."""
    null = os.open(os.devnull, os.O_RDWR)
    for standard in (0, 1, 2):
        os.dup2(null, standard)
    for descriptor in [int(path.name) for path in Path("/proc/self/fd").iterdir()]:
        if descriptor > 2 and descriptor != kept:
            with contextlib.suppress(OSError):
                os.close(descriptor)
