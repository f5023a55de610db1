"""`llmcache kv show DIR MODEL`."""

from __future__ import annotations

import click

from llmcache.cli import base, types


@base.command("show")
@click.argument("directory", metavar="DIR", type=types.DIRECTORY)
@click.argument("model", metavar="MODEL")
@base.json_option("llmcache.kv-show/1")
def command(directory: str, model: str, as_json: bool) -> None:
    """What prompts of MODEL are stored in DIR, and what its blocks depend on.

    MODEL is the beginning of a fingerprint, as 'llmcache kv list' shows it, or the name of the model's file.

    \b
    Examples:
      llmcache kv show /mnt/nvme/kv 1f83a0c4
      llmcache kv show /mnt/nvme/kv llama-8b.gguf --json | jq '.described'
    """
    from llmcache.kv.prefix.listing import chosen, listed
    from llmcache.report import kv_prefix

    kv_prefix.show_model(chosen(listed(directory), model), as_json)
