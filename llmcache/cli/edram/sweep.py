"""`llmcache edram sweep`."""

from __future__ import annotations

from typing import Any

import click

from llmcache.cli import base, kinds, names
from llmcache.cli.edram.options import bandwidth, factor, profile_option, several, whole
from llmcache.units import parse_size


@base.command("sweep")
@click.option(
    "--model",
    type=kinds.Names(names.edram_models),
    default="llama2-7b",
    show_default=True,
    help="Models, or all.",
)
@click.option(
    "--workload",
    type=kinds.Names(names.edram_workloads),
    default="PG19",
    show_default=True,
    help="LA, TQ, QP, PG19, or all.",
)
@click.option(
    "--system",
    type=kinds.Names(names.edram_systems),
    default="Kelle+eDRAM",
    show_default=True,
    help="Systems, or all.",
)
@profile_option("paper", "paper, public, silicon, or all.")
@click.option("--context", "contexts", metavar="N,…", callback=several(whole(1)), help="Tokens of the prompt.")
@click.option("--decode", "decodes", metavar="N,…", callback=several(whole(1)), help="Tokens to decode.")
@click.option("--batch", "batches", metavar="N,…", callback=several(whole(1)), help="Sequences at once.")
@click.option("--budget", "budgets", metavar="N,…", callback=several(whole(1)), help="N': tokens that eviction keeps.")
@click.option(
    "--interval-scale",
    "interval_factors",
    metavar="X,…",
    callback=several(factor),
    help="Factors of all refresh intervals: 0.125,0.5,1.",
)
@click.option(
    "--dram-bw", "dram_rates", metavar="RATE,…", callback=several(bandwidth), help="Bandwidths of DRAM: 15GB/s,64GB/s."
)
@click.option(
    "--kv-memory",
    "kv_capacities",
    metavar="SIZE,…",
    callback=several(parse_size),
    help="Capacities of the KV memory: 4Mi,8Mi.",
)
@click.option("--recompute", metavar="MODE", help="first-principles, declared (section 8.3.2) or none.")
@click.option("--constants", type=kinds.FILE, help="Your profiles, models, workloads and systems: TOML.")
@base.json_option("llmcache.edram-sweep/1")
def command(as_json: bool, **options: Any) -> None:
    """Latency and energy of every combination of what is varied, against Original+SRAM; all modelled.

    \b
    Examples:
      llmcache edram sweep --model all --workload all --system all
      llmcache edram sweep --budget 2048,3500,5250 --model llama3.2-3b
      llmcache edram sweep --interval-scale 0.5,1 --profile all --json > x.json
    """
    from llmcache.report import edram_model

    edram_model.show_sweep(edram_model.swept(*edram_model.axes_of(**options)), as_json)
