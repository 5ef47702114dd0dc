"""`prefetchd run`: the agent on this node. Here alone probes, cgroup files and the core are wired together."""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import fcntl
import logging
import os
import resource
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec

from agent import config as configuration
from agent import garbage, systemd
from agent.__main__ import version
from agent.commands import options
from agent.commands.wiring import (
    be_the_only_one,
    make_endpoint,
    make_enforcer,
    make_pods,
    make_probes,
    make_rearranger,
    recover_journal,
)
from agent.config import Config
from agent.core import Core
from agent.errors import CannotEnforceError, PrefetchdError
from agent.history import History
from agent.logs import setup
from agent.loop import Loop, LoopSettings, run
from agent.named_devices import NamedDevices
from agent.node import LocalNode
from agent.policies.base import make_policy
from agent.recording import Recorder, refuse_other_file
from agent.server import Endpoint, refuse_unusable
from agent.settings import core_settings, policy_settings
from agent.stopping import SignalFlags, StoppedEarlyError
from agent.stuck import StuckQueues
from agent.types import TickReport
from bpf.loader import Loader
from bpf.samples import NOT_LOADED
from cgroup.devices import Devices
from cgroup.guardian import Guardian
from cgroup.hierarchy import Hierarchy, detect_hierarchy
from cgroup.hotplug import DeviceWatch
from cgroup.mounts import Mounts

log = logging.getLogger("prefetchd")

MIN_OPEN_FILES, MAX_OPEN_FILES = 256, 16384

EPILOG = """\
examples:
  sudo prefetchd run                                          # observe this node, answer on 127.0.0.1:9753
  sudo prefetchd run --mode dry-run --config node.toml        # log what would be written
  sudo prefetchd run --mode enforce --config node.toml --listen 0.0.0.0:9753

exit status:
  0  ended as asked, by a signal or --duration; every limit is restored
  1  it could not start: no root, another agent runs, a recording cannot be written
  2  the command line or the configuration cannot be used
  3  this node has no cgroups that could be watched; or, in mode enforce, the journal or the guardian cannot work, or
     another agent enforces. Where cgroup v2 has no io controller it observes instead, and says so
"""


def add_arguments(parser: argparse.ArgumentParser, *, recording: bool = False) -> None:
    """Declare the options; each overrides the configuration. `recording`: the caller asks for the file itself."""
    parser.description = "Measure the training jobs of this node and, in mode enforce, move bandwidth to those in need."
    parser.epilog = EPILOG
    options.add_config(parser)
    parser.add_argument(
        "--mode",
        choices=("observe", "dry-run", "enforce"),
        help=argparse.SUPPRESS if recording else "default: the configuration's, else observe",
    )
    parser.add_argument("--policy", choices=("adaptive", "paper"), help="default: the configuration's, else adaptive")
    parser.add_argument(
        "--listen", metavar="ADDR:PORT", help=f"default: the configuration's, else {configuration.DEFAULT_LISTEN}"
    )
    parser.add_argument("--duration", type=options.seconds, metavar="S", help="end after S seconds")
    if not recording:
        parser.add_argument("--record", metavar="FILE", help="also record every pass to FILE (see `prefetchd record`)")


def main(args: argparse.Namespace) -> int:
    """Run until a signal or --duration; everything that was set is restored on the way out."""
    config = _overridden(options.load_config(args), args)
    setup(config.log)
    if os.geteuid() != 0:
        raise PrefetchdError("prefetchd must run as root to load BPF programs; use sudo or the systemd unit.")
    _raise_file_limit()
    hierarchy = detect_hierarchy()
    root = _cgroup_root(config, hierarchy)
    mode, notes = _possible_mode(config, hierarchy)
    config = msgspec.structs.replace(config, mode=mode)
    with SignalFlags() as flags, _last_words():
        try:
            with contextlib.ExitStack() as stack:
                stack.enter_context(_only_instance(Path(config.enforcement.state_directory)))
                return _serve(stack, flags, config, root, args, notes)
        except StoppedEarlyError as request:
            log.info("ending before the start was complete: %s", request)
            return 0


def _overridden(config: Config, args: argparse.Namespace) -> Config:
    changes = {name: getattr(args, name) for name in ("mode", "policy") if getattr(args, name)}
    if args.listen:
        configuration.split_address(args.listen)
        changes["metrics"] = msgspec.structs.replace(config.metrics, listen=args.listen)
    return msgspec.structs.replace(config, **changes)


def _cgroup_root(config: Config, hierarchy: Hierarchy) -> str:
    root = config.cgroup_root or hierarchy.root
    if root is None:
        raise CannotEnforceError(f"No jobs can be found: {hierarchy.problem}. {hierarchy.fix}")
    if not Path(root, "cgroup.procs").exists():
        raise configuration.ConfigError(
            f"cgroup_root {root!r} is no cgroup v2 file system; remove it from the configuration to use "
            f"{hierarchy.root or '/sys/fs/cgroup'}."
        )
    return root


def _raise_file_limit() -> None:
    """Programs, maps and attachments take a hundred descriptors, senders of hints one each, clients up to 64."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < MIN_OPEN_FILES:
        raise PrefetchdError(
            f"Only {hard} files may be open at once, and the agent needs {MIN_OPEN_FILES}; raise the limit (ulimit -n, "
            "LimitNOFILE= of the systemd unit)."
        )
    wanted = MAX_OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, MAX_OPEN_FILES)
    if resource.getrlimit(resource.RLIMIT_NOFILE)[0] < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


@contextlib.contextmanager
def _last_words() -> Iterator[None]:
    """Where the process is when a C library aborts it (LLVM does when memory is short), on standard error.

    On a descriptor of its own, since standard error itself is caught while programs are compiled, when it matters.
    """
    with os.fdopen(os.dup(2), "wb", buffering=0) as stream:
        faulthandler.enable(stream)
        try:
            yield
        finally:
            faulthandler.disable()


def _possible_mode(config: Config, hierarchy: Hierarchy) -> tuple[configuration.Mode, tuple[str, ...]]:
    """The mode asked for, or observe where this node cannot enforce; and a note of that, with what to change."""
    if config.mode == "observe" or hierarchy.problem is None:
        return config.mode, ()
    why = f"{hierarchy.problem}. {hierarchy.fix}".rstrip()
    log.warning("cannot %s here, observing instead: %s", config.mode, why)
    return "observe", (f"{config.mode} was asked for, observing because {why}",)


@contextlib.contextmanager
def _only_instance(state: Path) -> Iterator[None]:
    """Hold the node's lock: two agents would fight over every limit."""
    try:
        state.mkdir(mode=0o755, parents=True, exist_ok=True)
        file = (state / "lock").open("ab+", buffering=0)
    except OSError as error:
        raise PrefetchdError(
            f"State directory {str(state)!r} cannot be used ({error.strerror}); check the path."
        ) from None
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            other = file.read().decode("ascii", "replace").strip() or "unknown"
            raise PrefetchdError(
                f"Another agent runs on this node (pid {other}); stop it, or use another state_directory "
                "to observe beside it."
            ) from None
        with contextlib.suppress(OSError):  # no room on the disk: the lock holds without its owner's number
            file.truncate(0)
            file.write(b"%d\n" % os.getpid())
        yield


def _serve(
    stack: contextlib.ExitStack,
    flags: SignalFlags,
    config: Config,
    root: str,
    args: argparse.Namespace,
    notes: tuple[str, ...],
) -> int:
    _refuse_early(config, args)
    mode = config.mode
    if mode == "enforce":
        be_the_only_one(stack, root)
    journal, restored = recover_journal(config, root, mode)
    loader = stack.enter_context(Loader(cache=Path(config.enforcement.state_directory)))
    disks = DeviceWatch()
    stack.callback(disks.close)
    devices = NamedDevices(config.devices, Mounts(Devices()), root, config.loop.scan_seconds, disks.changes)
    log.info("compiling the probes, which takes seconds (on a busy node longer)")
    node = LocalNode(root, config, make_probes(config, root, loader), devices, make_pods(stack, config))
    stack.callback(node.close)
    enforcer, guardian = make_enforcer(stack, config, root, mode, journal)
    core = Core(make_policy(config.policy, policy_settings(config)), core_settings(config))
    rearranger = make_rearranger(stack, config, root, enforcer)
    loop = Loop(node, core, enforcer, _loop_settings(config, notes), rearranger, StuckQueues(root))
    loop.restores += restored
    history = History()
    endpoint = make_endpoint(config, loop, history)
    endpoint.start()
    stack.callback(endpoint.close)
    hooks = _hooks(guardian)
    hooks.append(history.add)
    recorder = Recorder(Path(args.record), config, software=version()) if args.record is not None else None
    if recorder is not None:
        stack.callback(recorder.close)
        hooks.append(lambda report: recorder.add(report, loop.samples))
    _announce(config, node, endpoint, enforcer.mode)
    garbage.settle()
    systemd.notify("READY=1")
    why = run(loop, flags, duration=args.duration, after_tick=hooks)
    systemd.notify("STOPPING=1")
    log.info("ending: %s", why)
    loop.release(why)
    return _status(recorder, args)


def _refuse_early(config: Config, args: argparse.Namespace) -> None:
    """Raise for an address or a recording that cannot be used before seconds are spent on compiling the probes."""
    refuse_unusable(config.metrics)
    if args.record is not None:
        refuse_other_file(Path(args.record))


def _status(recorder: Recorder | None, args: argparse.Namespace) -> int:
    """Where recording was all that was asked for, a recording that broke off is a failure."""
    if recorder is None or args.command != "record":
        return 0
    recorder.close()
    return 1 if recorder.problem else 0


def _loop_settings(config: Config, notes: tuple[str, ...]) -> LoopSettings:
    enforcement = config.enforcement
    return LoopSettings(
        floor=enforcement.floor_ratio,
        ceiling=enforcement.ceiling_ratio,
        interval_seconds=config.loop.interval_seconds,
        stale_seconds=config.loop.stale_seconds,
        kill_switch=Path(enforcement.kill_switch_file) if enforcement.kill_switch_file else None,
        notes=notes,
    )


def _hooks(guardian: Guardian | None) -> list[Callable[[TickReport], object]]:
    """What follows every pass: the service manager's watchdog is fed, the guardian is looked after."""
    hooks: list[Callable[[TickReport], object]] = [lambda _: systemd.notify("WATCHDOG=1")]
    if guardian is not None:
        hooks.append(lambda _: guardian.check())
    return hooks


def _announce(config: Config, node: LocalNode, endpoint: Endpoint, mode: str) -> None:
    for probe in node.probes():
        well = probe.state == "attached" or NOT_LOADED in probe.why
        level = logging.INFO if well else logging.WARNING
        how, why = f" ({probe.tier})" if probe.tier else "", f": {probe.why}" if probe.why else ""
        more = " (prefetchd doctor --attach --all says why)" if probe.detail else ""
        log.log(level, "probe %s: %s%s%s%s", probe.name, probe.state, how, why, more)
        if probe.detail:
            log.debug("probe %s: %s", probe.name, probe.detail)
    if not config.jobs:
        log.warning("no [[jobs]] in the configuration: nothing will be measured; add the cgroups of your training jobs")
    address = configuration.split_address(config.metrics.listen)[0]
    address = f"[{address}]" if ":" in address else address
    scheme = "https" if config.metrics.certificate else "http"
    log.info("mode %s, policy %s, answering on %s://%s:%d/metrics", mode, config.policy, scheme, address, endpoint.port)
