"""Which Debian package holds a kernel, and which of several releases is the newest."""

import pytest

from tests.lab import LabBroken
from tests.lab.kernel import newest, real_package, release_of, usable_releases

BOOKWORM = "linux-image-amd64\n  Depends: linux-image-6.1.0-57-amd64\n"
ALTERNATIVES = """linux-image-amd64
 |Depends: linux-image-6.12.48+deb13-amd64
  Depends: linux-image-6.12.48+deb13-amd64-unsigned
  Recommends: firmware-linux-free
"""


@pytest.mark.parametrize(
    ("package", "release"),
    [
        ("linux-image-6.1.0-57-amd64", "6.1.0-57-amd64"),
        ("linux-image-6.12.48+deb13-amd64", "6.12.48+deb13-amd64"),
        ("linux-image-6.1.0-57-arm64", "6.1.0-57-arm64"),
        ("linux-image-amd64", None),
        ("linux-image-6.1.0-57-amd64-dbg", None),
        ("linux-headers-6.1.0-57-amd64", None),
        ("firmware-linux-free", None),
    ],
)
def test_release_of_a_package(package, release):
    assert release_of(package) == release


def test_real_package_behind_the_meta_package():
    assert real_package(BOOKWORM) == "linux-image-6.1.0-57-amd64"
    assert real_package(ALTERNATIVES) == "linux-image-6.12.48+deb13-amd64"


@pytest.mark.parametrize("text", ["", "linux-image-amd64\n  Depends: <linux-image-virtual>\n"])
def test_no_package_says_what_to_do(text):
    with pytest.raises(LabBroken, match="apt-get update"):
        real_package(text)


def test_newest_release_by_number():
    assert newest(["6.1.0-9-amd64", "6.1.0-57-amd64", "5.10.0-99-amd64"]) == "6.1.0-57-amd64"
    assert newest([]) is None


def test_kernel_whose_headers_are_gone_is_not_used(tmp_path):
    for release in ("6.1.0-57-amd64", "6.1.0-58-amd64"):
        modules = tmp_path / release / "lib" / "modules" / release
        modules.mkdir(parents=True)
        (tmp_path / release / "complete").touch()
        (modules / "build").symlink_to(tmp_path / f"headers-{release}")
    assert usable_releases(tmp_path) == []
    (tmp_path / "headers-6.1.0-57-amd64").mkdir()
    assert usable_releases(tmp_path) == ["6.1.0-57-amd64"]
