"""The device map: which disks can be limited, what they are, what else schedules or throttles them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from agent.checks.finding import Finding, failed, note, ok, warning
from agent.checks.host import Host
from agent.config import Config, DeviceRule
from cgroup.devices import BlockDevice, Devices
from cgroup.errors import DeviceRefused
from cgroup.io_files import parse_scheduler
from cgroup.mounts import Mounts


@dataclass(frozen=True, slots=True)
class DeviceFacts:
    """One device: what sysfs says of it, and the rule that names it.

    `wbt_us` is the writeback-throttling target (0: off, None: not there), `virtual` says that a hypervisor's driver
    answers for it, whose `rotational` flag means nothing.
    """

    device: BlockDevice
    scheduler: str
    wbt_us: int | None
    virtual: bool
    rule: DeviceRule | None = None


@dataclass(frozen=True, slots=True)
class DeviceMap:
    """All devices, and (name in the configuration, reason) of the rules that resolve to none.

    `hidden`: (name, the later name of the same device, whose rule is taken).
    """

    devices: tuple[DeviceFacts, ...]
    refused: tuple[tuple[str, str], ...] = ()
    hidden: tuple[tuple[str, str], ...] = ()


def gather(host: Host, config: Config) -> DeviceMap:
    """Resolve every rule and describe every whole device of the host."""
    finder = Devices(str(host.at("/sys")), str(host.at("/dev")))
    mounts = Mounts(finder, str(host.at("/proc/self/mountinfo")), str(host.at("/sys")))
    rules: dict[str, DeviceRule] = {}
    refused, hidden = [], []
    for rule in config.devices:
        try:
            device = mounts.resolve(rule.device, rule.medium).device
        except DeviceRefused as error:
            refused.append((rule.device, str(error)))
        else:
            if device in rules:
                hidden.append((rules[device].device, rule.device))
            rules[device] = rule
    found = [finder.resolve(one.device, rules[one.device].medium) if one.device in rules else one
             for one in finder.all()]  # fmt: skip
    described = tuple(_facts(host, one, rules.get(one.device)) for one in found)
    return DeviceMap(described, tuple(refused), tuple(hidden))


def _facts(host: Host, device: BlockDevice, rule: DeviceRule | None) -> DeviceFacts:
    queue = f"/sys/block/{device.name}/queue"
    wbt = (host.read(f"{queue}/wbt_lat_usec") or "").strip()
    return DeviceFacts(
        device=device,
        scheduler=parse_scheduler(host.read(f"{queue}/scheduler") or ""),
        wbt_us=int(wbt) if wbt.isdigit() else None,
        virtual=device.name.startswith(("vd", "xvd")),
        rule=rule,
    )


def check(facts: DeviceMap) -> Iterator[Finding]:
    """Judge the facts, device by device."""
    for name, why in facts.refused:
        yield failed(f"device.{name}", why, f"Correct the [[devices]] entry {name!r}.", "enforcing")
    for name, later in facts.hidden:
        evidence = f"is the same device as {later!r}, whose entry comes later and counts alone"
        yield warning(f"device.{name}", evidence, f"Remove one of the two [[devices]] entries {name!r} and {later!r}.")
    if not facts.devices:
        yield note("device.none", "no disk of this host can be limited (loop, zram and RAM disks do not count)")
    known = {one.device.device: one.device for one in facts.devices}
    for one in facts.devices:
        yield _medium(one)
        yield from _joined(one, known)
        yield _capacity(one)
        yield from _rivals(one)


def _name(facts: DeviceFacts, what: str) -> str:
    return f"device.{facts.device.name}.{what}"


def _medium(facts: DeviceFacts) -> Finding:
    device = facts.device
    size = f"{device.size_bytes / 1e9:,.0f} GB"
    made = f" of {', '.join(device.members)}" if device.members else ""
    evidence = f"{device.device} {device.kind}{made}, {size}, medium {device.medium}, scheduler {facts.scheduler}"
    if facts.virtual and device.rotational and (facts.rule is None or facts.rule.medium is None):
        where = f"the [[devices]] entry of /dev/{device.name}"
        fix = f'Add medium = "ssd" (or "hdd") to {where}.'
        if facts.rule is None:
            fix = f'Make {where} in the configuration: device = "/dev/{device.name}", medium = "ssd" (or "hdd").'
        return warning(_name(facts, "medium"), f"{evidence}; a virtual disk says that it rotates, true or not", fix)
    return ok(_name(facts, "medium"), evidence)


def _joined(facts: DeviceFacts, known: Mapping[str, BlockDevice]) -> Iterator[Finding]:
    """A mapped device over disks of both media, such as dm-cache, that a rule makes one device of one medium."""
    disks = _bottom(facts.device, known) if facts.device.kind == "dm" else ()
    if facts.rule is None or len({disk.medium for disk in disks}) < 2:
        return
    evidence = f"named, so it counts as one {facts.device.medium}, though it joins disks of both media"
    names = ", ".join(f"/dev/{disk.name} ({disk.medium})" for disk in disks)
    yield warning(_name(facts, "joined"), evidence, f"Name the disks below in its place: {names}.")


def _bottom(device: BlockDevice, known: Mapping[str, BlockDevice]) -> tuple[BlockDevice, ...]:
    """The devices on which a stack of mapped devices stands."""
    found: dict[str, BlockDevice] = {}
    pending = [device]
    while pending:
        here = pending.pop()
        if here.kind != "dm":
            found[here.device] = here
        pending.extend(known[member] for member in here.members if here.kind == "dm" and member in known)
    return tuple(found[number] for number in sorted(found))


def _capacity(facts: DeviceFacts) -> Finding:
    rule = facts.rule
    if rule is None or rule.read_bytes_per_second is None:
        evidence = "its capacity is not known: it is observed, never enforced"
        fix = f"prefetchd calibrate /dev/{facts.device.name}, and add the lines that it prints"
        return note(_name(facts, "capacity"), evidence, fix)
    left_out = [
        name
        for name in ("write_bytes_per_second", "read_requests_per_second", "write_requests_per_second")
        if getattr(rule, name) is None
    ]
    evidence = f"reads {rule.read_bytes_per_second / 1e6:,.0f} MB/s"
    if left_out:
        fix = f"prefetchd calibrate /dev/{facts.device.name} measures them"
        return note(_name(facts, "capacity"), f"{evidence}; not enforced: {', '.join(left_out)}", fix)
    return ok(_name(facts, "capacity"), f"{evidence}, all four dimensions known")


def _rivals(facts: DeviceFacts) -> Iterator[Finding]:
    """What else decides who gets the device."""
    name = facts.device.name
    if facts.rule is None:
        return
    if facts.wbt_us:
        evidence = f"writeback throttling aims at {facts.wbt_us / 1000:g} ms: it holds buffered writes back by itself"
        yield note(_name(facts, "wbt"), evidence, f"echo 0 > /sys/block/{name}/queue/wbt_lat_usec switches it off")
    if facts.scheduler == "bfq" and facts.rule.actuator in ("auto", "io.max"):
        evidence = "bfq shares the device by weights beside the agent's caps"
        fix = f'Set actuator = "io.bfq.weight", or echo mq-deadline > /sys/block/{name}/queue/scheduler'
        yield warning(_name(facts, "scheduler"), evidence, fix)
    if facts.rule.actuator == "io.bfq.weight" and facts.scheduler != "bfq":
        evidence = f'actuator is "io.bfq.weight" but the scheduler is {facts.scheduler}'
        fix = f"echo bfq > /sys/block/{name}/queue/scheduler (modprobe bfq first), or another actuator"
        yield failed(_name(facts, "scheduler"), evidence, fix, "enforcing")
