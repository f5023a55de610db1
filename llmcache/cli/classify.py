"""`llmcache classify TRACE`."""

from __future__ import annotations

import click


@click.command("classify", context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("trace")
@click.option("--json", "as_json", is_flag=True, help="The classes as JSON, in bytes, seconds and blocks.")
@click.option("--min-bytes", metavar="SIZE", default="64K", show_default=True, help="Sum up what is smaller in one line.")
@click.option("--model", "models", metavar="FILE", multiple=True, help="Name tensors from this GGUF or safetensors file.")
def command(trace: str, as_json: bool, min_bytes: str, models: tuple[str, ...]) -> None:
    """What was read once (SEQ), in a LOOP with its period, or again and again (HOT), by file.

    TRACE is a trace of llmcache (.parquet), or .strace, .csv or .oracleGeneral. Tensors are named where a model file is
    still where the trace saw it; --model names them from a copy.

    \b
    llmcache classify run.parquet
    llmcache classify run.parquet --model ~/models/llama-8b-q8_0.gguf
    llmcache classify run.parquet --json | jq .totals
    """
    from llmcache.cache.classify import classify_file
    from llmcache.fs.layout.naming import TensorNames
    from llmcache.report import classification
    from llmcache.units import parse_size

    least = parse_size(min_bytes)
    found = classify_file(trace, lambda files: TensorNames(models, files))
    classification.show(found, trace, least, as_json)
