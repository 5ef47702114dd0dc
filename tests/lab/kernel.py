"""The guest's kernel: Debian's stock packages, unpacked into the cache and never installed."""

from __future__ import annotations

import re
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from tests.lab.cache import cache_folder
from tests.lab.errors import LabBroken

_RELEASE = re.compile(r"linux-image-(?P<release>\d[\w.+~]*(?:-\d+)?-(?P<flavour>amd64|arm64))$")
_META_PACKAGE = "linux-image-amd64"


@dataclass(frozen=True)
class Kernel:
    """An unpacked kernel: `release` as uname prints it, `root` holds boot/, lib/modules/ and maybe usr/src/."""

    release: str
    root: Path

    @property
    def image(self) -> Path:
        return self.root / "boot" / f"vmlinuz-{self.release}"

    @property
    def modules(self) -> Path:
        return self.root / "lib" / "modules" / self.release


def release_of(package: str) -> str | None:
    """Return the kernel release that a Debian package name carries, or None: a meta package has none.

    >>> release_of("linux-image-6.1.0-57-amd64")
    '6.1.0-57-amd64'
    """
    match = _RELEASE.match(package)
    return match["release"] if match else None


def real_package(depends_text: str) -> str:
    """Return the package with the kernel in it from what `apt-cache depends linux-image-amd64` prints."""
    for line in depends_text.splitlines():
        relation, _, package = line.strip().partition(": ")
        if relation.lstrip("|") == "Depends" and release_of(package):
            return package
    raise LabBroken(
        f"apt knows no kernel package behind {_META_PACKAGE} (it printed {depends_text.strip()!r}): "
        "run `apt-get update`, or add a Debian mirror to the apt sources."
    )


def newest(releases: Iterable[str]) -> str | None:
    """Return the newest of the releases by their numbers, or None where there is none."""
    return max(releases, key=lambda release: [int(n) for n in re.findall(r"\d+", release)], default=None)


def ensure_kernel(progress: Callable[[str], None]) -> Kernel:
    """Return the newest kernel of the cache; download and unpack one first where the cache holds none."""
    folder = cache_folder("kernel")
    cached = newest(usable_releases(folder))
    if cached:
        return Kernel(cached, folder / cached)
    package = real_package(command_output(["apt-cache", "depends", _META_PACKAGE]))
    release = release_of(package)
    assert release is not None
    packages = [package, *_missing_headers(release)]
    progress(f"downloads {' '.join(packages)} into {folder}")
    kernel = Kernel(release, folder / release)
    unpack_packages(packages, kernel.root)
    _link_headers(kernel)
    command_output(["depmod", "--basedir", str(kernel.root), kernel.release])
    (kernel.root / "complete").touch()
    return kernel


def usable_releases(folder: Path) -> list[str]:
    """Return the unpacked releases whose headers are still there: the host's own may have been upgraded since."""
    kernels = [Kernel(mark.parent.name, mark.parent) for mark in folder.glob("*/complete")]
    return [kernel.release for kernel in kernels if (kernel.modules / "build").exists()]


def unpack_packages(packages: Iterable[str], root: Path) -> None:
    """Download Debian packages and unpack them under `root`, without installing them or running their scripts."""
    wanted = list(packages)
    with tempfile.TemporaryDirectory(dir=cache_folder()) as folder:
        if wanted:
            command_output(["apt-get", "download", "-q", "-o", "APT::Sandbox::User=root", *wanted], cwd=Path(folder))
        shutil.rmtree(root, ignore_errors=True)
        root.mkdir(parents=True)
        for archive in sorted(Path(folder).glob("*.deb")):
            command_output(["dpkg", "-x", str(archive), str(root)])


def _missing_headers(release: str) -> list[str]:
    """Return the header packages to unpack: none where the host has those of this very release installed."""
    if Path(f"/usr/src/linux-headers-{release}").is_dir():
        return []
    common = release.removesuffix("-amd64").removesuffix("-arm64") + "-common"
    return [f"linux-headers-{release}", f"linux-headers-{common}"]


def _link_headers(kernel: Kernel) -> None:
    """Make build and source below lib/modules resolve in the guest: BCC compiles with what they point to."""
    own = kernel.root / "usr" / "src"
    base = own if own.is_dir() else Path("/usr/src")
    common = kernel.release.removesuffix("-amd64").removesuffix("-arm64") + "-common"
    for name, target in (("build", kernel.release), ("source", common)):
        link = kernel.modules / name
        link.unlink(missing_ok=True)
        link.symlink_to(base / f"linux-headers-{target}")


def command_output(argv: list[str], cwd: Path | None = None) -> str:
    """Return what a program of the host prints; raises `LabBroken` with its last line where it fails."""
    try:
        done = subprocess.run(argv, cwd=cwd, check=False, capture_output=True, text=True)
    except FileNotFoundError as error:
        raise LabBroken(f"The lab needs the program {argv[0]!r}, which is not installed.") from error
    if done.returncode:
        last = (done.stderr.strip() or done.stdout.strip()).splitlines()[-1:] or ["no output"]
        raise LabBroken(f"`{' '.join(argv)}` failed with status {done.returncode}: {last[0]}")
    return done.stdout
