"""The commands for recorded traces: describe, convert, classify and plot them."""

from __future__ import annotations

import json
import os

import click

from llmcache.cli import base, types


@base.command("info")
@click.argument("file", type=types.FILE)
@base.json_option("llmcache.info/1")
def info_command(file: str, as_json: bool) -> None:
    """Show contents and origin of the trace FILE (.parquet, .csv, .strace or .oracleGeneral).

    \b
    Examples:
      llmcache info run.parquet
      llmcache info run.parquet --json | jq .provenance
    """
    from llmcache.trace import info

    info.show(file, as_json=as_json)


FORMATS = """\b
Formats, by file name extension:
  .parquet        llmcache's own format, with all columns
  .csv            file,offset,length,op[,time] in bytes and seconds
  .oracleGeneral  libCacheSim, records of 24 bytes; one for each block
  .strace         input: strace -f -ttt -y -e trace=desc,process -o OUT …

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
    """Convert the trace IN to OUT. The file name extensions select the formats."""
    from llmcache.trace.formats import convert
    from llmcache.units import format_size

    rows, size_bytes = convert(source, target, force), os.path.getsize(target)
    if as_json:
        click.echo(json.dumps({"schema": "llmcache.convert/1", "path": target, "rows": rows, "size_bytes": size_bytes}))
    click.echo(f"{target}: {rows} rows, {format_size(size_bytes)}", err=True)


@base.command("classify")
@click.argument("trace", type=types.FILE)
@base.json_option("llmcache.classify/1")
@click.option("--min-bytes", type=types.SIZE, default="64K", help="Add up smaller rows in one line.")
@click.option(
    "--model",
    "models",
    type=types.FILE,
    multiple=True,
    help="Read tensor names from this GGUF or safetensors file (repeatable).",
)
def classify_command(trace: str, as_json: bool, min_bytes: int, models: tuple[str, ...]) -> None:
    """Show which parts of each file were read once (SEQ), in a LOOP with a period, or all the time (HOT).

    TRACE is a .parquet, .strace, .csv or .oracleGeneral file. If a model file still has the path recorded in the trace,
    its tensors are named; for a copy of it, use --model. For MoE models, the output also shows how unevenly the experts
    are used, and the hits of caches of whole experts.

    \b
    Examples:
      llmcache classify run.parquet
      llmcache classify run.parquet --model ~/models/llama-8b-q8_0.gguf
      llmcache classify run.parquet --json | jq .totals
    """
    from llmcache.cache.classify import classify_file
    from llmcache.model.modelfile import ModelHeaders
    from llmcache.report import classify

    found = classify_file(trace, lambda files: ModelHeaders(models, files))
    classify.show(found, trace, min_bytes, as_json)


@base.command("plot")
@click.argument("trace", type=types.FILE)
@base.output_option("Write the plot to this .png, .svg or .html file.", required=True)
@click.option(
    "--files",
    metavar="GLOB",
    help="Draw files whose path or name matches: '*.gguf', '*' [default: files with 1 % of the accesses or blocks].",
)
@click.option("--classes/--no-classes", default=True, help="Tint the classes SEQ, LOOP and HOT.")
@click.option(
    "--model",
    "models",
    type=types.FILE,
    multiple=True,
    help="Read layer names from this GGUF or safetensors file (repeatable).",
)
@base.force_option()
@base.json_option("llmcache.plot/1")
def plot_command(
    trace: str, output: str, files: str | None, classes: bool, models: tuple[str, ...], force: bool, as_json: bool
) -> None:
    """Plot block number against time, with a band for each file.

    TRACE is a .parquet, .strace, .csv or .oracleGeneral file. If a model file still has the path recorded in the trace,
    its layers and tensors are named at the right edge; for a copy of it, use --model.

    An HTML page is a single file and includes the table of classes. Memory does not depend on the length of the trace.
    For traces with millions of random accesses, --no-classes is faster.

    \b
    Examples:
      llmcache plot run.parquet -o run.html
      llmcache plot run.parquet -o loops.png --files '*.gguf'
      llmcache plot run.parquet -o run.svg --model ~/models/llama-8b-q8_0.gguf
    """
    from llmcache.model.modelfile import ModelHeaders
    from llmcache.report.output import progress
    from llmcache.report.plot import plot

    with progress() as tell:
        written = plot(
            trace, output, lambda table: ModelHeaders(models, table), tell, files=files, classes=classes, force=force
        )
    if as_json:
        written.show("llmcache.plot/1")
