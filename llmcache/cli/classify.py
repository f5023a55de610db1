"""`llmcache classify TRACE`."""

from __future__ import annotations

import click

from llmcache.cli import base, types


@base.command("classify")
@click.argument("trace", type=types.FILE)
@base.json_option("llmcache.classify/1")
@click.option("--min-bytes", type=types.SIZE, default="64K", help="Sum up what is smaller in one line.")
@click.option("--model", "models", type=types.FILE, multiple=True, help="Name tensors from this GGUF or safetensors file.")
def command(trace: str, as_json: bool, min_bytes: int, models: tuple[str, ...]) -> None:
    """What was read once (SEQ), in a LOOP with its period, or again and again (HOT), by file.

    TRACE is a trace of llmcache (.parquet), or .strace, .csv or .oracleGeneral. Tensors are named where a model file is
    still where the trace saw it; --model names them from a copy. Of a mixture of experts it also shows how unevenly they
    are used, and what caches of whole experts would hit.

    \b
    Examples:
      llmcache classify run.parquet
      llmcache classify run.parquet --model ~/models/llama-8b-q8_0.gguf
      llmcache classify run.parquet --json | jq .totals
    """
    from llmcache.cache.classify import classify_file
    from llmcache.fs.layout.modelfile import ModelHeaders
    from llmcache.report import classify

    found = classify_file(trace, lambda files: ModelHeaders(models, files))
    classify.show(found, trace, min_bytes, as_json)
