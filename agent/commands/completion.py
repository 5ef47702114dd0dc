"""`prefetchd completion bash | zsh | man`: what the shell and man(1) want, made from the parser itself."""

from __future__ import annotations

import argparse

from agent.__main__ import COMMANDS, build_parser, version
from agent.shell import bash, man, zsh
from agent.shell.spec import describe

EPILOG = """\
examples:
  source <(prefetchd completion bash)
  prefetchd completion bash | sudo tee /usr/share/bash-completion/completions/prefetchd
  prefetchd completion zsh  | sudo tee /usr/local/share/zsh/site-functions/_prefetchd
  prefetchd completion man  | sudo tee /usr/local/share/man/man8/prefetchd.8
  prefetchd completion man  | man -l -

exit status:
  0  done    2  the command line cannot be used
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.description = "Print the completion script of a shell, or the manual page; nothing is installed."
    parser.epilog = EPILOG
    parser.add_argument("what", choices=("bash", "zsh", "man"), help="what to print on standard output")


def main(args: argparse.Namespace) -> int:
    """Print it."""
    parser = build_parser(*COMMANDS)
    commands = describe(parser)
    if args.what == "man":
        print(man.page(commands, version(), parser.description or ""), end="")
    else:
        print({"bash": bash.script, "zsh": zsh.script}[args.what](commands), end="")
    return 0
