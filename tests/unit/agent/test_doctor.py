"""Doctor's checks over made-up facts and made-up hosts, its exit statuses, and the support archive."""

import fcntl
import gzip
import json
import os
import re
import subprocess
import sys
import tarfile
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from agent.checks import agent as agent_checks
from agent.checks import cgroups, devices, kernel, pressure, remote, runtime, state
from agent.checks.bundle import mask, write_bundle
from agent.checks.finding import Finding, Result, failed, matters, severity, warning
from agent.checks.host import Host
from agent.checks.run import run_checks
from agent.commands import doctor
from agent.config import BestEffortRule, Config, DeviceRule, EnforcementSection, JobRule, MetricsSection
from agent.jobs import PodInfo
from agent.types import Job
from cgroup.devices import BlockDevice
from cgroup.hierarchy import Hierarchy

GOOD_KERNEL = kernel.KernelFacts(
    release="6.1.0-1",
    bpf=True,
    jit="1",
    btf_bytes=5 << 20,
    headers="the running kernel's own",
    trace_folder=True,
    events=frozenset(kernel.TRACEPOINTS),
    kprobes=True,
    lockdown="[none] integrity confidentiality",
)
GOOD_RUNTIME = runtime.RuntimeFacts(
    capabilities=(1 << 41) - 1,
    bcc="/usr/lib/python3/dist-packages/bcc/__init__.py",
    bcc_is_real=True,
    libbcc="libbcc.so.0",
    available_mib=9000.0,
    clock="tsc",
    python="3.11.2",
)
GOOD_CGROUPS = cgroups.CgroupFacts(
    Hierarchy("v2", "/sys/fs/cgroup"), rules=1, jobs=(Job(7, "a", "/prefetchd.slice/a", training=True),)
)
APART = (Job(7, "a", "/prefetchd.slice/a", training=True), Job(8, "scan", "/batch.slice/scan", training=False))
GOOD_STATE = state.StateFacts(
    directory="/run/prefetchd",
    folder="/run",
    writable=True,
    free_bytes=1 << 30,
    holder=None,
    holder_alive=False,
    lock_readable=True,
    kill_switch=None,
    listen="127.0.0.1:9753",
    address_taken=False,
)
DISK = BlockDevice("259:0", "nvme0n1", "ssd", rotational=False, size_bytes=10**12, kind="disk")
FULL_RULE = DeviceRule(
    device="/dev/nvme0n1",
    read_bytes_per_second=5e9,
    write_bytes_per_second=2e9,
    read_requests_per_second=5e5,
    write_requests_per_second=2e5,
)
GOOD_DEVICES = devices.DeviceMap((devices.DeviceFacts(DISK, "none", 0, virtual=False, rule=FULL_RULE),))


def named(findings, name):
    (found,) = [finding for finding in findings if finding.name == name]
    return found


def judge_kernel(**changes):
    return list(kernel.check(replace(GOOD_KERNEL, **changes)))


def judge_cgroups(agent_runs=False, **changes):
    return list(cgroups.check(replace(GOOD_CGROUPS, **changes), agent_runs=agent_runs))


def test_good_facts_give_only_ok():
    findings = [
        *kernel.check(GOOD_KERNEL),
        *runtime.check(GOOD_RUNTIME),
        *cgroups.check(GOOD_CGROUPS, agent_runs=False),
        *state.check(GOOD_STATE, answers=False),
        *devices.check(GOOD_DEVICES),
    ]
    assert [finding for finding in findings if finding.result is not Result.OK] == []
    assert len({finding.name for finding in findings}) == len(findings)


@pytest.mark.parametrize(
    ("name", "changes", "result", "fix"),
    [
        ("kernel.bpf", {"bpf": False}, Result.FAILED, "CONFIG_BPF_SYSCALL"),
        ("kernel.bpf_jit", {"jit": "0"}, Result.WARNING, "sysctl -w net.core.bpf_jit_enable=1"),
        ("kernel.bpf_jit", {"jit": None}, Result.UNKNOWN, "root"),
        ("kernel.btf", {"btf_bytes": None}, Result.FAILED, "CONFIG_DEBUG_INFO_BTF=y"),
        ("kernel.headers", {"headers": None}, Result.FAILED, "apt-get install linux-headers-6.1.0-1"),
        ("kernel.tracefs", {"events": None}, Result.NOTE, "mount -t tracefs"),
        ("kernel.tracefs", {"events": None, "trace_folder": False}, Result.FAILED, "CONFIG_FTRACE"),
        ("kernel.tracepoints", {"events": frozenset()}, Result.FAILED, "CONFIG_TRACEPOINTS"),
        (
            "kernel.tracepoints",
            {"events": frozenset(e for e in kernel.TRACEPOINTS if e.startswith("block/"))},
            Result.WARNING,
            "CONFIG_FTRACE_SYSCALLS",
        ),
        ("kernel.kprobes", {"kprobes": False}, Result.NOTE, "CONFIG_KPROBES"),
        ("kernel.lockdown", {"lockdown": "none integrity [confidentiality]"}, Result.FAILED, "lockdown=integrity"),
        ("kernel.lockdown", {"lockdown": "none [integrity] confidentiality"}, Result.OK, ""),
        ("kernel.lockdown", {"lockdown": None}, Result.OK, ""),
    ],
)
def test_kernel(name, changes, result, fix):
    finding = named(judge_kernel(**changes), name)
    assert finding.result is result
    assert fix in finding.fix


@pytest.mark.parametrize(
    ("name", "changes", "result", "fix"),
    [
        ("runtime.rights", {"capabilities": 0}, Result.FAILED, "sudo prefetchd doctor"),
        ("runtime.rights", {"capabilities": 1 << 38 | 1 << 39}, Result.NOTE, ""),
        ("runtime.rights", {"capabilities": 1 << 38 | 1 << 39 | 1 << 1}, Result.OK, ""),
        ("runtime.bcc", {"bcc": None}, Result.FAILED, "python3-bpfcc"),
        ("runtime.bcc", {"bcc_is_real": False}, Result.FAILED, "pip uninstall bcc"),
        ("runtime.bcc", {"libbcc": None}, Result.FAILED, "apt-get install libbpfcc"),
        ("runtime.memory", {"available_mib": 150.0}, Result.WARNING, "Free memory"),
        ("runtime.clock", {"clock": "hpet"}, Result.WARNING, "tsc"),
        ("runtime.clock", {"clock": None}, Result.UNKNOWN, ""),
    ],
)
def test_runtime(name, changes, result, fix):
    finding = named(runtime.check(replace(GOOD_RUNTIME, **changes)), name)
    assert finding.result is result
    assert fix in finding.fix


@pytest.mark.parametrize(
    ("name", "changes", "result", "fix"),
    [
        (
            "cgroup.hierarchy",
            {"hierarchy": Hierarchy("hybrid", "/u", "the host runs the hybrid hierarchy", "Use v2.")},
            Result.FAILED,
            "Use v2.",
        ),
        ("cgroup.jobs", {"rules": 0, "jobs": ()}, Result.WARNING, "[[jobs]]"),
        ("cgroup.jobs", {"idle_rules": ("/x/*",), "jobs": ()}, Result.NOTE, "find /sys/fs/cgroup -type d"),
        ("cgroup.jobs", {"idle_rules": ("/x/*",), "jobs": (), "root": "/u"}, Result.NOTE, "find /u -type d"),
        ("cgroup.delegation", {"jobs": ()}, Result.UNKNOWN, ""),
        (
            "cgroup.delegation",
            {"undelegated": {"/prefetchd.slice/a": ("/", "/prefetchd.slice")}},
            Result.FAILED,
            "subtree_control; echo +io > /sys/fs/cgroup/prefetchd.slice/cgroup.subtree_control",
        ),
        (
            "cgroup.delegation",
            {"undelegated": {"/prefetchd.slice/a": ("/",)}, "enabling_allowed": True},
            Result.NOTE,
            "",
        ),
        ("cgroup.io_max", {"limits": {"/prefetchd.slice/a": "io.max: 8:0 rbps=1"}}, Result.WARNING, "rbps=max"),
        ("cgroup.io_latency", {"latencies": {"/a": "io.latency: 8:0 target=5"}}, Result.WARNING, "target=0"),
        ("cgroup.io_weight", {"weights": {"/a": "io.weight: default 500"}}, Result.WARNING, "actuator"),
        ("cgroup.io_cost", {"cost": frozenset({"8:0"})}, Result.NOTE, "io.cost.qos"),
        ("cgroup.siblings", {"weighed": True, "jobs": APART}, Result.WARNING, 'actuator = "io.max"'),
    ],
)
def test_cgroups(name, changes, result, fix):
    finding = named(judge_cgroups(**changes), name)
    assert finding.result is result
    assert fix in finding.fix


def test_weights_are_fine_among_siblings_and_caps_anywhere():
    beside = (APART[0], replace(APART[1], path="/prefetchd.slice/scan"))
    for changes in ({"weighed": True, "jobs": beside}, {"weighed": False, "jobs": APART}):
        assert "cgroup.siblings" not in [one.name for one in judge_cgroups(**changes)]


def test_limits_of_the_running_agent_are_no_conflict():
    limits = {"/prefetchd.slice/a": "io.max: 8:0 rbps=1"}
    assert named(judge_cgroups(agent_runs=True, limits=limits), "cgroup.io_max").result is Result.OK


def test_many_jobs_are_counted_not_listed():
    jobs = tuple(Job(i, f"j{i}", f"/prefetchd.slice/j{i}", training=True) for i in range(40))
    evidence = named(judge_cgroups(jobs=jobs), "cgroup.jobs").evidence
    assert evidence.startswith("40 training job(s)")
    assert "and 37 more" in evidence


@pytest.mark.parametrize(
    ("name", "changes", "result"),
    [
        ("state.directory", {"writable": False}, Result.UNKNOWN),
        ("state.directory", {"free_bytes": 1000}, Result.FAILED),
        ("state.instance", {"lock_readable": False}, Result.UNKNOWN),
        ("state.instance", {"holder": 42, "holder_alive": True}, Result.OK),
        ("state.instance", {"holder": -1}, Result.OK),
        ("state.address", {"address_taken": True}, Result.FAILED),
        ("state.address", {"address_taken": True, "holder": 42}, Result.OK),
        ("state.kill_switch", {"kill_switch": "/run/prefetchd/disable"}, Result.WARNING),
    ],
)
def test_state(name, changes, result):
    assert named(state.check(replace(GOOD_STATE, **changes), answers=False), name).result is result


def test_an_agent_that_answers_with_another_state_directory_is_told_once():
    findings = state.check(replace(GOOD_STATE, address_taken=True), answers=True)
    (told,) = [one for one in findings if one.result is not Result.OK]
    assert (told.name, told.result) == ("state.instance", Result.NOTE)
    assert "keeps its state elsewhere than in /run/prefetchd" in told.evidence


def test_an_agent_that_runs_and_does_not_answer_is_told_once(tmp_path):
    host = lay_out(tmp_path, {"run/prefetchd/lock": "4711\n", "proc/4711/stat": ""})
    with (tmp_path / "run/prefetchd/lock").open() as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        findings = run_checks(host, Config(metrics=MetricsSection(listen="127.0.0.1:1")), None)
    assert named(findings, "state.instance").evidence == "an agent runs as process 4711"
    told = [one for one in findings if one.name.startswith(("agent.", "state.")) and one.result is not Result.OK]
    assert [(one.name, one.result) for one in told] == [("agent.answers", Result.WARNING)]
    assert "--address" in told[0].fix
    assert "compiles its probes" in told[0].fix


def test_why_a_running_agent_was_not_understood_is_told():
    (told,) = agent_checks.check(None, runs=True, kprobes=True, silence="It wants a password; give --auth FILE.")
    assert told.detail == "It wants a password; give --auth FILE."


def test_limits_of_an_agent_that_does_not_answer_are_no_conflict(tmp_path):
    files = {
        "run/prefetchd/lock": "4711\n",
        "proc/self/mountinfo": CGROUP2,
        "sys/fs/cgroup/cgroup.controllers": "io",
        "sys/fs/cgroup/cgroup.subtree_control": "io",
        "sys/fs/cgroup/prefetchd.slice/a/io.max": "8:0 rbps=1000 wbps=max riops=max wiops=max\n",
    }
    host, config = lay_out(tmp_path, files), Config(jobs=(JobRule(cgroup="/prefetchd.slice/*"),))
    assert named(run_checks(host, config, None), "cgroup.io_max").result is Result.WARNING
    with (tmp_path / "run/prefetchd/lock").open() as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        assert named(run_checks(host, config, None), "cgroup.io_max").result is Result.OK


def judge_devices(facts=None, refused=(), **changes):
    return list(devices.check(devices.DeviceMap((replace(GOOD_DEVICES.devices[0], **changes),), refused)))


@pytest.mark.parametrize(
    ("name", "changes", "result", "fix"),
    [
        ("medium", {"virtual": True, "device": replace(DISK, rotational=True)}, Result.WARNING, 'medium = "ssd"'),
        (
            "medium",
            {"virtual": True, "device": replace(DISK, rotational=True), "rule": None},
            Result.WARNING,
            'Make the [[devices]] entry of /dev/nvme0n1 in the configuration: device = "/dev/nvme0n1", medium = "ssd"',
        ),
        ("capacity", {"rule": None}, Result.NOTE, "prefetchd calibrate /dev/nvme0n1"),
        (
            "capacity",
            {"rule": DeviceRule(device="nvme0n1", read_bytes_per_second=1e9)},
            Result.NOTE,
            "prefetchd calibrate",
        ),
        ("wbt", {"wbt_us": 2000}, Result.NOTE, "wbt_lat_usec"),
        ("scheduler", {"scheduler": "bfq"}, Result.WARNING, "io.bfq.weight"),
        (
            "scheduler",
            {"rule": DeviceRule(device="nvme0n1", read_bytes_per_second=1e9, actuator="io.bfq.weight")},
            Result.FAILED,
            "echo bfq",
        ),
    ],
)
def test_devices(name, changes, result, fix):
    finding = named(judge_devices(**changes), f"device.nvme0n1.{name}")
    assert finding.result is result
    assert fix in finding.fix


def test_a_rule_without_a_device_is_named():
    finding = named(judge_devices(refused=(("/dev/sdz", "'/dev/sdz' is no block device"),)), "device./dev/sdz")
    assert finding.blocks == "enforcing"


def test_no_disk_at_all():
    assert [one.name for one in devices.check(devices.DeviceMap(()))] == ["device.none"]


@pytest.mark.parametrize(
    ("facts", "result"),
    [
        (remote.RemoteFacts((), (), nfs_known=False, events=None), Result.NOTE),
        (remote.RemoteFacts(("/mnt",), (), nfs_known=True, events=None), Result.UNKNOWN),
        (remote.RemoteFacts(("/mnt",), (), nfs_known=True, events=frozenset()), Result.FAILED),
        (remote.RemoteFacts((), (), nfs_known=True, events=frozenset()), Result.WARNING),
        (remote.RemoteFacts(("/mnt",), (), nfs_known=True, events=frozenset(remote.NFS_EVENTS)), Result.OK),
    ],
)
def test_nfs(facts, result):
    assert named(remote.check(facts), "remote.nfs").result is result


def test_running_agent_speaks_for_its_probes():
    answer = {
        "policy": "adaptive",
        "mode": "observe",
        "jobs": [{}],
        "conflicts": 2,
        "notes": ["blind"],
        "probes": [
            {"name": "block", "state": "attached", "tier": "fentry", "why": "", "lost": 3},
            {"name": "nfs", "state": "unavailable", "tier": "", "why": "no sunrpc", "lost": 0},
        ],
    }
    findings = list(agent_checks.check(answer, runs=True, kprobes=True))
    lost = named(findings, "probe.block").evidence
    assert "3 events lost: requests that found no room in a table, or whose end the kernel did not show" in lost
    assert "a burst that is over does no harm" in lost
    assert "no sunrpc" in named(findings, "probe.nfs").evidence
    assert named(findings, "agent.conflicts").result is Result.WARNING
    assert named(findings, "agent.note").evidence == "blind"
    assert [one.result for one in agent_checks.check(None, runs=False, kprobes=True)] == [Result.NOTE]


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("page_cache", "calls that found no room in a table"),
        ("dataloader", "came faster than the agent took them"),
        ("links", "looks that failed"),
    ],
)
def test_what_a_probe_lost_is_told_with_what_it_matters(name, words):
    finding = agent_checks.probe_finding({"name": name, "state": "degraded", "why": "x", "lost": 24}, kprobes=True)
    assert re.search(rf"degraded: x, 24 .*{words}", finding.evidence)


@pytest.mark.parametrize(
    ("counts", "result"),
    [
        ({"received": 5, "unmanaged": 5}, Result.NOTE),
        ({"received": 5, "unmanaged": 3, "malformed": 2}, Result.NOTE),
        ({"received": 5, "unmanaged": 4}, Result.OK),
        ({"received": 0, "unmanaged": 0}, Result.OK),
        ({}, Result.OK),
    ],
)
def test_hints_that_all_are_refused_are_a_note(counts, result):
    finding = agent_checks.probe_finding({"name": "hint", "state": "attached", "counts": counts}, kprobes=True)
    assert finding.result is result
    if result is Result.NOTE:
        assert "none of the 5 hints that came counts: " in finding.evidence
        assert "unmanaged: the sender runs outside the jobs' cgroups; compare its /proc/PID/cgroup" in finding.fix
        assert ("malformed: the calls are wrong" in finding.fix) == ("malformed" in counts)


@pytest.mark.parametrize(
    ("tier", "fix"), [("tracepoint", "The check kernel.kprobes names"), ("", "checks under kernel.*")]
)
def test_the_fix_of_a_probe_names_the_check_that_matters(tier, fix):
    probe = {"name": "fuse", "state": "degraded", "tier": tier, "why": "x"}
    assert fix in agent_checks.probe_finding(probe, kprobes=False).fix


def test_free_room_is_told_with_the_folder_once():
    def evidence(folder):
        facts = replace(GOOD_STATE, folder=folder)
        return named(state.check(facts, answers=False), "state.directory").evidence

    assert evidence("/run/prefetchd") == "1,024 MiB free at /run/prefetchd"
    assert evidence("/run") == "1,024 MiB free at /run for /run/prefetchd"


def test_a_state_directory_that_is_there_is_not_said_to_be_made():
    def evidence(folder):
        facts = replace(GOOD_STATE, folder=folder, writable=False)
        return named(state.check(facts, answers=False), "state.directory").evidence

    assert evidence("/run/prefetchd") == "/run/prefetchd is not writable for this user"
    assert evidence("/run") == "/run is not writable for this user, and /run/prefetchd must be made there"


def test_the_doctor_does_not_advise_what_was_just_done():
    told = {mode: doctor.summary([ENFORCING], ["error"], mode, everything=True) for mode in doctor.MODES}
    assert "--mode enforce shows" in told["observe"]
    assert told["enforce"].endswith("limits cannot be enforced yet (mend the errors first).")
    (silent,) = agent_checks.check(None, runs=False, kprobes=True)
    assert "doctor --attach --all" in silent.fix
    assert doctor._without_advice(silent).fix == ""
    assert doctor._without_advice(ENFORCING) is ENFORCING


def lay_out(root: Path, files: dict[str, str | bytes]) -> Host:
    for name, content in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return Host(root)


CGROUP2 = "30 23 0:26 / /sys/fs/cgroup rw,nosuid - cgroup2 cgroup2 rw,nsdelegate\n"


def test_a_cache_of_both_media_that_is_named_in_place_of_its_disks():
    def mapped(number, *members, medium="ssd"):
        name = f"dm-{number[4:]}"
        return BlockDevice(number, name, medium, rotational=False, size_bytes=1, kind="dm", members=members)

    spinning = BlockDevice("8:0", "sda", "hdd", rotational=True, size_bytes=1, kind="disk")
    stack = [mapped("253:0", "253:1", "253:2", medium="hdd"), mapped("253:1", "259:0"), mapped("253:2", "8:0")]

    def findings(*ruled):
        rows = [
            devices.DeviceFacts(one, "none", 0, virtual=False, rule=FULL_RULE if one.device in ruled else None)
            for one in (*stack, DISK, spinning)
        ]
        return [one for one in devices.check(devices.DeviceMap(tuple(rows))) if one.name.endswith(".joined")]

    assert findings() == findings("259:0", "8:0", "253:1") == []
    (told,) = findings("253:0")
    assert (told.name, told.result) == ("device.dm-0.joined", Result.WARNING)
    assert "/dev/nvme0n1 (ssd), /dev/sda (hdd)" in told.fix


def test_a_device_is_named_by_a_path_on_it_as_the_agent_takes_it_and_twice_is_told(tmp_path):
    disk = "sys/class/block/sda"
    host = lay_out(
        tmp_path,
        {
            "proc/self/mountinfo": "40 23 8:0 / /no/such/data rw - ext4 /dev/sda rw\n",
            **{f"{disk}/{name}": text for name, text in (("dev", "8:0"), ("size", "2048"), ("queue/rotational", "1"))},
        },
    )
    (tmp_path / "sys/dev/block").mkdir(parents=True)
    (tmp_path / "sys/dev/block/8:0").symlink_to("../../class/block/sda")
    rules = (DeviceRule(device="/no/such/data"), DeviceRule(device="sda", medium="ssd"))
    assert devices.gather(host, Config(devices=rules[:1])).devices[0].rule == rules[0]
    seen = devices.gather(host, Config(devices=rules))
    assert (seen.refused, seen.devices[0].rule) == ((), rules[1])
    told = named(devices.check(seen), "device./no/such/data")
    assert told.result is Result.WARNING
    assert "same device as 'sda'" in told.evidence


def test_rules_by_label_are_judged_where_labels_are_known(tmp_path):
    """The chart selects by labels alone: without them no job is seen, and no path of one is checked."""
    uid = "11111111-2222-3333-4444-555555555555"
    group = f"kubepods.slice/kubepods-pod{uid.replace('-', '_')}.slice"
    host = lay_out(tmp_path, {
        "proc/self/mountinfo": CGROUP2,
        "sys/fs/cgroup/cgroup.controllers": "io",
        "sys/fs/cgroup/cgroup.subtree_control": "io",
        "sys/fs/cgroup/kubepods.slice/cgroup.subtree_control": "",
        f"sys/fs/cgroup/{group}/io.max": "",
    })  # fmt: skip
    config = Config(jobs=(JobRule(cgroup="/kubepods.slice/**", label="prefetchd.io/training=true"),))
    pods = {uid: PodInfo("bert-0", "ml", {"prefetchd.io/training": "true"})}.get
    known = cgroups.gather(host, config, pods)
    assert [job.pod for job in known.jobs] == ["bert-0"]
    assert named(cgroups.check(known, agent_runs=False), "cgroup.delegation").result is Result.FAILED
    assert "not known here" not in named(cgroups.check(known, agent_runs=False), "cgroup.jobs").evidence
    others = Config(jobs=(), best_effort=(BestEffortRule(cgroup="/kubepods.slice/**", label="a"),))
    for unknown in (cgroups.gather(host, config), cgroups.gather(host, others)):
        told = named(cgroups.check(unknown, agent_runs=False), "cgroup.jobs")
        assert "labels of pods are not known here" in told.evidence
        assert told.fix.startswith("Run the doctor in the agent's pod.")


@pytest.mark.parametrize("answers", [True, False])
def test_the_doctor_in_a_pod_asks_for_labels_where_rules_do(monkeypatch, answers):
    class Watch:
        closed = False

        def start(self):
            pass

        def wait(self, seconds):
            return answers

        def close(self):
            self.closed = True

    watch = Watch()
    monkeypatch.setattr(doctor.kube, "from_environment", lambda: watch)
    by_label = Config(jobs=(JobRule(cgroup="/a", label="b"),))
    assert doctor.known_pods(by_label) is (watch if answers else None)
    assert watch.closed
    assert doctor.known_pods(Config()) is None


def test_gathering_from_a_made_up_host(tmp_path):
    host = lay_out(
        tmp_path,
        {
            "proc/self/mountinfo": CGROUP2 + "40 23 0:50 / /mnt/d rw - nfs4 srv:/x rw,vers=4.2\n",
            "proc/filesystems": "nodev\tsysfs\nnodev\tnfs4\n\text4\n",
            "proc/config.gz": gzip.compress(b"CONFIG_BPF=y\n# CONFIG_KPROBES is not set\nCONFIG_PSI=y\n"),
            "proc/pressure/io": "some avg10=1.50 avg60=0.00 avg300=0.00 total=5\n",
            "proc/sys/kernel/unprivileged_bpf_disabled": "2",
            "proc/sys/kernel/osrelease": "6.9.9-made-up",
            "sys/kernel/btf/vmlinux": b"x" * 100,
            "sys/kernel/tracing/events/block/block_rq_issue/id": "1",
            "sys/fs/cgroup/cgroup.controllers": "cpu io memory",
            "sys/fs/cgroup/cgroup.subtree_control": "cpu io",
            "sys/fs/cgroup/io.cost.qos": "259:0 enable=1 ctrl=auto\n",
            "sys/fs/cgroup/prefetchd.slice/cgroup.subtree_control": "cpu",
            "sys/fs/cgroup/prefetchd.slice/a/io.max": "8:0 rbps=1000 wbps=max riops=max wiops=max\n",
            "sys/fs/cgroup/prefetchd.slice/a/io.weight": "default 100\n",
        },
    )
    config = Config(
        jobs=(JobRule(cgroup="/prefetchd.slice/*"),), best_effort=(BestEffortRule(cgroup="/batch.slice/*"),)
    )
    seen = kernel.gather(host)
    assert (seen.release, seen.bpf, seen.btf_bytes, seen.kprobes) == ("6.9.9-made-up", True, 100, False)
    assert seen.events == {"block/block_rq_issue"}
    assert seen.config == {"CONFIG_BPF": "y", "CONFIG_PSI": "y"}
    groups = cgroups.gather(host, config)
    assert groups.hierarchy.problem is None
    assert [job.path for job in groups.jobs] == ["/prefetchd.slice/a"]
    assert groups.undelegated == {"/prefetchd.slice/a": ("/prefetchd.slice",)}
    assert "rbps=1000" in groups.limits["/prefetchd.slice/a"]
    assert groups.weights == {}
    assert groups.cost == {"259:0"}
    assert groups.idle_rules == ("/batch.slice/*",)
    assert not groups.weighed
    rule = DeviceRule(device="/dev/sda", medium="hdd", actuator="io.bfq.weight")
    assert cgroups.gather(host, msgspec.structs.replace(config, devices=(rule,))).weighed
    mounts = remote.gather(host)
    assert mounts.nfs_mounts == ("/mnt/d",)
    assert mounts.events == frozenset()
    assert named(pressure.check(pressure.gather(host)), "host.psi").result is Result.OK


def test_host_without_pressure_or_with_an_odd_one(tmp_path):
    assert named(pressure.check(pressure.gather(Host(tmp_path))), "host.psi").result is Result.NOTE
    host = lay_out(tmp_path, {"proc/pressure/io": "weird line\n"})
    assert named(pressure.check(pressure.gather(host)), "host.psi").result is Result.WARNING


def test_an_empty_host_is_unknown_not_a_crash(tmp_path):
    findings = run_checks(Host(tmp_path), Config(), None)
    assert named(findings, "kernel.bpf").result is Result.FAILED
    assert any(finding.result is Result.UNKNOWN for finding in findings)


def test_the_lock_names_its_holder(tmp_path):
    lock = tmp_path / "lock"
    assert state.lock_holder(lock) == (None, True)
    with lock.open("w") as file:
        file.write("4711\n")
        file.flush()
        assert state.lock_holder(lock) == (None, True)
        fcntl.flock(file, fcntl.LOCK_EX)
        assert state.lock_holder(lock) == (4711, True)
        file.truncate(0)
        assert state.lock_holder(lock) == (-1, True)


def test_state_facts_find_the_nearest_folder(tmp_path):
    config = Config(
        enforcement=EnforcementSection(
            state_directory=str(tmp_path / "not/yet"), kill_switch_file=str(tmp_path / "disable")
        ),
        metrics=MetricsSection(listen="127.0.0.1:1"),
    )
    (tmp_path / "disable").touch()
    facts = state.gather(Host(), config)
    assert facts.folder == str(tmp_path)
    assert facts.kill_switch == str(tmp_path / "disable")
    assert not facts.address_taken


ENFORCING = failed("a", "x", "y", "enforcing")
MEASURING = failed("b", "x", "y", "measuring")


@pytest.mark.parametrize(
    ("finding", "mode", "level", "status"),
    [
        (ENFORCING, "observe", "warning", 0),
        (ENFORCING, "dry-run", "warning", 0),
        (ENFORCING, "enforce", "error", 3),
        (MEASURING, "observe", "error", 3),
        (warning("c", "x", "y"), "enforce", "warning", 0),
        (Finding("d", Result.UNKNOWN, ""), "enforce", "unknown", 0),
    ],
)
def test_severity_depends_on_the_mode(finding, mode, level, status):
    assert severity(finding, mode) == level
    assert matters(finding, mode) == (status == 3)
    assert doctor.exit_status([finding], mode, strict=False) == status
    strict = 3 if level in ("error", "warning") else 0
    assert doctor.exit_status([finding], mode, strict=True) == strict


def test_text_shows_the_worst_first_and_hides_what_is_ok(capsys):
    doctor.show([Finding("fine", Result.OK, "good"), ENFORCING, MEASURING], "observe", everything=False)
    out = capsys.readouterr().out
    assert out.index("error    b") < out.index("warning  a")
    assert "fix: y" in out
    assert "fine" not in out
    assert "3 checks: 1 ok, 1 warning, 1 error (--all shows what is ok)" in out
    assert "\033" not in out


def tier_probes(*, kprobes):
    rows = [("block", "throttle wait is unknown"), ("fuse", "waits are unknown"), ("page_cache", "splice is not seen")]
    probes = [
        {"name": name, "state": "degraded", "tier": "tracepoint", "why": why, "detail": f"cannot attach {name}.c"}
        for name, why in rows
    ]
    findings = [*judge_kernel(kprobes=kprobes), *agent_checks.check({"probes": probes}, runs=True, kprobes=kprobes)]
    return findings, [why for _, why in rows]


def test_what_one_cause_explains_is_told_once_with_its_fix(capsys):
    findings, reasons = tier_probes(kprobes=False)
    doctor.show(findings, "observe", everything=False)
    out = capsys.readouterr().out
    assert [line.split()[:2] for line in out.splitlines() if line.startswith("warning")] == [
        ["warning", "kernel.kprobes"]
    ]
    assert out.count("fix:") == 1
    assert all(reason in out for reason in reasons)
    assert "cannot attach" not in out
    assert "1 warning" in out
    doctor.show(findings, "observe", everything=True)
    out = capsys.readouterr().out
    assert out.count("\nwarning") + out.startswith("warning") == 3
    assert "said: cannot attach fuse.c" in out


def test_the_module_that_is_missing_is_told_once(capsys):
    why = "tracepoints of nfs and sunrpc are missing: the module is not loaded"
    answer = {"probes": [{"name": "nfs", "state": "unavailable", "tier": "", "why": why}]}
    facts = remote.RemoteFacts((), (), nfs_known=False, events=None)
    findings = [*remote.check(facts), *agent_checks.check(answer, runs=True, kprobes=True)]
    doctor.show(findings, "observe", everything=False)
    out = capsys.readouterr().out
    assert sum(line.startswith("note ") for line in out.splitlines()) == 1
    assert f"probe.nfs: unavailable: {why}" in out


def test_what_kprobes_do_not_explain_keeps_its_line(capsys):
    findings, _ = tier_probes(kprobes=True)
    doctor.show(findings, "observe", everything=False)
    out = capsys.readouterr().out
    assert sum(line.startswith("warning  probe.") for line in out.splitlines()) == 3
    assert "said: cannot attach block.c" in out


def run_doctor(*arguments, **keywords):
    command = [sys.executable, "-m", "agent", "doctor", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=60, **keywords)


def test_command_on_this_machine(tmp_path):
    config = tmp_path / "c.toml"
    config.write_text(f'[enforcement]\nstate_directory = "{tmp_path}"\n[metrics]\nlisten = "127.0.0.1:1"\n')
    done = run_doctor("--config", str(config), "--json")
    told = json.loads(done.stdout)
    assert done.returncode == (0 if told["can"]["observe"] else 3), done.stderr
    assert told["mode"] == "observe"
    assert {"kernel.btf", "cgroup.hierarchy", "runtime.bcc"} <= {check["check"] for check in told["checks"]}
    assert all(check["fix"] for check in told["checks"] if check["severity"] in ("error", "warning"))


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to become somebody else")
def test_command_without_root_says_what_it_can(tmp_path):
    done = subprocess.run(
        ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups", sys.executable, "-m", "agent", "doctor",
         "--json", "--address", "127.0.0.1:1"],
        capture_output=True, text=True, check=False, timeout=60, env={"PATH": os.environ["PATH"]},
    )  # fmt: skip
    told = json.loads(done.stdout)
    levels = {check["check"]: check["severity"] for check in told["checks"]}
    assert done.returncode == 3
    assert levels["runtime.rights"] == "error"
    assert levels["kernel.btf"] == "ok"


def test_broken_configuration_is_one_sentence(tmp_path):
    config = tmp_path / "c.toml"
    config.write_text("mood = 1\n")
    done = run_doctor("--config", str(config))
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert "'mood'" in done.stderr


@pytest.mark.parametrize(
    ("text", "secret"),
    [
        ("rw,username=me,password=hunter2,vers=3", "hunter2"),
        ('{"password": "hunter2", "x": 1}', "hunter2"),
        ("https://me:hunter2@host/bucket", "hunter2"),
        ("//me:hunter2@host/share /mnt cifs", "hunter2"),
        ("Authorization: Bearer hunter2hunter2", "hunter2hunter2"),
        ("AWS_SECRET_ACCESS_KEY=hunter2", "hunter2"),
        ("rw,secretfile=/etc/ceph/hunter2", "hunter2"),
        ("token: 'hunter2'", "hunter2"),
        ("password=1}hunter2", "hunter2"),
    ],
)
def test_credentials_are_masked(text, secret):
    assert secret not in mask(text)
    assert "***" in mask(text)


def test_masking_leaves_the_rest():
    text = "259:0 rbps=1000 /user.slice/user-1000.slice: fine, tokens per second 3"
    assert mask(text) == text


def test_masked_json_is_json_still():
    answer = {"passes": 29, "password": "hunter2", "token": 5, "x": [1, {"secret-key": None}]}
    masked = {"passes": 29, "password": "***", "token": "***", "x": [1, {"secret-key": "***"}]}
    assert json.loads(mask(json.dumps(answer))) == masked
    assert json.loads(mask(json.dumps(answer, indent=1))) == masked


def test_bundle_holds_what_helps_and_nothing_secret(tmp_path, monkeypatch):
    monkeypatch.setenv("API_TOKEN", "planted-in-the-environment")
    key = tmp_path / "key.pem"
    key.write_text("planted-in-a-key-file")
    config = Config(metrics=MetricsSection(listen="127.0.0.1:1", certificate=str(key), key=str(key)))
    path = tmp_path / "out.tar.gz"
    members = write_bundle(path, [ENFORCING], "observe", config, None)
    assert path.stat().st_mode & 0o777 == 0o600
    with tarfile.open(path) as archive:
        texts = {member.name: archive.extractfile(member).read().decode() for member in archive.getmembers()}
    assert set(texts) == {f"prefetchd-support/{name}" for name in members}
    assert {"README.txt", "doctor.json", "config.json", "host/proc/diskstats"} <= set(members)
    assert not any("planted" in text for text in texts.values())
    assert json.loads(texts["prefetchd-support/config.json"])["mode"] == "observe"


def test_bundle_that_cannot_be_written_is_one_sentence(tmp_path):
    done = run_doctor("--address", "127.0.0.1:1", "--bundle", str(tmp_path / "missing/x.tar.gz"))
    assert done.returncode == 2
    assert "choose another path" in done.stderr
    assert "Traceback" not in done.stderr
