"""`llmcache kv bench`."""

from __future__ import annotations

from typing import Any

import click

from llmcache.cli import base, kinds, names


@base.command("bench")
@click.option(
    "--policy",
    type=kinds.Names(names.kv_policies),
    help="Policies [default: full,h2o,prefetch,leoam,hillinfer; with --task: mass,icecache,quest,h2o,window].",
)
@click.option(
    "--task",
    type=kinds.Names(names.kv_tasks, several=False),
    metavar="TASK",
    help="Instead: answers of a real model: passkey, recall, needle, variables, common, frequent or chain; or its loss.",
)
@click.option(
    "--profile",
    type=click.Choice(["measured", "paper"]),
    default="measured",
    show_default=True,
    help="Run here, or by the latency model on the paper's machine.",
)
@click.option(
    "--model",
    type=kinds.FILE,
    help="A config.json, or Qwen-7B …, a shape. With --task: smollm2, gemma3, a directory or .gguf; --flips: a directory.",
)
@click.option("--context", metavar="TOKENS", help="Tokens of each sequence [default: 32k; with --task: 4k, also 1k,4k].")
@click.option(
    "--batch", type=click.IntRange(min=1), metavar="N", default=1, show_default=True, help="Sequences decoded together."
)
@click.option("--layers", type=click.IntRange(min=1), metavar="N", help="Layers that are run [default: 4].")
@click.option(
    "--steps", type=click.IntRange(min=1), metavar="N", default=16, show_default=True, help="Decode steps to measure."
)
@click.option("--alpha", metavar="SHARE", help="Share of the tokens that is attended [default: 0.2].")
@click.option("--budget", metavar="TOKENS", help="In place of --alpha: tokens attended [with --task: 64,128,256].")
@click.option("--beta", metavar="RATIO", help="Pages in memory to pages on the SSD, or auto: f_c/f_s [default: 1].")
@click.option("--ram", metavar="SIZE", help="The most that pages in memory may take (M0): 4G.")
@click.option(
    "--block", type=click.IntRange(min=1), metavar="N", default=256, show_default=True, help="Tokens of a score block (n)."
)
@click.option(
    "--device",
    type=click.Choice(["csd", "file"]),
    default="csd",
    show_default=True,
    help="HillInfer's SSD: an emulated computational one, or a plain file.",
)
@click.option("--csd", metavar="NAME", default="smartssd", show_default=True, help="Modelled speeds of the device, or none.")
@click.option("--throttle", is_flag=True, help="Let the emulated device really take as long as modelled.")
@click.option("--no-hie", is_flag=True, help="HillInfer without hierarchical importance evaluation.")
@click.option("--no-bkp", is_flag=True, help="HillInfer without bidirectional pools.")
@click.option("--no-app", is_flag=True, help="HillInfer without the prefetching pipeline.")
@click.option("--exact", is_flag=True, help="Evaluate again with the true queries what was looked ahead for.")
@click.option(
    "--compute",
    metavar="WHAT",
    default="paper",
    show_default=True,
    help="Emulated accelerator: of the machine paper or typical, or the time of a layer (20ms); or cpu.",
)
@click.option("--sweep-beta", is_flag=True, help="One policy at several betas around f_c/f_s.")
@click.option(
    "--path",
    "--ssd",
    "path",
    type=kinds.DIRECTORY,
    default="/var/tmp",
    show_default=True,
    help="Where spill files go; removed again.",
)
@click.option("--threads", type=click.IntRange(min=1), metavar="N", help="Of each kernel [default: one per core].")
@click.option(
    "--seed", type=click.IntRange(min=0), metavar="N", default=0, show_default=True, help="Of the synthetic stream."
)
@click.option(
    "--flips",
    metavar="RATES",
    multiple=True,
    help="Instead: answers of --model DIR over lost bits: 2drp, uniform=1e-3, …; sided, intervals (figure 8, table 4).",
)
@click.option(
    "--edram-run", type=kinds.FILE, metavar="RUN.json", help="Instead: record what --policy kelle keeps, for 'edram report'."
)
@click.option(
    "--cases", type=click.IntRange(min=1), metavar="N", default=2, show_default=True, help="Of --task: contexts (a depth)."
)
@click.option("--plot", type=kinds.FILE, help="Draw it as well, like 'kv plot': .png, .svg or .html.")
@base.force_option()
@base.json_option("llmcache.kv-bench/1", "; for 'kv plot'")
def command(
    as_json: bool,
    flips: tuple[str, ...],
    edram_run: str | None,
    force: bool,
    task: str | None,
    cases: int,
    plot: str | None,
    **options: Any,
) -> None:
    """How long a decode step takes by policy: by stage, with bytes by tier, hits, and speed-ups.

    Measured are the real policies, tiers and pipeline of this machine. Keys, values and queries are synthetic, the
    accelerator and the computational SSD are emulated; --profile paper is modelled altogether.

    \b
    Examples:
      llmcache kv bench --context 32k
      llmcache kv bench --policy hillinfer,hillinfer-no-app --json > run.json
      llmcache kv bench --policy hillinfer --sweep-beta --json > beta.json
      llmcache kv bench --profile paper --model Qwen-7B --context 16k --batch 8
      llmcache kv bench --policy kelle --edram-run run.json
      llmcache kv bench --flips 2drp
      llmcache kv bench --task passkey --policy icecache,quest --plot run.html
      llmcache kv bench --task needle --model ~/Llama-3.1-8B --context 32k
      llmcache kv bench --task loss --model smollm2 --policy mass,oracle
    """
    from llmcache.kv.bench.question import Options
    from llmcache.report import files, kv_plot
    from llmcache.report.progress import tell

    if plot is not None and (flips or edram_run is not None):
        raise click.UsageError("--plot: neither --flips nor --edram-run has a picture")
    if (bool(flips), edram_run is not None, task is not None).count(True) > 1:
        raise click.UsageError("--flips, --edram-run, --task: one of them at a time")
    if flips:
        from llmcache.report import edram_accuracy

        asked = edram_accuracy.Options(options["model"], flips=flips, seed=options["seed"])
        edram_accuracy.show(edram_accuracy.answer(asked, tell), as_json)
    elif edram_run is not None:
        from llmcache.edram.refresh.kelle import record_stream

        files.check_target("--edram-run", edram_run, force)
        record_stream(Options(**options), tell).save(edram_run, force)
        click.echo(f"written: {edram_run}; for 'llmcache edram report'", err=True)
    elif task is not None:
        from llmcache.kv.bench import task_question
        from llmcache.report import kv_task

        wanted = task_question.TaskOptions(task, cases, Options(**options))
        kv_task.answer(wanted, plot, force, as_json, tell)
    else:
        kv_plot.answer(Options(**options), plot, force, as_json, tell)
