"""`prefetchd run`: the agent on this node. Here alone probes, cgroup files and the core are wired together."""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import logging
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
from prometheus_client import CollectorRegistry, ProcessCollector

from agent import config as configuration
from agent import systemd
from agent.__main__ import version
from agent.commands import options
from agent.config import Config
from agent.core import Core
from agent.errors import CannotEnforceError, PrefetchdError
from agent.hint_listener import HintListener
from agent.logs import setup
from agent.loop import Loop, LoopSettings, run
from agent.metrics import ReportCollector
from agent.node import LocalNode, configured_devices
from agent.policies.base import make_policy
from agent.server import Endpoint
from agent.settings import core_settings, policy_settings
from agent.snapshot import snapshot
from agent.types import TickReport
from bpf.block import BlockProbe
from bpf.loader import Loader
from bpf.probes import Probe
from cgroup.devices import Devices
from cgroup.enforce import Enforcer
from cgroup.errors import CgroupError
from cgroup.files import KernelFiles
from cgroup.guardian import Guardian
from cgroup.hierarchy import Hierarchy, detect_hierarchy
from cgroup.journal import Journal
from cgroup.mounts import Mounts
from cgroup.plan import Rules
from cgroup.restore import recover

log = logging.getLogger("prefetchd")

EPILOG = """\
examples:
  sudo prefetchd run                                          # observe this node, answer on 127.0.0.1:9753
  sudo prefetchd run --mode dry-run --config node.toml        # log what would be written
  sudo prefetchd run --mode enforce --config node.toml --listen 0.0.0.0:9753
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options; each overrides the configuration."""
    parser.description = "Measure the training jobs of this node and, in mode enforce, move bandwidth to those in need."
    parser.epilog = EPILOG
    options.add_config(parser)
    parser.add_argument("--mode", choices=("observe", "dry-run", "enforce"), help="default: observe")
    parser.add_argument("--policy", choices=("adaptive", "paper"), help="default: adaptive")
    parser.add_argument("--listen", metavar="ADDR:PORT", help=f"default: {configuration.DEFAULT_LISTEN}")
    parser.add_argument("--duration", type=_seconds, metavar="S", help="end after S seconds")


def main(args: argparse.Namespace) -> int:
    """Run until a signal or --duration; everything that was set is restored on the way out."""
    config = _overridden(options.load_config(args), args)
    setup(config.log)
    if os.geteuid() != 0:
        raise PrefetchdError("prefetchd must run as root to load BPF programs; use sudo or the systemd unit.")
    hierarchy = detect_hierarchy()
    root = config.cgroup_root or hierarchy.root
    if root is None:
        raise CannotEnforceError(f"No jobs can be found: {hierarchy.problem}. {hierarchy.fix}")
    mode = _possible_mode(config, hierarchy)
    with contextlib.ExitStack() as stack:
        stack.enter_context(_only_instance(Path(config.enforcement.state_directory)))
        return _serve(stack, config, root, mode, args.duration)


def _seconds(text: str) -> float:
    value = float(text)
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is no duration; give seconds above zero")
    return value


def _overridden(config: Config, args: argparse.Namespace) -> Config:
    changes = {name: getattr(args, name) for name in ("mode", "policy") if getattr(args, name)}
    if args.listen:
        configuration.split_address(args.listen)
        changes["metrics"] = msgspec.structs.replace(config.metrics, listen=args.listen)
    return msgspec.structs.replace(config, **changes)


def _possible_mode(config: Config, hierarchy: Hierarchy) -> configuration.Mode:
    """The mode asked for, or observe where this node cannot enforce; says so once, with what to change."""
    if config.mode == "observe" or hierarchy.problem is None:
        return config.mode
    log.warning("cannot %s here, observing instead: %s. %s", config.mode, hierarchy.problem, hierarchy.fix)
    return "observe"


@contextlib.contextmanager
def _only_instance(state: Path) -> Iterator[None]:
    """Hold the node's lock: two agents would fight over every limit."""
    try:
        state.mkdir(mode=0o755, parents=True, exist_ok=True)
        file = (state / "lock").open("a+")
    except OSError as error:
        raise PrefetchdError(f"State directory {str(state)!r} cannot be used ({error}); check the path.") from None
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            other = file.read().strip() or "unknown"
            raise PrefetchdError(
                f"Another agent runs on this node (pid {other}); stop it or use another state_directory."
            ) from None
        file.truncate(0)
        file.write(f"{os.getpid()}\n")
        file.flush()
        yield


def _serve(
    stack: contextlib.ExitStack, config: Config, root: str, mode: configuration.Mode, duration: float | None
) -> int:
    enforcer, guardian, restored = _enforcer(stack, config, root, mode)
    loader = stack.enter_context(Loader(cache=Path(config.enforcement.state_directory)))
    node = LocalNode(root, config, _probes(config, root, loader), configured_devices(config.devices, Mounts(Devices())))
    stack.callback(node.close)
    core = Core(make_policy(config.policy, policy_settings(config)), core_settings(config))
    enforcement = config.enforcement
    settings = LoopSettings(
        floor=enforcement.floor_ratio,
        ceiling=enforcement.ceiling_ratio,
        interval_seconds=config.loop.interval_seconds,
        stale_seconds=config.loop.stale_seconds,
        kill_switch=Path(enforcement.kill_switch_file) if enforcement.kill_switch_file else None,
    )
    loop = Loop(node, core, enforcer, settings)
    loop.restores += restored
    endpoint = _endpoint(config, loop)
    endpoint.start()
    stack.callback(endpoint.close)
    _announce(config, node, endpoint, enforcer.mode)
    systemd.notify("READY=1")
    why = run(loop, duration=duration, after_tick=_hooks(guardian))
    systemd.notify("STOPPING=1")
    log.info("ending: %s", why)
    loop.release(why)
    return 0


def _hooks(guardian: Guardian | None) -> list[Callable[[TickReport], object]]:
    """What follows every pass: the service manager's watchdog is fed, the guardian is looked after."""
    hooks: list[Callable[[TickReport], object]] = [lambda _: systemd.notify("WATCHDOG=1")]
    if guardian is not None:
        hooks.append(lambda _: guardian.check())
    return hooks


def _enforcer(
    stack: contextlib.ExitStack, config: Config, root: str, mode: configuration.Mode
) -> tuple[Enforcer, Guardian | None, int]:
    """The enforcer and its guardian, and how many lines that a predecessor left behind were restored first."""
    files = KernelFiles(root)
    enforcement = config.enforcement
    rules = Rules(small_change_ratio=enforcement.small_change_ratio, raises_per_second=enforcement.raises_per_second)
    try:
        journal = Journal.open(str(Path(enforcement.state_directory) / "journal"))
        report = recover(files, journal, log.warning)
    except CgroupError as error:
        if mode == "enforce":
            raise CannotEnforceError(f"The journal cannot be used: {error}") from None
        log.warning("no journal: %s", error)
        return Enforcer(files, None, mode, rules=rules), None, 0
    if report.restored:
        log.warning("restored what an agent left behind: %s", report)
    guardian = _guardian(stack, config, root, journal.path) if mode == "enforce" else None
    enforcer = Enforcer(
        files, journal, mode, rules=rules, guardian=guardian, may_enable_io=enforcement.enable_io_controller
    )
    stack.callback(enforcer.close)
    return enforcer, guardian, len(report.restored)


def _guardian(stack: contextlib.ExitStack, config: Config, root: str, journal: str) -> Guardian:
    """The process that restores when this one dies; without it nothing is enforced."""
    guardian = Guardian(
        journal, root, limit_seconds=config.loop.heartbeat_seconds, cgroup=config.enforcement.guardian_cgroup
    )
    try:
        guardian.start()
    except CgroupError as error:
        raise CannotEnforceError(f"Nothing can be enforced without the guardian: {error}") from None
    stack.callback(guardian.close)
    log.info("guardian: pid %d, %d KiB", guardian.status.pid, guardian.status.resident_bytes // 1024)
    return guardian


def _probes(config: Config, root: str, loader: Loader) -> list[Probe]:
    """Every probe that the configuration asks for; one that this kernel refuses says so in its status."""
    probes: list[Probe] = []
    if config.probes.block:
        probes.append(BlockProbe(loader))
    if config.hint.enabled:
        probes.append(HintListener(Path(config.hint.socket), Path(root)))
    return probes


def _endpoint(config: Config, loop: Loop) -> Endpoint:
    registry = CollectorRegistry()
    ProcessCollector(namespace="prefetchd", registry=registry)
    registry.register(ReportCollector(lambda: loop.latest, version(), config.metrics.max_jobs))
    silent_after = config.loop.heartbeat_seconds

    def health() -> dict[str, str]:
        report = loop.latest
        if report is None:
            return {"readyz": "no pass of the loop yet"}
        silent = time.monotonic() - report.time
        return {"healthz": f"the loop is silent for {silent:.1f} s"} if silent > silent_after else {}

    def state() -> dict[str, object]:
        return snapshot(loop.latest) if loop.latest else {}

    return Endpoint(config.metrics, registry, state, health)


def _announce(config: Config, node: LocalNode, endpoint: Endpoint, mode: str) -> None:
    for probe in node.probes():
        level = logging.INFO if probe.state == "attached" else logging.WARNING
        log.log(level, "probe %s: %s %s %s", probe.name, probe.state, probe.tier, probe.why)
    if not config.jobs:
        log.warning("no [[jobs]] in the configuration: nothing will be measured; add the cgroups of your training jobs")
    address = configuration.split_address(config.metrics.listen)[0]
    scheme = "https" if config.metrics.certificate else "http"
    log.info("mode %s, policy %s, answering on %s://%s:%d/metrics", mode, config.policy, scheme, address, endpoint.port)
