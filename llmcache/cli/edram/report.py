"""`llmcache edram report`."""

from __future__ import annotations

import click


@click.command("report", context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("run", metavar="RUN.json")
@click.option("--profile", metavar="NAME,…", default="paper,silicon", show_default=True, help="Energies; also: public.")
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
@click.option("--constants", metavar="FILE", help="Your profiles: TOML.")
@click.option("--json", "as_json", is_flag=True, help="The accounts as JSON, in joules and bytes.")
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
    llmcache edram report run.json
    llmcache edram report run.json --intervals 180us,3.6ms,720us,5.4ms --profile paper --json
    """
    from llmcache.report import edram_account

    options = edram_account.Options(run, profile, intervals, rule, step, capacity, constants)
    edram_account.show(edram_account.answer(options), as_json)
