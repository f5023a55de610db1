"""`llmcache size`."""

from __future__ import annotations

from typing import Any

import click

from llmcache.cli import base, types
from llmcache.units import parse_duration, parse_size_with_unit


@base.command("size")
@click.option("--bw", type=types.BANDWIDTH, help="Bandwidth of storage: 100 (MB/s), 100MB/s, 1GB/s.")
@click.option(
    "--loop", type=types.above("size", parse_size_with_unit, "70M"), help="Bytes that a token reads of the weights: 70M."
)
@click.option("--model", type=types.FILE, help="Take loop and hot set from a GGUF or safetensors file, or a directory.")
@click.option("--cache", type=types.SIZE_WITH_UNIT, help="A cache to judge, hot set included: 64M.")
@click.option("--ram", type=types.SIZE_WITH_UNIT, help="Memory to judge: 16G [default, without --cache: this machine's].")
@click.option(
    "--t", type=types.above("time", parse_duration, "0.1, 100ms"), help="Computing time per token [default: 0.1 s]."
)
@click.option(
    "--tokens-per-second",
    type=types.above("n", types.number, "10", most=1e9),
    help="In place of --t: the wanted rate, T = 1/N.",
)
@click.option("--hot", type=types.SIZE_WITH_UNIT, help="Hot set, kept whole [default: the model's, else 4M].")
@click.option("--device", type=click.Choice(["watch", "phone"]), help="Bandwidth, cache and hot set of a device class.")
@click.option("--measure", type=types.DIRECTORY, help="Measure the bandwidth of DIR's storage, in place of --bw.")
@base.json_option("llmcache.size/1")
def command(as_json: bool, **options: Any) -> None:
    """How large a cache a model needs to run without stalls, what memory gives it, or how large a loop a cache serves.

    \b
    Examples:
      llmcache size --bw 100 --loop 70M    # the smallest cache for this loop
      llmcache size --bw 100 --cache 64M   # the largest loop for this cache
      llmcache size --bw 1GB/s --model m.gguf --cache 4G --t 50ms
      llmcache size --bw 3GB/s --loop 22.6G --ram 16G
      llmcache size --measure ~/models --model m.gguf --tokens-per-second 10
    """
    from llmcache.cache.question import ask
    from llmcache.fs.client.advice import advise
    from llmcache.report import size

    size.show(advise(ask(**options)), as_json)
