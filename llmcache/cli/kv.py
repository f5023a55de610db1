"""`llmcache kv`: the commands for keys and values in tiers, and for stored prompts."""

from __future__ import annotations

from typing import Any

import click

from llmcache.cli import base, types
from llmcache.units import parse_size

# name: (module:attribute, the line `llmcache kv --help` shows)
COMMANDS: dict[str, tuple[str, str]] = {
    "bench": ("llmcache.cli.kv:bench_command", "How long a decode step takes by policy: measured, or modelled."),
    "plot": ("llmcache.cli.kv:plot_command", "Draw what bench has saved: timelines, latency against beta."),
    "profile": ("llmcache.cli.kv:profile_command", "Measure this machine for planning: scoring, storage, memory."),
    "plan": ("llmcache.cli.kv:plan_command", "What of a model and its KV cache fits where, and how fast it is."),
    "proxy": ("llmcache.cli.kv:proxy_command", "Store prompts of the stock llama-server on disk and restore them."),
    "list": ("llmcache.cli.kv:list_command", "What prompts are stored in a directory, of which models."),
    "show": ("llmcache.cli.kv:show_command", "What is stored of one model, and what its blocks depend on."),
    "prune": ("llmcache.cli.kv:prune_command", "Remove stored prompts: by age, by size, of a model."),
}

command = base.group(
    "kv",
    COMMANDS,
    """Keys and values that do not fit in memory, or outlive it: in tiers, chosen by importance; prompts on disk.

    'llmcache kv COMMAND --help' tells more of each command, with examples.
    """,
    """\b
Examples:
  llmcache kv plan --model llama.json --context 128k --gpu 12G --ssd /tmp
  llmcache kv bench --context 32k --json > run.json
  llmcache kv plot run.json -o steps.png
  llmcache kv list /mnt/nvme/kv""",
)
SHARE = types.above("share", types.number, "0.2", 1)
RATIO = types.TextType(
    "ratio", lambda text: text if text == "auto" else types.above("ratio", types.number, "0.5, or auto").parse(text)
)
MEMORY = types.above("size", parse_size, "4G")


@base.command("bench")
@click.option(
    "--policy",
    type=types.NameType(table="llmcache.kv.policies:POLICIES"),
    help="Policies [default: full,h2o,prefetch,leoam,hillinfer; with --task: mass,icecache,quest,h2o,window].",
)
@click.option(
    "--task",
    type=types.NameType("passkey", "recall", "needle", "variables", "common", "frequent", "loss", "chain", several=False),
    metavar="TASK",
    help="Instead: answers of a real model: passkey, recall, needle, variables, common, frequent or chain; or its loss.",
)
@click.option(
    "--profile",
    type=click.Choice(["measured", "paper"]),
    default="measured",
    help="Run here, or by the latency model on the paper's machine.",
)
@click.option(
    "--model",
    type=types.FILE,
    help="A config.json, or Qwen-7B …, a shape. With --task: smollm2, gemma3, a directory or .gguf; --flips: a directory.",
)
@click.option(
    "--context",
    type=types.several(types.TOKENS),
    metavar="TOKENS",
    help="Tokens of each sequence [default: 32k; with --task: 4k, also 1k,4k].",
)
@click.option("--batch", type=types.COUNT, default=1, help="Sequences decoded together.")
@click.option("--layers", type=types.COUNT, help="Layers that are run [default: 4].")
@click.option("--steps", type=types.COUNT, default=16, help="Decode steps to measure.")
@click.option("--alpha", type=SHARE, help="Share of the tokens that is attended [default: 0.2].")
@click.option(
    "--budget",
    type=types.several(types.whole(1)),
    metavar="TOKENS",
    help="In place of --alpha: tokens attended [with --task: 64,128,256].",
)
@click.option("--beta", type=RATIO, help="Pages in memory to pages on the SSD, or auto: f_c/f_s [default: 1].")
@click.option("--ram", type=MEMORY, help="The most that pages in memory may take (M0): 4G.")
@click.option("--block", type=types.COUNT, default=256, help="Tokens of a score block (n).")
@click.option(
    "--device",
    type=click.Choice(["csd", "file"]),
    default="csd",
    help="HillInfer's SSD: an emulated computational one, or a plain file.",
)
@click.option("--csd", metavar="NAME", default="smartssd", help="Modelled speeds of the device, or none.")
@click.option("--throttle", is_flag=True, help="Let the emulated device really take as long as modelled.")
@click.option("--no-hie", is_flag=True, help="HillInfer without hierarchical importance evaluation.")
@click.option("--no-bkp", is_flag=True, help="HillInfer without bidirectional pools.")
@click.option("--no-app", is_flag=True, help="HillInfer without the prefetching pipeline.")
@click.option("--exact", is_flag=True, help="Evaluate again with the true queries what was looked ahead for.")
@click.option(
    "--compute",
    metavar="WHAT",
    default="paper",
    help="Emulated accelerator: of the machine paper or typical, or the time of a layer (20ms); or cpu.",
)
@click.option("--sweep-beta", is_flag=True, help="One policy at several betas around f_c/f_s.")
@click.option(
    "--path", "--ssd", "path", type=types.DIRECTORY, default="/var/tmp", help="Where spill files go; removed again."
)
@click.option("--threads", type=types.COUNT, help="Of each kernel [default: one per core].")
@click.option("--seed", type=types.Range(min=0), default=0, help="Of the synthetic stream.")
@click.option(
    "--flips",
    metavar="RATES",
    multiple=True,
    help="Instead: answers of --model DIR over lost bits: 2drp, uniform=1e-3, …; sided, intervals (figure 8, table 4).",
)
@click.option(
    "--edram-run", type=types.FILE, metavar="RUN.json", help="Instead: record what --policy kelle keeps, for 'edram report'."
)
@click.option("--cases", type=types.COUNT, default=2, help="Of --task: contexts (a depth).")
@click.option("--plot", type=types.FILE, help="Draw it as well, like 'kv plot': .png, .svg or .html.")
@base.force_option()
@base.json_option("llmcache.kv-bench/1", "; for 'kv plot'")
def bench_command(
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
    from llmcache.kv.bench.question import BenchOptions, task_of
    from llmcache.report import kv_bench
    from llmcache.report.output import check_target, tell

    if plot is not None and (flips or edram_run is not None):
        raise click.UsageError("--plot: neither --flips nor --edram-run has a picture")
    if (bool(flips), edram_run is not None, task is not None).count(True) > 1:
        raise click.UsageError("--flips, --edram-run, --task: one of them at a time")
    if flips:
        from llmcache.report import edram_accuracy

        asked = edram_accuracy.AccuracyOptions(options["model"], flips=flips, seed=options["seed"])
        edram_accuracy.show(edram_accuracy.answer(asked, tell), as_json)
    elif edram_run is not None:
        from llmcache.edram.kelle import record_stream

        check_target("--edram-run", edram_run, force)
        record_stream(BenchOptions(**options), tell).save(edram_run, force)
        click.echo(f"written: {edram_run}; for 'llmcache edram report'", err=True)
    else:
        bench = BenchOptions(**options)
        kv_bench.answer(bench if task is None else task_of(task, cases, bench), plot, force, as_json, tell)


@base.command("plot")
@click.argument("run", type=types.FILE)
@base.output_option("What to write: .png, .svg or .html, by its ending.", required=True)
@base.force_option()
@base.json_option("llmcache.kv-plot/1")
def plot_command(run: str, output: str, force: bool, as_json: bool) -> None:
    """Draw what 'llmcache kv bench --json' has saved.

    RUN of several policies: what each resource does in one decode step, a panel for each policy (Gantt chart). RUN with
    --sweep-beta: latency against beta, with f_c/f_s and M0 marked. RUN with --task: answers, memory, times and their parts,
    as in figures 1, 6, 7 and 8 of IceCache; .html has a picture of each.

    \b
    Examples:
      llmcache kv bench --policy hillinfer,hillinfer-no-app --json > run.json
      llmcache kv plot run.json -o steps.png
      llmcache kv bench --task passkey --json > passkey.json
      llmcache kv plot passkey.json -o passkey.html
    """
    from llmcache.report.kv_bench import plot

    written = plot(run, output, force)
    if as_json:
        written.show("llmcache.kv-plot/1")


@base.command("profile")
@click.argument("directory", metavar="DIR", type=types.DIRECTORY)
@base.json_option("llmcache.kv-profile/1")
@base.force_option("Measure again, also if there is a profile of this machine and device.")
def profile_command(directory: str, as_json: bool, force: bool) -> None:
    """Measure this machine for planning: scoring, storage below DIR, an emulated device, memory.

    It takes about 10 seconds and 140 MB in DIR (twice that must be free), which are removed at the end. What was measured
    is kept in the user's cache directory, per processor, kernel and device of DIR, and shown with its age from then on.

    \b
    Examples:
      llmcache kv profile /var/tmp
      llmcache kv profile ~/spill --json | jq '.storage'
    """
    from llmcache.kv.planning.profile import profile_of
    from llmcache.report import kv_plan
    from llmcache.report.output import tell

    kv_plan.show_profile(profile_of(directory, force=force, progress=tell), as_json)


@base.command("plan")
@click.option("--model", type=types.FILE, required=True, help="The model's config.json, or a directory with one.")
@click.option("--context", type=types.TOKENS, required=True, help="Tokens of each sequence: 8192, 128k.")
@click.option("--batch", type=types.whole(1), default=1, help="Sequences that are decoded together.")
@click.option("--gpu", type=types.SIZE, help="Memory of the GPU: 12G [default: the profile's; 0: the processor computes].")
@click.option("--ram", type=MEMORY, help="Memory of the host: 32G [default: the profile's].")
@click.option("--ssd", type=types.DIRECTORY, help="Where the spill file would go: its free space, and its measured speeds.")
@click.option("--alpha", type=SHARE, default=0.2, help="Share of the tokens that is attended.")
@click.option(
    "--profile",
    type=types.NameType("paper", "typical", "measured", several=False),
    help="Whose speeds: paper, typical (the paper's typical PC), measured [default: measured with --ssd, else typical].",
)
@click.option("--kv-dtype", metavar="TYPE", help="Type of the KV cache: float16, bfloat16, int8, float32.")
@base.json_option("llmcache.kv-plan/1")
def plan_command(as_json: bool, **options: Any) -> None:
    """What of a model and its KV cache fits where, and how long a token would take.

    All times are modelled. With --ssd, the speeds of this machine are those of 'llmcache kv profile', which measures them
    if it has not yet; the computational SSD is emulated. A GPU is never measured: its speeds are those of the typical PC.

    \b
    Examples:
      llmcache kv plan --model llama.json --context 128k --gpu 12G --ssd /tmp
      llmcache kv plan --model ~/qwen2 --context 32k --batch 8 --profile paper
    """
    from llmcache.kv.planning.plan import plan
    from llmcache.report import kv_plan
    from llmcache.report.output import tell

    kv_plan.show(plan(**options, progress=tell), as_json)


@base.command("list")
@click.argument("directory", metavar="DIR", type=types.DIRECTORY)
@base.json_option("llmcache.kv-list/1")
def list_command(directory: str, as_json: bool) -> None:
    """What prompts are stored in DIR, of which models, and what was restored of them.

    DIR is the directory of a PrefixCache (llama-cpp-python), or of 'llmcache serve-llama'.

    \b
    Examples:
      llmcache kv list /mnt/nvme/kv
      llmcache kv list /mnt/nvme/kv --json | jq '.models[].size_bytes'
    """
    from llmcache.kv.prefix.store import listed
    from llmcache.report import kv_prefix

    kv_prefix.show_list(directory, listed(directory), as_json)


@base.command("show")
@click.argument("directory", metavar="DIR", type=types.DIRECTORY)
@click.argument("model", metavar="MODEL")
@base.json_option("llmcache.kv-show/1")
def show_command(directory: str, model: str, as_json: bool) -> None:
    """What prompts of MODEL are stored in DIR, and what its blocks depend on.

    MODEL is the beginning of a fingerprint, as 'llmcache kv list' shows it, or the name of the model's file.

    \b
    Examples:
      llmcache kv show /mnt/nvme/kv 1f83a0c4
      llmcache kv show /mnt/nvme/kv llama-8b.gguf --json | jq '.described'
    """
    from llmcache.kv.prefix.store import chosen, listed
    from llmcache.report import kv_prefix

    kv_prefix.show_model(chosen(listed(directory), model), as_json)


@base.command("prune")
@click.argument("directory", metavar="DIR", type=types.DIRECTORY)
@click.option("--unused", metavar="TIME", help="Remove what was not used for so long: 30d.")
@click.option("--keep", metavar="SIZE", help="Keep so much, and remove what was not used for longest: 10G.")
@click.option("--model", metavar="NAME", help="Of this model alone: the beginning of its fingerprint, or its file.")
@base.json_option("llmcache.kv-prune/1")
def prune_command(directory: str, unused: str | None, keep: str | None, model: str | None, as_json: bool) -> None:
    """Remove stored prompts from DIR: by age, by size, of a model; with --model alone all of it.

    Programs that use DIR may go on: they evaluate what is not there any more. Files that are not theirs stay.

    \b
    Examples:
      llmcache kv prune /mnt/nvme/kv --unused 30d --keep 10G
      llmcache kv prune /mnt/nvme/kv --model 1f83a0c4
    """
    from llmcache.kv.prefix.store import pruned
    from llmcache.report import kv_prefix

    kv_prefix.show_pruned(pruned(directory, unused, keep, model), as_json)


@base.command(
    "proxy", context_settings={**base.HELP_OPTIONS, "ignore_unknown_options": False, "allow_interspersed_args": True}
)
@click.argument("directory", metavar="DIR", type=types.DIRECTORY)
@click.argument("words", metavar="[-- COMMAND...]", nargs=-1, type=click.UNPROCESSED)
@click.option("--url", metavar="URL", help="Serve in front of a server that runs: http://127.0.0.1:8080.")
@click.option("--slots-dir", metavar="PATH", type=types.DIRECTORY, help="With --url: the server's --slot-save-path.")
@click.option(
    "--listen",
    metavar="ADDRESS",
    help="Listen at HOST:PORT [default: --host and --port of COMMAND; with --url 127.0.0.1:8080].",
)
@click.option("--limit", type=types.SIZE, default="20G", help="Bytes that DIR may hold.")
@click.option("--ttl", metavar="TIME", help="Remove prompts that were not used for this long: 30d.")
@click.option("--floor", type=types.SIZE, default="1G", help="Space of the file system that is left free.")
def proxy_command(
    directory: str,
    words: tuple[str, ...],
    url: str | None,
    slots_dir: str | None,
    listen: str | None,
    limit: int,
    ttl: str | None,
    floor: int,
) -> int:
    """Store the prompts of a llama-server in DIR and restore them, also after a restart.

    COMMAND is llama-server with its arguments. The proxy listens where COMMAND would, and passes all requests on. The
    longest stored beginning of a prompt is restored into one of the server's slots; the rest is evaluated and stored.
    GET /llmcache/metrics reports hits, bytes and seconds saved (OpenMetrics).

    \b
    Examples:
      llmcache kv proxy /mnt/nvme/kv -- llama-server -m llama-8b.gguf -c 16384
      llmcache kv proxy /mnt/nvme/kv --limit 50G --ttl 30d -- llama-server -m llama-8b.gguf
      llmcache kv proxy /mnt/nvme/kv --url http://127.0.0.1:8081 --slots-dir /srv/slots
    """
    from llmcache.errors import UsageError
    from llmcache.kv.proxy import command as proxy
    from llmcache.units import parse_duration

    if bool(words) == (url is not None) or (url is None) != (slots_dir is None):
        hint = "llmcache kv proxy DIR -- llama-server -m model.gguf"
        raise UsageError("kv proxy: give either a command after --, or --url and --slots-dir", hint)
    limits = proxy.Limits(limit, parse_duration(ttl) if ttl else 0, floor)
    if url is not None and slots_dir is not None:
        return proxy.attach(directory, limits, url, slots_dir, listen)
    return proxy.start(directory, limits, words, listen)
