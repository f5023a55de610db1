"""`llmcache completion SHELL`: click's own completion, for both programs and without what commands import.

The script makes the shell call the program with `_LLMCACHE_COMPLETE` set; the answer is a line for each word that fits,
and comes before any command is run.
"""

from __future__ import annotations

import os

import click
from click.shell_completion import BashComplete, FishComplete, add_completion_class, shell_complete

from llmcache.cli import base

PROGRAMS = ("llmcache", "llmcachefs")


@add_completion_class
class _Bash(BashComplete):
    """click's, but `--option=value` is understood: bash breaks it into three words."""

    def get_completion_args(self) -> tuple[list[str], str]:
        """The words before the one to complete, and that."""
        args, incomplete = super().get_completion_args()
        joined = [word for before, word in zip(["", *args], args, strict=False) if not (word == "=" and before[:2] == "--")]
        return joined, "" if incomplete == "=" else incomplete


@add_completion_class
class _Fish(FishComplete):
    """click's, but words with commas stay whole: lists of names have them."""

    source_template = FishComplete.source_template.replace('string split ","', 'string split -m 1 ","')


@base.command("completion")
@click.argument("shell", metavar="bash|zsh|fish", type=click.Choice(["bash", "zsh", "fish"]))
def command(shell: str) -> None:
    """Print a script that makes a shell complete commands, options, names, mount points and files.

    \b
    Examples:
      eval "$(llmcache completion bash)"                   # in ~/.bashrc
      eval "$(llmcache completion zsh)"                    # in ~/.zshrc
      llmcache completion fish > ~/.config/fish/completions/llmcache.fish

    It completes llmcache and llmcachefs: both have to be found in PATH. bash must be 4.4 or later; in zsh, compinit must
    have run before. A word takes about as long as --help.
    """
    for program in PROGRAMS:
        shell_complete(click.Command(program), {}, program, base.completion_variable(program), f"{shell}_source")


def answer(command: click.Command, program: str) -> None:
    """Print the words that fit what has been typed of `program`; nothing for a shell that is not known."""
    variable = base.completion_variable(program)
    shell_complete(command, {}, program, variable, os.environ[variable])
