"""Which namespaces the processes of cgroups are in, on trees made of plain files, and a thread that must come home."""

import errno
import threading

import pytest

from bpf import net_namespaces
from bpf.net_namespaces import Found, StrandedError, find_namespaces, own_namespace, visited


@pytest.fixture
def node(tmp_path):
    """A cgroup tree and a /proc; `put(cgroup, process, namespace)` gives the cgroup's id and the namespace's."""
    root, proc, spaces = tmp_path / "cgroup", tmp_path / "proc", tmp_path / "spaces"
    for folder in (root, proc, spaces):
        folder.mkdir()

    def put(cgroup, process, namespace=None):
        folder = root / cgroup
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / "cgroup.procs").open("a") as file:
            file.write(f"{process}\n")
        if namespace is not None:
            (spaces / namespace).touch()
            (proc / str(process) / "ns").mkdir(parents=True)
            (proc / str(process) / "ns/net").symlink_to(spaces / namespace)
        return folder.stat().st_ino, (spaces / namespace).stat().st_ino if namespace else None

    put.root, put.proc = root, proc
    return put


def test_processes_of_managed_cgroups_and_of_what_is_below(node):
    job, near = node("a/job", 10, "near")
    node("a/job/container/deep", 11, "far")
    node("a/job/container/deep", 12, "far")
    node("a/other", 13, "unmanaged")
    far = node("b", 14, "far")[1]
    found = find_namespaces(node.root, [job], node.proc)
    assert found == Found({near: [10], far: [11, 12]}, "")


def test_processes_that_have_ended_and_cgroups_that_are_gone(node):
    job, _ = node("job", 10)
    (node.root / "job/emptied").mkdir()
    assert find_namespaces(node.root, [job, 2**63], node.proc) == Found({}, "")
    assert find_namespaces(node.root / "nowhere", [job], node.proc) == Found({}, "")


def test_processes_of_another_pid_namespace_are_told(node):
    job, _ = node("job", 0)
    _, near = node("job", 10, "near")
    found = find_namespaces(node.root, [job], node.proc)
    assert found.processes == {near: [10]}
    assert "hostPID" in found.why


def test_a_process_that_may_not_be_looked_at_is_told(node):
    job, _ = node("job", 10)
    (node.proc / "10/ns").mkdir(parents=True)
    (node.proc / "10/ns/net").symlink_to("net")  # a loop: ELOOP, for root too
    assert "10/ns/net: Too many levels" in find_namespaces(node.root, [job], node.proc).why


def test_a_way_back_that_is_barred(monkeypatch):
    """Only in a thread made for it; what is entered here is its own namespace."""
    entered, outcome = [], []

    def enter(namespace):
        entered.append(namespace)
        if len(entered) == 2:
            raise PermissionError(errno.EPERM, "Operation not permitted")

    def visit():
        try:
            with visited([threading.get_native_id()]):
                pass
        except StrandedError as error:
            outcome.append(str(error))

    monkeypatch.setattr(net_namespaces, "_enter", enter)
    thread = threading.Thread(target=visit)
    thread.start()
    thread.join()
    assert outcome == ["the way back to the agent's network namespace is barred: Operation not permitted"]


def test_what_is_no_namespace_is_refused(node):
    node("job", 10, "a plain file")
    before = own_namespace()
    with pytest.raises(OSError, match="setns: E") as caught, visited([10], node.proc):
        pass
    assert caught.value.errno in (errno.EINVAL, errno.EPERM)
    assert own_namespace() == before
