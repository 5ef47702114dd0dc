"""The command line as plain values: commands, their options and what follows them. Pure over the parser."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

Kind = Literal["none", "file", "folder", "choice", "device", "command", "text"]

_FILES = frozenset({"FILE", "PAGE", "DEVICE|FOLDER|FILE"})
_FOLDERS = frozenset({"DIR", "FOLDER"})


@dataclass(frozen=True, slots=True)
class Option:
    """An option or (without flags) a positional: what it takes, the words it may be, what it means."""

    flags: tuple[str, ...]
    takes: str
    kind: Kind
    choices: tuple[str, ...]
    meaning: str


@dataclass(frozen=True, slots=True)
class CommandSpec:
    """One command: its name, a line on it, its description and epilog, its options and positionals."""

    name: str
    summary: str
    description: str
    epilog: str
    usage: str
    options: tuple[Option, ...]
    positionals: tuple[Option, ...]


def describe(parser: argparse.ArgumentParser) -> tuple[CommandSpec, ...]:
    """Every command of a parser that was built with all of them."""
    group = next(one for one in _actions(parser) if isinstance(one, argparse._SubParsersAction))  # noqa: SLF001 - no public way
    summaries = {one.dest: one.help or "" for one in group._choices_actions}  # noqa: SLF001
    return tuple(_command(name, summaries.get(name, ""), one) for name, one in group.choices.items())


def _actions(parser: argparse.ArgumentParser) -> Sequence[argparse.Action]:
    return parser._actions  # noqa: SLF001 - argparse tells its options nowhere else


def _command(name: str, summary: str, parser: argparse.ArgumentParser) -> CommandSpec:
    described = [_option(action) for action in _actions(parser) if action.help != argparse.SUPPRESS]
    usage = " ".join(parser.format_usage().removeprefix("usage: ").split())
    return CommandSpec(
        name,
        summary,
        parser.description or "",
        parser.epilog or "",
        usage,
        tuple(option for option in described if option.flags),
        tuple(option for option in described if not option.flags),
    )


def _option(action: argparse.Action) -> Option:
    choices = tuple(str(choice) for choice in action.choices or ())
    metavar = action.metavar if isinstance(action.metavar, str) else ""
    takes = "" if action.nargs == 0 else metavar or ("|".join(choices) if choices else action.dest.upper())
    meaning = " ".join((action.help or "").replace("%%", "%").split())
    return Option(tuple(action.option_strings), takes, _kind(action, takes, choices), choices, meaning)


def _kind(action: argparse.Action, takes: str, choices: tuple[str, ...]) -> Kind:
    if action.nargs == 0:
        return "none"
    if choices:
        return "choice"
    if action.nargs == argparse.REMAINDER:
        return "command"
    if takes in _FILES:
        return "file"
    return "folder" if takes in _FOLDERS else "text"
