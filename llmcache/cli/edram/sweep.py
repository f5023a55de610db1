"""`llmcache edram sweep`."""

from __future__ import annotations

import click

from llmcache.cli import base, types
from llmcache.cli.edram.options import profile_option


@base.command("sweep")
@click.option(
    "--model",
    type=types.NameType("all", table="llmcache.edram.models:MODELS"),
    default="llama2-7b",
    show_default=True,
    help="Models, or all.",
)
@click.option(
    "--workload",
    type=types.NameType("all", table="llmcache.edram.workloads:WORKLOADS"),
    default="PG19",
    show_default=True,
    help="LA, TQ, QP, PG19, or all.",
)
@click.option(
    "--system",
    type=types.NameType("all", table="llmcache.edram.systems:SYSTEMS"),
    default="Kelle+eDRAM",
    show_default=True,
    help="Systems, or all.",
)
@profile_option("paper", "paper, public, silicon, or all.")
@click.option("--context", metavar="N,…", help="Tokens of the prompt.")
@click.option("--decode", metavar="N,…", help="Tokens to decode.")
@click.option("--batch", metavar="N,…", help="Sequences at once.")
@click.option("--budget", metavar="N,…", help="N': tokens that eviction keeps.")
@click.option("--interval-scale", metavar="X,…", help="Factors of all refresh intervals: 0.125,0.5,1.")
@click.option("--dram-bw", metavar="RATE,…", help="Bandwidths of DRAM: 15GB/s,64GB/s.")
@click.option("--kv-memory", metavar="SIZE,…", help="Capacities of the KV memory: 4Mi,8Mi.")
@click.option("--recompute", metavar="MODE", help="first-principles, declared (section 8.3.2) or none.")
@click.option("--constants", type=types.FILE, help="Your profiles, models, workloads and systems: TOML.")
@base.json_option("llmcache.edram-sweep/1")
def command(as_json: bool, **options: str | None) -> None:
    """Latency and energy of every combination of what is varied, against Original+SRAM; all modelled.

    \b
    Examples:
      llmcache edram sweep --model all --workload all --system all
      llmcache edram sweep --budget 2048,3500,5250 --model llama3.2-3b
      llmcache edram sweep --interval-scale 0.5,1 --profile all --json > x.json
    """
    from llmcache.edram.question import Options, ask_sweep
    from llmcache.report import edram_sweep

    edram_sweep.show(edram_sweep.swept(*ask_sweep(Options.given(options))), as_json)
