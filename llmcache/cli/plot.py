"""`llmcache plot TRACE -o FILE`."""

from __future__ import annotations

import click

from llmcache.cli import base, types


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
def command(
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
