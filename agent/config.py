"""The configuration: a frozen typed tree read from TOML, units in names, unknown keys refused in one sentence."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec

from agent.errors import UsageError
from agent.toml_text import convert, parse_toml, quoted, read_text
from bpf.endpoints import parse_endpoint

Mode = Literal["observe", "dry-run", "enforce"]
PolicyName = Literal["adaptive", "paper"]
MediumName = Literal["ssd", "hdd"]

_ENDLESS = 1e15
"""Above every number of seconds or requests that means anything; keeps infinity out."""
Positive = Annotated[float, msgspec.Meta(gt=0, lt=_ENDLESS)]
NotNegative = Annotated[float, msgspec.Meta(ge=0, lt=_ENDLESS)]
Ratio = Annotated[float, msgspec.Meta(ge=0, le=1)]
Count = Annotated[int, msgspec.Meta(ge=1)]

DEFAULT_PATH = Path("/etc/prefetchd/prefetchd.toml")
DEFAULT_LISTEN = "127.0.0.1:9753"
STATE_DIRECTORY = "/run/prefetchd"
EXEC_JOBS = "/prefetchd.slice/*"
"""Where `prefetchd exec` starts jobs; the one rule there is by default."""

MAX_SOCKET_PATH = 96
"""Bytes: 107 in sockaddr_un (unix(7)) less what is appended while the socket is prepared."""

_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
_UNITS |= {f"{letter}i": 1024**power for power, letter in enumerate("kmgt", start=1)}
_SIZE = re.compile(r"(?P<number>\d+(?:\.\d*)?)\s*(?P<unit>[kmgt]?i?)b?(?:/s)?", re.IGNORECASE)


class ConfigError(UsageError):
    """A configuration that cannot be used; the message quotes the key and the value."""


class ByteRate(float):
    """Bytes per second; written as a number or as text with a unit: "6.5 GB", "120 MiB"."""

    __slots__ = ()

    @classmethod
    def parse(cls, value: object) -> ByteRate:
        """Read a number of bytes per second or a text with a decimal (GB) or binary (GiB) unit."""
        if isinstance(value, int | float) and not isinstance(value, bool):
            rate = float(value) if value < 1e300 else float("inf")
        else:
            match = _SIZE.fullmatch(value.strip()) if isinstance(value, str) else None
            if match is None:
                raise ValueError(
                    f'{quoted(value)} is no byte rate; write a number or a text like "6.5 GB" or "120 MiB"'
                )
            rate = float(match["number"]) * _UNITS[match["unit"].lower()]
        if not 0 < rate < float("inf"):
            raise ValueError(f"{quoted(value)} is no byte rate; it must be above zero and finite")
        return cls(rate)


class _Section(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Base of all sections: frozen, keyword only, unknown keys refused."""


class JobRule(_Section, frozen=True):
    """Which cgroups are training jobs. `cgroup` is a glob on the path below the cgroup root (`**` spans levels)."""

    cgroup: str
    label: str = ""
    name: str = ""
    weight: Annotated[float, msgspec.Meta(ge=1, le=10000)] = 100.0


class BestEffortRule(_Section, frozen=True):
    """Which cgroups may be capped for the sake of training; they are never scored."""

    cgroup: str
    label: str = ""
    name: str = ""


class DeviceRule(_Section, frozen=True):
    """What one device can do. Dimensions left out are not enforced; without a read rate the device is observed only."""

    device: str
    medium: MediumName | None = None
    read_bytes_per_second: ByteRate | None = None
    write_bytes_per_second: ByteRate | None = None
    read_requests_per_second: Positive | None = None
    write_requests_per_second: Positive | None = None
    actuator: Literal["auto", "io.max", "io.weight", "io.bfq.weight"] = "auto"


class MetricsSection(_Section, frozen=True):
    """The HTTP endpoint. TLS needs `certificate` and `key`; `client_ca` asks clients for a certificate as well."""

    listen: str = DEFAULT_LISTEN
    certificate: str = ""
    key: str = ""
    client_ca: str = ""
    basic_auth_file: str = ""
    max_jobs: Count = 1000


class LoopSection(_Section, frozen=True):
    """How often the agent looks, and when it stops trusting what it sees.

    A pass must come twice within `stale_seconds` and within `heartbeat_seconds`, or the agent would release in every
    pass what it had set in the one before, or its guardian would take it for stuck between two.
    """

    interval_seconds: Annotated[float, msgspec.Meta(ge=0.02, le=5)] = 0.1
    scan_seconds: Positive = 10.0
    timer_seconds: Annotated[float, msgspec.Meta(ge=0.01, lt=_ENDLESS)] = 1.0
    stale_seconds: Positive = 3.0
    heartbeat_seconds: Positive = 5.0


class HealthSection(_Section, frozen=True):
    """Weights of the four metrics (they are scaled to sum to 1) and the smoothing of the score."""

    queue_weight: Ratio = 0.45
    latency_weight: Ratio = 0.20
    variation_weight: Ratio = 0.10
    demand_weight: Ratio = 0.25
    smoothing_seconds: Positive = 0.3
    starvation_seconds: Positive = 0.010


class GainsSection(_Section, frozen=True):
    """PID gains: relative change of a quota per point of error (kp), point and second (ki), point per second (kd)."""

    kp: NotNegative | None = None
    ki: NotNegative | None = None
    kd: NotNegative | None = None


class PoolSection(_Section, frozen=True):
    """The elastic part of every device and how long a loan lasts."""

    ssd_loan_iterations: Count = 3
    hdd_loan_iterations: Count = 3
    loan_seconds: Positive = 1.5


class PidSection(_Section, frozen=True):
    """Controller gains by medium."""

    ssd: GainsSection = GainsSection()
    hdd: GainsSection = GainsSection()


class EnforcementSection(_Section, frozen=True):
    """Where the agent keeps what it must undo, and what it may touch."""

    state_directory: str = STATE_DIRECTORY
    kill_switch_file: str = f"{STATE_DIRECTORY}/disable"
    enable_io_controller: bool = False
    guardian_cgroup: str = ""
    floor_ratio: Ratio = 0.02
    ceiling_ratio: Ratio = 1.0
    raises_per_second: Positive = 2.0
    small_change_ratio: Annotated[float, msgspec.Meta(ge=0, le=0.5)] = 0.03  # at 1 no cut would ever be written


class RearrangeSection(_Section, frozen=True):
    """What is done on disks with moving parts, in enforce mode, by helpers in `cgroup`.

    `read_ahead`: what jobs read next is read ahead, within `memory_mib`; `read_ahead_kb`: the disk's own read-ahead
    meanwhile, where it is less; 0 leaves it alone. `defragment`: badly fragmented files are made contiguous, within
    `defragment_memory_mib` and this share of the disk.
    """

    enabled: bool = True
    read_ahead: bool = True
    cgroup: str = "/prefetchd-rearrange"
    memory_mib: Annotated[int, msgspec.Meta(ge=24, le=65536)] = 192
    read_ahead_kb: Annotated[int, msgspec.Meta(ge=0, le=65536)] = 0
    cool_down_seconds: Positive = 30.0
    defragment: bool = False
    defragment_memory_mib: Annotated[int, msgspec.Meta(ge=24, le=65536)] = 256
    defragment_ratio: Ratio = 0.1

    @property
    def cgroup_path(self) -> str:
        """The cgroup of the helper that reads ahead, as paths are written elsewhere."""
        return "/" + self.cgroup.strip("/")

    @property
    def defragment_cgroup_path(self) -> str:
        """The cgroup of the helper that moves files."""
        return f"{self.cgroup_path}-defragment"


class HintSection(_Section, frozen=True):
    """The socket on which training code may tell its queue state."""

    enabled: bool = True
    socket: str = f"{STATE_DIRECTORY}/hint.sock"


class ProbesSection(_Section, frozen=True):
    """Which probes are attached; object-store endpoints are `address:port`, empty means ports 80, 443 and 9000."""

    block: bool = True
    nfs: bool = True
    fuse: bool = True
    object_store: bool = True
    page_cache: bool = True
    dataloader: bool = True
    workers: bool = True
    object_endpoints: tuple[str, ...] = ()


class LogSection(_Section, frozen=True):
    """Log lines go to standard error, as text or as one JSON object a line."""

    level: Literal["debug", "info", "warning", "error"] = "info"
    json: bool = False


class Config(_Section, frozen=True):
    """The whole configuration; every default is that of the commented `packaging/prefetchd.toml`."""

    mode: Mode = "observe"
    policy: PolicyName = "adaptive"
    cgroup_root: str = ""
    jobs: tuple[JobRule, ...] = (JobRule(cgroup=EXEC_JOBS),)
    best_effort: tuple[BestEffortRule, ...] = ()
    devices: tuple[DeviceRule, ...] = ()
    metrics: MetricsSection = MetricsSection()
    loop: LoopSection = LoopSection()
    health: HealthSection = HealthSection()
    pool: PoolSection = PoolSection()
    pid: PidSection = PidSection()
    enforcement: EnforcementSection = EnforcementSection()
    rearrange: RearrangeSection = RearrangeSection()
    hint: HintSection = HintSection()
    probes: ProbesSection = ProbesSection()
    log: LogSection = LogSection()


def _decode_hook(kind: type, value: Any) -> Any:
    if kind is ByteRate:
        return ByteRate.parse(value)
    raise NotImplementedError(kind)


def parse(text: str, source: str = "configuration") -> Config:
    """Read TOML text; raises `ConfigError` with one sentence that names the key."""
    return from_mapping(parse_toml(text, source, ConfigError), source)


def from_mapping(raw: dict[str, Any], source: str = "configuration") -> Config:
    """Check a mapping as TOML gives it; raises `ConfigError` with one sentence that names the key."""
    config = convert(raw, Config, source, ConfigError, _decode_hook)
    _check_texts(raw, source, "")
    _check(config, source)
    return config


def load(path: Path) -> Config:
    """Read the file at `path`; a file that cannot be read is a `ConfigError` as well."""
    return parse(read_text(path, "Configuration", ConfigError), str(path))


def split_address(listen: str) -> tuple[str, int]:
    """`ADDR:PORT` or `[v6]:PORT` as (address, port); raises `ConfigError`."""
    host, colon, port = listen.rpartition(":")
    is_port = port.isascii() and port.isdecimal() and len(port) <= 5 and int(port) <= 65535
    if not colon or not is_port or not host.isprintable() or " " in host:
        raise ConfigError(f"Address {quoted(listen)} is not ADDR:PORT; write for example {DEFAULT_LISTEN}.")
    return host.removeprefix("[").removesuffix("]") or "0.0.0.0", int(port)  # noqa: S104 - an empty address is asked for


def _check_texts(value: object, source: str, path: str) -> None:
    """No text may hold a character that cannot be printed: none means anything here, and the kernel refuses some."""
    if isinstance(value, str) and not value.isprintable():
        raise ConfigError(f"{source}: key {path!r} has the value {quoted(value)} with a control character; remove it.")
    items: Iterable[tuple[object, object]] = ()
    if isinstance(value, dict):
        items = value.items()
    elif isinstance(value, list):
        items = enumerate(value)
    for key, inside in items:
        _check_texts(inside, source, f"{path}[{key}]" if isinstance(key, int) else f"{path}.{key}".removeprefix("."))


def _check_paths(config: Config, source: str) -> None:
    """Paths are absolute, since the working directory changes while BPF programs are compiled."""
    enforcement = config.enforcement
    for key, path, may_be_empty in (
        ("cgroup_root", config.cgroup_root, True),
        ("enforcement.state_directory", enforcement.state_directory, False),
        ("enforcement.kill_switch_file", enforcement.kill_switch_file, True),
        ("hint.socket", config.hint.socket, not config.hint.enabled),
    ):
        if not path.startswith("/") and (path or not may_be_empty):
            raise ConfigError(f"{source}: key {key!r} has the value {quoted(path)}; give a path that begins with '/'.")
    for key, own, may_be_empty, usual in (
        ("rearrange.cgroup", config.rearrange.cgroup, False, "/prefetchd-rearrange"),
        ("enforcement.guardian_cgroup", enforcement.guardian_cgroup, True, "/prefetchd-guardian"),
    ):
        below = own.startswith("/") and own.strip("/") and ".." not in own.split("/")
        if not below and (own or not may_be_empty):
            raise ConfigError(
                f"{source}: key {key!r} has the value {quoted(own)}; give a path below the cgroup root, "
                f"such as {usual!r}."
            )
    if len(os.fsencode(config.hint.socket)) > MAX_SOCKET_PATH:
        raise ConfigError(
            f"{source}: key 'hint.socket' has the value {quoted(config.hint.socket)}; "
            f"give a path of at most {MAX_SOCKET_PATH} bytes."
        )


def _check_pace(loop: LoopSection, source: str) -> None:
    for name, limit in (("stale_seconds", loop.stale_seconds), ("heartbeat_seconds", loop.heartbeat_seconds)):
        if loop.interval_seconds > limit / 2:
            raise ConfigError(
                f"{source}: loop.interval_seconds {loop.interval_seconds:g} is more than half of "
                f"loop.{name} {limit:g}; correct one of them."
            )


def _check(config: Config, source: str) -> None:
    """What types alone cannot say."""
    try:
        split_address(config.metrics.listen)
    except ConfigError as error:
        raise ConfigError(f"{source}: key 'metrics.listen': {error}") from None
    rules: tuple[tuple[bool, Callable[[], str]], ...] = (
        (bool(config.metrics.certificate) != bool(config.metrics.key), lambda: "metrics.certificate needs metrics.key"),
        (bool(config.metrics.client_ca) > bool(config.metrics.certificate), lambda: "metrics.client_ca needs TLS"),
        (
            config.enforcement.floor_ratio >= config.enforcement.ceiling_ratio,
            lambda: f"enforcement.floor_ratio {config.enforcement.floor_ratio} is not below the ceiling_ratio",
        ),
        (sum(_weights(config.health)) <= 0, lambda: "the weights in [health] are all zero"),
    )
    for broken, text in rules:
        if broken:
            raise ConfigError(f"{source}: {text()}; correct it.")
    _check_paths(config, source)
    _check_pace(config.loop, source)
    for index, endpoint in enumerate(config.probes.object_endpoints):
        try:
            parse_endpoint(endpoint)
        except ValueError as error:
            raise ConfigError(f"{source}: key 'probes.object_endpoints[{index}]': {error}; correct it.") from None
    patterns = [rule.cgroup for rule in config.jobs] + [rule.cgroup for rule in config.best_effort]
    for pattern in patterns:
        if not pattern.startswith("/") or ".." in pattern.split("/"):
            raise ConfigError(
                f"{source}: cgroup pattern {quoted(pattern)} must start with '/' (the cgroup root) and hold no '..'."
            )
    labels = [rule.label for rule in config.jobs] + [rule.label for rule in config.best_effort]
    for label in labels:
        if label.startswith("="):
            raise ConfigError(f"{source}: label {quoted(label)} has no key; write key=value, or the key alone.")


def _weights(health: HealthSection) -> tuple[float, float, float, float]:
    return health.queue_weight, health.latency_weight, health.variation_weight, health.demand_weight
