import pytest

from cgroup.patterns import matches

POD = "/kubepods.slice/kubepods-burstable.slice/kubepods-burstable-podab_c.slice"


@pytest.mark.parametrize(
    ("pattern", "path", "expected"),
    [
        ("/kubepods.slice/**/kubepods-*pod*.slice", POD, True),
        ("/kubepods.slice/**/kubepods-*pod*.slice", "/kubepods.slice/kubepods-podabc.slice", True),
        ("/kubepods.slice/**/kubepods-*pod*.slice", "/kubepods.slice/kubepods-burstable.slice", False),
        ("/kubepods.slice/**/kubepods-*pod*.slice", POD + "/cri-containerd-x.scope", False),
        ("/batch.slice/*", "/batch.slice/a", True),
        ("/batch.slice/*", "/batch.slice", False),
        ("/batch.slice/*", "/batch.slice/a/b", False),
        ("/batch.slice/**", "/batch.slice/a/b", True),
        ("/batch.slice/**", "/batch.slice", False),
        ("/**/job_*", "/job_1", True),
        ("/**/job_*", "/system.slice/slurmstepd.scope/job_1", True),
        ("**", "/a/b", True),
        ("/**/**/x", "/x", True),
        ("/train[0-9].slice", "/train7.slice", True),
        ("/train[!0-9].slice", "/train7.slice", False),
        ("/a[/]b", "/a/b", False),
        ("/a[!x]b", "/a/b", False),
        ("/?", "/a", True),
        ("/?", "/ab", False),
        ("/a[b", "/a[b", True),
        ("/[]]", "/]", True),
        ("/[^]]", "/a", True),
        ("/a.slice", "/axslice", False),
        ("/system-serial\\x2dgetty.slice", "/system-serial\\x2dgetty.slice", True),
        ("/job/", "/job", True),
        ("/", "/", True),
        ("/", "/a", False),
        ("/[z-a]", "/a", False),
        ("/a\n*", "/a\nb", True),
    ],
)
def test_matches(pattern, path, expected):
    assert matches(pattern, path) is expected
