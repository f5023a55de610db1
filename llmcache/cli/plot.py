"""`llmcache plot TRACE -o FILE`."""

from __future__ import annotations

import click


@click.command("plot", context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("trace")
@click.option("-o", "--output", metavar="FILE", required=True, help="What to write: .png, .svg or .html, by its ending.")
@click.option("--files", metavar="GLOB", help="Draw only files whose path or name matches: '*.gguf'.")
@click.option("--classes/--no-classes", default=True, show_default=True, help="Shade what is SEQ, LOOP and HOT.")
@click.option("--model", "models", metavar="FILE", multiple=True, help="Name layers from this GGUF or safetensors file.")
@click.option("--force", is_flag=True, help="Replace the file of -o if it exists.")
def command(trace: str, output: str, files: str | None, classes: bool, models: tuple[str, ...], force: bool) -> None:
    """Draw which blocks are accessed when: block number against time, a band for each file.

    TRACE is a trace of llmcache (.parquet), or .strace, .csv or .oracleGeneral. Layers and tensors are named at the
    right edge where a model file is still where the trace saw it; --model names them from a copy.

    An HTML page is a single file, with the table of classes. A trace of any length is drawn in the same memory;
    --no-classes is faster where millions of rows are random.

    \b
    llmcache plot run.parquet -o run.html
    llmcache plot run.parquet -o loops.png --files '*.gguf' --model ~/models/llama-8b-q8_0.gguf
    """
    from llmcache.fs.layout.naming import TensorNames
    from llmcache.report.plot import Wanted, plot
    from llmcache.report.simulation_text import progress

    with progress() as tell:
        plot(Wanted(trace, output, files, classes, force), lambda table: TensorNames(models, table), tell)
