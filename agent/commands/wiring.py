"""Puts the agent together from its configuration: probes, enforcer and guardian, endpoint, pod labels."""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Callable, Collection
from pathlib import Path

from prometheus_client import CollectorRegistry, ProcessCollector

from agent import kube
from agent.__main__ import version
from agent.checks.cgroups import asks_for_labels
from agent.config import Config, Mode
from agent.errors import CannotEnforceError
from agent.guarded import made
from agent.hint_listener import HintListener
from agent.history import History
from agent.loop import Loop
from agent.metrics import ReportCollector
from agent.rearrange_mending import Mending
from agent.rearrange_process import HelperProcess, MoverProcess
from agent.rearranger import Rearranger
from agent.server import Endpoint
from agent.settings import pay_settings, stop_settings
from agent.snapshot import snapshot
from bpf.block import BlockProbe
from bpf.dataloader import DataLoaderProbe
from bpf.endpoints import ANY_PEER
from bpf.fuse import FuseProbe
from bpf.link_state import LinkProbe
from bpf.loader import Loader
from bpf.nfs import NfsProbe
from bpf.object_store import ObjectStoreProbe
from bpf.page_cache import PageCacheProbe
from bpf.probes import Probe
from bpf.workers import WorkersProbe
from cgroup.enforce import Enforcer
from cgroup.errors import CgroupError
from cgroup.files import KernelFiles
from cgroup.guardian import Guardian
from cgroup.journal import Journal
from cgroup.journal_lock import take_tree
from cgroup.plan import Rules
from cgroup.restore import recover

log = logging.getLogger("prefetchd")


def make_probes(config: Config, root: str, loader: Loader) -> list[Probe]:
    """Every probe that the configuration asks for; one that this kernel refuses says so in its status."""
    wanted = config.probes
    ladder: tuple[tuple[bool, str, Callable[[], Probe]], ...] = (
        (wanted.block, BlockProbe.name, lambda: BlockProbe(loader)),
        (wanted.nfs, NfsProbe.name, lambda: NfsProbe(loader)),
        (wanted.fuse, FuseProbe.name, lambda: FuseProbe(loader)),
        (wanted.page_cache, PageCacheProbe.name, lambda: PageCacheProbe(loader)),
        (wanted.object_store, ObjectStoreProbe.name, lambda: ObjectStoreProbe(loader, endpoints=_endpoints(config))),
        (wanted.object_store, LinkProbe.name, lambda: LinkProbe(_endpoints(config), root=Path(root))),
        (wanted.dataloader, DataLoaderProbe.name, lambda: DataLoaderProbe(loader)),
        (wanted.workers, WorkersProbe.name, lambda: WorkersProbe(loader)),
        (config.hint.enabled, HintListener.name, lambda: HintListener(Path(config.hint.socket), Path(root))),
    )
    return [made(name, make) for is_wanted, name, make in ladder if is_wanted]


def _endpoints(config: Config) -> Collection[str]:
    return config.probes.object_endpoints or ANY_PEER


def make_pods(stack: contextlib.ExitStack, config: Config) -> kube.PodWatch | None:
    """Pod names and labels, followed in the background where this is a pod itself."""
    watch = kube.from_environment()
    if watch is None and asks_for_labels(config):
        log.warning("rules with a label match nothing: pod labels are known where the agent runs as a pod itself "
                    "(packaging/helm)")  # fmt: skip
    if watch is not None:
        watch.start()
        stack.callback(watch.close)
        watch.wait(2.0)
    return watch


def be_the_only_one(stack: contextlib.ExitStack, root: str) -> None:
    """Raise CannotEnforceError where another agent enforces on this node; keep others from it until the end."""
    try:
        stack.callback(os.close, take_tree(root))
    except CgroupError as error:
        raise CannotEnforceError(f"Nothing can be enforced here: {error} Stop it, or observe only.") from None


def recover_journal(config: Config, root: str, mode: Mode) -> tuple[Journal | None, int]:
    """The journal, after what a predecessor left behind was restored; and how many lines those were.

    None where it cannot be used and is not needed; raises CannotEnforceError where it is.
    """
    try:
        journal = Journal.open(str(Path(config.enforcement.state_directory) / "journal"), root)
        report = recover(KernelFiles(root), journal, log.warning)
    except CgroupError as error:
        if mode == "enforce":
            raise CannotEnforceError(f"The journal cannot be used: {error}") from None
        log.warning("no journal: %s", error)
        return None, 0
    if report.restored:
        log.warning("restored what an agent left behind: %s", report)
    return journal, len(report.restored)


def make_enforcer(
    stack: contextlib.ExitStack, config: Config, root: str, mode: Mode, journal: Journal | None
) -> tuple[Enforcer, Guardian | None]:
    """The enforcer and, in mode enforce, its guardian, which counts heartbeats from now on."""
    enforcement = config.enforcement
    rules = Rules(small_change_ratio=enforcement.small_change_ratio, raises_per_second=enforcement.raises_per_second)
    guardian = _guardian(stack, config, root, journal.path) if mode == "enforce" and journal else None
    enforcer = Enforcer(
        KernelFiles(root),
        journal,
        mode,
        rules=rules,
        guardian=guardian,
        may_enable_io=enforcement.enable_io_controller,
        clock=time.monotonic,
    )
    stack.callback(enforcer.close)
    return enforcer, guardian


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


def make_rearranger(stack: contextlib.ExitStack, config: Config, root: str, enforcer: Enforcer) -> Rearranger | None:
    """What reads ahead on disks with moving parts; its helper starts with the first job that needs it."""
    chosen = config.rearrange
    if not chosen.enabled or config.mode == "observe" or not (chosen.read_ahead or chosen.defragment):
        return None
    mending = None
    if chosen.defragment:
        mover = MoverProcess(root, chosen.defragment_cgroup_path, chosen.defragment_memory_mib << 20)
        mending = Mending(mover, pay_settings(config), chosen.defragment_ratio)
    rearranger = Rearranger(
        HelperProcess(root, chosen.cgroup_path, chosen.memory_mib << 20),
        stop_settings(config),
        reads_ahead=chosen.read_ahead,
        mending=mending,
        read_ahead=enforcer,
        read_ahead_kilobytes=chosen.read_ahead_kb,
    )
    stack.callback(rearranger.close, "the agent stops")
    return rearranger


def make_endpoint(config: Config, loop: Loop, history: History) -> Endpoint:
    """The HTTP endpoint over the loop's last report; not started."""
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
        return snapshot(loop.latest, history) if loop.latest else {}

    return Endpoint(config.metrics, registry, state, health)
