"""The support archive: what somebody else needs to see of this node, and nothing secret.

No environment, no command line of any process, no file contents of jobs. What could hold a credential (mount options,
log lines, URLs) is masked by name before it is written.
"""

from __future__ import annotations

import io
import json
import os
import re
import subprocess
import tarfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import msgspec

from agent.checks.cgroups import gather as gather_cgroups
from agent.checks.finding import Finding, as_json
from agent.checks.host import Host, this_host
from agent.checks.kernel import kernel_config
from agent.client import AgentClient
from agent.config import Config, Mode
from agent.errors import PrefetchdError
from agent.jobs import PodLookup
from agent.whole_file import replacing
from cgroup.tree import join

HOST_FILES = (
    "/proc/version",
    "/proc/diskstats",
    "/proc/filesystems",
    "/proc/loadavg",
    "/proc/meminfo",
    "/proc/modules",
    "/proc/mounts",
    "/proc/pressure/io",
    "/proc/self/mountinfo",
    "/etc/os-release",
    "/sys/kernel/security/lockdown",
)
JOB_FILES = ("io.max", "io.stat", "io.pressure", "io.weight", "io.bfq.weight", "io.latency", "cgroup.controllers")
MAX_JOBS = 200
LOG_LINES = 1000
OPTIONS = re.compile(r"CONFIG_(BPF|DEBUG_INFO_BTF|KPROBE|FTRACE|CGROUP|BLK_|IOSCHED|PSI|NFS|SUNRPC|FUSE|IKHEADERS)")

_NAMES = r"pass(?!es\b)(?:word|wd|phrase)?|secret|token|credential|(?:api|access|private)[-_]?key"
_NAMED = re.compile(
    rf"(?i)([\w.-]*(?:{_NAMES}|\buser(?:name)?(?==))[\w.-]*[\"']?\s*[=:]\s*)(\"[^\"]*\"|'[^']*'|[^\s,;\"']+)"
)
_NAMED_NUMBER = re.compile(
    rf"(?i)(\"[\w.-]*(?:{_NAMES})[\w.-]*\"\s*:\s*)(?:-?\d[\d.e+-]*|true|false|null)(?=\s*[,}}\]])"
)
"""In JSON, where a bare `***` is no value."""
_USER_INFO = re.compile(r"(\w+://|//)[^\s/@,]+@")
_BEARER = re.compile(r"(?i)\b(bearer|basic)\s+[\w+/=.~-]{8,}")
README = """\
Support archive of prefetchd. Look through it before you pass it on.
doctor.json, doctor.txt  the checks
config.json              the configuration in force (paths of key and password files, not their contents)
state.json, metrics.txt  what the running agent answered; job, namespace and pod names are in there
log.txt                  the agent's last log lines, where systemd keeps them
host/                    kernel and mount facts; credentials in mount options are masked
cgroup/                  io files of the job cgroups
Left out: environment, command lines, keys, passwords, data.
"""


def mask(text: str) -> str:
    """The text with what looks like a credential replaced by `***`; what was JSON is JSON still.

    >>> mask("rw,username=me,password=hunter2,vers=3 https://me:pw@host/x")
    'rw,username=***,password=***,vers=3 https://***@host/x'
    """
    text = _NAMED.sub(_masked, _NAMED_NUMBER.sub(lambda match: match[1] + '"***"', text))
    return _BEARER.sub(lambda match: f"{match[1]} ***", _USER_INFO.sub(lambda match: match[1] + "***@", text))


def _masked(match: re.Match[str]) -> str:
    name, value = match.groups()
    quote = value[0] if value[0] in "\"'" else ""
    return f"{name}{quote}***{quote}"


def write_bundle(
    path: Path,
    findings: Sequence[Finding],
    mode: Mode,
    config: Config,
    client: AgentClient | None,
    pods: PodLookup | None = None,
) -> tuple[str, ...]:
    """Write the archive, readable by its owner alone; returns the names in it. Raises PrefetchdError."""
    members = dict(_members(findings, mode, config, client))
    members |= _job_members(this_host(), config, pods)
    with (
        replacing(path, "Archive", permissions=0o600) as raw,
        tarfile.open(fileobj=raw, mode="w:gz") as archive,
    ):
        for name, text in members.items():
            _add(archive, f"prefetchd-support/{name}", text)
    return tuple(members)


def _add(archive: tarfile.TarFile, name: str, text: str) -> None:
    content = text.encode()
    member = tarfile.TarInfo(name)
    member.size, member.mode, member.mtime = len(content), 0o600, int(time.time())
    archive.addfile(member, io.BytesIO(content))


def _line(finding: Finding) -> str:
    said = f" ({finding.detail})" if finding.detail else ""
    return f"{finding.result:8} {finding.name}: {finding.evidence}{said}\n"


def _members(
    findings: Sequence[Finding], mode: Mode, config: Config, client: AgentClient | None
) -> Iterator[tuple[str, str]]:
    host = this_host()
    yield "README.txt", README
    yield "doctor.json", mask(json.dumps(as_json(findings, mode), indent=1))
    yield "doctor.txt", mask("".join(_line(one) for one in findings))
    yield "config.json", mask(json.dumps(msgspec.to_builtins(config, enc_hook=float), indent=1))
    if client is not None:
        for name, where in (("state.json", "/state"), ("metrics.txt", "/metrics")):
            with suppress(PrefetchdError):
                yield name, mask(client.get(where).decode(errors="replace"))
    yield from _host_members(host)
    yield "log.txt", mask(_log())


def _host_members(host: Host) -> Iterator[tuple[str, str]]:
    for path in HOST_FILES:
        text = host.read(path)
        if text is not None:
            yield f"host{path}", mask(text + "\n")
    options = kernel_config(host, os.uname().release)
    yield "host/kernel-options", _lines({name: value for name, value in options.items() if OPTIONS.match(name)})
    for name in host.names("/sys/block"):
        facts = {file: host.read(f"/sys/block/{name}/{file}") for file in ("dev", "size", "queue/rotational",
                 "queue/scheduler", "queue/wbt_lat_usec", "queue/read_ahead_kb")}  # fmt: skip
        yield f"host/block/{name}", _lines({file: text for file, text in facts.items() if text is not None})


def _lines(facts: Mapping[str, str]) -> str:
    return "".join(f"{name}={value}\n" for name, value in sorted(facts.items()))


def _job_members(host: Host, config: Config, pods: PodLookup | None) -> Iterator[tuple[str, str]]:
    facts = gather_cgroups(host, config, pods)
    for job in facts.jobs[:MAX_JOBS]:
        for file in JOB_FILES:
            text = host.read(join(facts.root, job.path) + "/" + file)
            if text is not None:
                yield f"cgroup{job.path}/{file}", text + "\n"


def _log() -> str:
    command = ["journalctl", "--unit", "prefetchd", "--lines", str(LOG_LINES), "--no-pager", "--output", "short-iso"]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=10, check=False).stdout
    except (OSError, subprocess.TimeoutExpired):
        return "no journal on this node\n"
