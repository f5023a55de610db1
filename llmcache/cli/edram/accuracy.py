"""`llmcache edram accuracy`."""

from __future__ import annotations

from typing import Any

import click

from llmcache.cli import base, kinds
from llmcache.cli.edram.options import one, positive
from llmcache.units import parse_duration


@base.command("accuracy")
@click.option(
    "--model",
    type=kinds.DIRECTORY,
    help="config.json and model.safetensors of one that was trained to recall [default: ours].",
)
@click.option(
    "--experiment",
    metavar="NAME,…",
    help="budgets (table 3), uniform (figure 8a), sided (8b, 8c), intervals (table 4) [default: all, or none with --flips].",
)
@click.option(
    "--flips",
    metavar="RATES",
    multiple=True,
    help="A variant of your own, may be repeated: uniform=1e-3, msb=1e-2, hst=1e-2, 2drp, interval=1050us, …",
)
@click.option("--curve", metavar="POINTS", default="paper", show_default=True, help="Retention: 45us=1e-6,1.05ms=3e-4,…")
@click.option("--format", type=click.Choice(["int16", "fp16"]), default="int16", show_default=True, help="Of vectors.")
@click.option(
    "--sequences", type=click.IntRange(min=2), metavar="N", default=8, show_default=True, help="Texts; errors are over them."
)
@click.option(
    "--context", type=click.IntRange(min=64), metavar="N", default=1024, show_default=True, help="Tokens of each text."
)
@click.option(
    "--pairs", type=click.IntRange(1, 512), metavar="N", default=64, show_default=True, help="Pairs of key and value in it."
)
@click.option("--questions", type=click.IntRange(min=1), metavar="N", default=32, show_default=True, help="Pairs asked for.")
@click.option("--seed", type=click.IntRange(min=0), metavar="N", default=0, show_default=True, help="Of the texts.")
@click.option(
    "--record",
    type=kinds.FILE,
    metavar="RUN.json",
    help="Also record what AERP keeps at --budget, for 'llmcache edram report'.",
)
@click.option(
    "--budget", type=click.IntRange(min=1), metavar="N", default=256, show_default=True, help="N' of the recorded run."
)
@click.option(
    "--step",
    "step_ns",
    metavar="TIME",
    callback=one(positive(parse_duration)),
    help="Length of a step on the modelled accelerator, in the recorded run: 20ms.",
)
@base.force_option()
@base.json_option("llmcache.edram-accuracy/1")
def command(as_json: bool, **options: Any) -> None:
    """What eviction and lost bits do to a model's answers. Answers are measured here, losses of bits are modelled.

    The model finds values of keys in noise. All variants answer the same questions with the same draws of bits; "harm" is
    how much the loss of the right answers rises over keeping everything intact, paired by text.

    \b
    Examples:
      llmcache edram accuracy
      llmcache edram accuracy --flips uniform=1e-3 --flips 2drp
      llmcache edram accuracy --model DIR --record run.json --step 20ms
    """
    from llmcache.report import edram_accuracy
    from llmcache.report.output import tell

    edram_accuracy.show(edram_accuracy.answer(edram_accuracy.AccuracyOptions(**options), tell), as_json)
