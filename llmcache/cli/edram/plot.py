"""`llmcache edram plot`."""

from __future__ import annotations

import click

from llmcache.cli import base, kinds

_PICTURES = kinds.Names(lambda: ("energy", "speedup", "refresh", "roofline", "sweep"), several=False)


@base.command("plot")
@click.argument("source", metavar="RESULT.json", type=kinds.FILE)
@base.output_option("What to write: .png, .svg or .html, by its ending.", required=True)
@click.option("--what", type=_PICTURES, help="For .png and .svg: energy, speedup, refresh, roofline; sweep of a sweep.")
@base.force_option()
@base.json_option("llmcache.edram-plot/1")
def command(source: str, output: str, what: str | None, force: bool, as_json: bool) -> None:
    """Draw a saved document of 'llmcache edram model --json' or 'llmcache edram sweep --json'; all of it is modelled.

    \b
    Examples:
      llmcache edram model llama2-7b --json > run.json
      llmcache edram plot run.json -o run.html
      llmcache edram plot run.json -o roofline.png --what roofline
    """
    from llmcache.report.edram_plot import PlotRequest, plot

    written = plot(PlotRequest(source, output, what, force))
    if as_json:
        written.show("llmcache.edram-plot/1")
