"""`llmcache kv plan`."""

from __future__ import annotations

import click

from llmcache.cli import base, kinds


@base.command("plan")
@click.option("--model", type=kinds.FILE, required=True, help="The model's config.json, or a directory with one.")
@click.option("--context", metavar="TOKENS", required=True, help="Tokens of each sequence: 8192, 128k.")
@click.option("--batch", metavar="N", default="1", show_default=True, help="Sequences that are decoded together.")
@click.option("--gpu", metavar="SIZE", help="Memory of the GPU: 12G [default: the profile's; 0: the processor computes].")
@click.option("--ram", metavar="SIZE", help="Memory of the host: 32G [default: the profile's].")
@click.option("--ssd", type=kinds.DIRECTORY, help="Where the spill file would go: its free space, and its measured speeds.")
@click.option("--alpha", metavar="SHARE", default="0.2", show_default=True, help="Share of the tokens that is attended.")
@click.option(
    "--profile",
    type=kinds.Names(lambda: ("paper", "typical", "measured"), several=False),
    help="Whose speeds: paper, typical (the paper's typical PC), measured [default: measured with --ssd, else typical].",
)
@click.option("--kv-dtype", metavar="TYPE", help="Type of the KV cache: float16, bfloat16, int8, float32.")
@base.json_option("llmcache.kv-plan/1")
def command(as_json: bool, **options: str) -> None:
    """What of a model and its KV cache fits where, and how long a token would take.

    All times are modelled. With --ssd, the speeds of this machine are those of 'llmcache kv profile', which measures them
    if it has not yet; the computational SSD is emulated. A GPU is never measured: its speeds are those of the typical PC.

    \b
    Examples:
      llmcache kv plan --model llama.json --context 128k --gpu 12G --ssd /tmp
      llmcache kv plan --model ~/qwen2 --context 32k --batch 8 --profile paper
    """
    from llmcache.kv.planning.plan import Options, plan
    from llmcache.report import kv_plan
    from llmcache.report.output import tell

    kv_plan.show(plan(Options(**options), tell), as_json)
