"""Which cgroups become jobs: first rule wins, outermost cgroup wins, the node's own cgroups never."""

import re
import time
from pathlib import Path

from agent.config import parse
from agent.jobs import CLASS_ANNOTATION, WEIGHT_ANNOTATION, PodInfo, select_jobs
from cgroup.tree import Cgroup

POD = "/kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod0a1b2c3d_0000_1111_2222_333344445555.slice"
UID = "0a1b2c3d-0000-1111-2222-333344445555"
CONFIG = parse("""
[[jobs]]
cgroup = "/train.slice/*"
weight = 300
[[jobs]]
cgroup = "/kubepods.slice/**/kubepods-*pod*.slice"
label = "prefetchd.io/training=true"
[[best_effort]]
cgroup = "/batch.slice/**"
[[best_effort]]
cgroup = "/kubepods.slice/**/kubepods-*pod*.slice"
""")


def select(*paths, pods=None, config=CONFIG):
    tree = [Cgroup(100 + index, path) for index, path in enumerate(paths)]
    return select_jobs(tree, config, (pods or {}).get)


def test_training_and_best_effort():
    jobs = select("/", "/train.slice", "/train.slice/a", "/batch.slice/x", "/other.slice/a")
    assert {(job.id, job.name, job.training, job.weight) for job in jobs} == {
        (102, "a", True, 300.0),
        (103, "x", False, 100.0),
    }


def test_the_patterns_of_the_default_configuration_find_what_they_are_for():
    text = (Path(__file__).parents[3] / "packaging" / "prefetchd.toml").read_text()
    patterns = re.findall(r'(?m)^# \[\[jobs\]\]\n# (cgroup = "[^"]*")', text)
    config = parse("".join(f"[[jobs]]\n{pattern}\n" for pattern in patterns))
    services = {
        "/system.slice/slurmstepd.scope/job_7": "slurm-7",
        "/system.slice/node7_slurmstepd.scope/job_8": "slurm-8",
        "/system.slice/train-resnet.service": "train-resnet",
    }
    labelled = {UID: PodInfo("bert-0", "ml", {"prefetchd.io/training": "true"})}
    jobs = select(POD, *services, "/system.slice/sshd.service", pods=labelled, config=config)
    assert {job.path: job.name for job in jobs} == services | {POD: "bert-0"}


def test_the_agents_own_cgroups_are_no_jobs_whatever_the_pattern():
    """A helper that reads ahead would be capped for the sake of those it reads for, or be read ahead for itself."""
    text = """
    [[jobs]]
    cgroup = "/prefetchd.slice/*"
    [[best_effort]]
    cgroup = "/*"
    [rearrange]
    cgroup = "/prefetchd.slice/ahead/"
    [enforcement]
    guardian_cgroup = "/prefetchd-guardian"
    """
    own = ("/prefetchd.slice/ahead", "/prefetchd.slice/ahead-defragment", "/prefetchd-guardian")
    jobs = select("/", *own, "/prefetchd.slice/resnet", "/scan", config=parse(text))
    assert {job.path for job in jobs} == {"/prefetchd.slice/resnet", "/scan"}


def test_names_that_nobody_can_print_are_written_out():
    paths = ["/train.slice/\udcff\udc80x", "/train.slice/a\rb\x1b[31m", "/train.slice/作业 1"]
    names = [job.name for job in select(*paths)]
    assert names == ["a\\rb\\x1b[31m", "作业 1", "\\udcff\\udc80x"]
    assert all(name.encode() for name in names)
    assert [job.path for job in select(*paths)] == [paths[1], paths[2], paths[0]]


def test_names_stay_unique_where_one_is_called_as_another_is_renamed():
    config = parse('[[jobs]]\ncgroup = "/one/*"\nname = "a"\n[[jobs]]\ncgroup = "/two/*"')
    names = [job.name for job in select("/one/p", "/one/q", "/one/r", "/two/a-2", "/two/a", config=config)]
    assert sorted(names) == sorted(set(names))
    assert names[:3] == ["a", "a-2", "a-3"]


def test_thousands_of_cgroups_are_sorted_out_quickly():
    paths = [f"/train.slice/job{number}{below}" for number in range(3000) for below in ("", "/worker")]
    began = time.thread_time()
    assert len(select(*paths)) == 3000
    assert time.thread_time() - began < 2.0


def test_what_lies_below_a_job_belongs_to_it():
    assert [job.path for job in select("/batch.slice/x/y", "/batch.slice/x", "/train.slice/a/worker")] == [
        "/batch.slice/x"
    ]


def test_best_effort_never_holds_a_training_job():
    """A cap on the outer one would hold back the job inside, which nobody would even measure."""
    rules = '[[jobs]]\ncgroup = "/work.slice/**/train-*"\n[[best_effort]]\ncgroup = "/**"'
    paths = ["", "/u1", "/u1/train-a", "/u1/train-a/worker", "/u1/scan", "/u2", "/u2/scan", "/u2/deep/scan"]
    found = {job.path: job.training for job in select(*[f"/work.slice{path}" for path in paths], config=parse(rules))}
    assert found == {"/work.slice/u1/train-a": True, "/work.slice/u1/scan": False, "/work.slice/u2": False}


def test_pod_without_known_labels_is_best_effort_by_the_later_rule():
    (job,) = select(POD)
    assert (job.name, job.training) == (UID, False)


def test_pod_with_label_is_training_and_named():
    (job,) = select(POD, pods={UID: PodInfo("bert-0", "ml", {"prefetchd.io/training": "true"})})
    assert (job.name, job.namespace, job.pod, job.training) == ("bert-0", "ml", "bert-0", True)


def test_annotations_set_class_and_weight(caplog):
    labels = {"prefetchd.io/training": "true"}
    pod = PodInfo("a", "b", labels, {CLASS_ANNOTATION: "best-effort", WEIGHT_ANNOTATION: "250"})
    (job,) = select(POD, pods={UID: pod})
    assert (job.training, job.weight) == (False, 250.0)
    (job,) = select(POD, pods={UID: PodInfo("a", "b", labels, {WEIGHT_ANNOTATION: "heavy"})})
    assert job.weight == 100.0
    assert "'heavy'" in caplog.text


def test_protected_cgroups_are_never_taken():
    config = parse('[[best_effort]]\ncgroup = "/**"')
    paths = [job.path for job in select("/", "/system.slice", "/kubepods.slice", "/mine", config=config)]
    assert paths == ["/mine"]


def test_equal_names_are_told_apart():
    config = parse('[[jobs]]\ncgroup = "/*/job"')
    assert [job.name for job in select("/a/job", "/b/job", "/c/job", config=config)] == ["job", "job-2", "job-3"]
