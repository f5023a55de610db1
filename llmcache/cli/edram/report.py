"""`llmcache edram report`."""

from __future__ import annotations

import click

from llmcache.cli import base, types
from llmcache.cli.edram.options import profile_option


@base.command("report")
@click.argument("run", metavar="RUN.json", type=types.FILE)
@profile_option()
@click.option(
    "--intervals",
    metavar="WHICH",
    default="kelle",
    show_default=True,
    help="kelle, uni (0.36 ms), org (45 µs), one duration, or four: HST MSB, HST LSB, LST MSB, LST LSB.",
)
@click.option("--rule", metavar="NAME", default="ticks", show_default=True, help="ticks, expected, floor or ceil.")
@click.option("--step", metavar="TIME", help="How long a step takes, in place of what the run says: 20ms.")
@click.option("--capacity", metavar="SIZE", help="What the eDRAM holds: 4Mi; of more, the rest streams unrefreshed.")
@click.option("--constants", type=types.FILE, help="Your profiles: TOML.")
@base.json_option("llmcache.edram-report/1")
def command(
    run: str,
    profile: str,
    intervals: str,
    rule: str,
    step: str | None,
    capacity: str | None,
    constants: str | None,
    as_json: bool,
) -> None:
    """What refreshing a recorded run would cost in eDRAM: rows, refreshes and joules by group; all modelled.

    A run is recorded by a policy of the KV manager; its clock is that of a modelled accelerator, never of this machine.

    \b
    Examples:
      llmcache edram report run.json
      llmcache edram report run.json --intervals 180us,3.6ms,720us,5.4ms
    """
    from llmcache.report import edram_account

    options = edram_account.Options(run, profile, intervals, rule, step, capacity, constants)
    edram_account.show(edram_account.answer(options), as_json)
