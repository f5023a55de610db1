"""`llmcache kv`: the commands for KV caches in tiers and for stored prompts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from llmcache.cli import base, types
from llmcache.errors import EXIT_INTERRUPTED
from llmcache.units import parse_size

if TYPE_CHECKING:
    from llmcache.kv.bench.options import BenchOptions

# name: (module:attribute, the line `llmcache kv --help` shows)
COMMANDS: dict[str, tuple[str, str]] = {
    "bench": ("llmcache.cli.kv:bench_command", "Compare policies: time of a decode step, or answers of a model."),
    "plot": ("llmcache.cli.kv:plot_command", "Plot a saved run of bench: timelines, latency over beta, answers."),
    "profile": ("llmcache.cli.kv:profile_command", "Measure this machine for plan: key scoring, storage, memory."),
    "plan": ("llmcache.cli.kv:plan_command", "Plan where a model and its KV cache fit, and estimate the speed."),
    "proxy": ("llmcache.cli.kv:proxy_command", "Store and restore the prompts of a stock llama-server."),
    "list": ("llmcache.cli.kv:list_command", "List the prompts stored in a directory, by model."),
    "show": ("llmcache.cli.kv:show_command", "Show the stored prompts and the fingerprint of one model."),
    "prune": ("llmcache.cli.kv:prune_command", "Remove stored prompts by age, size or model."),
}

command = base.group(
    "kv",
    COMMANDS,
    """Plan and measure KV caches larger than memory, and manage prompts stored on disk.

    'llmcache kv COMMAND --help' describes each command, with examples.
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
    help="Policies to run [default: full,h2o,prefetch,leoam,hillinfer; with --task: mass,icecache,quest,h2o,window].",
)
@click.option(
    "--task",
    type=types.NameType("passkey", "recall", "needle", "variables", "common", "frequent", "loss", "chain", several=False),
    metavar="TASK",
    help="Test the answers of a real model instead: passkey, recall, needle, variables, common, frequent, chain or loss.",
)
@click.option(
    "--profile",
    type=click.Choice(["measured", "paper"]),
    default="measured",
    help="Measure on this machine, or model the paper's machine.",
)
@click.option(
    "--model",
    type=types.FILE,
    help="Shape: config.json, or a name: Qwen-7B. With --task: smollm2, gemma3, directory, .gguf; with --flips: directory.",
)
@click.option(
    "--context",
    type=types.several(types.TOKENS),
    metavar="TOKENS",
    help="Tokens of each sequence [default: 32k; with --task: 4k, or a list: 1k,4k].",
)
@click.option("--batch", type=types.COUNT, default=1, help="Sequences decoded together.")
@click.option("--layers", type=types.COUNT, help="Layers to run [default: 4].")
@click.option("--steps", type=types.COUNT, default=16, help="Decode steps to measure.")
@click.option("--alpha", type=SHARE, help="Fraction of the tokens to attend to [default: 0.2].")
@click.option(
    "--budget",
    type=types.several(types.whole(1)),
    metavar="TOKENS",
    help="Tokens to attend to, instead of --alpha [default with --task: 64,128,256].",
)
@click.option("--beta", type=RATIO, help="Ratio of pages in memory to pages on the SSD, or auto: f_c/f_s [default: 1].")
@click.option("--ram", type=MEMORY, help="Maximum size of the pages in memory (M0): 4G.")
@click.option("--block", type=types.COUNT, default=256, help="Tokens in a score block (n).")
@click.option(
    "--device",
    type=click.Choice(["csd", "file"]),
    default="csd",
    help="SSD of HillInfer: an emulated computational one, or a plain file.",
)
@click.option(
    "--csd", metavar="NAME", default="smartssd", help="Profile with the modelled speeds of the emulated SSD, or none."
)
@click.option("--throttle", is_flag=True, help="Delay the emulated SSD to its modelled speed.")
@click.option("--no-hie", is_flag=True, help="Run HillInfer without hierarchical importance evaluation.")
@click.option("--no-bkp", is_flag=True, help="Run HillInfer without bidirectional pools.")
@click.option("--no-app", is_flag=True, help="Run HillInfer without the prefetching pipeline.")
@click.option("--exact", is_flag=True, help="Evaluate prefetched layers again with the true queries.")
@click.option(
    "--compute",
    metavar="WHAT",
    default="paper",
    help="Emulated accelerator: paper or typical machine, or the time of a layer (20ms); or cpu.",
)
@click.option("--sweep-beta", is_flag=True, help="Run one policy at several betas around f_c/f_s.")
@click.option(
    "--path",
    "--ssd",
    "path",
    type=types.DIRECTORY,
    default="/var/tmp",
    help="Directory of the spill files, which are removed at the end.",
)
@click.option("--threads", type=types.COUNT, help="Threads of each kernel [default: one for each core].")
@click.option("--seed", type=types.Range(min=0), default=0, help="Random seed.")
@click.option(
    "--flips",
    metavar="RATES",
    multiple=True,
    help="Test answers with lost bits instead: 2drp, uniform=1e-3, …; sided, intervals (figure 8, table 4).",
)
@click.option(
    "--edram-run", type=types.FILE, metavar="RUN.json", help="Record a run of --policy kelle for 'edram report' instead."
)
@click.option("--cases", type=types.COUNT, default=2, help="Number of contexts for --task (passkey: for each depth).")
@click.option("--plot", type=types.FILE, help="Also plot the result, like 'kv plot': .png, .svg or .html.")
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
    """Compare KV cache policies: time of a decode step by stage, bytes by tier, hits and speed-ups.

    By default, the real policies, tiers and pipeline are measured on this machine with synthetic keys, values and queries;
    the accelerator and the computational SSD are emulated. With --profile paper, everything is modelled.

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
    from llmcache.kv.bench import options as bench_options
    from llmcache.report.output import check_target, progress_line

    if plot is not None and (flips or edram_run is not None):
        raise click.UsageError("--plot: --flips and --edram-run have no plot")
    if (bool(flips), edram_run is not None, task is not None).count(True) > 1:
        raise click.UsageError("--flips, --edram-run, --task: give only one of them")
    if flips:
        from llmcache.papers.edram import accuracy

        variants = accuracy.AccuracyOptions(options["model"], flips=flips, seed=options["seed"])
        accuracy.show(accuracy.answer(variants, progress_line), as_json)
    elif edram_run is not None:
        from llmcache.papers.edram.kelle import record_stream

        check_target("--edram-run", edram_run, force)
        settings = bench_options.BenchOptions(**options)
        record_stream(bench_options.setup_of(settings), settings.policy, progress_line).save(edram_run, force)
        click.echo(f"{edram_run} is written, for 'llmcache edram report'", err=True)
    else:
        _run_bench(bench_options.BenchOptions(**options), task, cases, plot, force, as_json)


def _run_bench(settings: BenchOptions, task: str | None, cases: int, plot: str | None, force: bool, as_json: bool) -> None:
    from llmcache.kv.bench import options as bench_options
    from llmcache.kv.bench.task import run as run_task
    from llmcache.report import kv_bench
    from llmcache.report.output import form_of, progress_line, write_target

    form = "" if plot is None else form_of("--plot", plot, force)
    found = (
        bench_options.run(settings, progress_line, drawn=plot is not None)
        if task is None
        else run_task(bench_options.task_of(task, cases, settings), progress_line)
    )
    kv_bench.show(found, as_json)
    if plot is not None:
        write_target("--plot", plot, kv_bench.drawn(found, plot, form), force)


@base.command("plot")
@click.argument("run", type=types.FILE)
@base.output_option("Write the plot to this .png, .svg or .html file.", required=True)
@base.force_option()
@base.json_option("llmcache.kv-plot/1")
def plot_command(run: str, output: str, force: bool, as_json: bool) -> None:
    """Plot a run saved by 'llmcache kv bench --json'.

    For several policies: a Gantt chart of one decode step by resource, in a panel for each policy. For --sweep-beta:
    latency over beta, with f_c/f_s and M0. For --task: answers, memory, and times with their parts, as in figures 1, 6, 7
    and 8 of IceCache; .html has a plot of each.

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
@base.force_option("Measure again even if a profile of this machine and device exists.")
def profile_command(directory: str, as_json: bool, force: bool) -> None:
    """Measure this machine for 'llmcache kv plan': key scoring, storage of DIR, an emulated device, memory.

    This takes about 10 seconds and a temporary file of 140 MB in DIR (270 MB must be free). The profile is stored in your
    cache directory, for each processor, kernel and device; later calls show it with its age.

    \b
    Examples:
      llmcache kv profile /var/tmp
      llmcache kv profile ~/spill --json | jq '.storage'
    """
    from llmcache.kv.planning.profile import profile_of
    from llmcache.report import kv_plan
    from llmcache.report.output import progress_line

    kv_plan.show_profile(profile_of(directory, force=force, progress=progress_line), as_json)


@base.command("plan")
@click.option("--model", type=types.FILE, required=True, help="The model's config.json, or a directory with one.")
@click.option("--context", type=types.TOKENS, required=True, help="Tokens of each sequence: 8192, 128k.")
@click.option("--batch", type=types.whole(1), default=1, help="Sequences decoded together.")
@click.option("--gpu", type=types.SIZE, help="GPU memory: 12G; 0: compute on the CPU [default: the profile's].")
@click.option("--ram", type=MEMORY, help="Host memory: 32G [default: the profile's].")
@click.option("--ssd", type=types.DIRECTORY, help="Directory of the spill file: use its free space and measured speeds.")
@click.option("--alpha", type=SHARE, default=0.2, help="Fraction of the tokens to attend to.")
@click.option(
    "--profile",
    type=types.NameType("paper", "typical", "measured", several=False),
    help="Speeds to use: paper, typical (the paper's typical PC) or measured [default: measured with --ssd, else typical].",
)
@click.option(
    "--kv-dtype", metavar="TYPE", help="Type of the KV cache: float16, bfloat16, int8 or float32 [default: the model's]."
)
@base.json_option("llmcache.kv-plan/1")
def plan_command(as_json: bool, **options: Any) -> None:
    """Plan where a model and its KV cache fit (GPU, RAM, SSD), and estimate the time of a token.

    All times are modelled. With --ssd, the speeds are those of 'llmcache kv profile', which is run if there is no profile;
    the computational SSD is emulated. GPUs are not measured: their speeds are those of the typical PC.

    \b
    Examples:
      llmcache kv plan --model llama.json --context 128k --gpu 12G --ssd /tmp
      llmcache kv plan --model ~/qwen2 --context 32k --batch 8 --profile paper
    """
    from llmcache.kv.planning.plan import plan
    from llmcache.report import kv_plan
    from llmcache.report.output import progress_line

    kv_plan.show(plan(**options, progress=progress_line), as_json)


@base.command("list")
@click.argument("directory", metavar="DIR", type=types.DIRECTORY)
@base.json_option("llmcache.kv-list/1")
def list_command(directory: str, as_json: bool) -> None:
    """List the prompts stored in DIR by model, and how often they were restored.

    DIR is the directory of a PrefixCache (llama-cpp-python) or of 'llmcache serve-llama'.

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
    """Show the prompts of MODEL stored in DIR, and the data of its fingerprint.

    MODEL is the beginning of the fingerprint, as 'llmcache kv list' shows it, or the name of the model's file.

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
@click.option("--unused", metavar="TIME", help="Remove blocks not used for this time: 30d.")
@click.option("--keep", metavar="SIZE", help="Remove the least recently used blocks until this size is left: 10G.")
@click.option(
    "--model", metavar="NAME", help="Only this model: the beginning of its fingerprint, or its file [default: all]."
)
@base.json_option("llmcache.kv-prune/1")
def prune_command(directory: str, unused: str | None, keep: str | None, model: str | None, as_json: bool) -> None:
    """Remove stored prompts from DIR by age, size or model. --model by itself removes all prompts of the model.

    Programs that use DIR can continue: they evaluate removed prompts again. Other files in DIR are not touched.

    \b
    Examples:
      llmcache kv prune /mnt/nvme/kv --unused 30d --keep 10G
      llmcache kv prune /mnt/nvme/kv --model 1f83a0c4
    """
    from llmcache.kv.prefix.store import pruned
    from llmcache.report import kv_prefix

    kv_prefix.show_pruned(pruned(directory, unused, keep, model), as_json)


@base.command(
    "proxy",
    interrupted=EXIT_INTERRUPTED,
    context_settings={**base.HELP_OPTIONS, "ignore_unknown_options": False, "allow_interspersed_args": True},
)
@click.argument("directory", metavar="DIR", type=types.DIRECTORY)
@click.argument("words", metavar="[-- COMMAND...]", nargs=-1, type=click.UNPROCESSED)
@click.option("--url", metavar="URL", help="Use a running server: http://127.0.0.1:8080.")
@click.option("--slots-dir", metavar="PATH", type=types.DIRECTORY, help="With --url: the --slot-save-path of the server.")
@click.option(
    "--listen",
    metavar="ADDRESS",
    help="Listen on HOST:PORT [default: --host and --port of COMMAND; with --url 127.0.0.1:8080].",
)
@click.option("--limit", type=types.SIZE, default="20G", help="Maximum size of DIR.")
@click.option("--ttl", metavar="TIME", help="Remove prompts not used for this time: 30d [default: never].")
@click.option(
    "--floor", type=types.SIZE, help="Space to leave free on the file system [default: 1G, or 5 % of a smaller file system]."
)
def proxy_command(
    directory: str,
    words: tuple[str, ...],
    url: str | None,
    slots_dir: str | None,
    listen: str | None,
    limit: int,
    ttl: str | None,
    floor: int | None,
) -> int:
    """Serve a stock llama-server, and store its prompts in DIR.

    COMMAND is llama-server with its options. The proxy listens where the server would, and passes all requests on. If a
    prompt begins like a stored one, that beginning is restored into a slot of the server instead of evaluated, also
    after a restart of both. GET /llmcache/metrics returns hits, bytes and seconds saved (OpenMetrics).

    \b
    Examples:
      llmcache kv proxy /mnt/nvme/kv -- llama-server -m llama-8b.gguf -c 16384
      llmcache kv proxy ~/kv --limit 50G -- llama-server -m llama-8b.gguf
      llmcache kv proxy ~/kv --url http://127.0.0.1:8081 --slots-dir ~/slots
    """
    from functools import partial

    from llmcache.errors import UsageError
    from llmcache.kv.prefix.store import BlockStore
    from llmcache.kv.proxy import command as proxy
    from llmcache.units import parse_duration

    if bool(words) == (url is not None) or (url is None) != (slots_dir is None):
        hint = "llmcache kv proxy DIR -- llama-server -m model.gguf"
        raise UsageError("kv proxy: give either a command after --, or --url and --slots-dir", hint)
    open_store = partial(BlockStore, directory, limit, parse_duration(ttl) if ttl else 0, floor)
    if url is not None and slots_dir is not None:
        return proxy.attach(open_store, url, slots_dir, listen)
    return proxy.start(open_store, words, listen)
