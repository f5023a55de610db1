"""`llmcache evict MOUNT [GLOB…]`."""

from __future__ import annotations

import click

from llmcache.cli import base, types


@base.command("evict")
@click.argument("mount", type=types.MOUNT)
@click.argument("globs", metavar="[GLOB…]", nargs=-1)
@base.json_option("llmcache.evict/1")
def command(mount: str, globs: tuple[str, ...], as_json: bool) -> None:
    """Give up what the mount on MOUNT keeps of files, and what it learned about them: all, or those that match a GLOB.

    \b
    Examples:
      llmcache evict /mnt/models
      llmcache evict /mnt/models 'llama-8b*' '*.json'

    Shards of one model go together. Files of --pin stay. Programs that read on bring their files back.
    """
    from llmcache.fs.client import operation

    operation.evict(mount, globs, as_json=as_json)
