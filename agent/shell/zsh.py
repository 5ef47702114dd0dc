"""The completion script for zsh. Pure."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence

from agent.shell.spec import CommandSpec, Option

_PLAIN = str.maketrans({"[": "(", "]": ")", ":": "\\:", "\\": " "})


def script(commands: Sequence[CommandSpec]) -> str:
    """A file `_prefetchd` for a folder of $fpath."""
    lines = ["#compdef prefetchd", "# zsh completion for prefetchd; made by `prefetchd completion zsh`", "",
             "_prefetchd() {", "    local context state line", "    local -a commands", "    commands=("]  # fmt: skip
    lines += [f"        {shlex.quote(command.name + ':' + command.summary)}" for command in commands]
    lines += ["    )", "    _arguments -C '(- *)--help[show help]' '(- *)--version[show the version]' \\",
              "        '1:command:->command' '*::argument:->argument'", "    case $state in",
              "    command) _describe command commands ;;", "    argument)", "        case $line[1] in"]  # fmt: skip
    for command in commands:
        lines.append(f"        {command.name})")
        lines.append("            _arguments \\")
        lines += [f"                {spec} \\" for spec in _specs(command)]
        lines[-1] = lines[-1].removesuffix(" \\")
        lines.append("            ;;")
    return "\n".join([*lines, "        esac", "        ;;", "    esac", "}", "", '_prefetchd "$@"', ""])


def _specs(command: CommandSpec) -> Iterator[str]:
    for option in command.options:
        for flag in option.flags:
            others = " ".join(option.flags)
            text = f"({others}){flag}[{_plain(option.meaning)}]"
            yield shlex.quote(text if option.kind == "none" else f"{text}:{_plain(option.takes)}:{_action(option)}")
    for positional in command.positionals:
        if positional.kind == "command":
            yield "'(-)1:command:_command_names -e' '*::arguments:_normal'"
        else:
            yield shlex.quote(f"1:{_plain(positional.takes)}:{_action(positional)}")


def _action(option: Option) -> str:
    if option.kind == "choice":
        return f"({' '.join(option.choices)})"
    return {"file": "_files", "folder": "_files -/"}.get(option.kind, "")


def _plain(text: str) -> str:
    """Without what _arguments would take for its own."""
    return text.translate(_PLAIN)
