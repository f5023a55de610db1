"""`llmcache kv prune DIR`."""

from __future__ import annotations

import click

from llmcache.cli import base, types


@base.command("prune")
@click.argument("directory", metavar="DIR", type=types.DIRECTORY)
@click.option("--unused", metavar="TIME", help="Remove what was not used for so long: 30d.")
@click.option("--keep", metavar="SIZE", help="Keep so much, and remove what was not used for longest: 10G.")
@click.option("--model", metavar="NAME", help="Of this model alone: the beginning of its fingerprint, or its file.")
@base.json_option("llmcache.kv-prune/1")
def command(directory: str, unused: str | None, keep: str | None, model: str | None, as_json: bool) -> None:
    """Remove stored prompts from DIR: by age, by size, of a model; with --model alone all of it.

    Programs that use DIR may go on: they evaluate what is not there any more. Files that are not theirs stay.

    \b
    Examples:
      llmcache kv prune /mnt/nvme/kv --unused 30d --keep 10G
      llmcache kv prune /mnt/nvme/kv --model 1f83a0c4
    """
    from llmcache.kv.prefix.listing import pruned
    from llmcache.report import kv_prefix

    kv_prefix.show_pruned(pruned(directory, unused, keep, model), as_json)
