"""The manual page, in roff's man macros. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from agent.shell.spec import CommandSpec, Option

_FILES = (
    ("/etc/prefetchd/prefetchd.toml", "The configuration; every key is explained in it."),
    ("/run/prefetchd", "Journal of what must be restored, lock, sockets; the file `disable` in it stops enforcing."),
)


def page(commands: Sequence[CommandSpec], version: str, description: str) -> str:
    """The whole page, section 8."""
    lines = [f'.TH PREFETCHD 8 "" "prefetchd {_text(version)}" "System administration"', ".SH NAME"]
    lines += [r"prefetchd \- node agent that moves storage bandwidth to the training jobs about to starve"]
    lines += [
        ".SH SYNOPSIS",
        r".B prefetchd",
        r".I COMMAND",
        r"[\fIoption\fR ...]",
        ".SH DESCRIPTION",
        _text(description),
    ]
    lines += [".SH COMMANDS"]
    for command in commands:
        lines += [
            f'.SS "prefetchd {_text(command.name)}"',
            _text(command.description),
            ".PP",
            _text(command.usage),
        ]
        for option in (*command.positionals, *command.options):
            lines += _option(option)
        lines += _epilog(command.epilog)
    lines.append(".SH FILES")
    for path, meaning in _FILES:
        lines += [".TP", f".I {_text(path)}", _text(meaning)]
    lines += [".SH SEE ALSO", ".BR fio (1),", ".BR systemd.resource\\-control (5),", ".BR cgroups (7)", ""]
    return "\n".join(lines)


def _option(option: Option) -> Iterator[str]:
    yield ".TP"
    takes = rf"\fI{_text(option.takes)}\fR" if option.takes else ""
    flags = ", ".join(rf"\fB{_text(flag)}\fR" for flag in option.flags)
    yield " ".join(part for part in (flags, takes) if part)
    yield _text(option.meaning or "See above.")


def _epilog(epilog: str) -> Iterator[str]:
    """Examples and exit statuses as they stand."""
    if epilog.strip():
        yield from (".PP", ".nf", ".RS 2", *(_text(line) for line in epilog.rstrip().splitlines()), ".RE", ".fi")


def _text(text: str) -> str:
    r"""Text that roff shows as it is.

    >>> _text("a-b"), _text(".x"), _text("c\\d")
    ('a\\-b', '\\&.x', 'c\\ed')
    """
    safe = text.replace("\\", "\\e").replace("-", "\\-")
    return "\\&" + safe if safe.startswith((".", "'")) else safe
