"""`llmcache edram report`."""

from __future__ import annotations

from typing import Any

import click

from llmcache.cli import base, kinds
from llmcache.cli.edram.options import one, positive, profile_option
from llmcache.errors import UsageError
from llmcache.units import parse_duration, parse_size


@base.command("report")
@click.argument("run", metavar="RUN.json", type=kinds.FILE)
@profile_option()
@click.option(
    "--intervals",
    metavar="WHICH",
    default="kelle",
    show_default=True,
    help="kelle, uni (0.36 ms), org (45 µs), one duration, or four: HST MSB, HST LSB, LST MSB, LST LSB.",
)
@click.option("--rule", metavar="NAME", default="ticks", show_default=True, help="ticks, expected, floor or ceil.")
@click.option(
    "--step",
    "step_ns",
    metavar="TIME",
    callback=one(positive(parse_duration)),
    help="How long a step takes, in place of what the run says: 20ms.",
)
@click.option(
    "--capacity",
    "capacity_bytes",
    metavar="SIZE",
    callback=one(positive(parse_size)),
    help="What the eDRAM holds: 4Mi; of more, the rest streams unrefreshed.",
)
@click.option("--constants", type=kinds.FILE, help="Your profiles: TOML.")
@base.json_option("llmcache.edram-report/1")
def command(run: str, intervals: str, as_json: bool, **options: Any) -> None:
    """What refreshing a recorded run would cost in eDRAM: rows, refreshes and joules by group; all modelled.

    A run is recorded by a policy of the KV manager; its clock is that of a modelled accelerator, never of this machine.

    \b
    Examples:
      llmcache edram report run.json
      llmcache edram report run.json --intervals 180us,3.6ms,720us,5.4ms
    """
    from llmcache.report import edram_report

    try:
        at = edram_report.parse_intervals(intervals)
    except UsageError as error:
        raise UsageError(f"--intervals: {error.message}", error.hint) from error
    edram_report.show(edram_report.accounted(run, at, **options), as_json)
