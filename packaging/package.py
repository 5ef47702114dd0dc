#!/usr/bin/env python3
"""Builds the release archive: everything that a node without a network needs to install prefetchd.

The archive holds the project's wheel, the wheels of what it depends on in the exact versions of `constraints.txt`, the
install and uninstall scripts, the systemd unit, the default configuration, Prometheus rules, dashboards and the Helm
chart. Order, times, modes and the program that builds the wheel are fixed: the same sources give the same bytes.
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import tomllib
from collections.abc import Iterable
from pathlib import Path

PACKAGING = Path(__file__).resolve().parent
SOURCE = PACKAGING.parent
WHEEL_INPUTS = ("agent", "bpf", "cgroup", "pyproject.toml", "README.md", "LICENSE")
SHIPPED = (
    "constraints.txt",
    "container",
    "debian-run.txt",
    "grafana",
    "install.sh",
    "prefetchd.toml",
    "prometheus",
    "README.md",
    "runbook.md",
    "systemd",
    "uninstall.sh",
)
CHART = PACKAGING / "helm" / "prefetchd"
WHEEL_BUILDER = "setuptools==84.2.1"
"""Its version stands in the wheel. It is used for the build alone, so `constraints.txt` does not have it."""
_UNSHIPPED = shutil.ignore_patterns("__pycache__", "*.pyc", "*.egg-info", "*.test.yml")


def main() -> int:
    """Build the archive and print its path."""
    parser = argparse.ArgumentParser(
        description="Build the archive that installs prefetchd without a network.",
        epilog="example: packaging/package.py --output dist",
    )
    parser.add_argument("--output", type=Path, default=SOURCE / "dist", help="folder for the archive (default: dist)")
    parser.add_argument("--wheel-only", action="store_true", help="build just the project's wheel into the folder")
    options = parser.parse_args()
    try:
        options.output.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        print(f"package.py: {str(options.output)!r} cannot be made ({error.strerror}); give --output another folder.",
              file=sys.stderr)  # fmt: skip
        return 1
    try:
        built = build_wheel(options.output) if options.wheel_only else build_archive(options.output)
    except (OSError, subprocess.CalledProcessError) as error:
        print(f"package.py: {error}; see the lines above.", file=sys.stderr)
        return 1
    print(built)
    return 0


def version() -> str:
    """The project's version, from the one place that says it."""
    metadata = tomllib.loads((SOURCE / "pyproject.toml").read_text(encoding="utf-8"))
    return str(metadata["project"]["version"])


def build_archive(output: Path) -> Path:
    """Assemble the release folder and pack it; returns the path of the archive."""
    name = f"prefetchd-{version()}"
    with tempfile.TemporaryDirectory(prefix="prefetchd-package-") as scratch:
        folder = Path(scratch) / name
        wheels = folder / "wheels"
        wheels.mkdir(parents=True)
        build_wheel(wheels)
        download(wheels)
        copy_shipped(folder)
        pack(CHART, folder / "helm" / f"{name}.tgz", CHART.name)
        write_sums(folder)
        archive = output / f"{name}-{os.uname().machine}.tar.gz"
        pack(folder, archive, name)
    return archive


def build_wheel(target: Path) -> Path:
    """Build the wheel from a copy of the sources, so that the tree stays as it is; returns the wheel's path."""
    with tempfile.TemporaryDirectory(prefix="prefetchd-wheel-") as scratch:
        for name in WHEEL_INPUTS:
            source = SOURCE / name
            if source.is_dir():
                shutil.copytree(source, Path(scratch) / name, ignore=_UNSHIPPED)
            else:
                shutil.copy2(source, Path(scratch) / name)
        set_modes(Path(scratch))
        _pip("wheel", "--no-deps", "--wheel-dir", str(target), scratch)
    return next(target.glob(f"prefetchd-{version()}-*.whl"))


def download(target: Path) -> None:
    """Fetch exactly the versions of `constraints.txt`, as wheels, for this machine and its Python."""
    _pip(
        "download", "--no-deps", "--only-binary=:all:", "--dest", str(target), "-r", str(PACKAGING / "constraints.txt")
    )


def copy_shipped(folder: Path) -> None:
    """Copy what stands beside the wheels, links followed."""
    for name in SHIPPED:
        source = PACKAGING / name
        if source.is_dir():
            shutil.copytree(source, folder / name, ignore=_UNSHIPPED)
        else:
            shutil.copy2(source, folder / name)


def set_modes(folder: Path) -> None:
    """Give every file and folder the mode that it has under the usual umask; the wheel keeps them."""
    for path in folder.rglob("*"):
        path.chmod(0o755 if path.stat().st_mode & 0o100 else 0o644)


def write_sums(folder: Path) -> None:
    """Write SHA256SUMS over every file, for `sha256sum --check`."""
    lines = [
        f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.relative_to(folder)}\n" for path in _files(folder)
    ]
    (folder / "SHA256SUMS").write_text("".join(lines), encoding="utf-8")


def pack(folder: Path, archive: Path, root: str) -> None:
    """Write a .tar.gz of `folder` under the name `root` whose bytes depend on the files' contents and modes alone."""
    archive.parent.mkdir(parents=True, exist_ok=True)
    with (
        archive.open("wb") as raw,
        gzip.GzipFile(filename="", mode="wb", fileobj=raw, mtime=_epoch()) as zipped,
        tarfile.open(fileobj=zipped, mode="w", dereference=True) as tar,
    ):
        for path in _files(folder):
            member = tar.gettarinfo(path, f"{root}/{path.relative_to(folder)}")
            member.uid = member.gid = 0
            member.uname = member.gname = "root"
            member.mtime = _epoch()
            member.mode = 0o755 if member.mode & 0o100 else 0o644
            with path.open("rb") as content:
                tar.addfile(member, content)


def _files(folder: Path) -> Iterable[Path]:
    walk = os.walk(folder, followlinks=True)  # the chart links to rules and dashboards
    return sorted(Path(parent) / name for parent, folders, names in walk for name in names)


def _epoch() -> int:
    """The time written into archives, in Unix seconds (reproducible-builds convention)."""
    return int(os.environ.get("SOURCE_DATE_EPOCH", "1700000000"))


def _pip(*arguments: str) -> None:
    command = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check", "--no-input", *arguments]
    with tempfile.NamedTemporaryFile("w", prefix="prefetchd-builder-", suffix=".txt") as builder:
        builder.write(f"{WHEEL_BUILDER}\n")
        builder.flush()
        # pip up to 25.2 reads the first name, later ones the second.
        pins = dict.fromkeys(("PIP_CONSTRAINT", "PIP_BUILD_CONSTRAINT"), builder.name)
        environment = {"SOURCE_DATE_EPOCH": str(_epoch()), **os.environ, "TZ": "UTC", **pins}
        subprocess.run(command, check=True, env=environment, umask=0o022)


if __name__ == "__main__":
    sys.exit(main())
