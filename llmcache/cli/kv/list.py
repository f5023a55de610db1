"""`llmcache kv list DIR`."""

from __future__ import annotations

import click

from llmcache.cli import base, types


@base.command("list")
@click.argument("directory", metavar="DIR", type=types.DIRECTORY)
@base.json_option("llmcache.kv-list/1")
def command(directory: str, as_json: bool) -> None:
    """What prompts are stored in DIR, of which models, and what was restored of them.

    DIR is the directory of a PrefixCache (llama-cpp-python), or of 'llmcache serve-llama'.

    \b
    Examples:
      llmcache kv list /mnt/nvme/kv
      llmcache kv list /mnt/nvme/kv --json | jq '.models[].size_bytes'
    """
    from llmcache.kv.prefix.listing import listed
    from llmcache.report import kv_prefix

    kv_prefix.show_list(directory, listed(directory), as_json)
