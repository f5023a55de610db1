"""`llmcache serve-llama DIR -- ARGUMENTS`."""

from __future__ import annotations

import sys

import click

from llmcache.cli import base, types


@base.command("serve-llama", context_settings={**base.HELP_OPTIONS, "ignore_unknown_options": True})
@click.argument("directory", metavar="DIR", type=types.DIRECTORY)
@click.option("--limit", metavar="SIZE", default="20G", help="Bytes that DIR may hold.")
@click.option("--ttl", metavar="TIME", help="Remove what was not used for so long: 30d.")
@click.option(
    "--floor", metavar="SIZE", help="Space of the file system that is left free. [default: 1G, or 5 % of a smaller one]"
)
@click.option(
    "--queue",
    metavar="SIZE",
    default="1G",
    help="Bytes of prompts that may wait in memory to be written, at most half of the memory that is available.",
)
@click.option(
    "--shared",
    metavar="ADDRESS",
    envvar="LLMCACHE_SHARED",
    show_envvar=True,
    help="A Redis-compatible server to share prompts over: redis://host:6379/0.",
)
@click.argument("arguments", metavar="-- ARGUMENTS...", nargs=-1, type=click.UNPROCESSED)
def command(
    directory: str,
    limit: str,
    ttl: str | None,
    floor: str | None,
    queue: str,
    shared: str | None,
    arguments: tuple[str, ...],
) -> None:
    """Serve models with llama-cpp-python; prompts are stored in DIR.

    The server is 'python -m llama_cpp.server', which takes ARGUMENTS, with a cache that its own settings cannot name: what
    a prompt has in common with those that are stored, also by an earlier server or another one, is not evaluated again.
    GET /metrics tells hits, bytes and seconds saved (OpenMetrics).

    \b
    Examples:
      llmcache serve-llama /mnt/nvme/kv -- --model llama-8b.gguf --n_ctx 16384
      llmcache serve-llama /mnt/nvme/kv --ttl 30d -- --config_file models.json
    """
    from llmcache.kv.llama import PrefixCache
    from llmcache.kv.llama.server import serve

    sys.exit(serve(PrefixCache(directory, limit, ttl=ttl, floor=floor, queue=queue, shared=shared), arguments))
