"""The commands for recorded traces: what one holds, in other formats, what was read how, and pictures of it."""

from __future__ import annotations

import json
import os

import click

from llmcache.cli import base, types


@base.command("info")
@click.argument("file", type=types.FILE)
@base.json_option("llmcache.info/1")
def info_command(file: str, as_json: bool) -> None:
    """Show what the trace in FILE (.parquet, .csv, .strace, .oracleGeneral) holds and where it comes from.

    \b
    Examples:
      llmcache info run.parquet
      llmcache info run.parquet --json | jq .provenance
    """
    from llmcache.trace import info

    info.show(file, as_json=as_json)


FORMATS = """\b
Formats, by the ending of the name:
  .parquet        llmcache's own: every column
  .csv            file,offset,length,op[,time] in bytes and seconds
  .oracleGeneral  libCacheSim's, 24 bytes a record; written by block
  .strace         only read: strace -f -ttt -y -e trace=desc,process -o OUT …

\b
Examples:
  llmcache convert app.strace app.parquet
  llmcache convert app.parquet app.oracleGeneral --force"""


@base.command("convert", epilog=FORMATS)
@click.argument("source", metavar="IN", type=types.FILE)
@click.argument("target", metavar="OUT", type=types.FILE)
@base.force_option()
@base.json_option("llmcache.convert/1")
def convert_command(source: str, target: str, force: bool, as_json: bool) -> None:
    """Convert the trace IN to OUT; the endings of the names tell the formats."""
    from llmcache.trace.formats import convert
    from llmcache.units import format_size

    rows, size_bytes = convert(source, target, force), os.path.getsize(target)
    if as_json:
        click.echo(json.dumps({"schema": "llmcache.convert/1", "path": target, "rows": rows, "size_bytes": size_bytes}))
    click.echo(f"{target}: {rows} rows, {format_size(size_bytes)}", err=True)


@base.command("classify")
@click.argument("trace", type=types.FILE)
@base.json_option("llmcache.classify/1")
@click.option("--min-bytes", type=types.SIZE, default="64K", help="Sum up what is smaller in one line.")
@click.option("--model", "models", type=types.FILE, multiple=True, help="Name tensors from this GGUF or safetensors file.")
def classify_command(trace: str, as_json: bool, min_bytes: int, models: tuple[str, ...]) -> None:
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


@base.command("plot")
@click.argument("trace", type=types.FILE)
@base.output_option("What to write: .png, .svg or .html, by its ending.", required=True)
@click.option(
    "--files",
    metavar="GLOB",
    help="Draw the files whose path or name matches: '*.gguf', '*' [default: those with 1 % of accesses or blocks].",
)
@click.option("--classes/--no-classes", default=True, help="Shade what is SEQ, LOOP and HOT.")
@click.option("--model", "models", type=types.FILE, multiple=True, help="Name layers from this GGUF or safetensors file.")
@base.force_option()
@base.json_option("llmcache.plot/1")
def plot_command(
    trace: str, output: str, files: str | None, classes: bool, models: tuple[str, ...], force: bool, as_json: bool
) -> None:
    """Draw which blocks are accessed when: block number against time, a band for each file.

    TRACE is a trace of llmcache (.parquet), or .strace, .csv or .oracleGeneral. Layers and tensors are named at the
    right edge where a model file is still where the trace saw it; --model names them from a copy.

    An HTML page is a single file, with the table of classes. A trace of any length is drawn in the same memory;
    --no-classes is faster where millions of rows are random.

    \b
    Examples:
      llmcache plot run.parquet -o run.html
      llmcache plot run.parquet -o loops.png --files '*.gguf'
      llmcache plot run.parquet -o run.svg --model ~/models/llama-8b-q8_0.gguf
    """
    from llmcache.fs.layout.modelfile import ModelHeaders
    from llmcache.report.output import progress
    from llmcache.report.plot import plot

    with progress() as tell:
        written = plot(
            trace, output, lambda table: ModelHeaders(models, table), tell, files=files, classes=classes, force=force
        )
    if as_json:
        written.show("llmcache.plot/1")
