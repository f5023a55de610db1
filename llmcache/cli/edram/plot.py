"""`llmcache edram plot`."""

from __future__ import annotations

import click


@click.command("plot", context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("source", metavar="RESULT.json")
@click.option("-o", "--output", metavar="FILE", required=True, help="What to write: .html, .png or .svg, by its ending.")
@click.option("--what", metavar="NAME", help="For .png and .svg: energy, speedup, refresh, roofline; sweep of a sweep.")
@click.option("--force", is_flag=True, help="Replace the file of -o if it exists.")
def command(source: str, output: str, what: str | None, force: bool) -> None:
    """Draw a saved document of 'llmcache edram model --json' or 'llmcache edram sweep --json'; all of it is modelled.

    \b
    llmcache edram model llama2-7b --json > run.json
    llmcache edram plot run.json -o run.html
    llmcache edram plot run.json -o roofline.png --what roofline
    """
    from llmcache.report.edram_plot import Wanted, plot

    plot(Wanted(source, output, what, force))
