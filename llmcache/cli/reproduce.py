"""`llmcache reproduce NAME`."""

from __future__ import annotations

import click


@click.command("reproduce", context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("name", metavar="NAME")
@click.option(
    "-o",
    "directory",
    metavar="DIR",
    help="Write NAME.html and NAME.json here [default: the current directory; with --json, nowhere].",
)
@click.option("--quick", is_flag=True, help="Coarser and smaller: 10 cache sizes, short runs (all but kelle).")
@click.option("--json", "as_json", is_flag=True, help="Print the JSON document instead of the claims.")
@click.option("--force", is_flag=True, help="Replace the files if they exist.")
def command(name: str, directory: str | None, quick: bool, as_json: bool, force: bool) -> None:
    """Recompute a paper: its figures and claims beside what our policies and models give.

    \b
    io-caching   Rethinking I/O Caching for LLM Inference (2025): figures 1, 2, 4, 5, section 4.2
    hillinfer    HillInfer, KV eviction with a SmartSSD: figures 2, 3, 8 to 11; modelled, and measured here
    icecache     IceCache, trees of keys (ICLR 2026): figures 1, 6 to 8, claims of the tables; measured here
    kelle        Kelle, KV caching on eDRAM (MICRO 2025): tables, text, figures; all modelled

    \b
    llmcache reproduce io-caching -o results
    llmcache reproduce io-caching --quick --json | jq '.claims[] | {name, findings}'

    Every verdict (confirmed, partly, not confirmed) is computed from the numbers beside it, by the rule on the page. What
    the paper says, what is modelled and what is measured here stay apart. The paper's traces are not public: synthetic
    ones stand in.
    """
    from llmcache.cli import ending
    from llmcache.report.reproduce.output import Wanted, run

    where = directory if directory is not None or as_json else "."
    with ending.in_order():
        run(Wanted(name, where, quick, as_json, force))
