from pathlib import Path

import pytest

from cgroup.pods import ContainerRef, ExecRef, Owner, PodRef, SlurmRef, UnitRef, identify, protected

LAYOUTS = sorted((Path(__file__).parent / "fixtures" / "layouts").glob("*.txt"))


def rows():
    for file in LAYOUTS:
        for line in file.read_text().splitlines():
            if not line.startswith("#"):
                path, _, owner = line.partition("  ")
                yield pytest.param(path, owner, id=f"{file.stem}:{path[-40:]}")


def spelled(owner: Owner | None):
    match owner:
        case PodRef():
            return f"pod {owner.uid} {owner.container_id or '-'} {owner.runtime or '-'} {owner.qos}"
        case ContainerRef():
            return f"container {owner.container_id} {owner.runtime}"
        case SlurmRef():
            return f"slurm {owner.job} {owner.step or '-'}"
        case ExecRef():
            return f"exec {owner.name}"
        case UnitRef():
            return f"unit {owner.unit}"
    return "none"


@pytest.mark.parametrize(("path", "owner"), list(rows()))
def test_layouts(path, owner):
    assert spelled(identify(path)) == owner


def test_a_restarted_container_is_the_same_job():
    pod = "/kubepods.slice/kubepods-pod3f0b6a1e_92c4_4d5b_8a77_0c1d2e3f4a5b.slice"
    before = identify(f"{pod}/cri-containerd-{'a' * 64}.scope")
    after = identify(f"{pod}/cri-containerd-{'b' * 64}.scope")
    assert before is not None
    assert after is not None
    assert before != after
    assert before.key == after.key == "pod:3f0b6a1e-92c4-4d5b-8a77-0c1d2e3f4a5b"


def test_every_owner_has_a_key_that_outlives_its_parts():
    job = "/system.slice/slurmstepd.scope/job_7"
    paths = [
        f"{job}/step_0/user",
        f"{job}/step_batch",
        "/prefetchd.slice/a/b",
        f"/docker/{'c' * 64}",
        "/system.slice/x.service/y",
    ]
    keys = [owner.key for owner in map(identify, paths) if owner]
    assert keys == ["slurm:7", "slurm:7", "exec:a", f"container:{'c' * 64}", "unit:x.service"]


@pytest.mark.parametrize(
    "path",
    [
        "/", "/system.slice", "/user.slice", "/init.scope", "/machine.slice", "/kubelet.slice", "/kubepods.slice",
        "/kubepods", "/kubepods.slice/kubepods-burstable.slice", "/kubepods/besteffort",
        "/docker/x/kubelet/kubepods/burstable",
        "/kubelet.slice/kubelet-kubepods.slice/kubelet-kubepods-besteffort.slice", "/system.slice/kubelet.service",
        "/system.slice/containerd.service", "/system.slice/ssh.service", "/system.slice/systemd-journald.service",
        "/system.slice/slurmstepd.scope", "/slurm", "/slurm/uid_1000", "/runtime.slice",
        "/system.slice/prefetchd.service",
    ],
)  # fmt: skip
def test_what_keeps_the_node_alive_is_protected(path):
    assert protected(path)


@pytest.mark.parametrize(
    "path",
    [
        "/train.slice/j1", "/system.slice/train.service", "/kubepods.slice/kubepods-podx.slice", "/burstable/x",
        "/batch.slice",
        "/system.slice/slurmstepd.scope/job_1", "/prefetchd.slice/a", "/user.slice/user-1000.slice/session-3.scope",
    ],
)  # fmt: skip
def test_jobs_are_not_protected(path):
    assert protected(path) is None
