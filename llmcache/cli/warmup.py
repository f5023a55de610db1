"""`llmcache warmup MOUNT [GLOB…]`."""

from __future__ import annotations

import click

from llmcache.cli import base, types


@base.command("warmup")
@click.argument("mount", type=types.MOUNT)
@click.argument("globs", metavar="[GLOB…]", nargs=-1)
@click.option("--check", is_flag=True, help="Bring nothing in: say how much is there, exit code 4 if some is not.")
@base.json_option("llmcache.warmup/1")
def command(mount: str, globs: tuple[str, ...], check: bool, as_json: bool) -> None:
    """Bring in what the mount on MOUNT would keep of its files, before they are read.

    \b
    Examples:
      llmcache warmup /mnt/models
      llmcache warmup /mnt/models 'llama-70b*.gguf'
      llmcache warmup /mnt/models --check

    GLOBs are matched with paths below MOUNT and with names. Without one: models and small files; files of no known
    format only if a GLOB names them. What would stream through the budget is not read. What was brought in is kept
    until it has been used, or others need the room. Sizes are by the mount's own count.

    Exit code 4 if something that should be kept is not there.
    """
    from llmcache.fs.client import operation

    operation.warmup(mount, globs, check=check, as_json=as_json)
