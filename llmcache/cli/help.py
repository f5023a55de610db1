"""`llmcache help [COMMAND]…`."""

from __future__ import annotations

import click
from click.shell_completion import CompletionItem

from llmcache.cli import base


def _offered(context: click.Context, _parameter: click.Parameter, incomplete: str) -> list[CompletionItem]:
    found: click.Command | None = context.find_root().command
    for word in context.params.get("words") or ():
        found = found.get_command(context, word) if isinstance(found, base.LazyGroup) else None
    return found.shell_complete(context, incomplete or "") if isinstance(found, base.LazyGroup) else []


@base.command("help")
@click.argument("words", metavar="[COMMAND]…", nargs=-1, shell_complete=_offered)
@click.pass_context
def command(context: click.Context, words: tuple[str, ...]) -> None:
    """Show the help of a command, like --help after its name; without COMMAND, that of llmcache.

    \b
    Examples:
      llmcache help
      llmcache help stats
      llmcache help kv bench

    The manual pages have more detail: man llmcache-stats.
    """
    root = context.find_root()
    with root.command.make_context(root.info_name, [*words, "--help"]) as shown:
        root.command.invoke(shown)
