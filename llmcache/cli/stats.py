"""`llmcache stats [MOUNT [INTERVAL [COUNT]]]`."""

from __future__ import annotations

import click

from llmcache.cli import base, types


@base.command("stats")
@click.argument("mount", required=False, type=types.MOUNT)
@click.argument("interval", required=False, type=types.TIME)
@click.argument("count", required=False, type=click.IntRange(min=1))
@base.json_option("llmcache.stats/1", "; one line for each sample; of a list llmcache.mounts/1")
@click.option("--openmetrics", is_flag=True, help="Print OpenMetrics text 1.0, once, with the names of looping files.")
def command(mount: str | None, interval: float | None, count: int | None, as_json: bool, openmetrics: bool) -> None:
    """Show what the mount on MOUNT keeps and reads; every INTERVAL (e.g. 1s), COUNT times or until Ctrl-C.

    Without MOUNT it lists your mounts (root: all), also dead ones.

    \b
    Examples:
      llmcache stats
      llmcache stats /mnt/models
      llmcache stats /mnt/models 1s 10
      llmcache stats /mnt/models --openmetrics | grep byte_hit_ratio

    For a scraper, a mount can serve the same over HTTP itself: llmcachefs … --metrics 127.0.0.1:9464
    """
    from llmcache.fs.client import operation

    if openmetrics:
        if interval is not None or as_json:
            raise click.UsageError("--openmetrics goes neither with INTERVAL nor with --json")
        if mount is None:
            raise click.UsageError("--openmetrics: of which MOUNT? 'llmcache stats' lists them")
        operation.show_openmetrics(mount)
        return
    if mount is None:
        operation.show_mounts(as_json)
        return
    operation.show_stats(mount, pause_s=interval, count=count, as_json=as_json)
