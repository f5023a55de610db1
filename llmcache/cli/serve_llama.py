"""`llmcache serve-llama DIR -- ARGUMENTS`."""

from __future__ import annotations

import sys

import click

from llmcache.cli import base, types


@base.command("serve-llama", context_settings={**base.HELP_OPTIONS, "ignore_unknown_options": True})
@click.argument("directory", metavar="DIR", type=types.DIRECTORY)
@click.option("--limit", metavar="SIZE", default="20G", help="Maximum size of DIR.")
@click.option("--ttl", metavar="TIME", help="Remove blocks not used for this time: 30d [default: never].")
@click.option(
    "--floor", metavar="SIZE", help="Space to leave free on the file system [default: 1G, or 5 % of a smaller file system]."
)
@click.option(
    "--queue",
    metavar="SIZE",
    default="1G",
    help="Maximum memory for prompts that wait to be written; never more than half of the available memory.",
)
@click.option(
    "--shared",
    metavar="ADDRESS",
    envvar="LLMCACHE_SHARED",
    show_envvar=True,
    help="Share prompts through this Redis-compatible server: redis://host:6379/0.",
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
    """Serve models with llama-cpp-python, and store evaluated prompts in DIR.

    The server is 'python -m llama_cpp.server' with ARGUMENTS and the prefix cache of llmcache: if a prompt begins like
    a stored one, that beginning is restored instead of evaluated. Prompts stored by earlier or other servers count too.
    GET /metrics returns hits, bytes and seconds saved (OpenMetrics).

    \b
    Examples:
      llmcache serve-llama /mnt/nvme/kv -- --model llama-8b.gguf --n_ctx 16384
      llmcache serve-llama /mnt/nvme/kv --ttl 30d -- --config_file models.json
    """
    from llmcache.kv.llama import PrefixCache
    from llmcache.kv.llama.server import serve

    sys.exit(serve(PrefixCache(directory, limit, ttl=ttl, floor=floor, queue=queue, shared=shared), arguments))
