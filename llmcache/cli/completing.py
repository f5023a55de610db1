"""What shells ask for while a command line is typed: click's own mechanism, for both programs and without their imports.

A script (`llmcache completion bash`) makes the shell call the program with `_LLMCACHE_COMPLETE` set; the answer is a line
for each word that fits, and comes before any command is run.
"""

from __future__ import annotations

import os

import click
from click.shell_completion import BashComplete, FishComplete, ShellComplete, add_completion_class, get_completion_class

PROGRAMS = ("llmcache", "llmcachefs")
SHELLS = ("bash", "zsh", "fish")


class _Bash(BashComplete):
    """click's, but `--option=value` is understood: bash breaks it into three words."""

    def get_completion_args(self) -> tuple[list[str], str]:
        """The words before the one to complete, and that."""
        args, incomplete = super().get_completion_args()
        joined = [word for before, word in zip(["", *args], args, strict=False) if not (word == "=" and before[:2] == "--")]
        return joined, "" if incomplete == "=" else incomplete


class _Fish(FishComplete):
    """click's, but words with commas stay whole: lists of names have them."""

    source_template = FishComplete.source_template.replace('string split ","', 'string split -m 1 ","')


def variable(program: str) -> str:
    """Name of the variable in the environment that asks `program` for words."""
    return f"_{program.upper()}_COMPLETE"


def is_asked(program: str) -> bool:
    """Whether a shell asks `program` for words, rather than to run."""
    return variable(program) in os.environ


def answer(command: click.Command, program: str) -> None:
    """Print the words that fit what has been typed of `program`; nothing for a shell that is not known."""
    shell = os.environ[variable(program)].removesuffix("_complete")
    if shell in SHELLS:
        click.echo(_class(shell)(command, {}, program, variable(program)).complete())


def script(shell: str) -> str:
    """Returns what `shell` must run for completion of both programs."""
    made = _class(shell)
    return "\n".join(made(click.Command(name), {}, name, variable(name)).source() for name in PROGRAMS)


def _class(shell: str) -> type[ShellComplete]:
    for own in (_Bash, _Fish):
        add_completion_class(own)
    found = get_completion_class(shell)
    assert found is not None, shell
    return found
