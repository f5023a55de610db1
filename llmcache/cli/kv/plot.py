"""`llmcache kv plot RUN -o FILE`."""

from __future__ import annotations

import click

from llmcache.cli import base, kinds


@base.command("plot")
@click.argument("run", type=kinds.FILE)
@base.output_option("What to write: .png, .svg or .html, by its ending.", required=True)
@base.force_option()
@base.json_option("llmcache.kv-plot/1")
def command(run: str, output: str, force: bool, as_json: bool) -> None:
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
