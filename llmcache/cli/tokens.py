"""`llmcache tokens PID`, `llmcache tokens MOUNT`, `llmcache tokens -- COMMAND`."""

from __future__ import annotations

import click

from llmcache.cli import base, types
from llmcache.errors import EXIT_INTERRUPTED


@base.command("tokens", cls=base.CommandAfterDashes, interrupted=EXIT_INTERRUPTED)
@click.argument("words", metavar="PID | MOUNT | -- COMMAND...", nargs=-1, type=types.FILE)
@click.option("-d", "--duration", "seconds", type=types.TIME, help="Observe for this time: 30, 90s, 5m [default: no limit].")
@base.output_option("Write the table, or JSON, to FILE [default: stdout; the table of COMMAND: stderr].")
@base.force_option("Overwrite FILE if it exists.")
@base.json_option("llmcache.tokens/1", ", one object per line for each token, then the summary")
def command(words: tuple[str, ...], seconds: float | None, output: str | None, force: bool, as_json: bool) -> int:
    """Print a line for each token that a program computes, with its time and how the time was spent.

    \b
    Examples:
      sudo llmcache tokens $(pidof llama-server)
      sudo llmcache tokens /mnt/models
      sudo llmcache tokens -- llama-cli -m model.gguf -p "Hello"
      sudo llmcache tokens --json -d 1m 4711 | jq .storage_ns

    Works for any engine that maps its model file, with or without a mount. A summary follows at the end, and after Ctrl-C.
    With COMMAND, the table is written to stderr, and llmcache exits with the exit code of the command.
    """
    from llmcache.tokens.command import Settings, observe

    with base.orderly_end():
        return observe(words, Settings(seconds=seconds, output=output, force=force, as_json=as_json))
