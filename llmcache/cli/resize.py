"""`llmcache resize MOUNT SIZE`."""

from __future__ import annotations

import click

from llmcache.cli import base, types


@base.command("resize")
@click.argument("mount", type=types.MOUNT)
@click.argument("size", type=types.SIZE)
@base.json_option("llmcache.resize/1")
def command(mount: str, size: int, as_json: bool) -> None:
    """Give the mount on MOUNT a budget of SIZE while it serves.

    \b
    Examples:
      llmcache resize /mnt/models 12G

    Returns when what is kept has shrunk to it; a larger budget fills as files are read. Exit code 3 if it does not fit.
    """
    from llmcache.fs.client import operation

    operation.resize(mount, size, as_json=as_json)
