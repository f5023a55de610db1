"""`llmcache top MOUNT [INTERVAL [COUNT]]`."""

from __future__ import annotations

import click

from llmcache.cli import base, types


@base.command("top")
@click.argument("mount", type=types.MOUNT)
@click.argument("interval", type=types.TIME, default="1s")
@click.argument("count", required=False, type=click.IntRange(min=1))
@click.option("--once", is_flag=True, help="Print one view as text, with the rates of one INTERVAL.")
@base.json_option("llmcache.top/1", "; one line for each sample")
def command(mount: str, interval: float, count: int | None, once: bool, as_json: bool) -> None:
    """Watch the mount on MOUNT live: who has the memory, loops and their readers, rates, waits, heat of each layer.

    \b
    Examples:
      llmcache top /mnt/models
      llmcache top /mnt/models 5s
      llmcache top /mnt/models --once
      llmcache top /mnt/models 10s 6 --json | jq .interval.hit_ratio

    A new look every INTERVAL [default: 1s], COUNT of them or until q or Ctrl-C. Where stdout is no terminal, one view (or
    COUNT) is printed as text.
    """
    from llmcache.fs.client import top

    with base.orderly_end():
        top.show(mount, pause_s=interval, count=count, once=once, as_json=as_json)
