"""`llmcache edram model`."""

from __future__ import annotations

from typing import Any

import click

from llmcache.cli import base, kinds, names
from llmcache.cli.edram.options import one, profile_option, whole


@base.command("model")
@click.argument("model", metavar="MODEL", type=kinds.Names(names.edram_models, several=False), default="llama2-7b")
@click.option(
    "--workload",
    type=kinds.Names(names.edram_workloads, several=False),
    default="PG19",
    show_default=True,
    help="LA, TQ, QP or PG19.",
)
@click.option("--context", metavar="N", callback=one(whole(1)), help="Tokens of the prompt, in place of the workload's.")
@click.option("--decode", metavar="N", callback=one(whole(1)), help="Tokens to decode, in place of the workload's.")
@click.option("--batch", metavar="N", callback=one(whole(1)), help="Sequences at once [default: 16].")
@click.option("--budget", metavar="N", callback=one(whole(1)), help="N': tokens that eviction keeps.")
@click.option("--window", metavar="N", callback=one(whole(0)), help="Recent tokens that are never evicted.")
@click.option(
    "--system",
    type=kinds.Names(names.edram_systems),
    default="all",
    show_default=True,
    help="Systems to compare.",
)
@profile_option()
@click.option("--recompute", metavar="MODE", help="first-principles, declared (section 8.3.2) or none.")
@click.option("--constants", type=kinds.FILE, help="Your profiles, models, workloads and systems: TOML.")
@base.json_option("llmcache.edram-model/1")
def command(as_json: bool, **options: Any) -> None:
    """Latency and energy, by component, of serving MODEL on each of the five systems of the Kelle paper; all modelled.

    MODEL: llama2-7b, llama2-13b, llama3-8b, llama3.2-3b, mistral-7b, qwen2-7b, opt-6.7b, or one of --constants.

    \b
    Examples:
      llmcache edram model llama2-7b --workload PG19
      llmcache edram model llama3-8b --context 16000 --decode 128 --batch 1
      llmcache edram model --constants my.toml --profile mine --json > run.json
      llmcache edram plot run.json -o run.html

    \b
    [profile.mine]            # mine.toml; also [model.X], [workload.X], …
    base = "paper"            # what it begins with
    refresh_pass_j = 3.65e-6  # any constant of it: a wrong name lists all
    """
    from llmcache.report import edram_model

    edram_model.show(edram_model.compare(**options), as_json)
