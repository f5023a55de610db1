"""`llmcache help [COMMAND]…`."""

from __future__ import annotations

from collections.abc import Iterable

import click
from click.shell_completion import CompletionItem

from llmcache.cli import base


def _offered(context: click.Context, _parameter: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Commands that begin with `incomplete`, below those named before."""
    try:
        below = _context(context, context.params.get("words") or ()).command
    except click.UsageError:
        return []
    return below.shell_complete(context, incomplete or "") if isinstance(below, base.LazyGroup) else []


@base.command("help")
@click.argument("words", metavar="[COMMAND]…", nargs=-1, shell_complete=_offered)
@click.pass_context
def command(context: click.Context, words: tuple[str, ...]) -> None:
    """Show the help of a command, as `--help` after it does; without one, that of llmcache.

    \b
    Examples:
      llmcache help
      llmcache help stats
      llmcache help kv bench

    The manual page says more: man llmcache-stats.
    """
    click.echo(_context(context, words).get_help())


def _context(context: click.Context, words: Iterable[str]) -> click.Context:
    """That of the command which `words` name, below llmcache itself; UsageError if there is no such command."""
    found = context.find_root()
    for word in words:
        if not isinstance(found.command, base.LazyGroup):
            context.fail(f"{found.command_path} has no commands below it: '{word}'")
        name, below, _ = found.command.resolve_command(found, [word])
        assert below is not None  # else there was an error
        found = click.Context(below, parent=found, info_name=name, **base.HELP_OPTIONS)
    return found
