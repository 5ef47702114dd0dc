"""The completion script for bash. Pure."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence

from agent.shell.spec import CommandSpec, Option

_HEAD = """\
# bash completion for prefetchd; made by `prefetchd completion bash`
_prefetchd() {
    local cur prev words cword i command=""
    COMPREPLY=()
    cur=${COMP_WORDS[COMP_CWORD]}
    prev=${COMP_WORDS[COMP_CWORD - 1]}
    for ((i = 1; i < COMP_CWORD; i++)); do
        case ${COMP_WORDS[i]} in
        -*) ;;
        *)
            command=${COMP_WORDS[i]}
            break
            ;;
        esac
    done
"""
_TAIL = """\
    return 0
}
complete -F _prefetchd prefetchd
"""


def script(commands: Sequence[CommandSpec]) -> str:
    """What `source` or a file in bash-completion's folder wants."""
    names = " ".join(command.name for command in commands)
    first = shlex.quote(f"{names} --help --version")
    lines = [_HEAD.rstrip(), "    case $command in", '    "")']
    lines += [f'        COMPREPLY=($(compgen -W {first} -- "$cur"))', "        ;;"]
    for command in commands:
        lines += [f"    {command.name})", *(f"        {line}" for line in _command(command)), "        ;;"]
    return "\n".join([*lines, "    esac", _TAIL])


def _command(command: CommandSpec) -> Iterator[str]:
    if any(positional.kind == "command" for positional in command.positionals):
        yield from _after_dashes()
    valued = [option for option in command.options if option.kind != "none"]
    if valued:
        yield "case $prev in"
        for option in valued:
            yield f"{'|'.join(option.flags)})"
            yield f"    {_reply(option)}"
            yield "    return 0"
            yield "    ;;"
        yield "esac"
    flags = " ".join(flag for option in command.options for flag in option.flags)
    yield "if [[ $cur == -* ]]; then"
    yield f'    COMPREPLY=($(compgen -W {shlex.quote(flags)} -- "$cur"))'
    for positional in command.positionals:
        if positional.kind in ("file", "folder", "choice"):
            yield "else"
            yield f"    {_reply(positional)}"
            break
    yield "fi"


def _after_dashes() -> Iterator[str]:
    """What follows `--` is a command of its own."""
    yield "for ((i = 1; i < COMP_CWORD; i++)); do"
    yield "    if [[ ${COMP_WORDS[i]} == -- ]]; then"
    yield "        if ((i + 1 == COMP_CWORD)); then"
    yield '            COMPREPLY=($(compgen -c -- "$cur"))'
    yield "        else"
    yield '            COMPREPLY=($(compgen -f -- "$cur"))'
    yield "        fi"
    yield "        return 0"
    yield "    fi"
    yield "done"


def _reply(option: Option) -> str:
    if option.kind == "choice":
        return f'COMPREPLY=($(compgen -W {shlex.quote(" ".join(option.choices))} -- "$cur"))'
    if option.kind == "file":
        return 'COMPREPLY=($(compgen -f -- "$cur"))'
    return 'COMPREPLY=($(compgen -d -- "$cur"))' if option.kind == "folder" else ":"
