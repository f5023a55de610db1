"""`llmcache completion SHELL`."""

from __future__ import annotations

import click

from llmcache.cli import base


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
    from llmcache.cli.completing import script

    click.echo(script(shell))
