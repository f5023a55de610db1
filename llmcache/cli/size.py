"""`llmcache size`."""

from __future__ import annotations

from typing import Any

import click

from llmcache.cli import base, types
from llmcache.units import parse_duration, parse_size_with_unit


@base.command("size")
@click.option("--bw", type=types.BANDWIDTH, help="Storage bandwidth: 100 (MB/s), 100MB/s, 1GB/s.")
@click.option(
    "--loop", type=types.above("size", parse_size_with_unit, "70M"), help="Bytes of weights read for each token: 70M."
)
@click.option("--model", type=types.FILE, help="Read loop and hot set from a GGUF or safetensors file, or a directory.")
@click.option("--cache", type=types.SIZE_WITH_UNIT, help="Cache size to evaluate, hot set included: 64M.")
@click.option("--ram", type=types.SIZE_WITH_UNIT, help="Memory to evaluate: 16G [default without --cache: this machine's].")
@click.option(
    "--t", type=types.above("time", parse_duration, "0.1, 100ms"), help="Computing time for each token [default: 0.1 s]."
)
@click.option(
    "--tokens-per-second",
    type=types.above("n", types.number, "10", most=1e9),
    help="Target rate instead of --t: T = 1/N.",
)
@click.option("--hot", type=types.SIZE_WITH_UNIT, help="Hot set, always cached [default: the model's, else 4M].")
@click.option(
    "--device", type=click.Choice(["watch", "phone"]), help="Use bandwidth, cache and hot set of this device class."
)
@click.option("--measure", type=types.DIRECTORY, help="Measure the storage bandwidth of DIR instead of --bw.")
@base.json_option("llmcache.size/1")
def command(as_json: bool, **options: Any) -> None:
    """Calculate the cache a model needs to run without stalls, its speed with this memory, or a cache's largest loop.

    \b
    Examples:
      llmcache size --bw 100 --loop 70M    # the smallest cache for this loop
      llmcache size --bw 100 --cache 64M   # the largest loop for this cache
      llmcache size --bw 1GB/s --model m.gguf --cache 4G --t 50ms
      llmcache size --bw 3GB/s --loop 22.6G --ram 16G
      llmcache size --measure ~/models --model m.gguf --tokens-per-second 10
    """
    from llmcache.cache.sizing import ask
    from llmcache.mount.client.advice import advise
    from llmcache.report import size

    size.show(advise(ask(**options)), as_json)
