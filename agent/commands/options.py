"""Options that several commands share."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from pathlib import Path
from urllib.parse import urlsplit

from agent import config
from agent.client import AgentClient
from agent.config import Config
from agent.errors import UsageError

ADDRESS_VARIABLE = "PREFETCHD_ADDRESS"
"""Set in the agent's pod: it listens on the pod's own address there, which no configuration knows beforehand."""


def add_config(parser: argparse.ArgumentParser) -> None:
    """Declare `--config FILE`."""
    parser.add_argument(
        "--config", type=Path, metavar="FILE", help=f"configuration file (default: {config.DEFAULT_PATH}, if it exists)"
    )


def load_config(args: argparse.Namespace) -> Config:
    """The configuration named by `--config`, else the usual file, else the defaults; raises ConfigError."""
    if args.config is not None:
        return config.load(args.config)
    return config.load(config.DEFAULT_PATH) if config.DEFAULT_PATH.exists() else Config()


def add_address(parser: argparse.ArgumentParser) -> None:
    """Declare where the agent answers and how to identify there."""
    group = parser.add_argument_group("the agent's endpoint")
    group.add_argument(
        "--address",
        metavar="ADDR:PORT|URL",
        help=f"where the agent answers (default: ${ADDRESS_VARIABLE}, else the configuration's metrics.listen, else "
        f"{config.DEFAULT_LISTEN})",
    )
    group.add_argument("--ca", default="", metavar="FILE", help="PEM file that signs the agent's certificate")
    group.add_argument("--certificate", default="", metavar="FILE", help="PEM file to identify with")
    group.add_argument("--key", default="", metavar="FILE", help="PEM file with its key")
    group.add_argument("--auth", default="", metavar="FILE", help="file with one line user:password")


def client(args: argparse.Namespace) -> AgentClient:
    """The client for `--address`, or for the address of environment or configuration, where that can be read."""
    url = _url(args)
    unused = [option for option, file in (("--ca", args.ca), ("--certificate", args.certificate)) if file]
    if unused and url.startswith("http://"):
        raise UsageError(
            f"Address {url!r} is not encrypted, so {' and '.join(unused)} would do nothing; write https://."
        )
    return AgentClient(url=url, ca=args.ca, certificate=args.certificate, key=args.key, auth_file=args.auth)


def _url(args: argparse.Namespace) -> str:
    address = args.address
    secure = bool(args.ca or args.certificate)
    if address is None:
        section = _metrics_section(args)
        address = os.environ.get(ADDRESS_VARIABLE) or section.listen
        secure = secure or bool(section.certificate)
    _refuse_password(address)
    if address.startswith(("http://", "https://")):
        return _checked(address, address)
    if "://" in address:
        raise UsageError(f"Address {address!r} is neither ADDR:PORT nor an http:// or https:// URL; write for example "
                         f"{config.DEFAULT_LISTEN}.")  # fmt: skip
    host, port = config.split_address(address)
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)  # noqa: S104 - "every address" is reached by loopback
    return _checked(f"{'https' if secure else 'http'}://{f'[{host}]' if ':' in host else host}:{port}", address)


def _refuse_password(address: str) -> None:
    """Raise UsageError for user:password@ in an address: it stands in the process list and would in messages."""
    if "@" in address:
        scheme = address.partition("://")[0] + "://" if "://" in address else ""
        raise UsageError(
            f"Address {scheme + '***@' + address.rpartition('@')[2]!r} may hold no user and password; leave them out "
            "and give --auth FILE with one line user:password."
        )


def _checked(url: str, address: str) -> str:
    """The URL, ready for a path; raises UsageError where `address`, which it came from, is none."""
    try:
        parts = urlsplit(url)
        named = bool(parts.hostname) and parts.port != 0 and url.isprintable() and " " not in url
    except ValueError:
        named = False
    if not named or parts.query or parts.fragment:
        raise UsageError(f"Address {address!r} names no host and port; write for example {config.DEFAULT_LISTEN}.")
    return url.rstrip("/")


def _metrics_section(args: argparse.Namespace) -> config.MetricsSection:
    """Without --config, a file that we may not read (no root) means the default address, not an error."""
    if getattr(args, "config", None) is not None:
        return config.load(args.config).metrics
    try:
        return config.load(config.DEFAULT_PATH).metrics
    except config.ConfigError:
        return config.MetricsSection()


def file_to_write(text: str) -> Path:
    """A file's path for argparse, checked before long work; raises UsageError.

    The file will be replaced as a whole, which would be the end of a device's node.
    """
    path = Path(text)
    if path.name in ("", "..") or text.endswith("/"):
        raise UsageError(f"Path {text!r} names no file; give the path of the file to write.")
    if not path.parent.is_dir():
        raise UsageError(f"Path {text!r} is in a folder that does not exist; make it or choose another path.")
    if path.exists() and not path.is_file():
        raise UsageError(f"Path {text!r} is no regular file; choose another path.")
    return path


def refuse_same_file(target: Path | None, source: Path, what: str) -> None:
    """Raise UsageError where the file to write is the one that is read: it would be gone."""
    if target is not None and target.exists() and source.exists() and target.samefile(source):
        raise UsageError(f"Path {str(target)!r} is {what} itself, which would be replaced; choose another path.")


def seconds(text: str) -> float:
    """A duration for argparse: finite and above zero."""
    return _above_zero(text, float, "no duration; give seconds above zero")


def count(text: str) -> int:
    """A number of things for argparse: 1 or more."""
    return int(_above_zero(text, int, "no count; give a whole number from 1 on"))


def _above_zero(text: str, kind: Callable[[str], float], what: str) -> float:
    try:
        value = kind(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text[:40]!r} is {what}")
    return value
