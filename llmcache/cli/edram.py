"""`llmcache edram`: the commands for the modelled eDRAM accelerator."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import click

from llmcache.cli import base, types
from llmcache.cli.types import above, several, whole
from llmcache.errors import UsageError
from llmcache.units import parse_duration, parse_size

# name: (module:attribute, the line `llmcache edram --help` shows)
COMMANDS: dict[str, tuple[str, str]] = {
    "model": ("llmcache.cli.edram:model_command", "Compare latency and energy of a model on each system."),
    "sweep": ("llmcache.cli.edram:sweep_command", "Compare every combination of several parameters."),
    "report": ("llmcache.cli.edram:report_command", "Calculate the cost of refreshing a recorded run, by group."),
    "plot": ("llmcache.cli.edram:plot_command", "Plot a saved model or sweep: HTML, PNG or SVG."),
    "accuracy": ("llmcache.cli.edram:accuracy_command", "Test a model's answers with eviction and lost bits."),
}

command = base.group(
    "edram",
    COMMANDS,
    """Model the cost of KV caching on an edge accelerator with eDRAM, after the Kelle paper.

    All costs are modelled. 'llmcache edram COMMAND --help' describes each command, with examples.
    """,
    """\b
Examples:
  llmcache edram model llama2-7b --workload PG19
  llmcache edram sweep --budget 512,1024 --model all --json > sweep.json
  llmcache edram plot sweep.json -o sweep.png""",
)


STEP = above("time", lambda text: float(parse_duration(text)), "20ms")


def names(table: str, several: bool = True) -> types.NameType:
    """Return a type for names of a table of `edram.systems`, or "all"; for one name if `several` is not set."""
    return types.NameType("all", table=f"llmcache.papers.edram.systems:{table}", several=several)


def profile_option(default: str = "paper,silicon") -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Return the option `--profile`, for names of profiles separated by commas."""
    kind = types.NameType("all", table="llmcache.papers.edram.constants:PROFILES")
    return click.option("--profile", type=kind, default=default, help="Energy profiles: paper, public, silicon, or all.")


_recompute_option = click.option(
    "--recompute",
    metavar="MODE",
    help="Recomputation: first-principles, declared (section 8.3.2) or none [default: the system's].",
)
_constants_option = click.option(
    "--constants", type=types.FILE, help="TOML file with your own profiles, models, workloads and systems."
)


@base.command("model")
@click.argument("model", metavar="MODEL", type=names("MODELS", several=False), default="llama2-7b")
@click.option("--workload", type=names("WORKLOADS", several=False), default="PG19", help="Workload: LA, TQ, QP or PG19.")
@click.option("--context", type=whole(1), help="Tokens of the prompt [default: the workload's].")
@click.option("--decode", type=whole(1), help="Tokens to decode [default: the workload's].")
@click.option("--batch", type=whole(1), help="Sequences decoded together [default: 16].")
@click.option("--budget", type=whole(1), help="Tokens that eviction keeps (N') [default: the workload's].")
@click.option("--window", type=whole(0), help="Recent tokens that are never evicted [default: the workload's].")
@click.option("--system", type=names("SYSTEMS"), default="all", help="Systems to compare, or all.")
@profile_option()
@_recompute_option
@_constants_option
@base.json_option("llmcache.edram-model/1")
def model_command(as_json: bool, **options: Any) -> None:
    """Compare latency and energy of serving MODEL on the five systems of the Kelle paper, by component (modelled).

    MODEL is llama2-7b, llama2-13b, llama3-8b, llama3.2-3b, mistral-7b, qwen2-7b, opt-6.7b, or one from --constants.

    \b
    Examples:
      llmcache edram model llama2-7b --workload PG19
      llmcache edram model llama3-8b --context 16000 --decode 128 --batch 1
      llmcache edram model --constants my.toml --profile mine --json > run.json
      llmcache edram plot run.json -o run.html

    \b
    [profile.mine]            # mine.toml; also [model.X], [workload.X], …
    base = "paper"            # profile to start from
    refresh_pass_j = 3.65e-6  # any constant; a wrong name lists all
    """
    from llmcache.papers.edram import tables

    tables.show(tables.compare(**options), as_json)


@base.command("sweep")
@click.option("--model", type=names("MODELS"), default="llama2-7b", help="Models, or all.")
@click.option("--workload", type=names("WORKLOADS"), default="PG19", help="Workloads: LA, TQ, QP, PG19, or all.")
@click.option("--system", type=names("SYSTEMS"), default="Kelle+eDRAM", help="Systems, or all.")
@profile_option("paper")
@click.option(
    "--context", "contexts", type=several(whole(1)), default=(), help="Tokens of the prompt [default: the workload's]."
)
@click.option("--decode", "decodes", type=several(whole(1)), default=(), help="Tokens to decode [default: the workload's].")
@click.option("--batch", "batches", type=several(whole(1)), default=(), help="Sequences decoded together [default: 16].")
@click.option(
    "--budget",
    "budgets",
    type=several(whole(1)),
    default=(),
    help="Tokens that eviction keeps (N') [default: the workload's].",
)
@click.option(
    "--interval-scale",
    "interval_factors",
    type=several(above("x", types.number, "0.5", 1e9)),
    default=(),
    help="Factors for all refresh intervals: 0.125,0.5,1.",
)
@click.option(
    "--dram-bw",
    "dram_rates",
    type=several(types.BANDWIDTH),
    default=(),
    help="DRAM bandwidths: 15GB/s,64GB/s.",
)
@click.option("--kv-memory", "kv_capacities", type=several(types.SIZE), default=(), help="KV memory capacities: 4Mi,8Mi.")
@_recompute_option
@_constants_option
@base.json_option("llmcache.edram-sweep/1")
def sweep_command(as_json: bool, **options: Any) -> None:
    """Compare latency and energy of every combination of the parameters with Original+SRAM (modelled).

    \b
    Examples:
      llmcache edram sweep --model all --workload all --system all
      llmcache edram sweep --budget 2048,3500,5250 --model llama3.2-3b
      llmcache edram sweep --interval-scale 0.5,1 --profile all --json > x.json
    """
    from llmcache.papers.edram import tables

    tables.show_sweep(tables.swept(*tables.axes_of(**options)), as_json)


@base.command("report")
@click.argument("run", metavar="RUN.json", type=types.FILE)
@profile_option()
@click.option(
    "--intervals",
    metavar="WHICH",
    default="kelle",
    help="Refresh intervals: kelle, uni (0.36 ms), org (45 µs), one duration, or four: HST MSB, HST LSB, LST MSB, LST LSB.",
)
@click.option("--rule", metavar="NAME", default="ticks", help="Counting rule: ticks, expected, floor or ceil.")
@click.option("--step", "step_ns", type=STEP, help="Duration of a step: 20ms [default: that of the run].")
@click.option(
    "--capacity",
    "capacity_bytes",
    type=above("size", lambda text: float(parse_size(text)), "4Mi"),
    help="Capacity of the eDRAM: 4Mi; the rest streams without refresh [default: unlimited].",
)
@click.option("--constants", type=types.FILE, help="TOML file with your own profiles.")
@base.json_option("llmcache.edram-report/1")
def report_command(run: str, intervals: str, as_json: bool, **options: Any) -> None:
    """Calculate what refreshing a recorded run costs in eDRAM: rows, refreshes and joules by group (modelled).

    RUN.json is written by 'llmcache kv bench --edram-run' or 'llmcache edram accuracy --record'. Its times are those of a
    modelled accelerator, never of this machine.

    \b
    Examples:
      llmcache edram report run.json --step 20ms
      llmcache edram report run.json --intervals 180us,3.6ms,720us,5.4ms
    """
    from llmcache.papers.edram import report

    try:
        at = report.parse_intervals(intervals)
    except UsageError as error:
        raise UsageError(f"--intervals: {error.message}", error.hint) from error
    report.show(report.accounted(run, at, **options), as_json)


_PICTURES = types.NameType("energy", "speedup", "refresh", "roofline", "sweep", several=False)


@base.command("plot")
@click.argument("source", metavar="RESULT.json", type=types.FILE)
@base.output_option("Write the plot to this .png, .svg or .html file.", required=True)
@click.option(
    "--what",
    type=_PICTURES,
    help="Plot for .png and .svg: energy, speedup, refresh or roofline; for a sweep: sweep [default: the first available].",
)
@base.force_option()
@base.json_option("llmcache.edram-plot/1")
def plot_command(source: str, output: str, what: str | None, force: bool, as_json: bool) -> None:
    """Plot the output of 'llmcache edram model --json' or 'llmcache edram sweep --json'. All values are modelled.

    \b
    Examples:
      llmcache edram model llama2-7b --json > run.json
      llmcache edram plot run.json -o run.html
      llmcache edram plot run.json -o roofline.png --what roofline
    """
    from llmcache.papers.edram.plot import plot

    written = plot(source, output, what, force)
    if as_json:
        written.show("llmcache.edram-plot/1")


@base.command("accuracy")
@click.option(
    "--model",
    type=types.DIRECTORY,
    help="Directory with config.json and model.safetensors of a recall model [default: the built-in one].",
)
@click.option(
    "--experiment",
    metavar="NAME,…",
    help="budgets (table 3), uniform (figure 8a), sided (8b, 8c), intervals (table 4) [default: all; none with --flips].",
)
@click.option(
    "--flips",
    metavar="RATES",
    multiple=True,
    help="Another variant (repeatable): uniform=1e-3, msb=1e-2, hst=1e-2, 2drp, interval=1050us, …",
)
@click.option(
    "--curve", metavar="POINTS", default="paper", help="Retention curve: paper, or points: 45us=1e-6,1.05ms=3e-4,…"
)
@click.option("--format", type=click.Choice(["int16", "fp16"]), default="int16", help="Number format of the vectors.")
@click.option("--sequences", type=types.Range(min=2), default=8, help="Number of texts; standard errors are over texts.")
@click.option("--context", type=types.Range(min=64), default=1024, help="Tokens of each text.")
@click.option("--pairs", type=types.Range(1, 512), default=64, help="Key-value pairs in each text.")
@click.option("--questions", type=types.COUNT, default=32, help="Questions about each text.")
@click.option("--seed", type=types.Range(min=0), default=0, help="Random seed of the texts.")
@click.option(
    "--record",
    type=types.FILE,
    metavar="RUN.json",
    help="Also record a run of AERP with --budget, for 'llmcache edram report'.",
)
@click.option("--budget", type=types.COUNT, default=256, help="Budget N' of the recorded run.")
@click.option(
    "--step", "step_ns", type=STEP, help="Duration of a step of the recorded run on the modelled accelerator: 20ms."
)
@base.force_option()
@base.json_option("llmcache.edram-accuracy/1")
def accuracy_command(as_json: bool, **options: Any) -> None:
    """Test a model's answers with eviction and lost bits. Answers are measured; lost bits are modelled.

    The model recalls the values of keys in noise. All variants answer the same questions with the same random bits. "harm"
    is the increase of the loss of the right answers over keeping everything intact, paired by text.

    \b
    Examples:
      llmcache edram accuracy
      llmcache edram accuracy --flips uniform=1e-3 --flips 2drp
      llmcache edram accuracy --model DIR --record run.json --step 20ms
    """
    from llmcache.papers.edram import accuracy
    from llmcache.report.output import progress_line

    accuracy.show(accuracy.answer(accuracy.AccuracyOptions(**options), progress_line), as_json)
