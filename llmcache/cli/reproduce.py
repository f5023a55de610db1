"""`llmcache reproduce NAME`."""

from __future__ import annotations

import click

from llmcache.cli import base, types


@base.command("reproduce")
@click.argument("name", metavar="NAME", type=types.NameType("all", table="llmcache.papers:REPRODUCTIONS", several=False))
@base.output_option(
    "Write NAME.html and NAME.json to DIR [default: the current directory; with --json, no files].", types.DIRECTORY
)
@click.option("--quick", is_flag=True, help="Use 10 cache sizes instead of 100 (io-caching).")
@base.json_option("llmcache.reproduce.NAME/1")
@base.force_option()
def command(name: str, output: str | None, quick: bool, as_json: bool, force: bool) -> int:
    """Recompute the figures and claims of a paper, or of all papers, and compare them with the published ones.

    \b
    io-caching  Rethinking I/O Caching for LLM Inference (2025): figures 1, 2,
                4, 5, section 4.2; modelled, overheads measured
    hillinfer   HillInfer, KV eviction with a SmartSSD: figures 2, 3, 8 to 11;
                modelled, and measured
    icecache    IceCache, trees of keys (ICLR 2026): figures 1, 6 to 8, claims
                of the tables; measured
    kelle       Kelle, KV caching on eDRAM (MICRO 2025): tables, text, figures;
                all modelled
    all         all papers, and an index of their verdicts: all.html, all.json

    \b
    Examples:
      llmcache reproduce io-caching -o results
      llmcache reproduce kelle --json | jq '.claims[] | {name, findings}'
      llmcache reproduce all --quick -o results

    Every verdict (confirmed, partly, not confirmed) is computed from the numbers shown with it, by the rule on the page.
    Published, modelled and measured values are kept separate. This command measures nothing: measurements are part of
    llmcache, and the page names their machine and date. The traces of io-caching are not public; synthetic ones replace
    them.
    """
    from llmcache.papers.reproduce import run

    return run(name, output if output is not None or as_json else ".", quick, as_json, force)
