"""`llmcache stats MOUNT [INTERVAL [COUNT]]`."""

from __future__ import annotations

import click


@click.command("stats", context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("mount")
@click.argument("interval", required=False)
@click.argument("count", required=False, type=click.IntRange(min=1))
@click.option("--json", "as_json", is_flag=True, help="The counters as JSON, one line for each sample of an interval.")
def command(mount: str, interval: str | None, count: int | None, as_json: bool) -> None:
    """Show what the mount on MOUNT keeps and reads; every INTERVAL (e.g. 1s), COUNT times or until Ctrl-C."""
    from llmcache.fs import statistics
    from llmcache.units import parse_duration

    pause_ns = None if interval is None else parse_duration(interval)
    statistics.show(mount, pause_s=None if pause_ns is None else pause_ns / 1e9, count=count, as_json=as_json)
