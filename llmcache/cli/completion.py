"""`llmcache completion SHELL`: the completion of click, for both programs and without importing commands.

The script makes the shell call the program with `_LLMCACHE_COMPLETE` set. The program then prints a line for each word
that fits, and runs no command.
"""

from __future__ import annotations

import os

import click
from click.shell_completion import BashComplete, FishComplete, add_completion_class, shell_complete

from llmcache.cli import base

PROGRAMS = ("llmcache", "llmcachefs")


@add_completion_class
class _Bash(BashComplete):
    """The completion of click, with `--option=value`, which bash splits into three words."""

    def get_completion_args(self) -> tuple[list[str], str]:
        args, incomplete = super().get_completion_args()
        joined = [word for before, word in zip(["", *args], args, strict=False) if not (word == "=" and before[:2] == "--")]
        return joined, "" if incomplete == "=" else incomplete


@add_completion_class
class _Fish(FishComplete):
    """The completion of click, without splitting lists of names at their commas."""

    source_template = FishComplete.source_template.replace('string split ","', 'string split -m 1 ","')


@base.command("completion")
@click.argument("shell", metavar="bash|zsh|fish", type=click.Choice(["bash", "zsh", "fish"]))
def command(shell: str) -> None:
    """Print a script with which a shell completes commands, options, names, mount points and files.

    \b
    Examples:
      eval "$(llmcache completion bash)"                   # in ~/.bashrc
      eval "$(llmcache completion zsh)"                    # in ~/.zshrc
      llmcache completion fish > ~/.config/fish/completions/llmcache.fish

    The script completes llmcache and llmcachefs, which must be in PATH. It needs bash 4.4 or later; in zsh, compinit must
    run before it. A completion takes about as long as --help.
    """
    for program in PROGRAMS:
        shell_complete(click.Command(program), {}, program, base.completion_variable(program), f"{shell}_source")


def answer(command: click.Command, program: str) -> None:
    """Print the completions of a command line of `program`; nothing if the shell is unknown."""
    variable = base.completion_variable(program)
    shell_complete(command, {}, program, variable, os.environ[variable])
