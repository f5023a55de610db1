"""`llmcache kv plot RUN -o FILE`."""

from __future__ import annotations

import click


@click.command("plot", context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("run")
@click.option("-o", "--output", metavar="FILE", required=True, help="What to write: .png, .svg or .html, by its ending.")
@click.option("--force", is_flag=True, help="Replace the file of -o if it exists.")
def command(run: str, output: str, force: bool) -> None:
    """Draw what 'llmcache kv bench --json' has saved.

    RUN of several policies: what each resource does in one decode step, a panel for each policy (Gantt chart). RUN with
    --sweep-beta: latency against beta, with f_c/f_s and M0 marked. RUN with --task: answers, memory, times and their parts,
    as in figures 1, 6, 7 and 8 of IceCache; .html has a picture of each.

    \b
    llmcache kv bench --policy hillinfer,hillinfer-no-app --compute 20ms --json > run.json
    llmcache kv plot run.json -o steps.png
    llmcache kv bench --task passkey --json > passkey.json && llmcache kv plot passkey.json -o passkey.html
    """
    from llmcache.report.kv_plot import plot

    plot(run, output, force)
